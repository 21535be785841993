"""Forgetting token sequences: every version's chunks go, from every tier; what others said stays."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from memory.kv.forget import Doomed, Forgotten
from memory.kv.store import KVStore
from memory.kv.tiers.disk import DiskTier
from tests.memory.kv.common import identity, kv_of, open_store, prompt, restore

OTHER_VERSION = identity(weights_id="cd" * 32)


def save(store: KVStore, ids: list[int], version: str = "ab") -> None:
    of = identity(weights_id=version * 32)
    store.save(of, ids, kv_of(ids, of))
    assert store.flush(20)


def holds_bytes(folder: Path, ids: list[int]) -> bool:
    """Whether any file of the folder still holds a run of these token ids."""
    needle = np.asarray(ids, "<u4").tobytes()
    return any(needle in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_sequence_goes_whatever_version_computed_it(tmp_path: Path) -> None:
    ids = prompt(100)
    with open_store(tmp_path) as store:
        save(store, ids)
    with open_store(tmp_path) as store:  # of the first version nothing is known here but its files
        save(store, ids, "cd")
        assert holds_bytes(tmp_path, ids[64:90])
        gone = store.forget_tokens([Doomed.of(ids)])
        assert gone == Forgotten(ram=4, waiting=0, disk=8, quarantined=0)
        assert restore(store, ids) == restore(store, ids, OTHER_VERSION) == 0
        assert not holds_bytes(tmp_path, ids[64:90]), "neither in chunk files nor in the index"
        assert store.forget_tokens([Doomed.of(ids)]) == Forgotten()
        save(store, ids)  # it can be said, and remembered, again
        assert restore(store, ids) == 100


def test_other_conversations_stay(tmp_path: Path) -> None:
    shared, mine, other = prompt(40), prompt(60, seed=1), prompt(60, seed=2)
    with open_store(tmp_path) as store:
        save(store, shared + mine)
        save(store, shared + other)
        save(store, prompt(70, seed=3))
        store.forget_tokens([Doomed.of(shared + mine, keep=len(shared))])
        assert restore(store, shared + mine) == 40, "what is shared is still there, with the other conversation"
        assert restore(store, shared + other) == 100
        assert restore(store, prompt(70, seed=3)) == 70


def test_what_was_given_up_after_it_goes_too(tmp_path: Path) -> None:
    ids, more = prompt(100), prompt(90, seed=1)
    with open_store(tmp_path) as store:
        save(store, ids)
        save(store, ids + more)  # a turn that was never journalled
        store.forget_tokens([Doomed.of(ids)])
        assert store.stats().disk.chunks == store.stats().ram.chunks == 0
        assert not holds_bytes(tmp_path, more[40:60])


def test_what_waits_to_be_written_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = DiskTier.write
    monkeypatch.setattr(DiskTier, "write", lambda self, chunk: gate.wait(20) and write(self, chunk))
    ids = prompt(100)
    with open_store(tmp_path) as store:
        store.save(identity(), ids, kv_of(ids))
        threading.Timer(0.2, gate.set).start()
        gone = store.forget_tokens([Doomed.of(ids)])
        assert (gone.ram, gone.waiting + gone.disk) == (4, 4)
        assert store.flush(20)
        assert store.stats().disk.chunks == 0
        assert restore(store, ids) == 0


def test_a_file_that_no_index_lists_and_refused_ones_go_too(tmp_path: Path) -> None:
    ids = prompt(64)
    with open_store(tmp_path) as store:
        save(store, ids)
        assert store._disk is not None
        bad, unlisted = store.keys_of(identity(), ids)
        store._disk._index.remove([unlisted])  # as if its writer had been killed just before
        (file,) = tmp_path.rglob(f"{bad.hex()}.kv")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        store._ram.clear()
        restore(store, ids)
        gone = store.forget_tokens([Doomed.of(ids)])
        assert (gone.disk, gone.quarantined) == (1, 1)
        assert not list(tmp_path.rglob("*.kv"))


def test_a_disk_that_keeps_them_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        save(store, prompt(64))

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("as if")

        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(PermissionError):
            store.forget_tokens([Doomed.of(prompt(64))])
        monkeypatch.undo()


def test_bad_sequences_are_refused() -> None:
    for ids, keep in (([-1], 0), ([2**32], 0), ([1], -1)):
        with pytest.raises(ValueError, match="must"):
            Doomed.of(ids, keep)
