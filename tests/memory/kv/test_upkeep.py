"""Upkeep: what may not stay goes, one process works at a time, and what fails stops nothing."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from memory.kv import upkeep as upkeep_module
from memory.kv.codec.base import Kept
from memory.kv.store import KVStore
from memory.kv.tiers import room as room_module
from memory.kv.upkeep import Upkeep
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore
from tests.memory.kv.rungs import Clock, disk_of, upkeep_of, use_rungs

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", ram_bytes=0) as opened:
        yield opened


def save(store: KVStore, seed: int, expires: float | None = None, owner: str = "") -> list[int]:
    ids = prompt(CHUNK, seed=seed)
    store.save(identity(), ids, kv_of(ids), expires=expires, owner=owner)
    assert store.flush(20)
    return ids


def wait_until(condition: object) -> None:
    assert callable(condition)
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def test_what_has_expired_is_deleted(store: KVStore) -> None:
    clock = Clock()
    upkeep = upkeep_of(store, clock)
    for seed in range(6):
        save(store, seed, expires=None if seed % 2 else clock() + HOUR * (1 + seed))
    folder = disk_of(store).folder.chunks
    clock.ahead = 2 * HOUR
    upkeep.step()
    assert store.stats().disk.chunks == len(list(folder.glob("?/?/*.kv"))) == 5
    clock.ahead = 10 * HOUR
    upkeep.step()
    assert store.stats().disk.chunks == len(list(folder.glob("?/?/*.kv"))) == 3
    assert upkeep.stats().expired == 3
    assert restore(store, prompt(CHUNK, seed=1)) == CHUNK


def test_very_much_that_has_expired_goes_in_one_round(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_module, "STEP_CHUNKS", 2)
    clock = Clock()
    for seed in range(7):
        save(store, seed, expires=clock() + HOUR)
    clock.ahead = 2 * HOUR
    upkeep_of(store, clock).step()
    assert store.stats().disk.chunks == 0


def test_one_works_and_the_others_stand_by(store: KVStore) -> None:
    first, second = upkeep_of(store), upkeep_of(store)
    assert (first.step(), second.step()) == (True, False)
    assert (first.stats().active, second.stats().active) == (True, False)
    assert (first.step(), second.step()) == (True, False)
    first.close()
    assert second.step()
    second.close()
    assert second.stats().errors == 0


def test_the_lock_follows_a_folder_that_was_made_again(store: KVStore) -> None:
    first, second = upkeep_of(store), upkeep_of(store)
    assert first.step()
    (disk_of(store).folder.root / "upkeep.lock").unlink()
    assert second.step()
    assert not first.step(), "the lock it has is no longer the folder's"
    first.close()
    second.close()


def test_a_part_that_fails_stops_no_other_and_is_logged_once(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    upkeep = upkeep_of(store, clock)
    save(store, 1)
    save(store, 2, expires=clock() + HOUR)
    disk = disk_of(store)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(disk, "drop", fail)
        clock.ahead = 2 * HOUR
        for _ in range(3):
            assert upkeep.step(scrub_bytes=1 << 30)
    assert upkeep.stats().errors == 3
    assert "Input/output error" in upkeep.stats().trouble
    assert upkeep.stats().scrubbed.passes == 1
    assert len([record for record in caplog.records if "upkeep" in record.getMessage()]) == 1
    upkeep.step()
    assert (upkeep.stats().trouble, upkeep.stats().expired) == ("", 1)


def test_an_index_that_was_lost_is_mended_without_a_write(store: KVStore) -> None:
    ids = save(store, 1)
    (disk_of(store).folder.root / "index.db").unlink()
    upkeep = upkeep_of(store)
    assert upkeep.step()
    assert disk_of(store).index.is_current()
    assert restore(store, ids) == CHUNK


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvloop-kv-upkeep"]


def test_the_thread_works_and_ends_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", ram_bytes=0) as store:
        save(store, 1, expires=time.time() + 0.2)
        often = store.settings.model_copy(update={"upkeep_seconds": 0.05})
        upkeep = upkeep_of(store, settings=often)
        upkeep.start()
        upkeep.start()  # once is enough
        assert len(threads()) == 1
        wait_until(lambda: store.stats().disk.chunks == 0)
        started = time.monotonic()
        upkeep.close()
        assert threads() == []
        assert time.monotonic() - started < 5, "it ended by itself"
        upkeep.close()


def test_closing_waits_neither_for_a_long_pause_nor_for_much_work(store: KVStore) -> None:
    upkeep = upkeep_of(store, settings=store.settings.model_copy(update={"upkeep_seconds": HOUR}))
    upkeep.start()
    upkeep.close()
    assert threads() == []
    clock = Clock()
    for seed in range(5):
        save(store, seed, expires=clock() + HOUR)
    clock.ahead = 2 * HOUR
    late = upkeep_of(store, clock)
    late.close()
    assert late.step()
    assert store.stats().disk.chunks == 5, "it does nothing more"
    late.close()


def test_upkeep_that_is_switched_off_makes_no_thread(store: KVStore) -> None:
    upkeep = upkeep_of(store)
    upkeep.start()
    assert threads() == []


def test_the_thread_has_the_lowest_priority(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(upkeep_module.os, "setpriority", lambda kind, thread, nice: set_to.append(nice))
    upkeep = upkeep_of(store, settings=store.settings.model_copy(update={"upkeep_seconds": HOUR}))
    upkeep.start()
    wait_until(lambda: set_to == [19])
    upkeep.close()


# with a remote tier


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def objects(url: str) -> int:
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return len(files.find(root))


def remote_store(folder: Path, url: str, one: int, **changes: object) -> KVStore:
    return open_store(folder, ram_bytes=0, disk_bytes=10 * one, high_water=0.5, remote_url=url, **changes)


@pytest.fixture
def one(tmp_path: Path) -> int:
    """Bytes of one chunk's file."""
    with open_store(tmp_path / "probe", ram_bytes=0) as probe:
        save(probe, 0)
        return probe.stats().disk.bytes


