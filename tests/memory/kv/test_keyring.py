"""Keys: made once, shared by processes, opened by nobody else, and gone for good once destroyed."""

from __future__ import annotations

import base64
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag

from memory.kv.keyring import MASTER_VARIABLE, Keyring, KeyringError, OwnerForgotten, master_key

MASTER, OTHER_MASTER = b"m" * 32, b"n" * 32
OWNER, OTHER = b"o" * 16, b"p" * 16
NONCE = b"1" * 12


def keyring(tmp_path: Path, master: bytes = MASTER) -> Keyring:
    return Keyring(tmp_path / "keys.db", master)


def test_the_master_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "keyring"
    made = master_key(path, {})
    assert len(made) == 32
    assert master_key(path, {}) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    found: list[bytes] = []
    barrier = threading.Barrier(6)

    def make() -> None:
        barrier.wait(20)
        found.append(master_key(tmp_path / "keyring", {}))

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    given = base64.b64encode(MASTER).decode()
    assert master_key(tmp_path / "keyring", {MASTER_VARIABLE: given}) == MASTER
    assert not (tmp_path / "keyring").exists()


@pytest.mark.parametrize("text", ["short", base64.b64encode(b"x" * 31).decode(), "ä" * 44])
def test_a_key_of_another_form_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeyringError, match="openssl rand"):
        master_key(tmp_path / "keyring", {MASTER_VARIABLE: text})
    (tmp_path / "keyring").write_text(text, "utf-8")
    (tmp_path / "keyring").chmod(0o600)
    with pytest.raises(KeyringError, match="openssl rand"):
        master_key(tmp_path / "keyring", {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_key_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    master_key(tmp_path / "keyring", {})
    (tmp_path / "keyring").chmod(mode)
    with pytest.raises(KeyringError, match="chmod 600"):
        master_key(tmp_path / "keyring", {})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    master_key(tmp_path / "keyring", {})
    os.chown(tmp_path / "keyring", 12345, -1)
    with pytest.raises(KeyringError, match="another user"):
        master_key(tmp_path / "keyring", {})


def test_all_processes_find_an_owners_key(tmp_path: Path) -> None:
    one, two = keyring(tmp_path), keyring(tmp_path)
    sealed = one.to_write(OWNER, "tenant").cipher.encrypt(NONCE, b"words", b"")
    for key in (two.to_read(OWNER, "tenant"), two.to_write(OWNER, "tenant"), keyring(tmp_path).for_upkeep(OWNER)):
        assert key is not None
        assert key.cipher.decrypt(NONCE, sealed, b"") == b"words"
        assert key.id == one.to_write(OWNER, "tenant").id
    assert one.to_write(OTHER, "tenant").id != one.to_write(OWNER, "tenant").id
    with pytest.raises(InvalidTag):
        one.to_write(OTHER, "tenant").cipher.decrypt(NONCE, sealed, b"")


def test_another_tenant_or_another_master_opens_nothing(tmp_path: Path) -> None:
    keyring(tmp_path).to_write(OWNER, "tenant")
    assert keyring(tmp_path).to_read(OWNER, "another") is None
    assert keyring(tmp_path, OTHER_MASTER).to_read(OWNER, "tenant") is None
    assert keyring(tmp_path, OTHER_MASTER).for_upkeep(OWNER) is None


def test_a_lost_master_key_does_not_lock_the_owner_out_for_ever(tmp_path: Path) -> None:
    sealed = keyring(tmp_path).to_write(OWNER, "tenant").cipher.encrypt(NONCE, b"words", b"")
    other = keyring(tmp_path, OTHER_MASTER)
    made = other.to_write(OWNER, "tenant")
    found = keyring(tmp_path).to_read(OWNER, "tenant")
    assert found is not None, "when the first comes back, its keys are still there"
    assert found.id != made.id
    assert found.cipher.decrypt(NONCE, sealed, b"") == b"words"
    assert other.destroy([OWNER]) == 1
    assert keyring(tmp_path).to_read(OWNER, "tenant") is None, "those of every master are destroyed"


def test_a_destroyed_key_is_gone_everywhere_and_never_comes_back(tmp_path: Path) -> None:
    one, two = keyring(tmp_path), keyring(tmp_path)
    one.to_write(OWNER, "tenant")
    one.to_write(OTHER, "tenant")
    assert two.to_read(OWNER, "tenant") is not None
    assert two.news() == []
    database = (tmp_path / "keys.db").read_bytes()
    wrapped = sqlite3.connect(tmp_path / "keys.db").execute("SELECT for_tenant FROM keys WHERE owner = ?", (OWNER,))
    secret = wrapped.fetchone()[0]
    assert secret in database
    assert one.destroy([OWNER, b"q" * 16]) == 1
    assert one.destroy([OWNER]) == 0
    assert not any(secret in path.read_bytes() for path in tmp_path.iterdir()), "not even its wrapping is left"
    assert two.news() == [OWNER, b"q" * 16], "another process hears of it"
    assert two.news() == []
    for ring in (one, two, keyring(tmp_path)):
        assert ring.to_read(OWNER, "tenant") is None
        assert ring.for_upkeep(OWNER) is None
        assert ring.is_destroyed(OWNER)
        assert not ring.is_destroyed(OTHER)
        with pytest.raises(OwnerForgotten):
            ring.to_write(OWNER, "tenant")
        assert ring.to_read(OTHER, "tenant") is not None


def test_what_is_written_after_a_deletion_elsewhere_notices_it_at_once(tmp_path: Path) -> None:
    one, two = keyring(tmp_path), keyring(tmp_path)
    one.to_write(OWNER, "tenant")
    two.destroy([OWNER])
    with pytest.raises(OwnerForgotten):
        one.to_write(OWNER, "tenant")
    assert one.news() == [OWNER], "and still says so to whom it concerns"


def test_a_file_that_is_damaged_is_put_aside_and_one_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    ring = keyring(tmp_path)
    ring.to_write(OWNER, "tenant")
    path.unlink()
    ring.to_write(OWNER, "tenant")
    assert path.exists(), "a key that only memory holds would be lost at the next start"
    assert keyring(tmp_path).to_read(OWNER, "tenant") is not None
    ring.close()
    path.write_bytes(b"this is no database\n" * 100)
    again = keyring(tmp_path)
    again.to_write(OWNER, "tenant")
    assert keyring(tmp_path).to_read(OWNER, "tenant") is not None
    assert (tmp_path / "keys.db.damaged").exists()


def test_the_file_is_private(tmp_path: Path) -> None:
    keyring(tmp_path).to_write(OWNER, "tenant")
    assert (tmp_path / "keys.db").stat().st_mode & 0o777 == 0o600


def test_who_changes_the_file_holds_up_no_lookup(tmp_path: Path) -> None:
    one, two = keyring(tmp_path), keyring(tmp_path)
    one.to_write(OWNER, "tenant")
    assert two.to_read(OWNER, "tenant") is not None
    busy = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    busy.execute("BEGIN EXCLUSIVE")
    assert two.news() == []
    assert two.to_read(OWNER, "tenant") is not None, "what is known needs no file"
    busy.execute("ROLLBACK")
    busy.close()
    one.destroy([OWNER])
    assert two.news() == [OWNER]
    assert two.to_read(OWNER, "tenant") is None
