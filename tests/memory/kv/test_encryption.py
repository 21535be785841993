"""Encrypted chunks are read by who has the keys, and are misses for everybody else."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

import pytest

from memory.kv.keyring import MASTER_VARIABLE, KeyringError
from memory.kv.store import KVStore
from tests.memory.kv.common import CHUNK, identity, kv_of, open_store, prompt, restore

IDS = prompt(3 * CHUNK)


def save(store: KVStore, ids: list[int] = IDS, owner: str = "") -> None:
    store.save(identity(), ids, kv_of(ids), owner=owner)
    assert store.flush(20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one sequence of three encrypted chunks; its keyring lies beside it."""
    with open_store(tmp_path / "kv") as store:
        save(store)
    assert (tmp_path / "kv.key").stat().st_mode & 0o777 == 0o600
    return tmp_path / "kv"


def test_a_lost_keyring_makes_misses_and_new_chunks_take_the_place_of_old_ones(folder: Path) -> None:
    (folder.parent / "kv.key").unlink()
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == 0
        assert store.stats().locked > 0
        assert store.stats().read_errors == store.stats().quarantined == store.stats().write_errors == 0
        assert store.match(identity(), IDS).tokens == 0, "what nobody can read is not offered again"
        save(store)
        assert restore(store, IDS) == len(IDS)
        assert len(list(folder.rglob("*.kv"))) == 3
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_lost_key_had_encrypted_is_replaced_in_one_turn(folder: Path, threads: int) -> None:
    """Also when the owner has a new key by then, for another sequence: the files are locked, not bad."""
    other = prompt(4 * CHUNK, seed=1)
    with open_store(folder) as store:
        save(store, other)
    (folder.parent / "kv.key").unlink()
    with open_store(folder, ram_bytes=0, load_threads=threads) as store:
        for ids in (IDS, other):
            assert restore(store, ids) == 0
            save(store, ids)
            assert restore(store, ids) == len(ids)
        assert store.stats().quarantined == 0
        assert store.stats().disk.chunks == len(list(folder.rglob("*.kv"))) == 7


def test_a_keyring_that_comes_back_opens_what_nobody_replaced(folder: Path) -> None:
    path = folder.parent / "kv.key"
    key = path.read_bytes()
    path.unlink()
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == 0
    path.write_bytes(key)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)


@pytest.mark.parametrize("damage", ["deleted", "text", "empty"])
def test_a_lost_table_of_keys_makes_misses_too(folder: Path, damage: str) -> None:
    path = folder / "keys.db"
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"this is no database\n" * 50 if damage == "text" else b"")
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == 0
        save(store)
        assert restore(store, IDS) == len(IDS)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)


def test_keys_that_vanish_while_the_store_runs(folder: Path) -> None:
    new = prompt(2 * CHUNK, seed=1)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, IDS) == len(IDS)
        (folder / "keys.db").unlink()
        save(store, new)
    with open_store(folder, ram_bytes=0) as store:
        assert restore(store, new) == len(new), "no key was used that only memory held"
        assert restore(store, IDS) == 0


def test_the_setting_names_another_place(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", keyring=tmp_path / "safe" / "ring") as store:
        save(store)
    assert (tmp_path / "safe" / "ring").exists()
    assert not (tmp_path / "kv.key").exists()


def test_the_environment_holds_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASTER_VARIABLE, base64.b64encode(secrets.token_bytes(32)).decode())
    for expected in (0, len(IDS)):
        with open_store(tmp_path / "kv", ram_bytes=0) as store:
            assert restore(store, IDS) == expected
            save(store)
    monkeypatch.setenv(MASTER_VARIABLE, base64.b64encode(secrets.token_bytes(32)).decode())
    with open_store(tmp_path / "kv", ram_bytes=0) as store:
        assert restore(store, IDS) == 0


def test_a_keyring_that_others_may_read_is_refused_when_the_store_opens(folder: Path) -> None:
    (folder.parent / "kv.key").chmod(0o644)
    with pytest.raises(KeyringError, match="chmod 600"):
        open_store(folder)


def test_a_keyring_that_cannot_be_is_told_and_nothing_is_written_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the keyring's folder")
    with open_store(tmp_path / "kv", keyring=tmp_path / "file" / "ring", ram_bytes=0) as store:
        save(store)
        assert store.stats().write_errors > 0
        assert store.stats().disk_trouble
        assert restore(store, IDS) == 0
        assert not list(tmp_path.rglob("*.kv"))
        (tmp_path / "file").unlink()
        save(store)
        assert restore(store, IDS) == len(IDS), "it mends itself"


def test_encryption_can_be_switched_on_and_off(tmp_path: Path) -> None:
    for number, encryption in enumerate([True, False, True]):
        with open_store(tmp_path / "kv", ram_bytes=0, encryption=encryption) as store:
            save(store, prompt(CHUNK, seed=number))
            for before in range(number + 1):
                assert restore(store, prompt(CHUNK, seed=before)) == CHUNK
    encrypted = [path.read_bytes()[248:260] != bytes(12) for path in (tmp_path / "kv").rglob("*.kv")]
    assert sorted(encrypted) == [False, True, True]


def test_the_same_words_are_never_the_same_bytes(tmp_path: Path) -> None:
    """Two owners, or the same one twice: each file has a nonce of its own."""
    files = []
    for number in range(2):
        with open_store(tmp_path / str(number), keyring=tmp_path / "ring") as store:
            save(store, IDS[:CHUNK], owner="session")
        (path,) = (tmp_path / str(number)).rglob("*.kv")
        files.append(path.read_bytes())
    assert files[0][248:260] != files[1][248:260]
    assert files[0][1000:2000] != files[1][1000:2000]
