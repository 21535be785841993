"""What happens between two steps of one caller: another process, another thread, or the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memory.kv.store import KVStore
from memory.kv.tiers.folder import ChunkFolder
from memory.kv.tiers.ram import RamTier
from tests.memory.kv.common import CHUNK, chunk_data, identity, kv_of, open_store, prompt, restore
from tests.memory.kv.rungs import disk_of, upkeep_of

YEAR = 365 * 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", ram_bytes=0) as opened:
        yield opened


def save(store: KVStore, ids: list[int], **how: Any) -> None:
    store.save(identity(), ids, kv_of(ids), **how)
    assert store.flush(20)


def files(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in folder.glob("chunks/?/?/*.kv")}


def test_a_file_that_comes_back_while_a_reader_misses_it_is_still_counted(
    tmp_path: Path, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds no file; before it strikes the row out, another process has stored the chunk again."""
    ids, read = prompt(CHUNK), ChunkFolder.read
    save(store, ids)
    (path,) = (tmp_path / "kv").glob("chunks/?/?/*.kv")
    path.unlink()

    def missed(folder: ChunkFolder, *arguments: Any) -> memoryview:
        try:
            return read(folder, *arguments)
        except FileNotFoundError:
            monkeypatch.undo()
            with open_store(tmp_path / "kv", ram_bytes=0) as other:
                disk_of(other).index.remove([bytes.fromhex(path.stem)])
                save(other, ids)
            raise

    monkeypatch.setattr(ChunkFolder, "read", missed)
    assert restore(store, ids) == 0
    assert store.stats().lost == 1
    assert store.stats().disk.bytes == sum(files(tmp_path / "kv").values()) > 0
    assert restore(store, ids) == CHUNK


def test_what_a_killed_writer_left_is_cleared_up_while_others_have_the_folder_open(
    tmp_path: Path, store: KVStore
) -> None:
    """A row and half a file, as a kill in the middle of a write leaves them."""
    disk = disk_of(store)
    save(store, prompt(CHUNK))
    save(store, prompt(CHUNK, seed=1))
    whole, absent = sorted(disk.index.rows(list(disk.index.keys())).values(), key=lambda row: row.key)
    disk.index.enter(whole)
    disk.folder.delete(absent.key)
    disk.index.enter(absent)
    half = disk.folder.path(absent.key).with_name(f".{absent.key.hex()}.kv.1.00.tmp")
    half.write_bytes(b"half")
    assert upkeep_of(store).step()
    assert not half.exists()
    assert disk.index.writing() == []
    assert store.stats().disk.bytes == sum(files(tmp_path / "kv").values()) == whole.size


def test_half_a_file_goes_when_its_owner_is_forgotten_or_its_chunk_is_stored_again(store: KVStore) -> None:
    disk = disk_of(store)
    for again in (True, False):
        ids = prompt(CHUNK, seed=again)
        save(store, ids, owner="session")
        (row,) = disk.index.rows(list(disk.index.keys())).values()
        disk.folder.delete(row.key)
        disk.index.enter(row)
        half = disk.folder.path(row.key).with_name(f".{row.key.hex()}.kv.1.00.tmp")
        half.write_bytes(b"half")
        if again:
            store.match(identity(), ids)
            save(store, ids, owner="session")
            assert restore(store, ids) == CHUNK
            disk.drop([row.key])
        else:
            store.forget_owners("secret", ["session"])
        assert not half.exists()
        assert store.stats().disk.chunks == 0


@pytest.mark.parametrize("who", ["this process", "another process", "an earlier process"])
def test_what_is_saved_for_a_forgotten_owner_is_not_even_in_memory(tmp_path: Path, who: str) -> None:
    ids = prompt(2 * CHUNK)
    if who == "an earlier process":
        with open_store(tmp_path) as earlier:
            earlier.forget_owners("secret", ["session"])
    with open_store(tmp_path) as store:
        if who == "this process":
            store.forget_owners("secret", ["session"])
        elif who == "another process":
            with open_store(tmp_path) as other:
                other.forget_owners("secret", ["session"])
        save(store, ids, owner="session")
        save(store, ids, owner="session")
        assert restore(store, ids) == 0
        assert store.stats().ram.chunks == store.stats().disk.chunks == 0
        assert store.stats().dropped >= 3, "one that waits when the first is refused is taken back"
        save(store, ids, owner="another")
        assert restore(store, ids) == 2 * CHUNK


def test_what_is_loaded_while_its_owner_is_forgotten_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, put = prompt(CHUNK), RamTier.put
    with open_store(tmp_path) as store:
        save(store, ids, owner="session")
        store._ram.clear()
        restore(store, ids)
        assert store.flush(20)

        def late(ram: RamTier, chunk: Any) -> bool:
            monkeypatch.undo()
            store.forget_owners("secret", ["session"])
            return put(ram, chunk)

        monkeypatch.setattr(RamTier, "put", late)
        assert restore(store, ids) == CHUNK, "it was read before"
        assert store.flush(20)
        assert store.stats().ram.chunks == 0
        assert restore(store, ids) == 0