def test_above_the_mark_chunks_move_out_and_come_back(tmp_path: Path, url: str, one: int) -> None:
    clock = Clock()
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed)
        upkeep = upkeep_of(store, clock)
        upkeep.step()
        assert objects(url) == 0, "all of it was used a moment ago"
        clock.ahead = HOUR
        upkeep.step()
        moved = upkeep.stats().offloaded
        assert moved >= 4
        stats = store.stats()
        assert stats.disk.bytes <= 5 * one + one // 10
        assert (stats.disk.chunks, stats.remote.chunks, objects(url)) == (9 - moved, moved, moved)
        assert stats.evictions == 0
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(9)] == [CHUNK] * 9
        assert upkeep.stats().errors == 0
        upkeep.close()


def test_chunks_far_away_expire_and_are_forgotten_too(tmp_path: Path, url: str, one: int) -> None:
    clock = Clock()
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed, expires=clock() + (2 if seed else 100) * HOUR, owner="someone" if seed == 0 else "")
        upkeep = upkeep_of(store, clock)
        clock.ahead = HOUR
        upkeep.step()
        assert 4 <= objects(url) < 9
        clock.ahead = 3 * HOUR
        upkeep.step()
        assert (objects(url), store.stats().disk.chunks) == (1, 0)
        forgotten = store.forget_owners(identity().tenant_secret, ["someone"])
        assert (forgotten.remote, forgotten.remote_waiting) == (1, 0)
        assert objects(url) == 0
        upkeep.close()


def test_a_remote_that_is_dead_leaves_the_chunks_on_disk(
    tmp_path: Path, url: str, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed)
        clock.ahead = HOUR
        upkeep = upkeep_of(store, clock)
        remote = disk_of(store).remote
        assert remote is not None

        def dead(*_: object, **__: object) -> None:
            raise ConnectionError("no route to host")

        with monkeypatch.context() as patch:
            for name in ("pipe_file", "cat_file", "find", "rm", "rm_file"):
                patch.setattr(remote._files, name, dead)
            upkeep.step()
            assert store.stats().remote.chunks == 0
            assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(9)] == [CHUNK] * 9
        upkeep.close()


