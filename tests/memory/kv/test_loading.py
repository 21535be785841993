"""Loading survives what hangs, and hands no memory to who comes too late."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memory.kv.loading import Loaders, Place, TakenBack
from memory.kv.tiers.folder import ChunkFolder
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_end_at_the_first_that_did_not_come(threads: int) -> None:
    loaders = Loaders(threads)
    asked: list[int] = []

    def load(item: int, _: Place) -> int | None:
        asked.append(item)
        time.sleep(0.001 * (item % 3))
        return None if item in (7, 9) else item * 10

    assert loaders.run(range(20), load, 20.0) == ([0, 10, 20, 30, 40, 50, 60], False)
    assert loaders.run([], load, 20.0) == ([], False)
    assert loaders.run([1, 2], load, 20.0) == ([10, 20], False)
    assert len(asked) < 20, "nothing is begun after a failure"
    loaders.close()


def test_what_a_load_raises_is_raised_to_who_asked() -> None:
    loaders = Loaders(2)

    def fail(item: int, _: Place) -> int:
        raise RuntimeError(f"a fault at {item}")

    with pytest.raises(RuntimeError, match="a fault"):
        loaders.run([1], fail, 20.0)
    assert loaders.run([1, 2], lambda item, _: item, 20.0) == ([1, 2], False)
    loaders.close()


def test_who_comes_too_late_finds_the_place_taken_back() -> None:
    loaders = Loaders(2)
    memory = [0] * 4
    gate, late = threading.Event(), threading.Event()

    def load(item: int, place: Place) -> int | None:
        if item == 2:
            gate.wait(30)
        try:
            with place.writing():
                memory[item] = 1
        except TakenBack:
            late.set()
            raise
        return item

    assert loaders.run(range(4), load, 0.2) == ([0, 1], True)
    assert memory[:3] == [1, 1, 0]
    gate.set()
    assert late.wait(30)
    assert memory[2] == 0, "its owner uses it for something else by now"
    assert loaders.run(range(2), load, 20.0) == ([0, 1], False), "the threads are of use again"
    loaders.close()


def test_a_place_is_not_taken_while_someone_writes() -> None:
    place = Place()
    inside, taken = threading.Event(), threading.Event()
    leave = threading.Event()

    def write() -> None:
        with place.writing():
            inside.set()
            assert leave.wait(30)
            assert not taken.is_set()

    def take() -> None:
        place.take_back()
        taken.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert inside.wait(30)
    taker = threading.Thread(target=take)
    taker.start()
    assert not taken.wait(0.05)
    leave.set()
    writer.join(30)
    assert taken.wait(30)
    taker.join(30)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_disk_that_hangs_blocks_nobody_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A stalled file system: reads begin and do not come back."""
    ids = prompt(4 * CHUNK)
    with open_store(tmp_path, ram_bytes=0, load_threads=threads, stall_seconds=0.2, retry_seconds=3600.0) as store:
        store.save(identity(), ids, kv_of(ids))
        assert store.flush(20)
        match = store.match(identity(), ids)
        gate = threading.Event()
        read = ChunkFolder.read
        hanging = {chunk.key for chunk in match.chunks[2:]}
        ended = threading.Semaphore(0)

        def hang(self: ChunkFolder, key: bytes, accept: object) -> object:
            if key in hanging:
                gate.wait(60)
                try:
                    return read(self, key, accept)  # type: ignore[arg-type]
                finally:
                    ended.release()
            return read(self, key, accept)  # type: ignore[arg-type]

        monkeypatch.setattr(ChunkFolder, "read", hang)
        out = np.zeros(identity().shape(len(ids)), np.uint16)
        assert store.load(identity(), match, out) == 2 * CHUNK
        assert store.stats().disk_trouble
        assert store.stats().read_errors == 1
        assert store.match(identity(), ids).tokens == 0, "the disk is left alone"
        out[:] = 7
        gate.set()
        for _ in range(min(threads, len(hanging))):
            assert ended.acquire(timeout=30)
        time.sleep(0.05)
        assert (out == 7).all(), "the engine computes there now"


def test_a_disk_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(2 * CHUNK)
    with open_store(tmp_path, ram_bytes=0, stall_seconds=0.2, retry_seconds=0.0) as store:
        store.save(identity(), ids, kv_of(ids))
        assert store.flush(20)
        gate = threading.Event()
        read = ChunkFolder.read
        monkeypatch.setattr(ChunkFolder, "read", lambda *values: gate.wait(60) and read(*values))
        assert restore(store, ids) == 0
        assert store.stats().disk_trouble
        gate.set()
        monkeypatch.undo()
        assert restore(store, ids) == len(ids)
        assert store.stats().disk_trouble == ""
