"""The background writer keeps order and bounds, and survives what it writes to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from memory.kv.tiers.base import ChunkData
from memory.kv.writer import Use, Writer
from tests.memory.kv.test_ram import chunk

ROOT = b"r" * 32


class Disk:
    """Records what it is told; `gate` holds it up."""

    def __init__(self, fail: Callable[[ChunkData], bool] = lambda _: False) -> None:
        self.events: list[object] = []
        self.fidelities: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._fail = fail

    def write(self, item: ChunkData) -> bool:
        self.entered.set()
        self.gate.wait(30)
        if self._fail(item):
            raise RuntimeError("a fault in the codec")
        self.events.append(item.key)
        self.fidelities.append(item.fidelity)
        return True

    def touch(self, uses: Iterable[Use]) -> None:
        self.events.append(list(uses))


@contextmanager
def writer_on(disk: Disk, queue_bytes: int = 10_000) -> Iterator[Writer]:
    writer = Writer(disk.write, disk.touch, lambda _: None, queue_bytes, nice=0)
    try:
        yield writer
    finally:
        disk.gate.set()
        assert writer.close(20)


def test_chunks_are_written_in_order_and_visible_until_then() -> None:
    disk = Disk()
    disk.gate.clear()
    items = [chunk(ROOT, seed, 10, 0.0) for seed in range(5)]
    with writer_on(disk) as writer:
        assert all(writer.submit(item) for item in items)
        assert writer.submit(items[0]), "twice is once"
        assert set(writer.find([item.key for item in items])) == {item.key for item in items}
        assert writer.lengths(ROOT) == [10]
        assert not writer.flush(0.01)
        disk.gate.set()
        assert writer.flush(20)
        assert writer.get(items[0].key) is None
        assert writer.waiting_bytes == 0
    assert disk.events == [item.key for item in items]


def test_uses_are_recorded_before_the_chunks_that_come_after_them() -> None:
    disk = Disk()
    disk.gate.clear()
    first, second = chunk(ROOT, 0, 10, 0.0), chunk(ROOT, 1, 10, 0.0)
    with writer_on(disk) as writer:
        assert writer.submit(first)
        assert disk.entered.wait(20)
        writer.use([b"a", b"b"], 1.0, hits=1)
        writer.use([b"a"], 2.0, hits=1)
        assert writer.submit(second)
        disk.gate.set()
        assert writer.flush(20)
    assert disk.events == [first.key, [(b"a", 2.0, 2), (b"b", 1.0, 1)], second.key]


def test_the_queue_is_bounded() -> None:
    disk = Disk()
    disk.gate.clear()
    with writer_on(disk, queue_bytes=100) as writer:
        assert [writer.submit(chunk(ROOT, seed, 10, 0.0)) for seed in range(4)] == [True, True, False, False]
        assert writer.waiting_bytes <= 100


def test_one_chunk_that_fails_does_not_end_writing(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = chunk(ROOT, 0, 10, 0.0), chunk(ROOT, 1, 10, 0.0)
    disk = Disk(fail=lambda item: item.key == bad.key)
    with writer_on(disk) as writer, caplog.at_level(logging.CRITICAL + 1, logger="memory.kv.writer"):
        assert writer.submit(bad)
        assert writer.submit(good)
        assert writer.flush(20)
    assert disk.events == [good.key]


def test_cancelled_chunks_are_not_written() -> None:
    disk = Disk()
    disk.gate.clear()
    items = [chunk(ROOT, seed, 10, 0.0) for seed in range(3)]
    with writer_on(disk) as writer:
        assert all(writer.submit(item) for item in items)
        assert disk.entered.wait(20)
        writer.cancel([items[2].key])
        threading.Timer(0.05, disk.gate.set).start()
        writer.cancel()  # waits for the one being written
        assert disk.events == [items[0].key]
        assert writer.flush(20)
    assert disk.events == [items[0].key]


def test_what_can_wait_is_done_step_by_step_after_what_cannot() -> None:
    disk = Disk()
    disk.gate.clear()
    first, second = chunk(ROOT, 0, 10, 0.0), chunk(ROOT, 1, 10, 0.0)
    with writer_on(disk) as writer:

        def steps() -> Iterator[None]:
            disk.events.append("step")
            assert writer.submit(second)
            yield
            disk.events.append("last step")

        assert writer.submit(first)
        assert disk.entered.wait(20)
        writer.later(steps())
        disk.gate.set()
        assert writer.flush(20)
        disk.gate.clear()
        disk.entered.clear()
        assert writer.submit(first)
        assert disk.entered.wait(20)
        writer.later(steps())
        threading.Timer(0.05, disk.gate.set).start()
        writer.cancel()
        assert writer.flush(20)
    assert disk.events == [first.key, "step", second.key, "last step", first.key]


def test_a_step_that_fails_does_not_end_writing(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()

    def steps() -> Iterator[None]:
        yield
        raise RuntimeError("a fault")

    with writer_on(disk) as writer, caplog.at_level(logging.CRITICAL + 1, logger="memory.kv.writer"):
        writer.later(steps())
        assert writer.flush(20)
        assert writer.submit(chunk(ROOT, 0, 10, 0.0))
        assert writer.flush(20)
    assert len(disk.events) == 1


def test_a_disk_that_hangs_does_not_hang_closing() -> None:
    disk = Disk()
    disk.gate.clear()
    writer = Writer(disk.write, disk.touch, lambda _: None, 10_000, nice=0)
    assert writer.submit(chunk(ROOT, 0, 10, 0.0))
    assert writer.submit(chunk(ROOT, 1, 10, 0.0))
    assert disk.entered.wait(20)
    assert not writer.close(0.01)
    assert not writer.submit(chunk(ROOT, 2, 10, 0.0))
    disk.gate.set()
    assert writer.flush(20)
    assert len(disk.events) == 1


def test_of_two_that_wait_the_more_exact_is_written() -> None:
    disk = Disk()
    disk.gate.clear()
    blocker = chunk(ROOT, 9, 10, 0.0)
    rough, fine, rougher = (chunk(ROOT, 0, 10, 0.0, fidelity) for fidelity in ("int8", "exact", "int4"))
    with writer_on(disk) as writer:
        assert writer.submit(blocker)
        assert disk.entered.wait(20)
        for item in (rough, fine, rougher):
            assert writer.submit(item)
            assert writer.get(fine.key) is (rough if item is rough else fine)
        assert writer.waiting_bytes == blocker.kv.nbytes + fine.kv.nbytes
        disk.gate.set()
        assert writer.flush(20)
    assert disk.events == [blocker.key, fine.key]
    assert disk.fidelities == ["exact", "exact"]


def test_a_more_exact_one_that_comes_while_the_other_is_written_is_written_after_it() -> None:
    disk = Disk()
    disk.gate.clear()
    rough, fine = chunk(ROOT, 0, 10, 0.0, "int8"), chunk(ROOT, 0, 10, 0.0)
    with writer_on(disk) as writer:
        assert writer.submit(rough)
        assert disk.entered.wait(20)
        assert writer.submit(fine)
        assert writer.get(fine.key) is fine
        disk.gate.set()
        assert writer.flush(20)
        assert writer.waiting_bytes == 0
        assert writer.get(fine.key) is None
    assert disk.fidelities == ["int8", "exact"]


def test_cancelling_a_key_takes_both_the_one_that_waits_and_the_one_that_is_written() -> None:
    disk = Disk()
    disk.gate.clear()
    rough, fine = chunk(ROOT, 0, 10, 0.0, "int8"), chunk(ROOT, 0, 10, 0.0)
    with writer_on(disk) as writer:
        assert writer.submit(rough)
        assert disk.entered.wait(20)
        assert writer.submit(fine)
        threading.Timer(0.05, disk.gate.set).start()
        assert writer.cancel([fine.key]) == 1
        assert disk.fidelities == ["int8"], "it waited for the one being written"
        assert writer.flush(20)
        assert writer.waiting_bytes == 0
    assert disk.fidelities == ["int8"]


def test_expired_chunks_are_not_found_while_they_wait() -> None:
    disk = Disk()
    disk.gate.clear()
    item = replace(chunk(ROOT, 0, 10, 0.0), expires=1.0)
    with writer_on(disk) as writer:
        assert writer.submit(item)
        assert writer.get(item.key) is None
        assert writer.find([item.key]) == {}
        assert writer.siblings(ROOT, 5) == []
        assert writer.owned_by({item.owner}) == [item.key], "but it can be taken out"
