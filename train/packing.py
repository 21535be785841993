"""Rows of token ids, and packs: several rows laid out as one sequence so that no compute goes to padding.

Invariants: a token sees exactly the tokens of its own row that precede it, at the positions it would have alone; what
rows of a pack have in common at their start (the system prompt) is laid out once and seen by each of them. A pack
therefore computes what its rows would compute one by one, and differs from that by rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

OWN = -1
"""Segment number of the start that rows share; rows count from 0."""


@dataclass(frozen=True)
class Row:
    """One training row. Tokens from `completion_start` on are the ones to learn; position p predicts token p + 1."""

    key: int
    token_ids: npt.NDArray[np.int64]
    completion_start: int
    replay: int | None = None
    """Index into the replay set when the row's targets are the base model's distributions, else None."""

    @property
    def targets(self) -> int:
        """Number of tokens that count in the loss."""
        return len(self.token_ids) - max(self.completion_start, 1)

    @property
    def first_target_position(self) -> int:
        """The position whose output predicts the first token that counts."""
        return max(self.completion_start, 1) - 1


@dataclass(frozen=True)
class Pack:
    """Rows as one sequence of T tokens.

    `shared` leading tokens belong to every row in `sharing`; `spans[i]` is where row i's own tokens lie.
    `token_ids`, `positions`: int64 [T]; `allowed`: bool [T, T], True where the row token may look at the column token.
    """

    rows: tuple[Row, ...]
    sharing: tuple[bool, ...]
    shared: int
    spans: tuple[tuple[int, int], ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    allowed: torch.Tensor

    def target_positions(self, index: int) -> torch.Tensor:
        """int64 [targets]: places in the pack whose outputs predict row `index`'s targets."""
        row = self.rows[index]
        offset = self.spans[index][0] - (self.shared if self.sharing[index] else 0)
        return torch.arange(row.first_target_position + offset, len(row.token_ids) - 1 + offset)


def pack_rows(rows: Sequence[Row], max_tokens: int) -> list[Pack]:
    """Lays `rows` out in packs of at most `max_tokens` tokens each (a longer row gets a pack of its own)."""
    packs: list[Pack] = []
    group: list[Row] = []
    for row in rows:
        if group and sum(len(other.token_ids) for other in group) + len(row.token_ids) > max_tokens:
            packs.append(_lay_out(group))
            group = []
        group.append(row)
    if group:
        packs.append(_lay_out(group))
    return packs


def _lay_out(rows: Sequence[Row]) -> Pack:
    shared, sharing = _shared_start(rows)
    first_sharing = sharing.index(True) if shared else 0
    pieces = [rows[first_sharing].token_ids[:shared]]
    positions = [np.arange(shared)]
    segments = [np.full(shared, OWN)]
    spans: list[tuple[int, int]] = []
    place = shared
    for number, (row, shares) in enumerate(zip(rows, sharing, strict=True)):
        begin = shared if shares else 0
        own = row.token_ids[begin:]
        pieces.append(own)
        positions.append(np.arange(begin, begin + len(own)))
        segments.append(np.full(len(own), number))
        spans.append((place, place + len(own)))
        place += len(own)
    segment = np.concatenate(segments)
    sees_shared = np.array([True, *sharing])[segment + 1]
    allowed = segment[:, None] == segment[None, :]
    allowed |= (segment == OWN)[None, :] & sees_shared[:, None]
    allowed &= np.tri(len(segment), dtype=bool)
    return Pack(
        rows=tuple(rows),
        sharing=tuple(sharing),
        shared=shared,
        spans=tuple(spans),
        token_ids=torch.from_numpy(np.concatenate(pieces)),
        positions=torch.from_numpy(np.concatenate(positions)),
        allowed=torch.from_numpy(allowed),
    )


def _shared_start(rows: Sequence[Row]) -> tuple[int, list[bool]]:
    """The longest start that the largest group of rows with one first token has in common, and who shares it."""
    # A row whose first target is its second token has nothing to share: that position has to stay in its own span.
    firsts = [int(row.token_ids[0]) if row.first_target_position else OWN for row in rows]
    leader = max(set(firsts), key=lambda first: (first != OWN, firsts.count(first)))
    sharing = [first == leader != OWN for first in firsts]
    members = [row for row, shares in zip(rows, sharing, strict=True) if shares]
    if len(members) < 2:
        return 0, [False] * len(rows)
    length = min(row.first_target_position for row in members)
    for row in members[1:]:
        different = np.nonzero(row.token_ids[:length] != members[0].token_ids[:length])[0]
        length = int(different[0]) if len(different) else length
    return (length, sharing) if length else (0, [False] * len(rows))
