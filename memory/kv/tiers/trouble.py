"""Remembers that writing fails, so that a full or dead disk is tried now and then, and logged once."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)


class Trouble:
    """Thread-safe. Closed at first; `failed` opens it for `retry_seconds`; `recovered` closes it."""

    def __init__(self, what: str, retry_seconds: float) -> None:
        self._what = what
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._retry_at: float | None = None
        self.reason = ""
        """What went wrong last; empty while all is well."""

    def blocks(self) -> bool:
        """Whether it is too early to try again."""
        with self._lock:
            return self._retry_at is not None and time.monotonic() < self._retry_at

    def failed(self, error: Exception) -> None:
        """Notes a failure; the first one after a success is logged."""
        with self._lock:
            first = self._retry_at is None
            self._retry_at = time.monotonic() + self._retry_seconds
            self.reason = str(error)
        if first:
            logger.warning(
                "%s fails (%s); going on without it, trying again every %s s", self._what, error, self._retry_seconds
            )

    def recovered(self) -> None:
        """Notes a success; the first one after a failure is logged."""
        with self._lock:
            was_open = self._retry_at is not None
            self._retry_at = None
            self.reason = ""
        if was_open:
            logger.warning("%s works again", self._what)
