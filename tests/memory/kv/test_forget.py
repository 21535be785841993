"""Forgetting owners: the key goes first, then every byte in every tier; what others stored stays."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from memory.kv.forget import Forgotten
from memory.kv.store import KVStore
from memory.kv.tiers.base import ChunkData
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.folder import ChunkFolder
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

OTHER_VERSION = identity(weights_id="cd" * 32)


def save(store: KVStore, ids: list[int], owner: str = "session", version: str = "ab") -> None:
    of = identity(weights_id=version * 32)
    store.save(of, ids, kv_of(ids, of), owner=owner)
    assert store.flush(20)


def forget(store: KVStore, *owners: str) -> Forgotten:
    return store.forget_owners("secret", owners)


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("encryption", [True, False])
def test_an_owner_goes_whatever_version_computed_it(tmp_path: Path, encryption: bool) -> None:
    ids = prompt(100)
    with open_store(tmp_path, encryption=encryption) as store:
        save(store, ids)
    with open_store(tmp_path, encryption=encryption) as store:  # of the first version nothing is known here
        save(store, ids, version="cd")
        save(store, prompt(70, seed=3), "another")
        gone = forget(store, "session")
        assert gone == Forgotten(keys=int(encryption), ram=4, disk=8)
        assert restore(store, ids) == restore(store, ids, OTHER_VERSION) == 0
        assert restore(store, prompt(70, seed=3)) == 70, "what another owner stored stays"
        assert len(chunk_files(tmp_path)) == 3
        assert forget(store, "session") == Forgotten()


def test_it_is_final(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path) as store:
        save(store, ids)
        forget(store, "session")
        save(store, ids)
        assert store.stats().disk.chunks == 0
        assert store.stats().dropped == 4
        assert store.stats().disk_trouble == "", "which is no trouble of the disk"
    with open_store(tmp_path) as store:
        save(store, ids)
        assert not chunk_files(tmp_path)
        save(store, ids, "another session")
        assert restore(store, ids) == 100, "another may say the same words"


def test_an_owner_of_another_tenant_is_another_owner(tmp_path: Path) -> None:
    ids = prompt(64)
    with open_store(tmp_path) as store:
        save(store, ids)
        assert store.forget_owners("another tenant", ["session", ""]) == Forgotten()
        assert restore(store, ids) == 64


def test_shared_chunks_belong_to_who_stored_them_first(tmp_path: Path) -> None:
    shared, mine, other = prompt(64), prompt(60, seed=1), prompt(60, seed=2)
    with open_store(tmp_path) as store:
        save(store, shared, "")
        save(store, shared + mine, "mine")
        save(store, shared + other, "other")
        assert store.stats().shared_tokens == 2 * 64
        save(store, shared + mine, "mine")
        assert store.stats().shared_tokens == 2 * 64, "counted once for each owner"
        assert forget(store, "mine").disk == 2
        assert restore(store, shared + mine) == 64
        assert restore(store, shared + other) == 124
        assert forget(store, "").disk == 2
        assert restore(store, shared + other) == 0, "without its beginning the rest is of no use"


@pytest.mark.parametrize("encryption", [True, False])
def test_a_deletion_that_is_cut_short_has_deleted_all_the_same(
    tmp_path: Path, encryption: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of every file as it was before, put back: as a backup, or a disk that did not delete."""
    ids = prompt(100)
    with open_store(tmp_path, encryption=encryption) as store:
        save(store, ids)
        store._ram.clear()

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(ChunkFolder, "delete", fail)
        with pytest.raises(OSError, match="Input/output"):
            forget(store, "session")
        monkeypatch.undo()
        assert len(chunk_files(tmp_path)) == 4
        if encryption:
            assert restore(store, ids) == 0
            assert store.stats().locked > 0
        assert forget(store, "session").disk == 4, "asking again finishes it"
        assert not chunk_files(tmp_path)


def test_the_bytes_of_a_forgotten_owner_are_noise_even_in_a_copy(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path, ram_bytes=0) as store:
        save(store, ids)
    copies = {path: path.read_bytes() for path in chunk_files(tmp_path)}
    index = (tmp_path / "index.db").read_bytes()
    with open_store(tmp_path, ram_bytes=0) as store:
        forget(store, "session")
    for path, data in copies.items():
        path.write_bytes(data)
    (tmp_path / "index.db").write_bytes(index)
    with open_store(tmp_path, ram_bytes=0) as store:
        assert store.match(identity(), ids).tokens == 100
        assert restore(store, ids) == 0
        assert store.stats().locked > 0
        assert store.stats().quarantined == 0, "the file is whole"


