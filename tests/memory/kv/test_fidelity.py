"""Less exact chunks are stored, told, refused and replaced as the ladder says."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from memory.kv.fidelity import RUNGS, Fidelity, FidelityRecord, FidelityRecords, at_least, fidelity_named, worse
from memory.kv.store import KVStore, Loaded
from memory.kv.tiers.base import kept_of
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

IDS = prompt(2 * CHUNK)
RECORD = FidelityRecord(
    weights_id_base="ab" * 32,
    codec="int8",
    kl_mean=0.001,
    kl_p95=0.004,
    top1=0.99,
    tokens=20_000,
    noise_kl=0.0016,
    bytes_per_token=11_800.0,
    ratio=1.95,
    measured_at=1e9,
)


def save(store: KVStore, fidelity: Fidelity = "exact", ids: list[int] = IDS) -> None:
    store.save(identity(), ids, kv_of(ids), fidelity=fidelity)
    assert store.flush(20)


def loaded(store: KVStore, least: Fidelity = "compact", ids: list[int] = IDS) -> list[Loaded]:
    match = store.match(identity(), ids, least=least)
    return store.load_from(identity(), match, np.zeros(identity().shape(len(ids)), np.uint16))


def test_rungs_are_ordered() -> None:
    for one, other in itertools.product(RUNGS, RUNGS):
        assert at_least(one, other) == (RUNGS.index(one) <= RUNGS.index(other))
        assert worse(one, other) == worse(other, one) == RUNGS[max(RUNGS.index(one), RUNGS.index(other))]
        assert fidelity_named(one) is one
    with pytest.raises(ValueError, match="exact, int8, int4, compact"):
        fidelity_named("int2")


@pytest.mark.parametrize("ram_bytes", [0, 1 << 30])
def test_kv_computed_over_less_exact_kv_is_no_better(tmp_path: Path, ram_bytes: int) -> None:
    with open_store(tmp_path, ram_bytes=ram_bytes) as store:
        save(store, "int4")
        assert store.match(identity(), IDS).fidelity == "int4"
        tier = "ram" if ram_bytes else "disk"
        assert loaded(store) == loaded(store, "int4") == [Loaded(CHUNK, tier, "int4")] * 2
        assert loaded(store, "int8") == loaded(store, "exact") == []
    with open_store(tmp_path) as store:
        (holding,) = store.report()
        assert (holding.codec, holding.fidelity, holding.chunks) == ("exact", "int4", 2)
        assert holding.model_hex == identity().model_digest().hex()
        assert holding.raw_bytes == 2 * CHUNK * identity().token_bytes


@pytest.mark.parametrize("ram_bytes", [0, 1 << 30])
def test_better_kv_takes_the_place_of_worse_and_never_the_other_way_round(tmp_path: Path, ram_bytes: int) -> None:
    with open_store(tmp_path, ram_bytes=ram_bytes) as store:
        for saved, expected in (("int4", "int4"), ("compact", "int4"), ("int8", "int8"), ("exact", "exact")):
            before = store.stats().saved_tokens
            rises = store.save_from(identity(), IDS, fidelity=fidelity_named(saved)) == 0
            save(store, fidelity_named(saved))
            assert rises == (saved == expected)
            assert store.stats().saved_tokens - before == (len(IDS) if rises else 0)
            assert store.match(identity(), IDS).fidelity == expected
        save(store, "int4")
        assert store.match(identity(), IDS).fidelity == "exact"
        assert restore(store, IDS) == len(IDS)
        assert store.stats().disk.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        assert store.stats().disk.chunks == 2


def test_a_better_save_counts_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "compact")
    with open_store(tmp_path, ram_bytes=0) as store:
        assert store.match(identity(), IDS, least="exact").chunks == ()
        save(store)
        assert store.match(identity(), IDS, least="exact").tokens == len(IDS)


def test_a_prefix_is_as_exact_as_its_worst_chunk(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, "exact", IDS[:CHUNK])
        save(store, "int8")
        match = store.match(identity(), IDS)
        assert [chunk.fidelity for chunk in match.chunks] == ["exact", "int8"]
        assert match.fidelity == "int8"
        assert match.limited(CHUNK).fidelity == "exact"
        assert store.match(identity(), IDS, least="exact").tokens == CHUNK


def test_what_became_less_exact_after_it_was_matched_is_not_handed_out(tmp_path: Path) -> None:
    with open_store(tmp_path, ram_bytes=0) as store:
        save(store)
        exact = store.match(identity(), IDS, least="exact")
        anything = store.match(identity(), IDS)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*.kv")}
        store.clear()
        save(store, "int4")
        out = np.zeros(identity().shape(len(IDS)), np.uint16)
        assert store.load(identity(), exact, out) == 0
        assert [piece.fidelity for piece in store.load_from(identity(), anything, out)] == ["int4", "int4"]
        assert set(files) == set(tmp_path.rglob("*.kv")), "it is not deleted for that"


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_lossy_setting_is_told_and_loads(tmp_path: Path, codec: Fidelity) -> None:
    ids = prompt(12 * CHUNK)
    smooth = np.random.default_rng(0).standard_normal(identity().shape(len(ids)), np.float32)
    kv = (smooth.view(np.uint32) >> 16).astype(np.uint16)
    with open_store(tmp_path, ram_bytes=0, codec=codec) as store:
        store.save(identity(), ids, kv)
        assert store.flush(20)
        assert store.save_from(identity(), ids) == len(ids), "it is as exact as it would be stored"
        match = store.match(identity(), ids)
        assert match.fidelity == codec
        out = np.zeros_like(kv)
        assert store.load(identity(), match, out) == len(ids)
        assert np.array_equal(out[:, :, :, :4], kv[:, :, :, :4]), "the first tokens are exact"
        assert np.array_equal(out[:, :, :, -128:], kv[:, :, :, -128:]), "so are the last ones"
        assert not np.array_equal(out, kv)
        error = (out.astype(np.uint32) << 16).view(np.float32) - smooth
        assert float(np.abs(error).mean()) < 0.2


def test_what_stays_exact_depends_on_what_follows() -> None:
    assert (kept_of(0, 0).head, kept_of(0, 0).tail) == (4, 128)
    assert (kept_of(256, 100).head, kept_of(256, 100).tail) == (0, 28)
    assert kept_of(256, 256).tail == 0


def test_records_are_kept_per_base_and_rung(tmp_path: Path) -> None:
    records = FidelityRecords(tmp_path / "fidelity")
    assert records.get("ab" * 32, "int8") is None
    assert records.all() == []
    records.put(RECORD)
    records.put(dataclasses.replace(RECORD, codec="int4", kl_mean=0.004))
    records.put(dataclasses.replace(RECORD, kl_mean=0.002))
    again = FidelityRecords(tmp_path / "fidelity")
    assert again.get("ab" * 32, "int8") == dataclasses.replace(RECORD, kl_mean=0.002)
    assert again.get("ab" * 32 + "+" + "cd" * 32, "int8") == again.get("ab" * 32, "int8"), "an adapter's base"
    assert again.get("cd" * 32, "int8") is None
    assert [record.codec for record in again.all()] == ["int8", "int4"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"codec": "int8"}', '{"weights_id_base": 1}'])
def test_a_record_that_is_none_is_left_out(tmp_path: Path, content: str) -> None:
    records = FidelityRecords(tmp_path)
    records.put(RECORD)
    (path,) = tmp_path.glob("record-*")
    path.write_text(content)
    assert records.get("ab" * 32, "int8") is None
    assert records.all() == []


def test_saving_notes_which_base_the_chunks_belong_to(tmp_path: Path) -> None:
    of = identity(weights_id="ab" * 32 + "+" + "cd" * 32, band="1-3", compute_format="bf16-merged")
    with open_store(tmp_path) as store:
        store.save(of, IDS, kv_of(IDS, of))
        assert store.flush(20)
        store.fidelity.put(RECORD)
    with open_store(tmp_path) as store:
        (holding,) = store.report()
        model = bytes.fromhex(holding.model_hex)
        assert store.fidelity.base_of(model) == "ab" * 32
        assert store.fidelity.for_model(model, "int8") == RECORD
        assert store.fidelity.for_model(model, "int4") is None
        assert store.fidelity.for_model(bytes(16), "int8") is None


# expiry


def test_expired_chunks_are_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with open_store(tmp_path) as store:
        store.save(identity(), IDS, kv_of(IDS), expires=now + 1000)
        assert restore(store, IDS) == len(IDS)
        assert store.flush(20)
        matched = store.match(identity(), IDS)
        monkeypatch.setattr(time, "time", lambda: now + 1001)
        out = np.zeros(identity().shape(len(IDS)), np.uint16)
        assert store.load(identity(), matched, out) == 0, "not even what was matched before"
        assert restore(store, IDS) == 0, "neither from RAM nor from disk"
        assert store.stats().quarantined == 0
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
        assert restore(store, IDS) == len(IDS), "computed again, it is stored again"
    with open_store(tmp_path, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)


def test_a_limit_for_all_holds_with_the_earlier_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with open_store(tmp_path, ttl_seconds=100.0) as store:
        for seed, expires in ((0, None), (1, now + 50), (2, now + 500)):
            ids = prompt(CHUNK, seed=seed)
            store.save(identity(), ids, kv_of(ids), expires=expires)
        assert store.flush(20)
        for later, expected in ((40, [CHUNK] * 3), (60, [CHUNK, 0, CHUNK]), (130, [0, 0, 0])):
            monkeypatch.setattr(time, "time", lambda later=later: now + later)
            assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(3)] == expected


def test_what_has_expired_already_is_not_taken(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(identity(), IDS, kv_of(IDS), expires=time.time() - 1)
        assert store.stats().saved_tokens == 0
        assert restore(store, IDS) == 0