def test_a_clock_that_was_ahead_does_not_close_the_disk_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with open_store(tmp_path, ram_bytes=0) as store:
        save(store, prompt(CHUNK))
        size = store.stats().disk.bytes
    budget: dict[str, Any] = {"ram_bytes": 0, "disk_bytes": 4 * size}
    with open_store(tmp_path, **budget) as store:
        monkeypatch.setattr(time, "time", lambda: now() + YEAR)
        for seed in range(8):
            save(store, prompt(CHUNK, seed=seed))
        monkeypatch.undo()
        assert upkeep_of(store).step()
        save(store, prompt(4 * CHUNK, seed=20))
        assert restore(store, prompt(4 * CHUNK, seed=20)) == 4 * CHUNK
        index = disk_of(store).index
        assert all(row.last_used <= now() for row in index.rows(list(index.keys())).values())
        assert {victim.worth <= now() + 70 * 3600 for victim in index.least_worth(9)} == {True}


def test_a_clock_that_was_ahead_does_not_close_the_ram_tier() -> None:
    kv = kv_of(prompt(CHUNK))
    ram = RamTier(2 * kv.nbytes)
    for seed, stamp in ((0, time.time() + YEAR), (1, time.time() + YEAR), (2, time.time()), (3, time.time())):
        assert ram.put(chunk_data(identity().digest(), prompt(CHUNK, seed=seed), kv, stamp=stamp))
    assert ram.stats().chunks == 2


def remote(tmp_path: Path) -> dict[str, Any]:
    return {"ram_bytes": 0, "remote_url": f"file://{tmp_path}/far", "remote_bytes": 1 << 20}


def move_out(store: KVStore) -> list[Path]:
    """Moves everything to the remote tier; returns the objects."""
    disk = disk_of(store)
    with disk.exclusive():
        for victim in disk.index.least_worth(99):
            assert disk._room.move_out(disk.index, victim, disk.remote)
    root = Path(store.settings.remote_url.removeprefix("file://")) if store.settings.remote_url else Path()
    return sorted(root.rglob("*.kv"))


def test_an_object_that_went_bad_is_deleted_and_stored_anew(tmp_path: Path) -> None:
    ids = prompt(CHUNK)
    with open_store(tmp_path / "kv", **remote(tmp_path)) as store:
        save(store, ids)
        (path,) = move_out(store)
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
        assert restore(store, ids) == 0
        assert store.stats().quarantined == 1
        assert not path.exists(), "else the next listing would take it in again"
        assert store.stats().remote.chunks == 0
        save(store, ids)
        assert restore(store, ids) == CHUNK


def test_a_chunk_that_came_back_from_the_remote_is_not_struck_out_by_who_misses_its_object(tmp_path: Path) -> None:
    """Another process matched it when it was remote still."""
    ids = prompt(CHUNK)
    with open_store(tmp_path / "kv", **remote(tmp_path)) as store:
        save(store, ids)
        move_out(store)
        match = store.match(identity(), ids)
        assert [chunk.tier for chunk in match.chunks] == ["remote"]
        with open_store(tmp_path / "kv", **remote(tmp_path)) as other:
            for _ in range(3):
                restore(other, ids)
                assert other.flush(20)
            assert other.stats().disk.chunks == 1
        out = kv_of(ids) * 0
        assert store.load(identity(), match, out) == CHUNK, "its file is on disk"
        assert store.stats().disk.bytes == sum(files(tmp_path / "kv").values()) > 0


def test_listing_the_remote_does_not_delete_what_is_moved_out_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(CHUNK)
    with open_store(tmp_path / "kv", **remote(tmp_path)) as store:
        save(store, ids)
        tier = disk_of(store).remote
        assert tier is not None
        listing = tier._list

        def moved_first() -> dict[bytes, int]:
            move_out(store)
            return listing()

        monkeypatch.setattr(tier, "_list", moved_first)
        assert tier.reconcile(lambda _: True, lambda: False)
        assert restore(store, ids) == CHUNK


def test_a_file_of_another_chunk_under_this_name_is_refused_and_the_rest_is_right(
    tmp_path: Path, store: KVStore
) -> None:
    """Every chunk's file replaced by another's, valid in itself: of another place, tenant, model or dtype."""
    mine = identity()
    others = [identity(tenant_secret="other"), identity(weights_id="cd" * 32), identity(rope="{}"), mine]
    ids = prompt(3 * CHUNK)
    save(store, ids)
    targets = [disk_of(store).folder.path(ref.key) for ref in store.match(mine, ids).chunks]
    for other in others:
        words = ids if other is not mine else prompt(3 * CHUNK, seed=9)
        store.save(other, words, kv_of(words, other))
        assert store.flush(20)
        paths = [disk_of(store).folder.path(ref.key) for ref in store.match(other, words).chunks]
        targets[1].write_bytes(paths[1].read_bytes())
        assert restore(store, ids) == CHUNK
        store.match(mine, ids)
        save(store, ids)
        assert restore(store, ids) == 3 * CHUNK
    targets[1].write_bytes(targets[0].read_bytes())
    assert restore(store, ids) == CHUNK


def test_a_keyring_that_is_damaged_while_it_is_open_costs_its_keys_and_no_more(tmp_path: Path, store: KVStore) -> None:
    ids = prompt(CHUNK)
    save(store, ids)
    (tmp_path / "kv" / "keys.db").write_bytes(b"no database at all" * 1000)
    save(store, prompt(CHUNK, seed=1), owner="session")
    assert restore(store, prompt(CHUNK, seed=1)) == CHUNK
    assert store.stats().disk_trouble == ""
    assert store.forget_owners("secret", ["session"]).keys == 1
    assert restore(store, prompt(CHUNK, seed=1)) == restore(store, ids) == 0
    store.match(identity(), ids)
    save(store, ids)
    assert restore(store, ids) == CHUNK
    assert (tmp_path / "kv" / "keys.db.damaged").exists()
