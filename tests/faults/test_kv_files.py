"""Damaged chunk files: none is ever accepted, each is moved aside, and its tokens are computed again."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory.kv.chunk import HEADER_BYTES, open_chunk, pack_chunk, verify_chunk
from memory.kv.store import KVStore
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

IDS = prompt(4 * CHUNK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store's folder with one sequence of four chunks."""
    with open_store(tmp_path / "kv") as store:
        store.save(identity(), IDS, kv_of(IDS))
    return tmp_path / "kv"


def file_of(store: KVStore, folder: Path, number: int) -> Path:
    """The file of chunk `number` of the sequence."""
    key = store.match(identity(), IDS).chunks[number].key.hex()
    return folder / "chunks" / key[0] / key[1] / f"{key}.kv"


def places(size: int) -> list[int]:
    """Bits to flip: every bit of the header and the prefix digests, and 1,000 random ones behind them."""
    head = HEADER_BYTES + CHUNK // 2
    random = np.random.default_rng(0).integers(head * 8, size * 8, 1000)
    return [*range(head * 8), *(int(place) for place in random)]


@pytest.mark.parametrize("encryption", [True, False])
def test_no_flipped_bit_is_accepted(tmp_path: Path, encryption: bool) -> None:
    ids = prompt(CHUNK)
    with open_store(tmp_path, ram_bytes=0, load_threads=1, quarantine_bytes=0, encryption=encryption) as store:
        store.save(identity(), ids, kv_of(ids))
        assert store.flush(20)
        [path] = tmp_path.rglob("*.kv")
        whole = path.read_bytes()
        assert (whole[248:260] != bytes(12)) == encryption
        match = store.match(identity(), ids)
        out = np.zeros(identity().shape(CHUNK), np.uint16)
        flips = places(len(whole))
        for place in flips:
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            path.write_bytes(changed)
            assert store.load(identity(), match, out) == 0
            assert not out.any(), "memory that others own is touched only after the check"
            assert not path.exists()
        assert store.stats().quarantined == len(flips)
        path.write_bytes(whole)
        assert store.load(identity(), match, out) == CHUNK


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half a header": lambda data: data[:100],
    "header only": lambda data: data[:HEADER_BYTES],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"not a chunk at all\n" * 20,
    "another format": lambda data: b"\x80\x04\x95" + data[3:],
    "a page of zeros": lambda data: data[:1024] + bytes(512) + data[1536:],
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_file_ends_the_restored_prefix(folder: Path, damage: str) -> None:
    with open_store(folder) as store:
        path = file_of(store, folder, 2)
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
        assert restore(store, IDS) == 2 * CHUNK
        assert store.stats().quarantined == 1
        assert not path.exists()
        assert (folder / "quarantine" / path.name).exists()
        assert store.match(identity(), IDS).tokens == 2 * CHUNK, "it is not offered again"
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
    with open_store(folder) as store:
        assert restore(store, IDS) == 4 * CHUNK, "computed again, it is stored again"


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_file_damaged_while_nobody_ran_is_never_accepted(folder: Path, damage: str) -> None:
    with open_store(folder) as store:
        path = file_of(store, folder, 2)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with open_store(folder) as store:
        assert restore(store, IDS) == 2 * CHUNK
        assert store.stats().quarantined == 1
        assert restore(store, IDS) == 2 * CHUNK


def test_a_whole_chunk_in_the_place_of_another_is_refused(folder: Path) -> None:
    other = identity(tenant_secret="another tenant")
    with open_store(folder) as store:
        store.save(other, IDS, kv_of(IDS[::-1]))
        assert store.flush(20)
        foreign = store.match(other, IDS).chunks[1].key.hex()
        path = file_of(store, folder, 1)
        shutil.copy(folder / "chunks" / foreign[0] / foreign[1] / f"{foreign}.kv", path)
    for _ in range(2):
        with open_store(folder) as store:
            assert restore(store, IDS) == CHUNK
    with open_store(folder, ram_bytes=0) as store:
        shutil.copy(file_of(store, folder, 0), path)
        assert restore(store, IDS) == CHUNK


def test_a_whole_file_with_other_tokens_than_its_key_says_is_refused(tmp_path: Path) -> None:
    """Well-formed, with the right name, key and checksum; but its tokens are others."""
    with open_store(tmp_path, ram_bytes=0, encryption=False) as store:
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
        path = file_of(store, tmp_path, 2)
        data = memoryview(bytearray(path.read_bytes()))
        header, prefix = verify_chunk(data)
        _, ids, payload = open_chunk(data, None, data)
        for other in (ids[::-1], ids + 1, np.where(np.arange(len(ids)) == len(ids) - 1, 7, ids)):
            path.write_bytes(pack_chunk(header, prefix, other.astype("<u4"), bytes(payload), None))
            assert store.match(identity(), IDS).tokens == len(IDS)
            assert restore(store, IDS) == 2 * CHUNK
            assert not path.exists()
            store.save(identity(), IDS, kv_of(IDS))
            store.save(identity(), IDS, kv_of(IDS))
            assert store.flush(20)
        assert store.stats().quarantined == 3
        path.write_bytes(pack_chunk(header, prefix, ids, bytes(payload), None))
        assert restore(store, IDS) == len(IDS)


