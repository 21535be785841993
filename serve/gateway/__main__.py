"""`python -m serve.gateway --settings FILE.json` runs the gateway until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvicorn

from serve.gateway.app import create_app
from serve.gateway.logs import log_to_stderr
from serve.gateway.settings import load_settings


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2 for settings that cannot be used, 0 after a clean shutdown."""
    parser = argparse.ArgumentParser(prog="python -m serve.gateway", description="kvloop's gateway")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with the gateway's settings")
    given = parser.parse_args(arguments)
    try:
        settings = load_settings(given.settings)
    except (OSError, ValueError) as error:
        print(f"cannot use {given.settings}: {error}", file=sys.stderr)
        return 2
    log_to_stderr()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=settings.shutdown_seconds,
        )
    )
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
