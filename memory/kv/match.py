"""Finding the longest stored prefix of a sequence of tokens.

Full chunks are looked up by key. Where they end, any chunk that follows the last of them and begins with the same
tokens serves as far as it agrees: a tail of an earlier turn, or the first part of a longer chunk. Chunks that agree
to their end are found however many there are; of the others only the most recently used are compared, by the digests
of their prefixes: to a multiple of `PREFIX_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from memory.kv.fidelity import Fidelity, at_least, worse
from memory.kv.identity import Chain, agreeing_tokens, prefix_digests
from memory.kv.tiers.base import Lookup, Stored, TierName

COMPARED_SIBLINGS = 64


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A stored chunk and how much of it serves."""

    key: bytes
    parent: bytes
    start: int
    """Position of its first token."""
    tokens: int
    """Tokens of it that serve, counted from its first."""
    size: int
    """Bytes that reading it moves: its file's size, or its raw KV in RAM."""
    tier: TierName
    codec: str
    """How it is encoded there."""
    fidelity: Fidelity
    hits: int
    owner: bytes = field(repr=False)
    expires: float
    whole: bool
    """Whether it serves to its end."""
    ids: bytes = field(repr=False)
    """The tokens that serve, little-endian uint32."""
    identity: bytes = field(default=b"", repr=False)
    """Digest of the identity that it was matched for."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix: adjoining chunks from position 0 on."""

    chunks: tuple[ChunkRef, ...] = ()
    least: Fidelity = "compact"
    """What was asked for: nothing less exact is loaded, whatever the chunks have become meanwhile."""

    @property
    def tokens(self) -> int:
        """Tokens that the chunks serve together."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def fidelity(self) -> Fidelity:
        """That of the least exact chunk; "exact" for none."""
        return reduce(worse, (chunk.fidelity for chunk in self.chunks), "exact")

    @property
    def bytes(self) -> int:
        """Bytes that loading moves."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def disk_bytes(self) -> int:
        """Bytes that loading reads from disk."""
        return sum(chunk.size for chunk in self.chunks if chunk.tier == "disk")

    def limited(self, tokens: int) -> Match:
        """The part of this match that ends at or before `tokens`; cut between chunks."""
        return Match(tuple(chunk for chunk in self.chunks if chunk.start + chunk.tokens <= tokens), self.least)


def find_prefix(chain: Chain, tiers: Sequence[Lookup], min_tokens: int, least: Fidelity = "compact") -> Match:
    """The longest prefix of the chain's ids that the tiers hold at least that exact; earlier tiers serve first."""
    full = _find(tiers, chain.keys, least)
    chunks: list[ChunkRef] = []
    for number, key in enumerate(chain.keys):
        if key not in full:
            break
        chunks.append(_ref(chain, number, full[key], chain.chunk_tokens))
    last = _find_last(chain, len(chunks), tiers, min_tokens, least)
    return Match((*chunks, last) if last else tuple(chunks), least)


def _find(tiers: Sequence[Lookup], keys: Sequence[bytes], least: Fidelity) -> dict[bytes, Stored]:
    found: dict[bytes, Stored] = {}
    for tier in tiers:
        missing = [key for key in keys if key not in found]
        if missing:
            found |= {key: item for key, item in tier.find(missing).items() if at_least(item.fidelity, least)}
    return found


def _find_last(chain: Chain, number: int, tiers: Sequence[Lookup], min_tokens: int, least: Fidelity) -> ChunkRef | None:
    """The chunk in the place of full chunk `number` that agrees longest with the ids there."""
    start = number * chain.chunk_tokens
    left = len(chain.ids) - start
    if left < min_tokens:
        return None
    parent = chain.parent(number)
    best: tuple[int, Stored] | None = None
    lengths = {length for tier in tiers for length in tier.lengths(parent) if min_tokens <= length <= left}
    keys = [chain.tail_key(number, length) for length in sorted(lengths)]
    for candidate in _find(tiers, keys, least).values():
        if best is None or candidate.tokens > best[0]:
            best = candidate.tokens, candidate
    prefix = prefix_digests(parent, chain.ids[start : start + chain.chunk_tokens], chain.root)
    for tier in tiers:
        for candidate in tier.siblings(parent, COMPARED_SIBLINGS):
            agreed = agreeing_tokens(prefix, candidate.prefix)
            good = agreed >= min_tokens and at_least(candidate.fidelity, least)
            if good and (best is None or agreed > best[0]):
                best = agreed, candidate
    return _ref(chain, number, best[1], best[0]) if best else None


def _ref(chain: Chain, number: int, stored: Stored, tokens: int) -> ChunkRef:
    start = number * chain.chunk_tokens
    return ChunkRef(
        key=stored.key,
        parent=chain.parent(number),
        identity=chain.root,
        start=start,
        tokens=tokens,
        size=stored.size,
        tier=stored.tier,
        codec=stored.codec,
        fidelity=stored.fidelity,
        hits=stored.hits,
        owner=stored.owner,
        expires=stored.expires,
        whole=tokens == stored.tokens,
        ids=chain.ids[start : start + tokens].tobytes(),
    )
