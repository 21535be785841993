"""The remote tier: what it holds comes back byte for byte, what it should not hold goes, and nobody waits for it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from memory.kv.counters import Counters
from memory.kv.tiers import remote as remote_module
from memory.kv.tiers.index import Index
from memory.kv.tiers.patience import Patience
from memory.kv.tiers.remote import Deleted, RemoteTier
from tests.memory.kv.rows import OWNER, chunk_file, key, row

SIZE = len(chunk_file(0))


class Home:
    """A folder with an index, and a remote tier that belongs to it."""

    def __init__(self, folder: Path, url: str, **changes: Any) -> None:
        self.folder, self.url, self.counters = folder, url, Counters()
        self.index = Index.build(folder / "index.db", ())
        self.remote = self.open(**changes)

    def open(self, **changes: Any) -> RemoteTier:
        options: dict[str, Any] = {"budget": 100 * SIZE, "retry_seconds": 3600.0, "operation_seconds": 5.0} | changes
        return RemoteTier(self.url, folder=self.folder, index=lambda: self.index, counters=self.counters, **options)

    def put(self, number: int, worth: float = 1e9) -> bool:
        """Moves a chunk out, as upkeep does."""
        data = chunk_file(number)
        self.index.add([row(number, size=len(data))])
        if not self.remote.take(key(number), data, worth):
            return False
        assert self.index.moved(key(number), "remote", len(data))
        self.remote.keep([key(number)])
        return True

    def objects(self) -> set[bytes]:
        """Keys of what lies there."""
        files, root = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        try:
            return {bytes.fromhex(path.rpartition("/")[2].removesuffix(".kv")) for path in files.find(root)}
        except FileNotFoundError:
            return set()

    def close(self) -> None:
        self.remote.close()
        self.index.close()


@pytest.fixture(params=["file", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    url = f"file://{tmp_path}/far/away" if request.param == "file" else f"memory://{uuid.uuid4().hex}/kv"
    made = Home(tmp_path, url)
    yield made
    made.close()


def nothing_stops() -> bool:
    return False


def anybody(owner: bytes) -> bool:
    return True


def test_what_was_moved_out_comes_back_byte_for_byte(home: Home) -> None:
    for number in range(3):
        assert home.put(number)
    assert home.objects() == {key(number) for number in range(3)}
    for number in range(3):
        assert home.remote.fetch(key(number)) == chunk_file(number)
        assert home.index.find([key(number)])[key(number)].tier == "remote"
    assert home.remote.stats().chunks == 3
    assert home.remote.stats().bytes == 3 * SIZE
    assert (home.index.totals("disk"), home.remote.waiting) == ((0, 0, 0), 0)


def test_an_object_that_is_gone_is_a_miss_and_leaves_the_index(home: Home) -> None:
    home.put(1)
    files, root = fsspec.core.url_to_fs(home.url)
    files.rm(root, recursive=True)
    assert home.remote.fetch(key(1)) is None
    assert home.counters.get("lost") == 1
    assert home.index.find([key(1)]) == {}
    assert home.remote.available, "it answered"


def test_forgotten_objects_are_deleted(home: Home) -> None:
    for number in range(4):
        home.put(number)
    home.index.add([row(7)])  # on disk: not the remote's to strike out
    assert home.remote.forget([key(0), key(1), key(7)]) == Deleted(gone=3)
    assert home.objects() == {key(2), key(3)}
    assert set(home.index.find([key(number) for number in range(9)])) == {key(2), key(3), key(7)}
    assert home.remote.clear() == Deleted(gone=2)
    assert home.objects() == set()
    assert home.remote.waiting == 0


def test_the_budget_holds_and_what_is_worth_least_goes(tmp_path: Path) -> None:
    home = Home(tmp_path, f"memory://{uuid.uuid4().hex}", budget=3 * SIZE)
    for number in range(5):
        assert home.put(number)
        assert home.remote.stats().bytes <= 3 * SIZE
    assert home.objects() == {key(2), key(3), key(4)}
    assert home.counters.get("evictions") == 2
    assert not home.put(9, worth=0.0), "what is there is worth more"
    assert home.objects() == {key(2), key(3), key(4)}
    assert not home.remote.take(key(10), bytes(4 * SIZE), 1e12), "it would never fit"
    assert home.remote.stats().chunks <= 3
    home.close()


def test_an_upload_that_nobody_entered_is_deleted(home: Home) -> None:
    """As when the process dies between the upload and the index, or the chunk was forgotten meanwhile."""
    home.put(1)
    assert home.remote.take(key(2), chunk_file(2), 1e9)
    assert home.objects() == {key(1), key(2)}
    again = home.open()
    assert again.waiting == 1
    assert again.retry() == Deleted(gone=1)
    assert (home.objects(), again.waiting) == ({key(1)}, 0)
    again.close()


def test_a_kill_between_the_index_and_the_list_of_deletes_loses_nothing(home: Home) -> None:
    home.index.add([row(1)])
    assert home.remote.take(key(1), chunk_file(1), 1e9)
    home.index.moved(key(1), "remote", SIZE)
    assert home.remote.retry() == Deleted()
    assert (home.objects(), home.remote.waiting) == ({key(1)}, 0)


# a remote in trouble


def broken(home: Home, monkeypatch: pytest.MonkeyPatch, how: Callable[..., Any]) -> list[str]:
    """Makes every operation of the remote do this; returns the list of those that were tried."""
    tried: list[str] = []
    for name in ("cat_file", "pipe_file", "rm", "rm_file", "find", "cat_ranges"):

        def fail(*values: object, operation: str = name, **_: object) -> Any:
            tried.append(operation)
            return how()

        monkeypatch.setattr(home.remote._files, name, fail)
    return tried


def refuse() -> None:
    raise PermissionError("the key is wrong")


def test_a_dead_remote_is_a_miss_once_and_then_left_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.put(1)
    tried = broken(home, monkeypatch, refuse)
    for _ in range(3):
        assert home.remote.fetch(key(1)) is None
    assert tried == ["cat_file"]
    assert not home.remote.available
    assert "the key is wrong" in home.remote.trouble
    assert home.counters.get("read_errors") == 1
    assert not home.put(2)
    assert home.remote.retry() == Deleted()
    assert not home.remote.reconcile(anybody, nothing_stops)
    assert tried == ["cat_file"]
    assert key(1) in home.index.find([key(1)]), "it may come back"


def test_deletes_that_fail_are_kept_and_tried_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        home.put(number)
    with monkeypatch.context() as patch:
        broken(home, patch, refuse)
        assert home.remote.forget([key(0), key(1)]) == Deleted(waiting=2)
        assert set(home.index.find([key(0), key(1), key(2)])) == {key(2)}, "nobody finds them any more"
    assert home.objects() == {key(0), key(1), key(2)}
    later = home.open()
    assert later.waiting == 2
    assert later.retry() == Deleted(gone=2)
    assert (home.objects(), later.waiting) == ({key(2)}, 0)
    later.close()


def test_a_failed_upload_is_no_chunk(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        broken(home, patch, refuse)
        assert not home.put(1)
    assert home.index.find([key(1)])[key(1)].tier == "disk"
    assert home.counters.get("write_errors") == 1
    assert home.remote.waiting == 1, "some of it may lie there"


def test_a_remote_that_hangs_delays_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path, f"memory://{uuid.uuid4().hex}", operation_seconds=0.2)
    home.put(1)
    release = threading.Event()
    tried = broken(home, monkeypatch, lambda: release.wait(60))
    started = time.monotonic()
    for _ in range(20):
        assert home.remote.fetch(key(1)) is None
    assert time.monotonic() - started < 30, "not one of the calls was waited for to its end"
    assert len(tried) == 1
    release.set()
    home.close()


def test_calls_that_hang_are_few_and_close_waits_for_none() -> None:
    release = threading.Event()
    patience = Patience("test", at_once=2)
    ran = []

    def hang() -> None:
        ran.append(1)
        release.wait(60)

    for _ in range(4):
        with pytest.raises(TimeoutError):
            patience.call(hang, seconds=0.05)
    assert len(ran) == 2
    release.set()
    assert patience.call(lambda: 5, seconds=60) == 5
    release.clear()
    threading.Timer(0.05, patience.close).start()
    with pytest.raises(TimeoutError):
        patience.call(hang, seconds=3600)
    release.set()


def test_what_a_call_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        Patience("test", at_once=1).call(fail, seconds=60)


# agreeing with what is there


def test_the_index_is_made_again_from_the_listing(home: Home) -> None:
    for number in range(5):
        home.put(number)
    before = home.index.rows([key(number) for number in range(5)])
    home.index.close()
    home.index = Index.build(home.folder / "index.db", ())
    assert home.remote.listed_at() == 0
    assert home.remote.reconcile(anybody, nothing_stops)
    assert home.remote.listed_at() > 0
    after = home.index.rows([key(number) for number in range(5)])
    assert {name: entered.tier for name, entered in after.items()} == dict.fromkeys(before, "remote")
    assert home.remote.stats().bytes == 5 * SIZE
    assert home.remote.fetch(key(3)) == chunk_file(3)


def test_reconciling_strikes_out_what_is_gone_and_deletes_what_is_of_no_use(home: Home) -> None:
    files, root = home.remote._files, home.remote._root
    assert home.put(1)
    assert home.put(2)
    files.rm_file(home.remote._path(key(2)))
    home.index.add([row(3, size=SIZE)])  # came back to disk; its object was not deleted
    for number, data in {
        3: chunk_file(3),
        4: chunk_file(4, owner=OWNER),  # whose key was destroyed
        5: chunk_file(5)[:-1],
        6: chunk_file(99),
        7: chunk_file(7, expires=5.0),
        8: chunk_file(8),
    }.items():
        files.pipe_file(home.remote._path(key(number)), data)
    files.pipe_file(f"{root}/notes.txt", b"not ours")
    assert home.remote.reconcile(lambda owner: owner != OWNER, nothing_stops)
    tiers = {name: entered.tier for name, entered in home.index.rows([key(number) for number in range(100)]).items()}
    assert tiers == {key(1): "remote", key(3): "disk", key(8): "remote"}
    files.rm_file(f"{root}/notes.txt")
    assert home.objects() == {key(1), key(8)}


def test_reconciling_stops_when_it_is_told_to(home: Home) -> None:
    home.put(1)
    home.index.remove([key(1)])
    assert not home.remote.reconcile(anybody, lambda: True)
    assert home.remote.listed_at() == 0


def test_uploads_that_are_under_way_are_not_adopted(home: Home) -> None:
    assert home.remote.take(key(1), chunk_file(1), 1e9)
    assert home.remote.reconcile(anybody, nothing_stops)
    assert home.index.rows([key(1)]) == {}


# opening


@pytest.mark.parametrize("url", ["nothing://at/all", "kv is here://x"])
def test_a_url_that_nobody_knows(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="remote_url"):
        RemoteTier(url, 1, tmp_path, lambda: Index(None), Counters())


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match="kvloop\\[s3\\]"):
        RemoteTier("s3://bucket/kv", 1, tmp_path, lambda: Index(None), Counters())


def test_fsspec_is_imported_only_for_a_remote() -> None:
    code = "import sys, memory.kv.store, memory.kv.tiers.remote; assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_of_deletes_that_cannot_be_written_is_told(home: Home) -> None:
    home.put(1)
    (home.folder / remote_module.DELETES).unlink()
    (home.folder / remote_module.DELETES).mkdir()
    with pytest.raises(sqlite3.Error):
        home.remote.forget([key(1)])
    assert home.remote.fetch(key(1)) == chunk_file(1), "nothing was lost, and nobody was told that it was"
