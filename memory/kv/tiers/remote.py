"""The remote tier: chunk files as objects of any store that fsspec reaches, listed in the index of the folder.

Invariants:
- A lookup asks the index and never the remote. Every operation ends within a time limit; after one failed the tier is
  left alone for a while. So a slow or dead remote costs at most one limit, and then nothing.
- An object that must not be there (its chunk was forgotten, moved back or evicted, or its upload was cut short) is
  written down durably before anything else happens, and deleted again and again until it is gone.
- An object is the chunk file byte for byte: it is proven by the same checksum, and unreadable without its owner's key.

One URL belongs to one folder: what another folder put there would be taken for its own.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory.kv.chunk import BadChunk, read_head
from memory.kv.counters import Counters
from memory.kv.tiers.base import TierStats
from memory.kv.tiers.index import Index, Row
from memory.kv.tiers.patience import Patience
from memory.kv.tiers.rebuild import HEAD_BYTES, SUFFIX, key_of_name, row_of
from memory.kv.tiers.trouble import Trouble

logger = logging.getLogger(__name__)
DELETES = "remote.db"
DELETE_BATCH = 256
HEAD_BATCH = 64
OPERATION_SECONDS = 5.0
LIST_SECONDS = 600.0
AT_ONCE = 8
LISTED = "remote listed"


class RemoteError(OSError):
    """The remote did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """What became of objects that were to go."""

    gone: int = 0
    waiting: int = 0
    """Not deleted yet: the remote fails, and it will be tried again."""


