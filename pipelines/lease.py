"""A lease held while a pipeline works, kept alive by a thread.

Invariants: at most one process works on a kind of pipeline; whoever lost the lease learns it at the next `check`, and
the journal refuses its steps in any case.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from types import TracebackType
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from memory.journal import Journal, LeaseLost

_log = logging.getLogger(__name__)


class Busy(RuntimeError):
    """Another process holds the lease; the message says which and until when it is known to live."""


class HeldLease:
    """A context in which the lease of `kind` is held and renewed. Entering raises `Busy`."""

    def __init__(self, journal: Journal, kind: str, seconds: float) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._journal = journal
        self._kind = kind
        self._seconds = seconds
        self._ending = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{kind}", daemon=True)

    def __enter__(self) -> Self:
        if not self._journal.acquire_lease(self._kind, self.owner, self._seconds):
            held = self._journal.get_lease(self._kind)
            who = f"by {held.owner}, for {held.expires_at - self._journal.now():.0f} s more" if held else "a moment ago"
            raise Busy(f"another {self._kind} run is under way (held {who}): wait for it to end")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._journal.release_lease(self._kind, self.owner)

    def check(self) -> None:
        """Raises `LeaseLost` once somebody else has the lease, or may have."""
        if self._lost.is_set():
            raise LeaseLost(f"the lease of {self._kind!r} was lost: another process may work on the run now")

    def _beat(self) -> None:
        alive_until = time.monotonic() + self._seconds
        while not self._ending.wait(self._seconds / 3):
            try:
                self._journal.heartbeat(self._kind, self.owner, self._seconds)
                alive_until = time.monotonic() + self._seconds
            except LeaseLost:
                self._lost.set()
                return
            except SQLAlchemyError as error:
                _log.warning("heartbeat of %s failed: %s", self._kind, error)
                if time.monotonic() > alive_until:
                    self._lost.set()
                    return
