"""The RAM tier: raw chunks within a byte budget, the least recently used leave first.

Invariants:
- The bytes held never exceed the budget.
- A chunk never drives out one that is used more recently or lies before it in the same sequence: a chain is cut at
  its end, not at its beginning.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from memory.kv.fidelity import at_least
from memory.kv.tiers.base import ChunkData, Stored, TierStats


class RamTier:
    """Thread-safe. Holds references to the arrays it is given; nobody writes to them afterwards."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, ChunkData] = OrderedDict()  # least recently used first
        self._children: dict[bytes, set[bytes]] = {}
        self._bytes = 0
        self.evictions = 0

    def get(self, key: bytes) -> ChunkData | None:
        """The chunk, or None; one that has expired leaves. Does not count as a use."""
        with self._lock:
            return self._live(key)

    def _live(self, key: bytes) -> ChunkData | None:
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.expired(time.time()):
            self._remove(key)
            return None
        return chunk

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Those of `keys` that are here. See `Lookup.find`."""
        with self._lock:
            chunks = [self._chunks[key] for key in keys if key in self._chunks]
        return usable(chunks)

    def lengths(self, parent: bytes) -> list[int]:
        """See `Lookup.lengths`."""
        with self._lock:
            return sorted({self._chunks[key].tokens for key in self._children.get(parent, ())})

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """See `Lookup.siblings`."""
        with self._lock:
            chunks = [self._chunks[key] for key in self._children.get(parent, ())]
        return list(usable(heapq.nlargest(limit, chunks, key=lambda chunk: chunk.stamp)).values())

    def put(self, chunk: ChunkData) -> bool:
        """Takes the chunk in, in the place of one less exact; False where what it would drive out is worth as much."""
        with self._lock:
            before = self._live(chunk.key)
            if before is not None and at_least(before.fidelity, chunk.fidelity):
                return True
            if before is not None:
                self._remove(chunk.key)
            if not self._make_room(chunk):
                return False
            self._chunks[chunk.key] = chunk
            self._children.setdefault(chunk.parent, set()).add(chunk.key)
            self._bytes += chunk.kv.nbytes
            return True

    def _make_room(self, chunk: ChunkData) -> bool:
        if chunk.kv.nbytes > self._budget:
            return False
        while self._bytes + chunk.kv.nbytes > self._budget:
            oldest = next(iter(self._chunks.values()))
            if chunk.stamp <= oldest.stamp <= time.time():  # ahead of the clock: that was set back
                return False
            self._remove(oldest.key)
            self.evictions += 1
        return True

    def touch(self, keys: Sequence[bytes], stamp: float) -> None:
        """Marks a chain, given first chunk first, as used: its end will leave before its beginning."""
        with self._lock:
            for key in reversed(keys):
                if key in self._chunks:
                    self._chunks[key] = replace(self._chunks[key], stamp=stamp)
                    self._chunks.move_to_end(key)

    def supersede(self, keys: Iterable[bytes]) -> None:
        """Makes these the next to leave: a longer chunk holds all they hold."""
        with self._lock:
            for key in keys:
                if key in self._chunks:
                    self._chunks[key] = replace(self._chunks[key], stamp=0.0)
                    self._chunks.move_to_end(key, last=False)

    def owned_by(self, owners: Collection[bytes]) -> list[bytes]:
        """Keys of the chunks of these owners."""
        with self._lock:
            return [chunk.key for chunk in self._chunks.values() if chunk.owner in owners]

    def forget(self, keys: Iterable[bytes]) -> int:
        """Drops these chunks; returns how many were here."""
        with self._lock:
            present = [key for key in set(keys) if key in self._chunks]
            for key in present:
                self._remove(key)
            return len(present)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._chunks.clear()
            self._children.clear()
            self._bytes = 0

    def stats(self) -> TierStats:
        """How full the tier is."""
        with self._lock:
            tokens = sum(chunk.tokens for chunk in self._chunks.values())
            return TierStats(len(self._chunks), tokens, self._bytes, self._budget)

    def _remove(self, key: bytes) -> None:
        chunk = self._chunks.pop(key)
        self._bytes -= chunk.kv.nbytes
        children = self._children[chunk.parent]
        children.discard(key)
        if not children:
            del self._children[chunk.parent]


def usable(chunks: Iterable[ChunkData]) -> dict[bytes, Stored]:
    """How chunks in memory show in lookups: those that have not expired."""
    now = time.time()
    return {chunk.key: stored(chunk) for chunk in chunks if not chunk.expired(now)}


def stored(chunk: ChunkData) -> Stored:
    """How a chunk in memory shows in lookups."""
    return Stored(
        key=chunk.key,
        tier="ram",
        tokens=chunk.tokens,
        size=chunk.kv.nbytes,
        codec="exact",
        fidelity=chunk.fidelity,
        hits=0,
        owner=chunk.owner,
        expires=chunk.expires,
        prefix=chunk.prefix,
    )
