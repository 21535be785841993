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


@dataclass(frozen=True)
class Row:
    """One training row. Tokens from `completion_start` on are the ones to learn; position p predicts token p + 1."""

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
class Layout:
    """Who attends to whom. A pack's segments are its shared start, when there is one, and its rows' own tokens.

    `queries` int64 [segments, L]: places of a segment's tokens. `keys` int64 [segments, K]: places it may attend to.
    `visible` bool [segments, L, K]: which of these each token sees; `bias` float32, the same as 0 and -inf.
    `places` int64 [T]: where each of the pack's tokens lies in `queries`, flattened. Padding holds place 0.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    visible: torch.Tensor
    bias: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Pack:
    """Rows as one sequence of T tokens: the `shared` tokens that the rows in `sharing` begin with, then each row's own.

    `spans[i]` is where row i's own tokens lie; `token_ids` and `positions` are int64 [T].
    """

    rows: tuple[Row, ...]
    sharing: tuple[bool, ...]
    shared: int
    spans: tuple[tuple[int, int], ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout

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
    pieces = [rows[sharing.index(True)].token_ids[:shared]] if shared else []
    positions = [np.arange(shared)] if shared else []
    spans: list[tuple[int, int]] = []
    place = shared
    for row, shares in zip(rows, sharing, strict=True):
        begin = shared if shares else 0
        pieces.append(row.token_ids[begin:])
        positions.append(np.arange(begin, len(row.token_ids)))
        spans.append((place, place + len(row.token_ids) - begin))
        place = spans[-1][1]
    return Pack(
        rows=tuple(rows),
        sharing=tuple(sharing),
        shared=shared,
        spans=tuple(spans),
        token_ids=torch.from_numpy(np.concatenate(pieces)),
        positions=torch.from_numpy(np.concatenate(positions)),
        layout=_layout(shared, spans, sharing),
    )


def _layout(shared: int, spans: Sequence[tuple[int, int]], sharing: Sequence[bool]) -> Layout:
    segments = [(0, shared), *spans] if shared else list(spans)
    before = [0, *(shared if shares else 0 for shares in sharing)] if shared else [0] * len(spans)
    length = max(end - begin for begin, end in segments)
    queries = np.zeros((len(segments), length), dtype=np.int64)
    keys = np.zeros((len(segments), shared + length), dtype=np.int64)
    visible = np.zeros((len(segments), length, shared + length), dtype=bool)
    visible[:, :, 0] = True  # padding looks somewhere, so that no softmax is over nothing
    places = []
    for number, ((begin, end), start) in enumerate(zip(segments, before, strict=True)):
        own = end - begin
        queries[number, :own] = np.arange(begin, end)
        keys[number, : start + own] = np.concatenate([np.arange(start), np.arange(begin, end)])
        visible[number, :own, : start + own] = np.tri(own, start + own, start, dtype=bool)
        places.append(number * length + np.arange(own))
    seen = torch.from_numpy(visible)
    return Layout(
        queries=torch.from_numpy(queries),
        keys=torch.from_numpy(keys),
        visible=seen,
        bias=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
        places=torch.from_numpy(np.concatenate(places)),
    )


def _shared_start(rows: Sequence[Row]) -> tuple[int, list[bool]]:
    """The longest start that the largest group of rows with one first token has in common, and who shares it."""
    # A row whose first target is its second token has nothing to share: that position has to stay in its own span.
    firsts = [int(row.token_ids[0]) if row.first_target_position else None for row in rows]
    leader = max(set(firsts), key=lambda first: (first is not None, firsts.count(first)))
    sharing = [first == leader is not None for first in firsts]
    members = [row for row, shares in zip(rows, sharing, strict=True) if shares]
    if len(members) < 2:
        return 0, [False] * len(rows)
    length = min(row.first_target_position for row in members)
    for row in members[1:]:
        different = np.nonzero(row.token_ids[:length] != members[0].token_ids[:length])[0]
        length = int(different[0]) if len(different) else length
    return (length, sharing) if length else (0, [False] * len(rows))