def test_a_file_that_disappears_is_a_miss(folder: Path) -> None:
    with open_store(folder) as store:
        match = store.match(identity(), IDS)
        file_of(store, folder, 1).unlink()
        out = np.zeros(identity().shape(len(IDS)), np.uint16)
        assert store.load(identity(), match, out) == CHUNK
        assert store.stats().lost == 1
        assert store.stats().quarantined == 0
        assert store.match(identity(), IDS).tokens == CHUNK


def test_a_folder_or_a_link_in_the_place_of_a_file(folder: Path) -> None:
    with open_store(folder) as store:
        first, second = file_of(store, folder, 0), file_of(store, folder, 3)
        first.unlink()
        first.mkdir()
        second.unlink()
        second.symlink_to("/dev/zero")
        assert restore(store, IDS) == 0
    with open_store(folder) as store:
        assert restore(store, IDS) == 0


def test_strangers_in_the_folder_are_left_alone(folder: Path) -> None:
    strangers = [folder / "README", folder / "chunks" / "a" / "b" / "notes.txt", folder / "chunks" / "x.kv"]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_text("hello")
    with open_store(folder) as store:
        assert restore(store, IDS) == 4 * CHUNK
        assert store.stats().quarantined == 0
    assert all(stranger.read_text() == "hello" for stranger in strangers)


def test_the_quarantine_is_bounded(folder: Path) -> None:
    with open_store(folder, ram_bytes=0, quarantine_bytes=20_000) as store:
        for _ in range(6):
            path = file_of(store, folder, 0)
            path.write_bytes(path.read_bytes()[:-1] + b"!")
            assert restore(store, IDS) == 0
            store.save(identity(), IDS, kv_of(IDS))
            assert store.flush(20)
        assert store.stats().quarantined == 6
        assert sum(path.stat().st_size for path in (folder / "quarantine").iterdir()) <= 20_000


def entered_as_writing(folder: Path, path: Path) -> None:
    """The index as a writer leaves it that is killed before it has marked its chunk as stored."""
    index = sqlite3.connect(folder / "index.db")
    changed = index.execute("UPDATE chunks SET state = 'writing' WHERE key = ?", (bytes.fromhex(path.stem),)).rowcount
    index.commit()
    index.close()
    assert changed == 1


@pytest.mark.parametrize("renamed", [True, False])
def test_what_a_killed_writer_left_is_settled(folder: Path, renamed: bool) -> None:
    with open_store(folder) as store:
        path = file_of(store, folder, 2)
    leftover = path.with_name(f".{path.name}.1.abcd.tmp")
    leftover.write_bytes(b"half a chunk")
    entered_as_writing(folder, path)
    if not renamed:
        path.unlink()
    with open_store(folder) as store:
        assert not leftover.exists()
        assert restore(store, IDS) == (4 if renamed else 2) * CHUNK
        assert store.stats().disk.bytes == sum(file.stat().st_size for file in folder.rglob("*.kv"))
        assert store.stats().lost == store.stats().quarantined == 0
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
        assert restore(store, IDS) == 4 * CHUNK


def test_half_a_file_where_a_chunk_was_being_written(folder: Path) -> None:
    with open_store(folder) as store:
        path = file_of(store, folder, 2)
    path.write_bytes(path.read_bytes()[:-100])
    entered_as_writing(folder, path)
    with open_store(folder) as store:
        assert restore(store, IDS) == 2 * CHUNK
        assert store.stats().quarantined == 1


def test_leftovers_are_cleared_away_with_a_lost_index(folder: Path) -> None:
    with open_store(folder) as store:
        path = file_of(store, folder, 0)
    leftover = path.with_name(f".{path.name}.1.abcd.tmp")
    leftover.write_bytes(b"half a chunk")
    (folder / "index.db").unlink()
    with open_store(folder) as store:
        assert not leftover.exists()
        assert restore(store, IDS) == 4 * CHUNK


def test_files_of_the_earlier_format_are_deleted_and_not_kept_aside(folder: Path) -> None:
    with open_store(folder) as store:
        paths = [file_of(store, folder, number) for number in range(4)]
    for path in paths[1:3]:
        path.write_bytes(path.read_bytes()[:8] + (1).to_bytes(4, "little") + path.read_bytes()[12:])
    (folder / "index.db").unlink()
    with open_store(folder) as store:
        assert [path.exists() for path in paths] == [True, False, False, True]
        assert restore(store, IDS) == CHUNK
        paths[0].write_bytes(paths[0].read_bytes()[:8] + (1).to_bytes(4, "little") + bytes(500))
        assert restore(store, IDS) == 0
        assert not paths[0].exists()
        assert store.stats().quarantined == 0
        assert not list((folder / "quarantine").iterdir())


def test_a_file_nobody_may_read_is_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(folder) as store:
        assert restore(store, IDS[: 2 * CHUNK]) == 2 * CHUNK
        monkeypatch.setattr(os, "fstat", _fail)
        match = store.match(identity(), IDS)
        out = np.zeros(identity().shape(len(IDS)), np.uint16)
        assert store.load(identity(), match, out) == 0
        assert store.stats().read_errors > 0
        monkeypatch.undo()
        assert restore(store, IDS) == 4 * CHUNK, "the file itself is good"


def _fail(*_: object) -> None:
    raise OSError(5, "Input/output error")
