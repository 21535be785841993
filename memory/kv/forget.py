"""Which stored chunks hold a sequence of tokens, whatever computed them: what a deletion has to reach.

Invariants:
- Chunks are found by their token ids and position, not by key: those of versions that nobody has loaded any more are
  found as well.
- It errs towards deleting. A chunk that holds the same tokens at the same place in another conversation goes too: that
  costs time, never words. What agrees with a sequence only for a while (a shared prompt, then other words) stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memory.kv.identity import TokenIds, pack_ids

ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Doomed:
    """A sequence to forget, but for its first `keep` tokens, which others still need."""

    ids: bytes = field(repr=False)
    keep: int = 0

    @classmethod
    def of(cls, token_ids: TokenIds, keep: int = 0) -> Doomed:
        """Raises `ValueError` for token ids that are none, and for a `keep` below 0."""
        if keep < 0:
            raise ValueError(f"keep must be at least 0, got {keep}")
        return cls(pack_ids(token_ids).tobytes(), keep)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return len(self.ids) // ID_BYTES

    def is_held_by(self, start: int, ids: bytes) -> bool:
        """Whether `ids` from position `start` on hold some of what is to go: one of the two ends within the other."""
        at = start * ID_BYTES
        shared = min(len(ids), len(self.ids) - at)
        return shared > 0 and at + len(ids) > self.keep * ID_BYTES and ids[:shared] == self.ids[at : at + shared]


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk as a tier lists it."""

    key: bytes
    parent: bytes
    start: int
    ids: bytes = field(repr=False)
    """Its token ids, little-endian uint32."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many chunks went, and from where: RAM, the writer's queue, the disk, the refused files."""

    ram: int = 0
    waiting: int = 0
    disk: int = 0
    quarantined: int = 0


def keys_holding(chunks: Iterable[Held], doomed: Sequence[Doomed]) -> set[bytes]:
    """Keys of the chunks that hold any of the sequences, and of all that follow where one of them ends."""
    wanted = [sequence for sequence in doomed if sequence.tokens > sequence.keep]
    found: set[bytes] = set()
    ended: list[bytes] = []
    followers: dict[bytes, list[bytes]] = defaultdict(list)
    for chunk in chunks:
        followers[chunk.parent].append(chunk.key)
        end = chunk.start + len(chunk.ids) // ID_BYTES
        for sequence in wanted:
            if sequence.is_held_by(chunk.start, chunk.ids):
                found.add(chunk.key)
                if end >= sequence.tokens:
                    ended.append(chunk.key)
                    break
    while ended:
        following = [key for key in followers[ended.pop()] if key not in found]
        found.update(following)
        ended += following
    return found
