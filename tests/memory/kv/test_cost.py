"""Loading is chosen exactly where it is faster than computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.kv.cost import CHUNK_SECONDS, EXPLORE_EVERY, CostModel
from memory.kv.match import ChunkRef, Match
from memory.kv.tiers.base import TierName


def match_of(*tiers: TierName, tokens: int = 256, size: int = 4_000_000) -> Match:
    return Match(
        tuple(
            ChunkRef(
                key=bytes([number]) * 32,
                parent=b"p" * 32,
                start=number * tokens,
                tokens=tokens,
                size=size,
                tier=tier,
                fidelity="exact",
                hits=0,
                whole=True,
                ids=b"",
            )
            for number, tier in enumerate(tiers)
        )
    )


def test_without_measurements_everything_is_loaded() -> None:
    cost = CostModel()
    assert cost.tokens_to_load(match_of("disk", "disk"), 600) == 512
    cost.observe_prefill(1000, 1.0)
    assert cost.tokens_to_load(match_of("disk", "disk"), 600) == 512
    assert cost.tokens_to_load(Match(), 600) == 0


def test_a_fast_disk_is_read_and_a_slow_one_is_not() -> None:
    fast, slow = CostModel(), CostModel()
    for cost, bandwidth in ((fast, 500e6), (slow, 5e6)):
        cost.observe_prefill(1000, 1.0)
        cost.observe_load(int(bandwidth), 1.0)
    assert fast.tokens_to_load(match_of("disk", "disk"), 512) == 512
    assert slow.tokens_to_load(match_of("disk", "disk"), 512) == 0


def test_ram_in_front_of_a_slow_disk_is_a_split() -> None:
    cost = CostModel()
    cost.observe_prefill(1000, 1.0)
    cost.observe_load(5_000_000, 1.0, "disk")
    cost.observe_load(5_000_000_000, 1.0, "ram")
    assert cost.tokens_to_load(match_of("ram", "ram", "disk"), 800) == 512
    assert cost.tokens_to_load(match_of("disk", "ram", "ram"), 800) == 0 or cost.rates()["ram"]


def test_a_tail_of_few_tokens_in_a_large_chunk_is_computed() -> None:
    cost = CostModel()
    cost.observe_prefill(10_000, 1.0)
    cost.observe_load(400_000_000, 1.0)
    match = match_of("disk", tokens=16)
    assert cost.tokens_to_load(match, 16) == 0, "1.6 ms of computing against 10 ms of reading"


def test_estimates_follow_a_change() -> None:
    cost = CostModel()
    cost.observe_prefill(1000, 1.0)
    for _ in range(20):
        cost.observe_load(5_000_000, 1.0)
    assert cost.tokens_to_load(match_of("disk"), 256) == 0
    for _ in range(60):
        cost.observe_load(5_000_000, 0.01)
    assert cost.tokens_to_load(match_of("disk"), 256) == 256


def test_a_disk_once_slow_is_tried_again() -> None:
    cost = CostModel()
    cost.observe_prefill(1000, 1.0)
    cost.observe_load(5_000_000, 1.0)
    answers = [cost.tokens_to_load(match_of("disk"), 256) for _ in range(2 * EXPLORE_EVERY)]
    assert answers.count(256) == 2


@given(
    tiers=st.lists(st.sampled_from(["ram", "disk"]), max_size=6),
    prefill=st.floats(10, 1e5),
    ram=st.floats(1e6, 1e10),
    disk=st.floats(1e6, 1e10),
)
def test_the_answer_is_the_cheapest_cut(tiers: list[TierName], prefill: float, ram: float, disk: float) -> None:
    cost, match = CostModel(), match_of(*tiers)
    cost.observe_prefill(int(prefill * 100), 100.0)
    cost.observe_load(int(ram), 1.0, "ram")
    cost.observe_load(int(disk), 1.0, "disk")
    total = match.tokens + 100

    def seconds(tokens: int) -> float:
        rates = cost.rates()
        loaded = match.limited(tokens).chunks
        moving = sum(CHUNK_SECONDS + chunk.size / (rates[chunk.tier] or 1) for chunk in loaded)
        return moving + (total - tokens) / (rates["prefill"] or 1)

    chosen = cost.tokens_to_load(match, total)
    assert chosen in {0, *(chunk.start + chunk.tokens for chunk in match.chunks)}
    assert seconds(chosen) <= min(seconds(cut * 256) for cut in range(len(tiers) + 1)) * (1 + 1e-9)


@pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (5, 0.0), (-1, 1.0), (5, -1.0)])
def test_measurements_of_nothing_are_ignored(units: int, seconds: float) -> None:
    cost = CostModel()
    cost.observe_load(units, seconds)
    cost.observe_prefill(units, seconds)
    assert cost.rates() == {"ram": None, "disk": None, "prefill": None}
