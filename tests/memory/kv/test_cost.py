"""Loading is chosen exactly where it is faster than computing, on any machine, and whatever was measured wrongly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kv.cost import EXPECTED_LOAD, EXPECTED_PREFILL, EXPLORE_SHARE, CostModel
from memory.kv.fidelity import RUNGS, Fidelity
from memory.kv.fit import Fit
from memory.kv.match import ChunkRef, Match
from memory.kv.tiers.base import TierName

STEP = 512
BYTES_PER_TOKEN = {"exact": 16_000, "int8": 11_500, "int4": 6_200, "compact": 2_600}
RAW_BYTES_PER_TOKEN = 23_040
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def match_of(tokens: int, tiers: Sequence[TierName] = ("disk",), codec: Fidelity = "exact", chunk: int = 256) -> Match:
    """A match of so many tokens; the chunks are in these tiers in turn."""
    chunks = []
    for number, start in enumerate(range(0, tokens, chunk)):
        count = min(chunk, tokens - start)
        tier = tiers[number % len(tiers)]
        chunks.append(
            ChunkRef(
                key=number.to_bytes(32, "little"),
                parent=b"p" * 32,
                start=start,
                tokens=count,
                size=count * (RAW_BYTES_PER_TOKEN if tier == "ram" else BYTES_PER_TOKEN[codec]),
                tier=tier,
                codec=codec,
                fidelity=codec,
                hits=0,
                owner=b"",
                expires=0.0,
                whole=True,
                ids=b"",
            )
        )
    return Match(tuple(chunks))


@dataclass(frozen=True)
class Machine:
    """What things really take, in seconds."""

    step: float = 0.02
    token: float = 0.7e-3
    attended: float = 2e-7
    open_disk: float = 3e-4
    open_ram: float = 3e-5
    read_disk: float = 1 / 1.5e9
    read_ram: float = 1 / 5e9
    decode: float = 1 / 0.5e9

    def load(self, chunks: Sequence[ChunkRef]) -> float:
        seconds = 0.0
        for chunk in chunks:
            if chunk.tier == "ram":
                seconds += self.open_ram + chunk.size * self.read_ram
            else:
                seconds += self.open_disk + chunk.size * (self.read_disk + self.decode)
        return seconds

    def prefill(self, start: int, end: int) -> float:
        seconds = 0.0
        for first in range(start, end, STEP):
            count = min(STEP, end - first)
            seconds += self.step + self.token * count + self.attended * count * (first + count / 2)
        return seconds

    def turn(self, match: Match, loaded: int, total: int) -> float:
        return self.load(match.limited(loaded).chunks) + self.prefill(loaded, total)


def teach(cost: CostModel, machine: Machine, rounds: int = 8, noise: float = 0.0, seed: int = 0) -> None:
    """Shows a cost model what the machine does with some turns, as the engine and the store do."""
    draw = random.Random(seed)

    def seen(seconds: float) -> float:
        return seconds * draw.uniform(1 - noise, 1 + noise)

    for _ in range(rounds):
        for tier in ("disk", "ram"):
            chunks = match_of(draw.choice((100, 300, 1100, 4000)), (tier,)).chunks
            cost.observe_load([(c.tier, c.codec, c.size) for c in chunks], seen(machine.load(chunks)))
        start, total = draw.choice((0, 1000, 4000)), draw.choice((20, 90, 600, 2000))
        for first in range(start, start + total, STEP):
            count = min(STEP, start + total - first)
            cost.observe_prefill(count, seen(machine.prefill(first, first + count)), first)


machines = st.builds(
    Machine,
    step=st.floats(1e-4, 0.1),
    token=st.floats(1e-5, 1e-2),
    attended=st.floats(1e-9, 1e-6),
    open_disk=st.floats(1e-5, 3e-2),
    open_ram=st.floats(1e-6, 1e-4),
    read_disk=st.floats(1e-10, 1e-7),
    read_ram=st.floats(1e-11, 1e-9),
    decode=st.floats(1e-10, 1e-7),
)


@pytest.mark.parametrize("codec", RUNGS)
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_before_anything_is_measured_loading_is_taken_to_be_faster(tier: TierName, codec: Fidelity) -> None:
    for length in LENGTHS:
        assert CostModel().tokens_to_load(match_of(length, (tier,), codec), length + 20) == length
    assert CostModel().tokens_to_load(Match(), 600) == 0


def test_a_tiny_model_computes_instead_also_before_anything_is_measured() -> None:
    cost = CostModel()
    cost.expect_prefill(step=1e-5, token=1e-8, attended=1e-12, step_tokens=STEP)
    assert cost.tokens_to_load(match_of(64), 80) == 0


def test_a_fast_disk_is_read_and_a_slow_one_is_not() -> None:
    fast, slow = CostModel(), CostModel()
    teach(fast, Machine())
    teach(slow, Machine(read_disk=1 / 5e6))
    assert fast.tokens_to_load(match_of(512), 600) == 512
    assert slow.tokens_to_load(match_of(512), 600) == 0


def test_everything_is_loaded_where_that_is_asked_for() -> None:
    cost, slow = CostModel(always=True), Machine(read_disk=1 / 1e6)
    teach(cost, slow)
    match = match_of(1024)
    assert cost.tokens_to_load(match, 1100) == 1024
    assert cost.pays(match.chunks, 0, 1024, 1100, lift=True)


def test_ram_in_front_of_a_slow_disk_is_a_split() -> None:
    cost = CostModel()
    teach(cost, Machine(read_disk=1 / 5e6))
    chunks = (*match_of(512, ("ram",)).chunks, *match_of(768).chunks[2:])
    assert cost.tokens_to_load(Match(chunks), 1000) == 512


def test_what_has_to_be_loaded_as_well_counts() -> None:
    cost = CostModel()
    teach(cost, Machine(read_disk=1 / 20e6))
    match = match_of(512)
    assert cost.tokens_to_load(match, 600) == 0
    cheap = Machine(token=2e-3)
    cost = CostModel()
    teach(cost, cheap)
    beside = match_of(512, codec="exact")
    slow = Match(tuple(ChunkRef(**{**_fields(chunk), "size": 10**10}) for chunk in beside.chunks))
    assert cost.tokens_to_load(match, 600) == 512
    assert cost.tokens_to_load(match, 600, beside) == 512
    assert cost.tokens_to_load(match, 600, slow) == 0


def _fields(chunk: ChunkRef) -> dict[str, object]:
    return {name: getattr(chunk, name) for name in chunk.__slots__}


def test_prefill_grows_with_the_position() -> None:
    cost, machine = CostModel(), Machine(attended=5e-7)
    teach(cost, machine)
    assert cost.prefill_seconds(0, 512) == pytest.approx(machine.prefill(0, 512), rel=0.05)
    assert cost.prefill_seconds(7168, 7680) == pytest.approx(machine.prefill(7168, 7680), rel=0.1)
    assert cost.prefill_seconds(0, 8192) == pytest.approx(machine.prefill(0, 8192), rel=0.1)
    assert cost.prefill_seconds(5, 5) == 0


def test_each_codec_has_its_own_speed() -> None:
    cost = CostModel()
    for _ in range(4):
        for codec, decode in (("int8", 1e-9), ("compact", 2e-7)):
            size = 4_000_000
            cost.observe_load([("disk", codec, size)], 3e-4 + size * (1e-9 + decode))
    times = {codec: cost.load_seconds(match_of(256, codec=codec).chunks) for codec in ("int8", "compact")}
    assert times["int8"] == pytest.approx(3e-4 + 256 * BYTES_PER_TOKEN["int8"] * 2e-9, rel=0.2)
    assert times["compact"] == pytest.approx(256 * BYTES_PER_TOKEN["compact"] * 2e-7, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(machine=machines, data=st.data())
def test_never_slower_than_the_better_of_loading_and_computing(machine: Machine, data: st.DataObject) -> None:
    """What counts is what really passes, not what is estimated."""
    cost = CostModel()
    teach(cost, machine, rounds=10)
    tiers: list[TierName] = data.draw(st.lists(st.sampled_from(["ram", "disk"]), min_size=1, max_size=3))
    for length in LENGTHS:
        match, total = match_of(length, tiers), length + 20
        chosen = cost.tokens_to_load(match, total)
        assert chosen in {0, *(chunk.start + chunk.tokens for chunk in match.chunks)}
        pure = min(machine.turn(match, 0, total), machine.turn(match, length, total))
        assert machine.turn(match, chosen, total) <= 1.05 * pure


@settings(max_examples=60, deadline=None)
@given(machine=machines, seed=st.integers(0, 1000))
def test_by_its_own_estimates_the_choice_is_the_cheapest_cut(machine: Machine, seed: int) -> None:
    cost = CostModel()
    teach(cost, machine, noise=0.3, seed=seed)
    for length in LENGTHS:
        match, total = match_of(length, ("ram", "disk")), length + 20

        def seconds(tokens: int, match: Match = match, total: int = total) -> float:
            return cost.load_seconds(match.limited(tokens).chunks) + cost.prefill_seconds(tokens, total)

        cuts = [0, *(chunk.start + chunk.tokens for chunk in match.chunks)]
        # What exploring may cost on top was saved up by the turns before.
        best = min(seconds(cut) for cut in cuts)
        allowed = cost._credit + best * EXPLORE_SHARE
        assert seconds(cost.tokens_to_load(match, total)) <= best + allowed + 1e-9


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000))
def test_noise_of_a_third_changes_no_clear_decision(seed: int) -> None:
    machine, cost = Machine(), CostModel()
    teach(cost, machine, noise=0.33, seed=seed)
    for length in LENGTHS:
        assert cost.tokens_to_load(match_of(length), length + 20) == length


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1e3, 1e6])
def test_one_wild_measurement_changes_no_clear_decision(factor: float) -> None:
    cost, machine = CostModel(), Machine()
    teach(cost, machine)
    chunks = match_of(1024).chunks
    cost.observe_load([(c.tier, c.codec, c.size) for c in chunks], machine.load(chunks) * factor)
    cost.observe_prefill(STEP, machine.prefill(0, STEP) * factor)
    assert cost.tokens_to_load(match_of(1024), 1050) == 1024


def test_estimates_follow_a_change() -> None:
    cost = CostModel()
    teach(cost, Machine(read_disk=1 / 5e6), rounds=20)
    assert cost.tokens_to_load(match_of(512), 600) == 0
    teach(cost, Machine(), rounds=20)
    assert cost.tokens_to_load(match_of(512), 600) == 512


def test_a_disk_once_slow_is_tried_again_and_trying_costs_little() -> None:
    cost, slow, fast = CostModel(), Machine(read_disk=1 / 10e6, decode=1e-10), Machine()
    teach(cost, slow)
    match, total = match_of(512), 600
    spent = best = 0.0
    for _ in range(400):
        spent += slow.turn(match, cost.tokens_to_load(match, total), total)
        best += slow.turn(match, 0, total)
    assert best < spent <= best * (1 + 1.5 * EXPLORE_SHARE)
    loaded = 0
    for _ in range(200):  # now it is fast, and whoever tries it says so
        tokens = cost.tokens_to_load(match, total)
        if tokens:
            loaded += 1
            cost.observe_load([(c.tier, c.codec, c.size) for c in match.chunks], fast.load(match.chunks))
    assert loaded > 100


def test_lifting_pays_where_the_layers_above_cost_less_than_all() -> None:
    cost = CostModel()
    cost.expect_prefill(step=0.02, token=0.7e-3, attended=2e-7, step_tokens=STEP, lifted=0.6)
    chunks = match_of(2048, codec="int8").chunks
    assert cost.pays(chunks, 0, 2048, 2100, lift=True)
    for _ in range(4):
        cost.observe_lift(STEP, 1.2 * cost.prefill_seconds(0, STEP))
    assert not cost.pays(chunks, 0, 2048, 2100, lift=True)
    assert cost.pays(chunks, 0, 2048, 2100, lift=False)


def test_rates_are_told_once_measured() -> None:
    cost = CostModel()
    assert cost.rates() == {"ram": None, "disk": None, "remote": None, "prefill": None, "lift": None}
    for _ in range(4):
        cost.observe_prefill(STEP, 0.5)
        cost.observe_load([("disk", "exact", 4_000_000)], 0.02)
    rates = cost.rates()
    assert rates["prefill"] == pytest.approx(STEP / 0.5, rel=0.01)
    assert rates["disk"] is not None
    assert rates["ram"] is None
    assert set(cost.costs()) >= {*EXPECTED_LOAD, *(f"prefill {kind}" for kind in EXPECTED_PREFILL)}


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (5, 0.0), (5, -1.0)])
def test_measurements_of_nothing_are_ignored(tokens: int, seconds: float) -> None:
    cost = CostModel()
    cost.observe_load([("disk", "exact", tokens)] if tokens else [], seconds)
    cost.observe_prefill(tokens, seconds if tokens else 0.0)
    assert set(cost.rates().values()) == {None}


@settings(max_examples=100, deadline=None)
@given(a=st.floats(1e-4, 1e4), b=st.floats(1e-4, 1e4))
def test_a_fit_finds_what_it_was_shown_however_wrong_its_expectation(a: float, b: float) -> None:
    fit = Fit({"a": 1.0, "b": 1.0})
    for _ in range(3):
        for units in ({"a": 1.0}, {"b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 7.0}):
            fit.observe(units, units.get("a", 0) * a + units.get("b", 0) * b)
    for units in ({"a": 1.0, "b": 1.0}, {"a": 20.0, "b": 1.0}):
        assert fit.seconds(units) == pytest.approx(units["a"] * a + units["b"] * b, rel=0.1)
