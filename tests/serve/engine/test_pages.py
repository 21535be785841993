"""Buffers: within the budget, committed ahead, and used again only when nobody looks at them any more."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.model import Decoder
from serve.engine.pages import HUGE_PAGE, PAGE_TOKENS, BlockPool, PageBudget

TOKEN_BYTES = 64


class FakeDecoder:
    """Lays a buffer out as bytes, and half of them again as what enters a layer."""

    buffer_bytes_per_token = TOKEN_BYTES

    def lay_out(self, memory: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return memory[: tokens * 32], memory[tokens * 32 : tokens * 64]


DECODER = cast(Decoder, FakeDecoder())


def budget(tokens: int, keep: int = 1 << 20) -> PageBudget:
    return PageBudget(DECODER, tokens * TOKEN_BYTES, keep)


def test_rooms_are_counted_in_pages_and_given_back() -> None:
    pages = budget(4 * PAGE_TOKENS)
    assert pages.size(1) == pages.size(PAGE_TOKENS) == PAGE_TOKENS * TOKEN_BYTES
    first = pages.take(PAGE_TOKENS + 1)
    assert pages.used == first.reserved == 2 * PAGE_TOKENS * TOKEN_BYTES
    assert not pages.fits(pages.size(2 * PAGE_TOKENS + 1))
    with pytest.raises(MemoryError):
        pages.take(3 * PAGE_TOKENS)
    pages.give_back(first)
    assert pages.used == 0


def test_memory_is_used_again_when_the_last_holder_lets_go() -> None:
    pages = budget(64 * PAGE_TOKENS)
    first = pages.take(100)
    first.kv.fill_(7)
    held = first.hold()
    pages.give_back(first)
    second = pages.take(100)
    second.kv.fill_(9)
    assert bool((held.kv == 7).all()), "somebody still reads it"
    held.let_go()
    third = pages.take(100)
    assert third.kv.data_ptr() == first.kv.data_ptr()
    assert third.kv.data_ptr() != second.kv.data_ptr()
    with pytest.raises(RuntimeError, match="given back"):
        held.hold()


def test_no_more_is_kept_than_was_allowed() -> None:
    pool = BlockPool(keep_bytes=3000)
    blocks = [pool.take(1000) for _ in range(5)]
    for block in blocks:
        pool.put(block)
    assert pool.kept_bytes == 3000
    pool.warm(4000)
    assert pool.kept_bytes == 3000, "more than is kept is not committed ahead"
    nothing = BlockPool(keep_bytes=0)
    nothing.put(nothing.take(10))
    assert nothing.kept_bytes == 0


def test_a_small_sequence_leaves_large_blocks_to_others() -> None:
    pool = BlockPool(keep_bytes=1 << 20)
    small, large = pool.take(100), pool.take(100_000)
    pool.put(small)
    pool.put(large)
    assert pool.take(50) is small
    pool.put(small)
    assert pool.take(60_000) is large
    pool.put(large)
    assert pool.take(2000) not in (small, large), "neither too small nor wasteful"


def test_committed_memory_is_there_before_the_first_sequence() -> None:
    pages = budget(1 << 20, keep=8 * HUGE_PAGE)
    pages.warm(2 * HUGE_PAGE // TOKEN_BYTES)
    before = _resident()
    buffer = pages.take(2 * HUGE_PAGE // TOKEN_BYTES)
    buffer.kv.fill_(1)
    assert buffer.entering is not None
    buffer.entering.fill_(1)
    assert _resident() - before < HUGE_PAGE


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@given(sizes=st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=30))
def test_no_two_sequences_share_memory(sizes: list[tuple[int, bool]]) -> None:
    pages = budget(1 << 30)
    held = []
    for tokens, gives_back in sizes:
        buffer = pages.take(tokens)
        start = buffer.kv.data_ptr()
        held.append((start, start + tokens * TOKEN_BYTES, buffer))
        spans = sorted(each[:2] for each in held)
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
        if gives_back:
            pages.give_back(held.pop(0)[2])
