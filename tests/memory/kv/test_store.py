"""The store through its public face: what was saved comes back bit for bit, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory.kv.forget import Forgotten
from memory.kv.identity import PREFIX_TOKENS
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore


def save(store: KVStore, ids: list[int]) -> None:
    store.save(identity(), ids, kv_of(ids))


def test_a_saved_sequence_is_restored_bit_for_bit_by_the_next_process(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path) as store:
        save(store, ids)
        assert restore(store, ids) == 100
        assert store.stats().disk_tokens == 0, "RAM has it at once"
    with open_store(tmp_path) as store:
        match = store.match(identity(), ids + prompt(30, seed=9))
        assert [chunk.tokens for chunk in match.chunks] == [32, 32, 32, 4]
        assert match.tokens == 100
        assert match.bytes == match.disk_bytes > 0
        assert restore(store, ids) == 100
        assert store.stats().disk_tokens == 100
        assert store.stats().bytes_per_token > 0


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_dtype_and_thread_count(tmp_path: Path, kv_dtype: str, threads: int) -> None:
    of, ids = identity(kv_dtype=kv_dtype), prompt(150)
    with open_store(tmp_path, ram_bytes=0, load_threads=threads) as store:
        store.save(of, ids, kv_of(ids, of))
        assert store.flush(20)
        assert restore(store, ids, of) == 150


def found_of(stored: int, common: int) -> int:
    """Tokens of a stored sequence that serve one that agrees with it so far: all of a chunk, or multiples of 16."""
    agreed = min(stored, common)
    rest = agreed % CHUNK
    return agreed if agreed == stored else agreed - rest + rest // PREFIX_TOKENS * PREFIX_TOKENS


@given(
    saved=st.lists(st.integers(1, 110), min_size=1, max_size=3),
    asked=st.integers(0, 130),
    split=st.integers(0, 110),
    in_ram=st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_longest_common_prefix_is_found(
    tmp_path_factory: pytest.TempPathFactory, saved: list[int], asked: int, split: int, in_ram: bool
) -> None:
    """Sequences of different lengths share a trunk; the question leaves the trunk at `split`."""
    trunk = prompt(200)
    question = (trunk[:split] + prompt(200, seed=1))[:asked]
    with open_store(tmp_path_factory.mktemp("kv"), ram_bytes=10**9 if in_ram else 0) as store:
        for length in saved:
            save(store, trunk[:length])
        assert store.flush(20)
        common = min(asked, split, max(saved))
        # What is left over after full chunks is found where it is worth a file of its own.
        kept = [length if length % CHUNK >= 4 else length - length % CHUNK for length in saved]
        assert restore(store, question) == max(found_of(length, common) for length in kept)


def test_new_weights_another_format_or_tenant_find_nothing(tmp_path: Path) -> None:
    ids = prompt(80)
    with open_store(tmp_path) as store:
        save(store, ids)
        assert store.flush(20)
        for change in ({"weights_id": "cd" * 32}, {"compute_format": "int8"}, {"tenant_secret": "other"}):
            assert store.match(identity(**change), ids) == Match()
            match = store.match(identity(), ids)
            out = np.zeros(identity().shape(80), np.uint16)
            assert store.load(identity(**change), match, out) == 0, "not even with a match that was not theirs"
        assert restore(store, ids) == 80


def test_a_tail_grows_turn_by_turn_and_only_new_tokens_are_taken(tmp_path: Path) -> None:
    ids = prompt(200)
    with open_store(tmp_path) as store:
        for length in range(10, 200, 10):
            start = store.save_from(identity(), ids[:length])
            assert start % CHUNK == 0
            store.save(identity(), ids[:length], kv_of(ids[:length])[:, :, :, start:], start=start)
            assert store.flush(20)
            assert restore(store, ids[:length]) in (length, length - length % CHUNK)
        before = store.stats().saved_tokens
        save(store, ids[:190])
        assert store.stats().saved_tokens == before, "saving it again takes nothing"


def test_a_chunk_that_goes_on_differently_serves_as_far_as_it_agrees(tmp_path: Path) -> None:
    ids = prompt(60)
    with open_store(tmp_path, ram_bytes=0) as store:
        save(store, ids)
        assert store.flush(20)
        match = store.match(identity(), [*ids[:50], 1, 2, 3])
        assert [(chunk.tokens, chunk.whole) for chunk in match.chunks] == [(32, True), (16, False)]
        assert restore(store, ids[:50]) == 48
        assert restore(store, ids[:20]) == 16
        assert restore(store, ids[:15]) == 0, "no full 16 tokens agree"


def test_an_exact_tail_is_found_among_any_number_of_others(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        sequences = [prompt(8 + seed % 20, seed=seed) for seed in range(150)]
        for ids in sequences:
            save(store, ids)
        assert store.flush(60)
    with open_store(tmp_path) as store:
        assert all(restore(store, ids) == len(ids) for ids in sequences)


def test_a_match_can_be_cut_between_chunks(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path) as store:
        save(store, ids)
        match = store.match(identity(), ids)
        assert [match.limited(tokens).tokens for tokens in (0, 31, 32, 99, 100)] == [0, 0, 32, 96, 100]
        out = np.zeros(identity().shape(64), np.uint16)
        assert store.load(identity(), match.limited(64), out) == 64


def test_what_waits_for_the_writer_is_found_without_any_ram(tmp_path: Path) -> None:
    ids = prompt(70)
    with open_store(tmp_path, ram_bytes=0) as store:
        save(store, ids)
        assert restore(store, ids) == 70
        assert store.flush(20)
        assert restore(store, ids) == 70


def test_the_array_given_to_save_may_be_overwritten(tmp_path: Path) -> None:
    ids = prompt(70)
    kv = kv_of(ids)
    with open_store(tmp_path) as store:
        store.save(identity(), ids, kv)
        kv[...] = 0
        assert restore(store, ids) == 70


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    with open_store(tmp_path, queue_bytes=1) as store:
        save(store, prompt(70))
        assert store.flush(20)
        assert store.stats().dropped == 3
        assert store.stats().disk.chunks == 0
        assert restore(store, prompt(70)) == 70, "RAM still has it"


def test_without_disk_and_without_ram(tmp_path: Path) -> None:
    ids = prompt(70)
    with open_store(tmp_path / "none", disk_bytes=0) as store:
        save(store, ids)
        assert restore(store, ids) == 70
        assert not (tmp_path / "none").exists()
        assert store.forget_owners("secret", [""]) == Forgotten(ram=3)
        assert restore(store, ids) == 0
    with open_store(tmp_path / "none", disk_bytes=0, ram_bytes=0) as store:
        save(store, ids)
        assert restore(store, ids) == 0


def test_a_chunk_restored_twice_from_disk_moves_to_ram(tmp_path: Path) -> None:
    ids = prompt(70)
    with open_store(tmp_path) as store:
        save(store, ids)
    with open_store(tmp_path) as store:
        for expected in (70, 140, 140):
            assert restore(store, ids) == 70
            assert store.flush(20)
            assert store.stats().disk_tokens == expected
        assert store.stats().ram_tokens == 70


def test_clear_deletes_everything(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(100))
        assert store.flush(20)
        save(store, prompt(100, seed=1))
        store.clear()
        assert store.flush(20)
        assert not list(tmp_path.rglob("*.kv"))
        stats = store.stats()
        assert stats.ram.bytes == stats.disk.bytes == stats.waiting_bytes == 0
        assert restore(store, prompt(100)) == 0


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with open_store(folder) as store:
        save(store, prompt(100))
        assert store.flush(20)
        assert [path for path in folder.rglob("*") if path.stat().st_mode & 0o077 and path.name != "lock"] == []


@pytest.mark.parametrize(
    ("tokens", "shape", "dtype", "start", "message"),
    [
        (70, (3, 2, 2, 69, 8), "<u2", 0, "shape"),
        (70, (3, 2, 2, 70, 4), "<u2", 0, "shape"),
        (70, (2, 2, 70, 8), "<u2", 0, "shape"),
        (70, (3, 2, 2, 70, 8), "<f2", 0, "travels as"),
        (70, (3, 2, 2, 40, 8), "<u2", 30, "multiple"),
        (70, (3, 2, 2, 0, 8), "<u2", 96, "multiple"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, tokens: int, shape: tuple[int, ...], dtype: str, start: int, message: str
) -> None:
    with open_store(tmp_path) as store, pytest.raises(ValueError, match=message):
        store.save(identity(), prompt(tokens), np.zeros(shape, dtype), start=start)


def test_an_array_too_short_to_load_into_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(70))
        with pytest.raises(ValueError, match="or more tokens"):
            store.load(identity(), store.match(identity(), prompt(70)), np.zeros(identity().shape(69), np.uint16))


def test_a_closed_store_is_empty_and_quiet(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, prompt(70))
    match = store.match(identity(), prompt(70))
    store.close()
    store.close()
    out: Any = np.zeros(identity().shape(70), np.uint16)
    save(store, prompt(70))
    assert store.match(identity(), prompt(70)) == Match()
    assert store.load(identity(), match, out) == 0
    assert store.stats().disk.chunks == 0
    assert store.save_from(identity(), prompt(70)) == 64
    assert store.flush(1)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="codec"):
        KVSettings.model_validate({"codec": "zip"})