def test_what_a_dead_remote_holds_is_stored_here_again(
    tmp_path: Path, url: str, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, first = Clock(), prompt(CHUNK, seed=0)
    with remote_store(tmp_path / "kv", url, one, retry_seconds=HOUR) as store:
        for seed in range(9):
            save(store, seed)
        clock.ahead = HOUR
        upkeep = upkeep_of(store, clock)
        upkeep.step()
        before = store.stats()
        remote = disk_of(store).remote
        assert remote is not None

        def dead(*_: object, **__: object) -> None:
            raise ConnectionError("no route to host")

        for name in ("pipe_file", "cat_file", "find", "rm", "rm_file"):
            monkeypatch.setattr(remote._files, name, dead)
        assert store.match(identity(), first).tokens == CHUNK
        assert restore(store, first) == 0, "that is how one finds out"
        assert store.match(identity(), first).tokens == 0
        save(store, 0)
        assert restore(store, first) == CHUNK
        after = store.stats()
        assert (after.disk.chunks, after.remote.chunks) == (before.disk.chunks + 1, before.remote.chunks - 1)
        assert remote.waiting == 1, "its object is deleted when that can be done"
        upkeep.close()


def test_a_slow_remote_holds_up_one_write_in_a_while(
    tmp_path: Path, url: str, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote_store(tmp_path / "kv", url, one, retry_seconds=HOUR) as store:
        for seed in range(10):
            save(store, seed)
        remote, uploads = disk_of(store).remote, []
        assert remote is not None
        upload = remote._files.pipe_file

        def slow(path: str, data: bytes) -> None:
            uploads.append(path)
            time.sleep(0.02)
            upload(path, data)

        monkeypatch.setattr(remote._files, "pipe_file", slow)
        save(store, 10)
        save(store, 11)
        assert len(uploads) == store.stats().remote.chunks == 2, "fast enough"
        monkeypatch.setattr(room_module, "SLOW_SECONDS", 0.01)
        for seed in range(12, 16):
            save(store, seed)
        assert len(uploads) == store.stats().remote.chunks == 3
        assert restore(store, prompt(CHUNK, seed=15)) == CHUNK


def test_what_is_there_is_found_again_when_the_index_was_lost(tmp_path: Path, url: str, one: int) -> None:
    clock = Clock()
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed)
        clock.ahead = HOUR
        upkeep = upkeep_of(store, clock)
        upkeep.step()
        moved = store.stats().remote.chunks
        upkeep.close()
    (tmp_path / "kv" / "index.db").unlink()
    with remote_store(tmp_path / "kv", url, one) as store:
        assert store.stats().remote.chunks == 0
        upkeep = upkeep_of(store)
        upkeep.step()
        assert store.stats().remote.chunks == moved
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in range(9)] == [CHUNK] * 9
        upkeep.close()


def test_a_chunk_that_is_forgotten_while_it_is_uploaded_is_gone(
    tmp_path: Path, url: str, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed, owner="someone" if seed == 0 else "")
        clock.ahead = HOUR
        upkeep: Upkeep = upkeep_of(store, clock)
        remote = disk_of(store).remote
        assert remote is not None
        take = remote.take

        def forget_meanwhile(key: bytes, data: bytes, worth: float) -> bool:
            done = take(key, data, worth)
            store.forget_owners(identity().tenant_secret, ["someone"])
            return done

        monkeypatch.setattr(remote, "take", forget_meanwhile)
        upkeep.step()
        assert store.stats().disk.chunks + store.stats().remote.chunks == 8
        assert remote.waiting == 0, "it was deleted in the same round"
        assert objects(url) == store.stats().remote.chunks
        assert upkeep.stats().errors == 0
        upkeep.close()


def test_a_chunk_that_is_rewritten_while_it_is_uploaded_stays(
    tmp_path: Path, url: str, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rungs(monkeypatch)
    clock, changed = Clock(), []
    with remote_store(tmp_path / "kv", url, one) as store:
        for seed in range(9):
            save(store, seed)
        clock.ahead = HOUR
        upkeep, disk = upkeep_of(store, clock), disk_of(store)
        remote = disk.remote
        assert remote is not None
        take = remote.take

        def rewrite_meanwhile(key: bytes, data: bytes, worth: float) -> bool:
            if not changed:
                changed.append(key)
                assert disk.rewrite(key, "int8", Kept())
            return take(key, data, worth)

        monkeypatch.setattr(remote, "take", rewrite_meanwhile)
        upkeep.step()
        row = disk.index.rows(changed)[changed[0]]
        assert (row.tier, row.codec) == ("disk", "int8")
        assert disk.verify(changed[0])
        assert objects(url) == store.stats().remote.chunks
        assert (remote.waiting, upkeep.stats().errors) == (0, 0)
        upkeep.close()
