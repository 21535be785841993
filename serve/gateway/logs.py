"""Structured logs: one JSON object a line on stderr. What people wrote is never logged."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("kvloop.gateway")


def event(message: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Logs `message` with fields. `error` adds its traceback."""
    log.log(level, message, extra={"fields": fields}, exc_info=error)


class JsonFormatter(logging.Formatter):
    """Time, level, event, fields; a traceback as text under `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Sends every logger's records to stderr in this form; called once by the program's entry."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
