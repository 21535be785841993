"""A disk that is full, read-only, gone, or whose index is broken: serving goes on, and the counts say why."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memory.kv.tiers import folder as folder_module
from tests.memory.kv.child import NOBODY
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

IDS = prompt(3 * CHUNK)


def run_child(mode: str, folder: Path, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.memory.kv.child", mode, str(folder), str(number)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store's folder with one sequence of three chunks."""
    with open_store(tmp_path / "kv") as store:
        store.save(identity(), IDS, kv_of(IDS))
    return tmp_path / "kv"


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    new = prompt(3 * CHUNK, seed=1)
    with open_store(folder, ram_bytes=0) as store, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(folder_module, "write_atomic", full)
        for _ in range(2):
            store.save(identity(), new, kv_of(new))
            assert store.flush(20)
        assert store.stats().write_errors == 6
        assert "No space left" in store.stats().disk_trouble
        assert restore(store, new) == 0
        assert restore(store, IDS) == 3 * CHUNK, "what is there can be read"
        monkeypatch.undo()
        store.save(identity(), new, kv_of(new))
        assert store.flush(20)
        assert store.stats().disk_trouble == ""
        assert restore(store, new) == 3 * CHUNK
    assert [record.getMessage() for record in caplog.records if "fails" in record.getMessage()][1:] == []


def test_a_disk_in_trouble_is_not_tried_again_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full(*_: object, **__: object) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module, "write_atomic", full)
    with open_store(folder, retry_seconds=3600.0) as store:
        new = prompt(3 * CHUNK, seed=1)
        store.save(identity(), new, kv_of(new))
        assert store.flush(20)
        assert len(tries) == 1
        assert (store.stats().write_errors, store.stats().dropped) == (1, 2)


def test_no_file_may_grow(folder: Path) -> None:
    run_child("limit", folder, len(IDS))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder whose parents anybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_read_only_folder(open_folder: Path) -> None:
    folder = open_folder / "kv"
    with open_store(folder) as store:
        store.save(identity(), IDS, kv_of(IDS))
    paths = [folder, *folder.rglob("*"), open_folder / "kv.key"]
    for path in paths:
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o555 if path.is_dir() else 0o400)
    try:
        run_child("read-only", folder, len(IDS))
    finally:
        for path in paths:
            if path.exists():
                path.chmod(0o755)


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_folder_that_cannot_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "kv").write_text("a file, not a folder")
    where = tmp_path / "kv" if place == "file" else tmp_path / "kv" / "deeper"
    with open_store(where) as store:
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
        assert restore(store, IDS) == 3 * CHUNK, "RAM serves"
        assert store.stats().write_errors > 0
        (tmp_path / "kv").unlink()
        store.save(identity(), IDS, kv_of(IDS))
        assert store.flush(20)
        assert store.stats().disk.chunks == 3, "the disk is back"
    with open_store(where) as store:
        assert restore(store, IDS) == 3 * CHUNK


def test_a_folder_deleted_while_it_is_used(folder: Path) -> None:
    with open_store(folder, ram_bytes=0) as store:
        shutil.rmtree(folder)
        assert restore(store, IDS) == 0
        for _ in range(2):
            store.save(identity(), IDS, kv_of(IDS))
            assert store.flush(20)
        assert restore(store, IDS) == 3 * CHUNK
    with open_store(folder) as store:
        assert restore(store, IDS) == 3 * CHUNK


def damage_index(folder: Path, how: str) -> None:
    path = folder / "index.db"
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("this is no database\n" * 100)
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "zeros inside":
        path.write_bytes(data[:4096] + bytes(len(data) - 4096))
    elif how == "another schema":
        path.unlink()
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE chunks (name TEXT)")
        other.commit()
        other.close()
    elif how == "newer schema":
        other = sqlite3.connect(path)
        other.execute("PRAGMA user_version = 99")
        other.close()
    elif how == "a folder":
        path.unlink()
        path.mkdir()


DAMAGES = ["deleted", "empty", "text", "truncated", "zeros inside", "another schema", "newer schema"]


@pytest.mark.parametrize("how", DAMAGES)
def test_the_index_is_rebuilt_from_the_files(folder: Path, how: str) -> None:
    damage_index(folder, how)
    for _ in range(2):
        with open_store(folder, ram_bytes=0) as store:
            assert restore(store, IDS) == 3 * CHUNK
            assert store.stats().disk.bytes == sum(path.stat().st_size for path in folder.rglob("*.kv"))


def test_an_index_that_cannot_be_replaced_is_done_without(folder: Path) -> None:
    damage_index(folder, "a folder")
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == 3 * CHUNK
        assert store.stats().write_errors > 0


@pytest.mark.parametrize("how", DAMAGES)
def test_the_index_breaks_while_it_is_used(folder: Path, how: str) -> None:
    new = prompt(3 * CHUNK, seed=1)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == 3 * CHUNK
        assert store.flush(20)
        damage_index(folder, how)
        restore(store, IDS)  # some or nothing; what comes is right
        for _ in range(3):  # the first write may be the one that finds out
            store.save(identity(), new, kv_of(new))
            assert store.flush(20)
        restore(store, IDS)
        assert restore(store, new) == 3 * CHUNK
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == restore(store, new) == 3 * CHUNK


def test_flipped_bits_in_the_index_never_give_wrong_kv(folder: Path) -> None:
    path = folder / "index.db"
    whole = path.read_bytes()
    files = {file: file.read_bytes() for file in folder.rglob("*.kv")}
    rng = np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(whole)
        for _ in range(int(rng.integers(1, 30))):
            changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with open_store(folder, ram_bytes=0) as store:
            restore(store, IDS)
            restore(store, IDS[:40])
            store.stats()
            store.match(identity(), IDS, least="exact")
            store.report()
        for file, data in files.items():
            file.write_bytes(data)
        for side in ("-wal", "-shm"):
            path.with_name(path.name + side).unlink(missing_ok=True)
