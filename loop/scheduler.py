"""The scheduler's process: starts `kvloop retrain` when its triggers say so, until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from pathlib import Path

from loop.config import Config
from loop.processes import python_module
from memory.journal import Journal
from pipelines.schedule import Schedule


def main() -> None:
    """Runs until SIGTERM; a retrain under way is interrupted then, and resumed at the next start."""
    arguments = argparse.ArgumentParser(prog="python -m loop.scheduler")
    arguments.add_argument("--config-file", type=Path, required=True)
    path = arguments.parse_args().config_file
    config = Config.model_validate_json(path.read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    journal = Journal.open(config.journal.url, config.journal)
    schedule = Schedule(config.schedule)
    schedule.start(journal, python_module("loop.cli", "--config-file", str(path), "retrain"))
    stop.wait()
    schedule.stop()
    journal.close()


if __name__ == "__main__":
    main()
