"""Counts of what happened in this process, safe to add to from any thread."""

from __future__ import annotations

import threading
from typing import Literal

Event = Literal[
    "hits",
    "misses",
    "saved_tokens",
    "restored_tokens",
    "shared_tokens",
    "ram_tokens",
    "disk_tokens",
    "remote_tokens",
    "quarantined",
    "lost",
    "locked",
    "expired",
    "read_errors",
    "write_errors",
    "index_errors",
    "index_rebuilds",
    "dropped",
    "evictions",
]


class Counters:
    """Only ever grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Event, int] = {}

    def add(self, event: Event, count: int = 1) -> None:
        """Adds `count` to `event`."""
        with self._lock:
            self._counts[event] = self._counts.get(event, 0) + count

    def get(self, event: Event) -> int:
        """How often `event` was counted."""
        with self._lock:
            return self._counts.get(event, 0)
