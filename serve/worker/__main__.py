"""`python -m serve.worker --settings FILE.json`: serves one model until SIGTERM or SIGINT. Logs go to stderr.

Invariant: the process does not outlive its engine. Where the engine's thread has ended, it exits with a code other than
0, so that whoever supervises it starts it again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.engine.errors import EngineError
from serve.worker.app import create_app
from serve.worker.settings import WorkerSettings

SHUTDOWN_SECONDS = 5
WATCH_SECONDS = 0.2


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
    return serve(engine, settings)


def serve(engine: Engine, settings: WorkerSettings) -> int:
    """Serves with `engine` until it is told to stop or the engine has ended; closes it. Returns the exit code."""
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, settings.max_prompts),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    threading.Thread(target=_stop_with, args=(engine, server), name="watch-engine", daemon=True).start()
    try:
        server.run()
        return 0 if server.started and engine.alive else 1
    finally:
        server.should_exit = True
        engine.close()


def _stop_with(engine: Engine, server: uvicorn.Server) -> None:
    """Ends the server once the engine has ended."""
    while not server.should_exit:
        if not engine.alive:
            logging.getLogger("serve.worker").error("the engine has ended, so this process ends as well")
            server.should_exit = True
        time.sleep(WATCH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