class RemoteTier:
    """Thread-safe; many processes of one folder may use it. Close it.

    Methods raise nothing that a remote does, besides where they say so.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        folder: Path,
        index: Callable[[], Index],
        counters: Counters,
        *,
        retry_seconds: float = 30.0,
        operation_seconds: float = OPERATION_SECONDS,
    ) -> None:
        """Raises `ValueError` for a URL that cannot be used, and says what to install or to correct."""
        self._files, self._root = _open_filesystem(url)
        self._budget = budget
        self._deletes = folder / DELETES
        self._index = index
        self._counters = counters
        self._seconds = operation_seconds
        self._patience = Patience("kvloop-kv-remote", AT_ONCE)
        self._trouble = Trouble(f"KV memory at {url}", retry_seconds)

    # the serving path

    @property
    def available(self) -> bool:
        """Whether it is worth asking now: not for a while after something failed."""
        return not self._trouble.blocks()

    def fetch(self, key: bytes) -> bytes | None:
        """The bytes of the chunk's file, not verified; None where they are gone or the remote fails."""
        if self._trouble.blocks():
            return None
        try:
            data = self._call(self._files.cat_file, self._path(key))
        except FileNotFoundError:
            self._counters.add("lost")
            self._strike([key])
            return None
        except RemoteError as error:
            self._counters.add("read_errors")
            self._trouble.failed(error)
            return None
        self._trouble.recovered()
        return bytes(data)

    def stats(self) -> TierStats:
        """How full the tier is."""
        try:
            return TierStats(*self._index().totals("remote"), self._budget)
        except sqlite3.Error:
            self._counters.add("index_errors")
            return TierStats(0, 0, 0, self._budget)

    @property
    def trouble(self) -> str:
        """Why the remote is left alone at the moment; empty while all is well."""
        return self._trouble.reason

    # moving out: upkeep's thread

    def take(self, key: bytes, data: bytes, worth: float) -> bool:
        """Uploads a chunk file that is worth so much; False where the remote fails or holds only what is worth more.

        Until `keep` the object counts as one that must not be there.
        """
        if self._trouble.blocks() or not self._make_room(len(data), worth):
            return False
        self._doom([key])
        try:
            self._call(self._files.pipe_file, self._path(key), data)
        except (RemoteError, FileNotFoundError) as error:
            self._counters.add("write_errors")
            self._trouble.failed(error)
            return False
        self._trouble.recovered()
        return True

    def keep(self, keys: Iterable[bytes]) -> None:
        """The index lists these objects now: they stay."""
        self._spare(keys)

    def _make_room(self, needed: int, worth: float) -> bool:
        index = self._index()
        excess = index.used_bytes("remote") + needed - self._budget
        victims: list[bytes] = []
        while excess > 0:
            found = index.least_worth(DELETE_BATCH, "remote", skip=len(victims))
            for victim in found:
                if excess > 0 and victim.worth < worth:
                    victims.append(victim.key)
                    excess -= victim.size
            if excess > 0 and (not found or found[-1].worth >= worth):
                return False
        if victims:
            self.forget(victims)
            self._counters.add("evictions", len(victims))
        return True

    # deleting

    def forget(self, keys: Sequence[bytes]) -> Deleted:
        """Strikes chunks out and deletes their objects, or sees to it that they are deleted later.

        Raises `sqlite3.Error` where not even that can be written down.
        """
        if not keys:
            return Deleted()
        self._doom(keys)
        self._index().remove(keys, "remote")
        return self._delete(keys)

    def retry(self) -> Deleted:
        """Deletes what should be gone already. Raises `sqlite3.Error`."""
        doomed = self._doomed()
        kept = [key for key, row in self._index().rows(doomed).items() if row.tier == "remote"]
        self._spare(kept)  # they were entered, but not spared: a kill came between
        return self._delete([key for key in doomed if key not in set(kept)])

    def clear(self) -> Deleted:
        """Deletes every object that the index lists. Raises `sqlite3.Error`."""
        return self.forget(list(self._index().keys("remote")))

    @property
    def waiting(self) -> int:
        """Objects that should be gone but may not be."""
        return len(self._doomed())

    def _delete(self, keys: Sequence[bytes]) -> Deleted:
        gone = 0
        for at in range(0, len(keys), DELETE_BATCH):
            if self._trouble.blocks():
                break
            batch = keys[at : at + DELETE_BATCH]
            try:
                self._call(_delete_all, self._files, [self._path(key) for key in batch])
            except (RemoteError, FileNotFoundError) as error:
                self._counters.add("write_errors")
                self._trouble.failed(error)
                break
            self._trouble.recovered()
            self._spare(batch)
            gone += len(batch)
        if gone < len(keys):
            self._doom(keys[gone:])  # `retry` of another process may have spared them before their rows were gone
        return Deleted(gone, len(keys) - gone)

    # agreeing with what is there

    def reconcile(self, readable: Callable[[bytes], bool], stopped: Callable[[], bool]) -> bool:
        """Makes the index agree with the objects that are there; False where that was not finished.

        `readable` says whether an owner's key still exists: what nobody can read is deleted.
        """
        if self._trouble.blocks():
            return False
        before = set(self._index().keys("remote"))
        try:
            listed = self._list()
            doomed = set(self._doomed())  # afterwards: what was being uploaded is doomed, or entered by now
            strangers = [key for key in listed if key not in before and key not in doomed]
            for at in range(0, len(strangers), HEAD_BATCH):
                if stopped():
                    return False
                self._adopt(strangers[at : at + HEAD_BATCH], listed, readable)
        except (RemoteError, FileNotFoundError) as error:
            self._counters.add("read_errors")
            self._trouble.failed(error)
            return False
        self._strike(before - set(listed))
        self._index().note(LISTED, b"%d" % time.time())
        return True

    def listed_at(self) -> float:
        """When `reconcile` last came to its end; 0 where it has not since the index was built."""
        return float(self._index().fact(LISTED) or 0)

    def _list(self) -> dict[bytes, int]:
        found = self._call(_list_all, self._files, self._root, seconds=LIST_SECONDS)
        return {key: size for path, size in found.items() if (key := key_of_name(path.rpartition("/")[2]))}

    def _adopt(self, keys: list[bytes], sizes: dict[bytes, int], readable: Callable[[bytes], bool]) -> None:
        """Enters objects that the index does not list, and deletes what is of no use."""
        here = self._index().rows(keys)
        paths = [self._path(key) for key in keys]
        heads = self._call(self._files.cat_ranges, paths, [0] * len(keys), [HEAD_BYTES] * len(keys))
        rows: list[Row] = []
        useless = [key for key, row in here.items() if row.tier == "disk"]
        for key, head in zip(keys, heads, strict=True):
            if key in here or isinstance(head, FileNotFoundError):
                continue
            if isinstance(head, BaseException):
                raise RemoteError(str(head)) from head
            try:
                header, prefix = read_head(head, sizes[key])
                if header.key != key or not readable(header.owner) or header.expired(time.time()):
                    raise BadChunk("nobody can use it")
                rows.append(row_of(header, prefix, sizes[key], tier="remote"))
            except BadChunk:
                useless.append(key)
        self._index().add(rows)
        self.forget(useless)

    def close(self) -> None:
        """Waits for nothing: what hangs dies with the process."""
        self._patience.close()

    # means

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"

    def _call(self, function: Callable[..., Any], *values: Any, seconds: float | None = None) -> Any:
        """What the remote answers. Raises `FileNotFoundError`, and `RemoteError` for everything else."""
        try:
            return self._patience.call(function, *values, seconds=seconds or self._seconds)
        except FileNotFoundError:
            raise
        except Exception as error:  # what a client library may raise is not known here
            raise RemoteError(f"{type(error).__name__}: {error}") from error

    def _strike(self, keys: Iterable[bytes]) -> None:
        try:
            self._index().remove(keys, "remote")
        except sqlite3.Error:
            self._counters.add("index_errors")

    def _doom(self, keys: Iterable[bytes]) -> None:
        with self._table() as table:
            table.executemany("INSERT OR IGNORE INTO deletes VALUES (?)", [(key,) for key in keys])

    def _spare(self, keys: Iterable[bytes]) -> None:
        with self._table() as table:
            table.executemany("DELETE FROM deletes WHERE key = ?", [(key,) for key in keys])

    def _doomed(self) -> list[bytes]:
        with self._table() as table:
            return [row[0] for row in table.execute("SELECT key FROM deletes")]

    @contextmanager
    def _table(self) -> Iterator[sqlite3.Connection]:
        """The table of objects to delete; it outlives the index, so it is a file of its own. Raises `sqlite3.Error`."""
        with closing(sqlite3.connect(self._deletes, timeout=5.0)) as connection, connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("CREATE TABLE IF NOT EXISTS deletes (key BLOB PRIMARY KEY) WITHOUT ROWID")
            yield connection


def _open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Imported here: a store without a remote needs no fsspec."""
    try:
        import fsspec
        from fsspec.utils import get_protocol

        options = {"auto_mkdir": True} if get_protocol(url) in ("file", "local") else {"use_listings_cache": False}
        files, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"remote_url {url!r} needs another package: {error} (for s3: pip install 'kvloop[s3]')"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"remote_url {url!r} is none that fsspec knows: {error}") from error
    return files, str(root).rstrip("/")


def _list_all(files: Any, root: str) -> dict[str, int]:
    files.invalidate_cache()
    try:
        found = files.find(root, detail=True)
    except FileNotFoundError:
        return {}  # nothing was put there yet
    return {path: int(facts["size"]) for path, facts in found.items()}


def _delete_all(files: Any, paths: list[str]) -> None:
    """Deletes objects, at once where the store can; those that are gone already do not matter."""
    try:
        files.rm(paths)
    except FileNotFoundError:
        for path in paths:
            try:
                files.rm_file(path)
            except FileNotFoundError:
                continue
