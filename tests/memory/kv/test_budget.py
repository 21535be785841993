"""Budgets hold, across restarts and processes, and what leaves first is what is missed least."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.kv.store import KVStore
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore


def save(store: KVStore, ids: list[int]) -> None:
    store.save(identity(), ids, kv_of(ids))
    assert store.flush(20)


def size_of_one_chunk(tmp_path: Path) -> int:
    with open_store(tmp_path / "probe") as store:
        save(store, prompt(CHUNK))
        return store.stats().disk.bytes


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


def test_the_disk_budget_holds_at_every_moment_and_counts_what_is_there(tmp_path: Path) -> None:
    budget = 10 * size_of_one_chunk(tmp_path)
    folder = tmp_path / "kv"
    for life in range(3):
        with open_store(folder, ram_bytes=0, disk_bytes=budget) as store:
            for seed in range(12):
                save(store, prompt(3 * CHUNK + 8, seed=100 * life + seed))
                assert files_bytes(folder) <= budget
                assert store.stats().disk.bytes == files_bytes(folder)
            assert store.stats().evictions > 0
            assert restore(store, prompt(3 * CHUNK + 8, seed=100 * life + 11)) == 3 * CHUNK + 8, "the newest is there"


def test_a_smaller_budget_is_enforced_when_the_store_opens(tmp_path: Path) -> None:
    one = size_of_one_chunk(tmp_path)
    with open_store(tmp_path / "kv") as store:
        for seed in range(8):
            save(store, prompt(CHUNK, seed=seed))
    with open_store(tmp_path / "kv", disk_bytes=3 * one) as store:
        assert files_bytes(tmp_path / "kv") <= 3 * one
        assert store.stats().disk.chunks == 3
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(8)] == [0] * 5 + [CHUNK] * 3


def test_the_ram_budget_holds_and_the_least_recently_used_leaves(tmp_path: Path) -> None:
    chunk_bytes = identity().token_bytes * CHUNK
    with open_store(tmp_path, disk_bytes=0, ram_bytes=4 * chunk_bytes) as store:
        for seed in range(4):
            save(store, prompt(CHUNK, seed=seed))
        assert restore(store, prompt(CHUNK, seed=0)) == CHUNK
        save(store, prompt(CHUNK, seed=4))
        assert store.stats().ram.bytes <= 4 * chunk_bytes
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(5)] == [CHUNK, 0, CHUNK, CHUNK, CHUNK]


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_sequence_larger_than_the_budget_keeps_its_beginning(tmp_path: Path, tier: str) -> None:
    ids = prompt(12 * CHUNK)
    if tier == "ram":
        budgets = {"disk_bytes": 0, "ram_bytes": 5 * CHUNK * identity().token_bytes}
    else:
        budgets = {"ram_bytes": 0, "disk_bytes": 5 * size_of_one_chunk(tmp_path) + 200}
    with open_store(tmp_path / "kv", **budgets) as store:
        for turn in (2, 6, 12):
            save(store, ids[: turn * CHUNK])
            assert restore(store, ids) == min(turn, 5) * CHUNK


def test_a_chain_loses_its_end_first(tmp_path: Path) -> None:
    one = size_of_one_chunk(tmp_path)
    ids = prompt(6 * CHUNK)
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=7 * one) as store:
        save(store, ids)
        for seed in range(1, 5):
            save(store, prompt(CHUNK, seed=seed))
            assert store.match(identity(), ids).tokens == store.stats().disk.tokens - seed * CHUNK


def test_superseded_tails_leave_before_anything_else(tmp_path: Path) -> None:
    folder, ids = tmp_path / "kv", prompt(3 * CHUNK)
    one = size_of_one_chunk(tmp_path)
    with open_store(folder, ram_bytes=0) as store:
        save(store, prompt(CHUNK, seed=50))  # the oldest, but nothing stands in for it
        for tokens in range(CHUNK + 6, 2 * CHUNK, 6):
            save(store, ids[:tokens])
        save(store, ids)
        tails = store.stats().disk.chunks - 4
        assert tails == 5
    with open_store(folder, ram_bytes=0, disk_bytes=4 * one + 200) as store:
        assert restore(store, prompt(CHUNK, seed=50)) == CHUNK
        assert restore(store, ids) == 3 * CHUNK
        assert store.stats().disk.chunks == 4


def test_one_long_chat_with_a_small_budget_stays_resumable(tmp_path: Path) -> None:
    ids = prompt(20 * CHUNK)
    one = size_of_one_chunk(tmp_path)
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=22 * one) as store:
        for tokens in range(8, len(ids), 8):
            save(store, ids[:tokens])
            assert restore(store, ids[:tokens]) == tokens


def test_a_shared_prompt_that_is_reused_outlives_newer_sequences(tmp_path: Path) -> None:
    one = size_of_one_chunk(tmp_path)
    shared = prompt(CHUNK)
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=6 * one) as store:
        save(store, shared)
        for _ in range(3):
            assert restore(store, shared) == CHUNK
        for seed in range(1, 30):
            save(store, prompt(CHUNK, seed=seed))
        assert restore(store, shared) == CHUNK
        assert restore(store, prompt(CHUNK, seed=1)) == 0


def test_a_chunk_larger_than_the_whole_budget_is_left_out(tmp_path: Path) -> None:
    with open_store(tmp_path, ram_bytes=10, disk_bytes=500) as store:
        save(store, prompt(CHUNK))
        assert store.stats().dropped == 1
        assert store.stats().write_errors == 0
        assert restore(store, prompt(CHUNK)) == 0


def test_two_stores_on_one_folder_share_chunks_and_budget(tmp_path: Path) -> None:
    budget = 6 * size_of_one_chunk(tmp_path)
    folder = tmp_path / "kv"
    with (
        open_store(folder, ram_bytes=0, disk_bytes=budget) as one,
        open_store(folder, ram_bytes=0, disk_bytes=budget) as two,
    ):
        for seed in range(10):
            save(one if seed % 2 else two, prompt(CHUNK, seed=seed))
            assert files_bytes(folder) <= budget
            assert restore(two if seed % 2 else one, prompt(CHUNK, seed=seed)) == CHUNK
        assert one.stats().disk == two.stats().disk
        # What the other one evicted is written again when it comes again.
        for seed in range(10):
            for _ in range(3):  # notices that it is gone, and that it comes more often than the others
                save(one, prompt(CHUNK, seed=seed))
            assert restore(one, prompt(CHUNK, seed=seed)) == CHUNK


def test_free_space_is_left_to_others(tmp_path: Path) -> None:
    with open_store(tmp_path, ram_bytes=0, disk_reserve_bytes=1 << 60) as store:
        save(store, prompt(CHUNK))
        assert "reserved" in store.stats().disk_trouble
        assert store.stats().write_errors == 1
        assert store.stats().disk.chunks == 0


@pytest.mark.parametrize(("sequences", "fit"), [(6, 4), (3, 2), (8, 2)])
def test_sequences_that_come_in_turns_and_do_not_fit_do_not_drive_each_other_out(
    tmp_path: Path, sequences: int, fit: int
) -> None:
    """Where the least recently used leaves, each drives out the one that comes next: nothing is ever found."""
    one = size_of_one_chunk(tmp_path)
    all_ids = [prompt(3 * CHUNK, seed=seed) for seed in range(sequences)]
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=3 * fit * one + 200) as store:
        for ids in all_ids:
            save(store, ids)
        for _ in range(3):
            evictions = store.stats().evictions
            restored = 0
            for ids in all_ids:
                restored += restore(store, ids)
                save(store, ids)
            assert restored == fit * 3 * CHUNK, "as many as fit are found"
            assert store.stats().evictions == evictions, "and nothing is written to be deleted"


def test_what_left_and_comes_twice_in_a_row_is_let_in(tmp_path: Path) -> None:
    one = size_of_one_chunk(tmp_path)
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=4 * one + 200) as store:
        for seed in range(6):
            save(store, prompt(CHUNK, seed=seed))
        back = prompt(CHUNK, seed=0)
        assert restore(store, back) == 0
        save(store, back)
        assert restore(store, back) == 0, "it came again after all the others"
        save(store, back)
        assert restore(store, back) == CHUNK, "it comes more often than they"
        save(store, prompt(CHUNK, seed=9))
        assert restore(store, prompt(CHUNK, seed=9)) == CHUNK, "what never left is always let in"


def test_the_end_of_a_sequence_drives_nothing_out_when_its_beginning_is_not_stored(tmp_path: Path) -> None:
    one = size_of_one_chunk(tmp_path)
    ids = prompt(4 * CHUNK)
    with open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=3 * one + 200) as store:
        for seed in range(1, 4):
            save(store, prompt(CHUNK, seed=seed))
        store.save(identity(), ids, kv_of(ids)[:, :, :, 2 * CHUNK :], start=2 * CHUNK)
        assert store.flush(20)
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(1, 4)] == [CHUNK] * 3
