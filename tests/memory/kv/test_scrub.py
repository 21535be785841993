"""The scrubber: bad files are found before someone needs them, and folder and index are made to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memory.kv import scrub as scrub_module
from memory.kv.counters import Counters
from memory.kv.scrub import Scrubber
from memory.kv.store import KVStore
from memory.kv.tiers.index import Index
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore
from tests.memory.kv.rungs import Clock, disk_of

EVERYTHING = 1 << 40
DAY = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """A store of twelve chunks, each of a sequence of its own."""
    with open_store(tmp_path / "kv", ram_bytes=0) as opened:
        for seed in range(12):
            save(opened, seed)
        yield opened


def save(store: KVStore, seed: int, owner: str = "", expires: float | None = None) -> None:
    ids = prompt(CHUNK, seed=seed)
    store.save(identity(), ids, kv_of(ids), owner=owner, expires=expires)
    assert store.flush(20)


def scrubber_of(store: KVStore, clock: Clock | None = None, stopped: Callable[[], bool] = lambda: False) -> Scrubber:
    return Scrubber(disk_of(store), Counters(), store.settings.disk_bytes, stopped, clock or Clock())


def files(store: KVStore) -> list[Path]:
    return sorted(disk_of(store).folder.chunks.glob("?/?/*.kv"))


def index_of(store: KVStore) -> Index:
    return disk_of(store).index


def restored(store: KVStore, seeds: int = 12) -> int:
    return sum(restore(store, prompt(CHUNK, seed=seed)) > 0 for seed in range(seeds))


def test_whole_files_are_left_alone(store: KVStore) -> None:
    scrubber = scrubber_of(store)
    assert scrubber.step(EVERYTHING) == store.stats().disk.bytes
    assert (scrubber.done.files, scrubber.done.bad, scrubber.done.orphans, scrubber.done.passes) == (12, 0, 0, 1)
    assert restored(store) == 12


@pytest.mark.parametrize("at", [0, 30, 480, 507, 515, -1])
def test_a_bad_file_is_put_aside_before_anyone_reads_it(store: KVStore, at: int) -> None:
    path = files(store)[5]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    scrubber = scrubber_of(store)
    scrubber.step(EVERYTHING)
    assert scrubber.done.bad == 1
    assert not path.exists()
    assert (disk_of(store).folder.root / "quarantine" / path.name).exists()
    assert store.stats().disk.chunks == 11
    assert store.stats().quarantined == 1
    assert restored(store) == 11


def test_a_row_without_a_file_is_struck_out(store: KVStore) -> None:
    files(store)[3].unlink()
    scrubber_of(store).step(EVERYTHING)
    assert store.stats().disk.chunks == 11
    assert store.stats().disk.bytes == sum(path.stat().st_size for path in files(store))


def test_a_file_without_a_row_is_entered_again(store: KVStore) -> None:
    keys = list(index_of(store).keys())
    index_of(store).remove(keys[:4])
    scrubber = scrubber_of(store)
    scrubber.step(EVERYTHING)
    assert scrubber.done.orphans == 4
    assert set(index_of(store).keys()) == set(keys)
    assert restored(store) == 12


def test_a_bad_file_without_a_row_is_put_aside(store: KVStore) -> None:
    path = files(store)[0]
    index_of(store).remove([bytes.fromhex(path.stem)])
    path.write_bytes(path.read_bytes()[:-1])
    scrubber_of(store).step(EVERYTHING)
    assert not path.exists()
    assert store.stats().disk.chunks == 11


@pytest.mark.parametrize("why", ["forgotten", "expired", "no room"])
def test_a_file_without_a_row_that_nobody_may_use_is_deleted(store: KVStore, why: str) -> None:
    clock = Clock()
    before = set(files(store))
    save(store, 100, owner="someone", expires=clock() + DAY)
    (path,) = set(files(store)) - before
    index_of(store).remove([bytes.fromhex(path.stem)])
    room = store.settings.disk_bytes
    if why == "forgotten":
        store.forget_owners(identity().tenant_secret, ["someone"])
    elif why == "expired":
        clock.ahead = 2 * DAY
    else:
        room = store.stats().disk.bytes
    Scrubber(disk_of(store), Counters(), room, lambda: False, clock).step(EVERYTHING)
    assert not path.exists()
    assert store.stats().disk.chunks == 12


def test_what_killed_writers_left_half_written_is_deleted(store: KVStore) -> None:
    path = files(store)[0]
    leftover = path.with_name(f".{path.name}.1.ab.tmp")
    leftover.write_bytes(b"half")
    mine = path.with_name("notes.txt")
    mine.write_text("mine")
    scrubber_of(store).step(EVERYTHING)
    assert (leftover.exists(), mine.exists()) == (False, True)


def test_a_row_of_an_earlier_file_is_corrected(store: KVStore) -> None:
    """Its writer was killed between the file and the row."""
    key, size = next(iter(index_of(store).keys().items()))
    index_of(store).touch([(key, 9e9, 3)])
    (row,) = index_of(store).rows([key]).values()
    index_of(store).add([replace(row, size=size + 999, codec="int8", fidelity="int8")])
    scrubber_of(store).step(EVERYTHING)
    found = index_of(store).find([key])[key]
    assert (found.size, found.codec, found.fidelity, found.hits) == (size, "exact", "exact", 3)
    assert store.stats().disk.bytes == sum(path.stat().st_size for path in files(store))


def test_it_reads_no_more_than_it_is_given_and_goes_on_from_there(tmp_path: Path) -> None:
    seen: list[int] = []
    with open_store(tmp_path / "kv", ram_bytes=0) as store:
        for seed in range(12):
            save(store, seed)
        size = files(store)[0].stat().st_size
        largest = max(path.stat().st_size for path in files(store))
    for _ in range(6):  # each in a life of its own
        with open_store(tmp_path / "kv", ram_bytes=0) as store:
            scrubber = scrubber_of(store)
            assert scrubber.step(2 * size - 1) < 2 * size + largest
            seen.append(scrubber.done.files)
    assert sum(seen) == 12, "each file once"
    assert max(seen) <= 3
    with open_store(tmp_path / "kv", ram_bytes=0) as store:
        scrubber_of(store).step(EVERYTHING)
        assert scrubber_of(store).step(EVERYTHING) == 0, "the pass has ended"


def test_passes_keep_a_distance(store: KVStore) -> None:
    clock = Clock()
    scrubber = scrubber_of(store, clock)
    scrubber.step(EVERYTHING)
    files(store)[0].write_bytes(b"bad")
    clock.ahead = DAY - 60
    assert scrubber.step(EVERYTHING) == 0
    clock.ahead = DAY + 60
    assert scrubber.step(EVERYTHING) > 0
    assert (scrubber.done.bad, scrubber.done.passes) == (1, 2)


def test_it_stops_when_it_is_told_to(store: KVStore) -> None:
    scrubber = scrubber_of(store, stopped=lambda: True)
    assert scrubber.step(EVERYTHING) == 0
    assert scrubber.done.files == 0


def test_after_a_start_of_the_machine_all_folders_are_looked_at_once(
    store: KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(scrub_module, "BOOT_ID", boot)
    keys = list(index_of(store).keys())
    scrubber = scrubber_of(store)
    index_of(store).remove(keys[:3])  # as a power cut may
    files(store)[0].unlink()
    scrubber.after_boot()
    assert store.stats().disk.chunks == 9, "not a Linux: left to the walk"
    boot.write_text("one")
    scrubber.after_boot()
    assert store.stats().disk.chunks == 11
    assert scrubber.done.files == 0, "no file was read to its end that was entered already"
    index_of(store).remove(keys[5:])
    scrubber.after_boot()
    assert store.stats().disk.chunks < 11, "once a start"
    boot.write_text("two")
    scrubber.after_boot()
    assert store.stats().disk.chunks == 11


def test_a_file_that_cannot_be_read_stops_nothing(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_of(store)
    verify, failing = disk.verify, bytes.fromhex(files(store)[2].stem)

    def fail(key: bytes) -> bool:
        if key == failing:
            raise OSError(5, "Input/output error")
        return verify(key)

    monkeypatch.setattr(disk, "verify", fail)
    scrubber = scrubber_of(store)
    scrubber.step(EVERYTHING)
    assert (scrubber.done.files, scrubber.done.passes) == (12, 1)
    assert scrubber._counters.get("read_errors") == 1
