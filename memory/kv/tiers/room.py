"""Room on the disk: what leaves for what comes, and where it goes.

Invariants:
- The chunks worth least leave first, and never one that is used by the very sequence that wants the room: a chain is
  cut at its end, and storing does not drive out what was stored a moment ago for the same sequence.
- What left and comes again drives out only what was used longer ago than itself before. So sequences that come in
  turns and do not fit together settle: some of them stay, instead of each driving out the one that comes next. One
  that comes again soon after is let in: it has shown that it is used more often.
- Nothing is driven out for a chunk whose parent is not stored: nobody would find it.
- What leaves goes to the remote tier where there is one that takes it. It is deleted here only once it is there, and
  where the remote does not take it, it is gone.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from memory.kv.counters import Counters
from memory.kv.settings import KVSettings
from memory.kv.tiers.folder import ChunkFolder
from memory.kv.tiers.index import Index, Victim
from memory.kv.tiers.remote import RemoteTier

EVICTION_BATCH = 64
SLOW_SECONDS = 0.5
"""An upload that takes longer, with all writers waiting for the lock, is the last one for a while: upkeep moves chunks
out without it, ahead of need."""
REMEMBERED_KEYS = 1 << 17
"""Of chunks that left, and when they were used last; in this process."""


def open_remote(
    settings: KVSettings, folder: Path, index: Callable[[], Index], counters: Counters
) -> RemoteTier | None:
    """The remote tier of a folder, where the settings name one. Raises `ValueError` for a URL that cannot be used."""
    if settings.remote_url is None or not settings.remote_bytes:
        return None
    return RemoteTier(
        settings.remote_url, settings.remote_bytes, folder, index, counters, retry_seconds=settings.retry_seconds
    )


class Room:
    """Hold the folder's lock. Methods raise `OSError` and `sqlite3.Error`."""

    def __init__(
        self,
        settings: KVSettings,
        folder: ChunkFolder,
        remote: RemoteTier | None,
        counters: Counters,
        evicted: Callable[[Iterable[bytes]], None],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._remote = remote
        self._counters = counters
        self._evicted = evicted
        self._left: OrderedDict[bytes, float] = OrderedDict()
        self._upload_at = 0.0

    def make(self, index: Index, key: bytes, parent: bytes | None, size: int, stamp: float) -> bool:
        """Makes room for a file of `size` bytes in the place of the chunk's older one, if there is one.

        `parent` is None for the first chunk of a sequence; `stamp` is when the sequence is used. False where no room
        is to be had; `OSError` where the file system has too little for others.
        """
        before = index.rows([key]).get(key)
        needed = size - (before.size if before is not None and before.tier == "disk" else 0)
        used = index.used_bytes()
        free = self._folder.free_bytes()
        budget = min(self._settings.disk_bytes, used + free - self._settings.disk_reserve_bytes)
        if size > self._settings.disk_bytes:
            return False
        if needed > budget:
            raise OSError(errno.ENOSPC, f"{free} bytes free, of which {self._settings.disk_reserve_bytes} are reserved")
        excess = used + needed - budget
        if excess <= 0:
            return True
        victims = self._choose(index, excess, stamp) if parent is None or index.find([parent]) else None
        before_that = self._left.pop(key, None)
        if victims is None or (before_that is not None and any(_used(victim) >= before_that for victim in victims)):
            self._remember(key, stamp)
            return False
        self._remove(index, victims, self._remote)
        return True

    def _remember(self, key: bytes, used: float) -> None:
        self._left[key] = used
        while len(self._left) > REMEMBERED_KEYS:
            self._left.popitem(last=False)

    def keep_to_budget(self, index: Index) -> None:
        """Deletes what is beyond the budget, as when that was made smaller; asks nothing of a remote, to be quick."""
        self._remove(index, self._choose(index, index.used_bytes() - self._settings.disk_bytes, None) or [], None)

    def _choose(self, index: Index, excess: int, used_before: float | None) -> list[Victim] | None:
        """The chunks worth least, of `excess` bytes together; None where that would take what was used since."""
        victims: list[Victim] = []
        while excess > 0:
            candidates = index.least_worth(EVICTION_BATCH, skip=len(victims))
            if not candidates:
                return None if used_before is not None else victims
            for victim in candidates:
                if excess <= 0:
                    break
                if used_before is not None and _used(victim) >= used_before:
                    return None
                victims.append(victim)
                excess -= victim.size
        return victims

    def _remove(self, index: Index, victims: list[Victim], remote: RemoteTier | None) -> None:
        for victim in victims:
            self._remember(victim.key, victim.last_used)
        gone = [victim.key for victim in victims if not self.move_out(index, victim, remote)]
        for key in gone:
            self._folder.delete(key)
        index.remove(gone)
        self._evicted(victim.key for victim in victims)
        self._counters.add("evictions", len(victims))

    def move_out(self, index: Index, victim: Victim, remote: RemoteTier | None) -> bool:
        """Moves a chunk's file to the remote tier; False where it stays."""
        if remote is None or not remote.available or time.monotonic() < self._upload_at:
            return False
        started = time.monotonic()
        try:
            data = self._folder.path(victim.key).read_bytes()
        except FileNotFoundError:
            return False
        taken = remote.take(victim.key, data, victim.worth)
        if time.monotonic() - started > SLOW_SECONDS:
            self._upload_at = time.monotonic() + self._settings.retry_seconds
        if not taken:
            return False
        index.moved(victim.key, "remote", len(data))
        remote.keep([victim.key])
        self._folder.delete(victim.key)
        return True


def _used(victim: Victim) -> float:
    """When a chunk was used last; one that another chunk stands in for, as good as never."""
    return min(victim.last_used, victim.worth)
