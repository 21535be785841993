"""`python -m serve.worker --settings FILE.json`: serves one model until SIGTERM or SIGINT. Logs go to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from serve.engine import load_engine
from serve.engine.errors import EngineError
from serve.worker.app import create_app
from serve.worker.settings import WorkerSettings

SHUTDOWN_SECONDS = 5


def main() -> int:
    """Runs the worker; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serve.worker", description="Serves one model over HTTP.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the worker's settings")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    log = logging.getLogger("serve.worker")
    try:
        settings = WorkerSettings.model_validate_json(arguments.settings.read_bytes())
        engine = load_engine(settings)
    except (OSError, ValidationError, EngineError) as error:
        log.error("the worker cannot start: %s", error)
        return 1
    base = engine.versions.base
    log.info("serving %s (weights id %s) at http://%s:%d", base.name, base.weights_id, settings.host, settings.port)
    try:
        uvicorn.run(
            create_app(engine, settings.max_prompts),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
