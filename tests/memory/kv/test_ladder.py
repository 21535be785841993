"""The ladder: chunks get cheaper with age and for want of room, where that is trusted; and come back up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kv.codec.base import Kept
from memory.kv.fidelity import Fidelity
from memory.kv.store import KVStore
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore
from tests.memory.kv.rungs import Clock, Rungs, disk_of, rungs_of, trust, upkeep_of, use_rungs

HOUR, DAY = 3600.0, 86_400.0
AGES: dict[str, Any] = {
    "ram_bytes": 0,
    "int8_after_seconds": HOUR,
    "int4_after_seconds": DAY,
    "compact_after_seconds": None,
}


@pytest.fixture
def rungs(monkeypatch: pytest.MonkeyPatch) -> Rungs:
    return use_rungs(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, rungs: Rungs) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", **AGES) as opened:
        yield opened


def save(store: KVStore, ids: list[int], **how: Any) -> None:
    store.save(identity(), ids, kv_of(ids), **how)
    assert store.flush(20)


def test_chunks_move_down_with_age(store: KVStore) -> None:
    clock, ids = Clock(), prompt(3 * CHUNK)
    save(store, ids)
    trust(store, "int8")
    trust(store, "int4")
    upkeep = upkeep_of(store, clock)
    sizes = [store.stats().disk.bytes]
    for ahead, rung in ((HOUR - 60, "exact"), (HOUR + 60, "int8"), (HOUR + 120, "int8"), (DAY + 60, "int4")):
        clock.ahead = ahead
        assert upkeep.step()
        index = disk_of(store).index
        assert {row.codec for row in index.rows(list(index.keys())).values()} == {rung}
        sizes.append(store.stats().disk.bytes)
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3] > sizes[4]
    assert rungs_of(store, ids) == ["int4"] * 3
    assert upkeep.stats().moved.by_age == 6
    assert upkeep.stats().moved.saved_bytes == sizes[0] - sizes[-1]
    assert upkeep.stats().errors == 0


def test_moving_is_no_use(store: KVStore) -> None:
    clock = Clock()
    save(store, prompt(CHUNK))
    trust(store, "int8")
    index = disk_of(store).index
    before = index.rows(list(index.keys()))
    clock.ahead = 2 * HOUR
    upkeep = upkeep_of(store, clock)
    upkeep.step()
    after = index.rows(list(index.keys()))
    assert [row.codec for row in after.values()] == ["int8"]
    assert {key: row.last_used for key, row in after.items()} == {key: row.last_used for key, row in before.items()}
    clock.ahead = DAY + 1
    trust(store, "int4")
    upkeep.step()
    assert [row.codec for row in index.rows(list(index.keys())).values()] == ["int4"]


@pytest.mark.parametrize("why", ["no record", "too far off", "of another model"])
def test_a_rung_that_is_not_trusted_is_not_used(store: KVStore, why: str) -> None:
    clock, ids = Clock(), prompt(CHUNK)
    save(store, ids)
    if why == "too far off":
        trust(store, "int8", kl=0.0031)
        trust(store, "int4", kl=0.0061)
    elif why == "of another model":
        trust(store, "int8", weights_id="cd" * 32)
    clock.ahead = 10 * DAY
    upkeep = upkeep_of(store, clock)
    upkeep.step()
    assert rungs_of(store, ids) == ["exact"]
    trust(store, "int8", kl=0.0029)
    upkeep.step()
    assert rungs_of(store, ids) == ["int8"]


def test_the_records_of_the_base_hold_for_its_adapters(store: KVStore) -> None:
    clock, ids = Clock(), prompt(CHUNK)
    adapted = identity(weights_id="ab" * 32 + "+" + "cd" * 32)
    store.save(adapted, ids, kv_of(ids, adapted))
    assert store.flush(20)
    trust(store, "int8")
    clock.ahead = 2 * HOUR
    upkeep_of(store, clock).step()
    index = disk_of(store).index
    assert [row.codec for row in index.rows(list(index.keys())).values()] == ["int8"]


def test_what_is_old_enough_skips_the_rungs_between(store: KVStore, rungs: Rungs) -> None:
    clock, ids = Clock(), prompt(2 * CHUNK)
    save(store, ids)
    trust(store, "int8")
    trust(store, "int4")
    clock.ahead = 2 * DAY
    assert upkeep_of(store, clock).step()
    assert rungs_of(store, ids) == ["int4"] * 2
    assert rungs["int8"].asked == []


def test_both_ends_of_a_sequence_are_kept_exact(store: KVStore, rungs: Rungs) -> None:
    ids = prompt(2 * CHUNK + 10)
    clock = Clock()
    save(store, ids)
    trust(store, "int8")
    clock.ahead = 2 * HOUR
    upkeep_of(store, clock).step()
    assert sorted(rungs["int8"].asked, key=lambda asked: asked[0]) == [
        (0, Kept(head=4, tail=128 - CHUNK)),
        (CHUNK, Kept(head=0, tail=128 - 10)),
        (2 * CHUNK, Kept(head=0, tail=128)),
    ]


def test_fidelity_never_improves_by_rewriting(store: KVStore) -> None:
    """Exact bytes of KV that was computed over an int4 prefix."""
    clock, ids = Clock(), prompt(CHUNK)
    save(store, ids, fidelity="int4")
    trust(store, "int8")
    clock.ahead = 2 * HOUR
    upkeep_of(store, clock).step()
    index = disk_of(store).index
    assert [(row.codec, row.fidelity) for row in index.rows(list(index.keys())).values()] == [("int8", "int4")]
    assert store.match(identity(), ids, least="int8").tokens == 0
    assert store.match(identity(), ids, least="int4").tokens == CHUNK


def test_the_codecs_that_ship(tmp_path: Path) -> None:
    """Numbers as a model computes them come down two rungs, close to what they were, their ends as they were."""
    of, ids, clock = identity(head_dim=64), prompt(600), Clock()
    values = np.random.default_rng(0).normal(size=of.shape(len(ids))).astype("<f4")
    kv = (values.view("<u4") >> 16).astype("<u2")
    with open_store(tmp_path / "kv", chunk_tokens=256, **AGES) as store:
        store.save(of, ids, kv)
        assert store.flush(60)
        trust(store, "int8")
        trust(store, "int4")
        upkeep = upkeep_of(store, clock)
        sizes = [store.stats().disk.bytes]
        for ahead, rung, error in ((2 * HOUR, "int8", 0.05), (2 * DAY, "int4", 0.5)):
            clock.ahead = ahead
            upkeep.step()
            sizes.append(store.stats().disk.bytes)
            out = np.zeros_like(kv)
            match = store.match(of, ids)
            found = [(loaded.fidelity, loaded.tokens) for loaded in store.load_from(of, match, out)]
            assert found == [(rung, 256), (rung, 256), ("exact", 88)], "the last one is too short for any other rung"
            exact, came = ((bits.astype("<u4") << 16).view("<f4") for bits in (kv, out))
            assert 0 < np.abs(exact - came).max() < error
            assert out[:, :, :, :4].tobytes() == kv[:, :, :, :4].tobytes()
            assert out[:, :, :, -128:].tobytes() == kv[:, :, :, -128:].tobytes()
        assert upkeep.stats().errors == 0
        assert sizes[0] > sizes[1] > sizes[2]


# by budget


def one_chunk(tmp_path: Path) -> int:
    with open_store(tmp_path / "probe", ram_bytes=0) as probe:
        save(probe, prompt(CHUNK))
        return probe.stats().disk.bytes


@pytest.fixture
def tight(tmp_path: Path, rungs: Rungs) -> Iterator[KVStore]:
    """A store with room for ten chunks that holds ten, of which the mark allows eight."""
    size = one_chunk(tmp_path)
    ages = dict.fromkeys(("int8_after_seconds", "int4_after_seconds", "compact_after_seconds"))
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=10 * size, high_water=0.8, **ages) as opened:
        for seed in range(10):
            save(opened, prompt(CHUNK, seed=seed))
        yield opened


def rung_by_seed(store: KVStore) -> list[str]:
    """Reads the index only: restoring would be a use."""
    found = [store.match(identity(), prompt(CHUNK, seed=seed)).chunks for seed in range(10)]
    return [chunks[0].fidelity if chunks else "gone" for chunks in found]


def test_above_the_mark_what_is_worth_least_moves_and_nothing_is_evicted(tight: KVStore) -> None:
    clock = Clock()
    trust(tight, "int8")
    trust(tight, "int4")
    upkeep = upkeep_of(tight, clock)
    assert upkeep.step()
    assert rung_by_seed(tight) == ["exact"] * 10, "all of it was used a moment ago"
    clock.ahead = HOUR
    assert upkeep.step()
    moved = upkeep.stats().moved.by_budget
    assert rung_by_seed(tight) == ["int8"] * moved + ["exact"] * (10 - moved)
    assert 2 < moved < 10
    assert tight.stats().disk.bytes <= 0.8 * tight.settings.disk_bytes
    assert upkeep.step()
    assert upkeep.stats().moved.by_budget == moved, "there is room now"
    assert tight.stats().evictions == 0


def test_a_chunk_moves_one_rung_at_a_time(tight: KVStore) -> None:
    clock = Clock()
    clock.ahead = HOUR
    for rung in ("int8", "int4", "compact"):
        trust(tight, rung)  # type: ignore[arg-type]
    strict = tight.settings.model_copy(update={"high_water": 0.01})
    upkeep = upkeep_of(tight, clock, strict)
    for rung in ("int8", "int4", "compact", "compact"):
        upkeep.step()
        assert rung_by_seed(tight) == [rung] * 10
    assert upkeep.stats().moved.by_budget == 30


def test_what_climbed_back_stays_up_for_a_while(tight: KVStore) -> None:
    clock, ids = Clock(), prompt(CHUNK, seed=3)
    trust(tight, "int8")
    strict = tight.settings.model_copy(update={"high_water": 0.01})
    upkeep = upkeep_of(tight, clock, strict)
    clock.ahead = HOUR
    upkeep.step()
    assert rung_by_seed(tight) == ["int8"] * 10
    clock.ahead = 0.0
    save(tight, ids)  # computed again, exactly
    for _ in range(3):
        upkeep.step()
        assert rung_by_seed(tight) == ["int8"] * 3 + ["exact"] + ["int8"] * 6
    clock.ahead = HOUR
    upkeep.step()
    assert rung_by_seed(tight) == ["int8"] * 10


def test_a_rung_between_that_is_not_trusted_is_left_out(tight: KVStore) -> None:
    clock = Clock()
    clock.ahead = HOUR
    trust(tight, "int4")
    upkeep_of(tight, clock).step()
    assert set(rung_by_seed(tight)) == {"int4", "exact"}


@pytest.mark.parametrize("rung", ["int8", "compact"])
def test_what_cannot_move_is_not_tried_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Fidelity
) -> None:
    use_rungs(monkeypatch, without=rung)
    tried = []
    ages = {"int8_after_seconds": HOUR, "int4_after_seconds": None, "compact_after_seconds": HOUR}
    with open_store(tmp_path / "kv", ram_bytes=0, **ages) as store:
        for seed in range(5):
            save(store, prompt(CHUNK, seed=seed))
        trust(store, rung)
        disk, clock = disk_of(store), Clock()
        rewrite = disk.rewrite

        def counted(key: bytes, name: str, kept: Kept) -> int | None:
            tried.append(key)
            return rewrite(key, name, kept)

        monkeypatch.setattr(disk, "rewrite", counted)
        upkeep = upkeep_of(store, clock)
        for ahead in (2.0, 2.1, 2.2):
            clock.ahead = ahead * HOUR
            upkeep.step()
        assert len(tried) == 5
        clock.ahead = 5 * HOUR
        upkeep.step()
        assert len(tried) == 10, "once in a while it is"
        assert upkeep.stats().errors == 0


STATES = {"band": "hidden-2", "layers": 1, "kv_heads": 1, "head_dim": 64}


def test_states_stay_exact_whatever_their_age(tmp_path: Path, rungs: Rungs) -> None:
    of, ids = identity(**STATES), prompt(2 * CHUNK)
    with open_store(tmp_path / "kv", codec="int4", **AGES) as store:
        store.save(of, ids, kv_of(ids, of))
        save(store, ids)
        assert restore(store, ids, of) == len(ids), "written exactly whatever the codec for KV is"
        assert rungs_of(store, ids) == ["int4"] * 2
        trust(store, "int4")
        clock = Clock()
        clock.ahead = 10 * DAY
        upkeep_of(store, clock).step()
        assert restore(store, ids, of) == len(ids)
        assert not any(rungs[rung].asked for rung in ("int8", "compact"))
        assert {(each.band, each.codec) for each in store.report()} == {("hidden-2", "exact"), ("all", "int4")}


@pytest.mark.parametrize("trusted", [True, False])
def test_states_leave_in_their_turn_where_others_move_for_want_of_room(
    tmp_path: Path, rungs: Rungs, trusted: bool
) -> None:
    of, ids, clock = identity(**STATES), prompt(CHUNK), Clock()
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=100_000, high_water=0.01) as store:
        store.save(of, ids, kv_of(ids, of))
        save(store, ids)
        if trusted:
            trust(store, "int8")
        clock.ahead = HOUR
        upkeep = upkeep_of(store, clock)
        assert upkeep.step()
        assert rungs_of(store, ids) == ["int8" if trusted else "exact"]
        assert restore(store, ids, of) == (0 if trusted else CHUNK)
        assert store.stats().evictions == int(trusted)
        assert upkeep.stats().errors == 0