def test_what_waits_to_be_written_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = DiskTier.write
    ids = prompt(100)
    with open_store(tmp_path) as store:

        def write_when_the_others_are_gone(disk: DiskTier, chunk: ChunkData) -> bool:
            deadline = time.monotonic() + 20
            while store.stats().waiting_bytes > chunk.kv.nbytes and time.monotonic() < deadline:
                time.sleep(0.01)
            return write(disk, chunk)

        monkeypatch.setattr(DiskTier, "write", write_when_the_others_are_gone)
        store.save(identity(), ids, kv_of(ids), owner="session")
        gone = forget(store, "session")
        assert (gone.ram, gone.waiting) == (4, 3), "the one that was being written is not stored"
        assert store.flush(20)
        assert store.stats().disk.chunks == 0
        assert restore(store, ids) == 0


def test_a_chunk_whose_owner_is_forgotten_while_it_is_encoded_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process forgets between the moment the key was looked up and the moment the file is written."""
    ids = prompt(CHUNK)
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        assert store._disk is not None
        nonce = store._disk.keys.nonce()

        def slowly() -> bytes:
            forget(other, "session")
            return nonce

        monkeypatch.setattr(store._disk.keys, "nonce", slowly)
        store.save(identity(), ids, kv_of(ids), owner="session")
        assert store.flush(20)
        assert not chunk_files(tmp_path)
        assert store.stats().write_errors == 0
        assert store.stats().dropped == 1


def test_refused_files_of_the_owner_and_those_that_tell_nothing_go_too(tmp_path: Path) -> None:
    with open_store(tmp_path, ram_bytes=0) as store:
        for owner, seed in (("session", 1), ("another", 2), ("third", 3)):
            save(store, prompt(CHUNK, seed=seed), owner)
        mine, others, headless = (store.match(identity(), prompt(CHUNK, seed=seed)).chunks[0] for seed in (1, 2, 3))
        for chunk, at in ((mine, -1), (others, -1), (headless, 50)):
            (file,) = tmp_path.rglob(f"{chunk.key.hex()}.kv")
            data = bytearray(file.read_bytes())
            data[at] ^= 1
            file.write_bytes(data)
        assert [restore(store, prompt(CHUNK, seed=seed)) for seed in (1, 2, 3)] == [0, 0, 0]
        assert forget(store, "session") == Forgotten(keys=1, quarantined=2)
        assert [path.name for path in (tmp_path / "quarantine").iterdir()] == [f"{others.key.hex()}.kv"]


def test_other_processes_drop_it_from_ram_at_their_next_match(tmp_path: Path) -> None:
    ids, stays = prompt(64), prompt(64, seed=1)
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        save(one, ids)
        save(one, stays, "another")
        forget(two, "session")
        assert one.stats().ram.chunks == 4
        assert restore(one, ids) == 0
        assert restore(one, stays) == 64
        assert one.stats().ram.chunks == 2
        save(one, ids)
        assert restore(two, ids) == 0


def test_the_index_is_lost_and_the_owner_is_still_found(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(64))
    (tmp_path / "index.db").unlink()
    with open_store(tmp_path) as store:
        assert forget(store, "session") == Forgotten(keys=1, disk=2)
        assert not chunk_files(tmp_path)


def test_a_disk_that_keeps_them_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(64))

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("as if")

        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(PermissionError):
            forget(store, "session")
        monkeypatch.undo()


def test_clearing_forgets_nobody(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(64))
        store.clear()
        assert restore(store, prompt(64)) == 0
        save(store, prompt(64))
        assert restore(store, prompt(64)) == 64


def test_nothing_in_the_folder_tells_the_words(tmp_path: Path) -> None:
    ids = prompt(100)
    needles = [
        np.asarray(ids[at : at + 4], dtype).tobytes() for at in range(0, 96, 4) for dtype in ("<u4", "<u2", "<u8")
    ]
    with open_store(tmp_path, quarantine_bytes=1 << 20) as store:
        save(store, ids)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {"index.db", "keys.db"} <= {path.name for path in files}
        assert not [path for path in files for needle in needles if needle in path.read_bytes()]
        names = (b"session", b"secret")
        assert not [path for path in files for name in names if name in path.read_bytes()]
