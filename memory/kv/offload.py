"""Moving chunks from the disk to the remote tier, ahead of the eviction that would delete them.

Invariants:
- A chunk is on disk until its object is there and the index says so; the object counts as one to be deleted until then.
- Only whole files are moved, and only ones that are the same afterwards as when they were read.
"""

from __future__ import annotations

from collections.abc import Callable

from memory.kv.chunk import HEADER_BYTES, BadChunk, verify_chunk
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.index import Victim
from memory.kv.tiers.remote import RemoteTier

LOOKED_AT = 256


class Offload:
    """For one thread. `stopped` is asked between chunks. Methods raise `OSError` and `sqlite3.Error`."""

    def __init__(self, disk: DiskTier, remote: RemoteTier, stopped: Callable[[], bool]) -> None:
        self._disk = disk
        self._remote = remote
        self._stopped = stopped

    def step(self, excess: int, unused_since: float) -> int:
        """Moves chunks, those worth least first, until `excess` bytes are freed; returns how many.

        What was used after `unused_since` stays: it may be wanted again at once.
        """
        moved = 0
        for victim in self._disk.index.least_worth(LOOKED_AT):
            if excess <= 0 or self._stopped() or not self._remote.available:
                break
            if victim.last_used < unused_since and self._move(victim):
                moved += 1
                excess -= victim.size
        return moved

    def _move(self, victim: Victim) -> bool:
        key = victim.key
        try:
            data = bytes(self._disk.folder.read(key, lambda _: None))
            verify_chunk(memoryview(data))
        except FileNotFoundError:
            return False  # evicted meanwhile
        except BadChunk as error:
            self._disk.discard(key, error)
            return False
        if not self._remote.take(key, data, victim.worth):
            return False
        with self._disk.exclusive():
            row = self._disk.index.rows([key]).get(key)
            if row is None or row.tier != "disk" or row.state != "stored" or not self._is_same(key, data):
                return False  # forgotten or rewritten meanwhile: the object is deleted with the others
            self._disk.index.moved(key, "remote", len(data))
            self._disk.folder.delete(key)
        self._remote.keep([key])
        return True

    def _is_same(self, key: bytes, data: bytes) -> bool:
        try:
            with self._disk.folder.path(key).open("rb") as file:
                return file.read(HEADER_BYTES) == data[:HEADER_BYTES]  # the checksum is in it
        except FileNotFoundError:
            return False
