"""What this process knows of the disk, so that saving need not ask: what is stored, and whose is stored no more.

Bounded, and never more than a hint: a chunk that was evicted by another process is noticed at the next match, an owner
that it does not know to be forgotten when the chunk is to be written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable

from memory.kv.fidelity import Fidelity, at_least

KNOWN_KEYS = 1 << 18
KNOWN_SHARES = 1 << 18
FORGOTTEN_OWNERS = 1 << 16


class Known:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[bytes, tuple[Fidelity, bytes, float]] = {}
        self._shares: dict[tuple[bytes, bytes], None] = {}
        self._forgotten: dict[bytes, None] = {}

    def has(self, key: bytes, least: Fidelity) -> bool:
        """Whether the chunk is known to be stored at least that exact."""
        with self._lock:
            known = self._chunks.get(key)
        return known is not None and at_least(known[0], least) and not 0 < known[2] <= time.time()

    def learn(self, chunks: Iterable[tuple[bytes, Fidelity, bytes, float]]) -> None:
        """Notes key, fidelity, owner and expiry of chunks that are stored."""
        with self._lock:
            for key, fidelity, owner, expires in chunks:
                self._chunks[key] = fidelity, owner, expires
            while len(self._chunks) > KNOWN_KEYS:
                del self._chunks[next(iter(self._chunks))]

    def unlearn(self, keys: Iterable[bytes]) -> None:
        """Notes that chunks may be gone."""
        with self._lock:
            for key in keys:
                self._chunks.pop(key, None)

    def forget(self, owners: Collection[bytes]) -> None:
        """Notes that every chunk of these owners is gone, and that nothing more is stored for them."""
        with self._lock:
            self._chunks = {key: known for key, known in self._chunks.items() if known[1] not in owners}
            self._forgotten.update(dict.fromkeys(owners))
            while len(self._forgotten) > FORGOTTEN_OWNERS:
                del self._forgotten[next(iter(self._forgotten))]

    def is_forgotten(self, owner: bytes) -> bool:
        """Whether the owner is known to be forgotten."""
        with self._lock:
            return owner in self._forgotten

    def shares(self, key: bytes, owner: bytes) -> bool:
        """Whether another owner's chunk serves this owner, and that is said for the first time."""
        with self._lock:
            known = self._chunks.get(key)
            if known is None or known[1] == owner or (key, owner) in self._shares:
                return False
            self._shares[key, owner] = None
            while len(self._shares) > KNOWN_SHARES:
                del self._shares[next(iter(self._shares))]
            return True

    def clear(self) -> None:
        """Knows nothing any more."""
        with self._lock:
            self._chunks.clear()
