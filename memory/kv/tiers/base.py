"""What the tiers share, and the contract by which the store looks chunks up.

Lookups are called on the serving path, from any thread: they read no chunk file, and a tier that cannot answer
answers with nothing. All times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from memory.kv.codec.base import KVArray
from memory.kv.identity import Ids

TierName = Literal["ram", "disk"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One chunk that a tier holds."""

    key: bytes
    tier: TierName
    tokens: int
    size: int
    """Bytes that reading it moves: the file's size, or the raw KV in RAM."""
    fidelity: str
    hits: int
    ids: bytes = field(repr=False)
    """Its token ids, little-endian uint32."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkData:
    """One chunk in memory: what it is called, what it holds, when it was last used."""

    key: bytes
    parent: bytes
    identity: bytes
    start: int
    ids: Ids = field(repr=False)
    kv_dtype: str
    kv: KVArray = field(repr=False)
    """`[layers, 2, kv_heads, tokens, head_dim]`, contiguous and read-only."""
    stamp: float


class Lookup(Protocol):
    """How the store asks a tier what it holds."""

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Those of `keys` that the tier holds."""

    def lengths(self, parent: bytes) -> list[int]:
        """The different token counts of the chunks that follow `parent`."""

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """Up to `limit` chunks that follow `parent`, the most recently used first."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """How full one tier is."""

    chunks: int
    tokens: int
    bytes: int
    budget: int
