"""What turns are using, so that nothing is deleted under them and nothing begins on what is being deleted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from serve.gateway.errors import conflict


class Busy:
    """The sessions in which a turn runs, the sessions and memories that a running turn goes on from, and those that
    are being deleted, by tenant and id. Thread-safe."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._read: Counter[tuple[str, str]] = Counter()
        self._closed: set[tuple[str, str]] = set()
        self._guard = threading.Lock()

    def acquire(self, tenant: str, session_id: str) -> bool:
        """Whether the session was free and is now held."""
        with self._guard:
            if (tenant, session_id) in self._held | self._closed:
                return False
            self._held.add((tenant, session_id))
            return True

    def release(self, tenant: str, session_id: str) -> None:
        """Frees a session; harmless when it is free."""
        with self._guard:
            self._held.discard((tenant, session_id))

    def read(self, tenant: str, name: str) -> bool:
        """Whether a turn may go on from a session's reply or a memory; it is not deleted until `done_reading`."""
        with self._guard:
            if (tenant, name) in self._closed:
                return False
            self._read[tenant, name] += 1
            return True

    def done_reading(self, tenant: str, name: str) -> None:
        """Once for each `read` that was granted."""
        with self._guard:
            self._read[tenant, name] -= 1
            self._read += Counter()  # drops zeros

    def close(self, tenant: str, names: Iterable[str]) -> bool:
        """Whether nothing runs in these or from them; nothing can begin to then until `open`."""
        wanted = {(tenant, name) for name in names}
        with self._guard:
            if wanted & (self._held | self._closed | self._read.keys()):
                return False
            self._closed |= wanted
            return True

    def shut(self, tenant: str, name: str) -> bool:
        """As `close`, also while turns go on from it: they end, others do not begin. False when it is shut already."""
        with self._guard:
            if (tenant, name) in self._closed:
                return False
            self._closed.add((tenant, name))
            return True

    def quiet(self, tenant: str, name: str) -> bool:
        """Whether no turn goes on from it, or runs in it."""
        with self._guard:
            return (tenant, name) not in self._held and not self._read[tenant, name]

    def closed(self, tenant: str, names: Iterable[str]) -> bool:
        """Whether any of these is being deleted."""
        with self._guard:
            return any((tenant, name) in self._closed for name in names)

    def open(self, tenant: str, names: Iterable[str]) -> None:
        """Ends `close` and `shut`."""
        with self._guard:
            self._closed -= {(tenant, name) for name in names}


class Hold:
    """What one plan holds while it is made: at most one session to run in, and what it goes on from."""

    def __init__(self, busy: Busy, tenant: str) -> None:
        self._busy = busy
        self._tenant = tenant
        self._session: str | None = None
        self.reads: tuple[str, ...] = ()

    def take(self, session_id: str) -> bool:
        """Whether the session was free and is now held."""
        free = self._busy.acquire(self._tenant, session_id)
        if free:
            self._session = session_id
        return free

    def read(self, kind: Literal["session", "memory"], name: str) -> None:
        """Keeps a session or a memory from being deleted. Raises `ApiError` 409 when it is being deleted."""
        if not self._busy.read(self._tenant, name):
            raise conflict(f"{kind.capitalize()} '{name}' is being deleted.", f"{kind}_busy")
        self.reads = (*self.reads, name)

    def leave(self) -> None:
        """Frees the session that was to be run in."""
        if self._session is not None:
            self._busy.release(self._tenant, self._session)
        self._session = None

    def drop(self) -> None:
        """Frees everything."""
        self.leave()
        for name in self.reads:
            self._busy.done_reading(self._tenant, name)
        self.reads = ()
