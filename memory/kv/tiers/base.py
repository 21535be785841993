"""What the tiers share, and the contract by which the store looks chunks up.

Lookups are called on the serving path, from any thread: they read no chunk file, and a tier that cannot answer
answers with nothing. They tell of tokens only by digest. All times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from memory.kv.codec.base import Kept, KVArray
from memory.kv.fidelity import Fidelity
from memory.kv.identity import Ids

TierName = Literal["ram", "disk", "remote"]
KEPT_HEAD = 4
KEPT_TAIL = 128
"""Tokens at the beginning and at the end of a sequence that no lossy codec touches: those that attention leans on
most, and those that the next turn reads first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One chunk that a tier holds."""

    key: bytes
    tier: TierName
    tokens: int
    size: int
    """Bytes that reading it moves: the file's size, or the raw KV in RAM."""
    codec: str
    """How it is encoded; "exact" in RAM."""
    fidelity: Fidelity
    hits: int
    owner: bytes
    """`identity.owner_id` of who stored it first."""
    expires: float
    """When it may not be handed out any more; 0: never."""
    prefix: bytes = field(repr=False)
    """`identity.prefix_digests` of its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkData:
    """One chunk in memory: what it is called, what it holds, whose it is, when it was last used."""

    key: bytes
    parent: bytes
    identity: bytes
    """`KVIdentity.digest`."""
    model: bytes
    """`KVIdentity.model_digest`."""
    band: str
    weights_id: str
    tenant_secret: str = field(repr=False)
    owner: bytes
    start: int
    ids: Ids = field(repr=False)
    prefix: bytes = field(repr=False)
    kv_dtype: str
    kv: KVArray = field(repr=False)
    """`[layers, 2, kv_heads, tokens, head_dim]`, contiguous and read-only."""
    fidelity: Fidelity
    """Of this KV, as it was computed."""
    follows: int
    """Tokens that followed it in its sequence when it was taken in."""
    expires: float
    stamp: float

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return len(self.ids)

    def expired(self, now: float) -> bool:
        """Whether it may not be handed out any more."""
        return 0 < self.expires <= now


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


@dataclass(frozen=True, slots=True)
class Holding:
    """What is stored of one model and band, by one codec at one fidelity."""

    model_hex: str
    """`KVIdentity.model_digest`, in hexadecimal."""
    band: str
    codec: str
    fidelity: Fidelity
    chunks: int
    tokens: int
    bytes: int
    """Bytes of chunk files."""
    raw_bytes: int
    """Bytes of the KV they hold."""


def kept_of(start: int, followed_by: int) -> Kept:
    """What a lossy codec keeps exact in a chunk at position `start` that so many tokens of its sequence follow."""
    return Kept(head=KEPT_HEAD if start == 0 else 0, tail=max(0, KEPT_TAIL - followed_by))
