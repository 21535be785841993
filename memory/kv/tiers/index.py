"""The index of the disk and remote tiers: which chunks there are, what they follow, what they are worth.

Invariants:
- Everything in it can be read again from the chunk files, besides how often and when they were used. So it is
  written without syncing each commit, and a damaged one is thrown away.
- A chunk is entered as "writing" before its file appears and marked "stored" afterwards. So whoever opens the index
  need look only at the rows that a killed writer left, never at all files; and bytes are counted before they exist.
- A row's `worth` orders eviction: the time of the last use, plus a bonus for reuse that is largest for the first
  chunk of a sequence (a shared prompt), minus a penalty once a longer chunk holds the same tokens. A sequence's
  earlier chunks are never worth less than its later ones.

Opening raises `OSError` or `sqlite3.Error`, the methods `sqlite3.Error`; `is_damage` tells which mean that the index
must be built anew.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory.kv.fidelity import RUNGS
from memory.kv.tiers.base import Holding, Stored
from memory.kv.tiers.index_queries import (
    FOUND,
    FOUND_TYPES,
    INSERT,
    LENGTHS,
    MODELS,
    REPLACE,
    ROW,
    SUPERSEDE,
    TOUCH,
    USABLE,
)
from memory.kv.tiers.index_schema import (
    BUILD_CACHE_KIBIBYTES,
    INDICES,
    SCHEMA_VERSION,
    SUMS,
    TABLES,
    TIERS,
    TRIGGERS,
    ZEROS,
    IndexDamaged,
    IndexMissing,
    Place,
    Row,
    Tier,
    Victim,
    connect,
    discard,
    is_damage,
)

__all__ = ["Index", "IndexDamaged", "IndexMissing", "Place", "Row", "Tier", "Victim", "is_damage"]

BATCH = 500
READ_TIMEOUT, WRITE_TIMEOUT = 0.05, 5.0


class Index:
    """Thread-safe; many processes may have the same file open. Reading waits for no writer."""

    def __init__(self, path: Path | None) -> None:
        """Opens the index at `path`; None makes an empty one in memory (the folder cannot be written to).

        Raises `IndexMissing` where there is none yet: see `build`.
        """
        self.path = path
        if path is not None and not path.exists():
            raise IndexMissing(f"there is no index at {path}")
        self._write_lock = threading.RLock()
        self._writer = connect(path, WRITE_TIMEOUT)
        self._reader, self._read_lock = self._writer, self._write_lock
        try:
            if path is None:
                _create(self._writer, ())
            with _telling_damage():
                self._prepare()
            if path is not None:
                self._reader, self._read_lock = connect(path, READ_TIMEOUT), threading.RLock()
            self._inode = path.stat().st_ino if path else 0
        except BaseException:
            self.close()
            raise

    @classmethod
    def build(cls, path: Path | None, rows: Iterable[Row]) -> Index:
        """Replaces whatever is at `path` by a complete index of `rows`, whose keys all differ. Hold the folder's lock.

        A kill at any moment leaves an index that `Index(path)` calls missing. What `rows` raises goes through.
        """
        if path is None:
            index = cls(None)
            index.add(rows)
            return index
        discard(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # who stored what is nobody's business
        connection = connect(path, WRITE_TIMEOUT)
        try:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA cache_size = -{BUILD_CACHE_KIBIBYTES}")
            _create(connection, rows)
        finally:
            connection.close()
        _seal(path)
        return cls(path)

    def _prepare(self) -> None:
        self._writer.execute("PRAGMA synchronous = NORMAL")
        self._writer.execute("PRAGMA secure_delete = ON")  # what is struck out is overwritten
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            raise IndexMissing("the index was never completed")
        if version != SCHEMA_VERSION:
            raise IndexDamaged(f"index has schema {version}, this program uses {SCHEMA_VERSION}")
        for name in INDICES:  # cheap: the first page or two of every tree
            partial = "WHERE " + INDICES[name].partition(" WHERE ")[2] if " WHERE " in INDICES[name] else ""
            self._writer.execute(f"SELECT 1 FROM chunks INDEXED BY {name} {partial} LIMIT 1").fetchall()
        self._writer.execute(f"SELECT {ROW}, hits, superseded, worth FROM chunks LIMIT 1").fetchall()
        if len(self._writer.execute("SELECT tier FROM totals WHERE bytes >= 0").fetchall()) != 2:
            raise IndexDamaged("the sums of the index are not there")
        self._check_length()

    def _check_length(self) -> None:
        """A file that was cut short need not show in its first pages."""
        if self.path is None or _size(self.path.with_name(self.path.name + "-wal")):
            return
        pages = self._writer.execute("PRAGMA page_count").fetchone()[0]
        page = self._writer.execute("PRAGMA page_size").fetchone()[0]
        if _size(self.path) < pages * page:
            raise IndexDamaged("the index was cut short")

    def is_current(self) -> bool:
        """Whether `path` is still the file that is open: someone may have deleted or replaced it."""
        if self.path is None:
            return False
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Closes the connections; calling it again does nothing."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    # lookups: the serving path

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Those of `keys` that are stored and have not expired."""
        found: dict[bytes, Stored] = {}
        for at in range(0, len(keys), BATCH):
            batch = keys[at : at + BATCH]
            query = f"SELECT {FOUND} FROM chunks WHERE key IN ({_marks(batch)}) AND {USABLE}"
            found |= {row[0]: _stored(row) for row in self._read(query, (*batch, time.time()))}
        return found

    def lengths(self, parent: bytes) -> list[int]:
        """The different token counts of the chunks that follow `parent`, in order."""
        return [row[0] for row in self._read(LENGTHS, (parent,))]

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """Up to `limit` chunks that follow `parent`, the most recently used first."""
        query = f"SELECT {FOUND} FROM chunks WHERE parent = ? AND {USABLE} ORDER BY last_used DESC LIMIT ?"
        return [_stored(row) for row in self._read(query, (parent, time.time(), limit))]

    # questions of eviction and upkeep

    def totals(self, tier: Tier = "disk") -> tuple[int, int, int]:
        """Chunks, tokens and bytes of a tier; what is being written included."""
        found = self._read("SELECT chunks, tokens, bytes FROM totals WHERE tier = ?", (tier,))
        return tuple(found[0]) if found else (0, 0, 0)

    def used_bytes(self, tier: Tier = "disk") -> int:
        """Bytes of all files entered."""
        return self.totals(tier)[2]

    def least_worth(self, limit: int, tier: Tier = "disk", skip: int = 0) -> list[Victim]:
        """The chunks that should leave first, in order; of equals the one furthest from its sequence's start."""
        query = (
            "SELECT key, bytes, last_used, codec, worth FROM chunks WHERE tier = ? AND state = 'stored'"
            " ORDER BY worth, start DESC LIMIT ? OFFSET ?"
        )
        return [Victim(*row) for row in self._read(query, (tier, limit, skip))]

    def models(self) -> list[bytes]:
        """The models whose chunks lie on disk."""
        return [row[0] for row in self._read(MODELS, ())]

    def band_of(self, model: bytes) -> str:
        """The band of a model digest's chunks on disk, which is one; empty where there are none."""
        found = self._read("SELECT band FROM chunks WHERE tier = 'disk' AND model = ? LIMIT 1", (model,))
        return str(found[0][0]) if found else ""

    def colder_than(self, model: bytes, codec: str, before: float, limit: int, skip: int = 0) -> list[bytes]:
        """Chunks on disk of a model in a codec that were last used before a time, the coldest first."""
        query = (
            "SELECT key FROM chunks WHERE tier = 'disk' AND model = ? AND codec = ? AND last_used < ?"
            " AND state = 'stored' ORDER BY last_used LIMIT ? OFFSET ?"
        )
        return [row[0] for row in self._read(query, (model, codec, before, limit, skip))]

    def expired(self, now: float, limit: int) -> list[bytes]:
        """Chunks whose time has passed, the oldest first."""
        query = "SELECT key FROM chunks WHERE expires > 0 AND expires <= ? ORDER BY expires LIMIT ?"
        return [row[0] for row in self._read(query, (now, limit))]

    def by_owner(self, owner: bytes) -> list[bytes]:
        """Every chunk of an owner, in whatever tier and state."""
        return [row[0] for row in self._read("SELECT key FROM chunks WHERE owner = ?", (owner,))]

    def longest_child(self, key: bytes) -> int:
        """Tokens of the longest chunk that follows this one; 0 without."""
        return int(self._read("SELECT COALESCE(MAX(tokens), 0) FROM chunks WHERE parent = ?", (key,))[0][0])

    def rows(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """Those of `keys` that are entered, in whatever state."""
        found: dict[bytes, Row] = {}
        for at in range(0, len(keys), BATCH):
            batch = keys[at : at + BATCH]
            query = f"SELECT {ROW} FROM chunks WHERE key IN ({_marks(batch)})"
            found |= {row[0]: Row(*row) for row in self._read(query, batch)}
        return found

    def writing(self) -> list[Row]:
        """What is being written; under the folder's lock: what writers that were killed left behind."""
        return [Row(*row) for row in self._read(f"SELECT {ROW} FROM chunks WHERE state = 'writing'", ())]

    def places_after(self, key: bytes, limit: int) -> list[Place]:
        """The chunks that are stored, in the order of their keys, from the first beyond `key`."""
        query = "SELECT key, bytes, tier FROM chunks WHERE key > ? AND state = 'stored' ORDER BY key LIMIT ?"
        return [Place(*row) for row in self._read(query, (key, limit))]

    def entered(self, first: bytes, last: bytes, tier: Tier = "disk") -> set[bytes]:
        """The keys of a tier from `first` to `last`, both included, in whatever state."""
        query = "SELECT key FROM chunks WHERE key BETWEEN ? AND ? AND tier = ?"
        return {row[0] for row in self._read(query, (first, last, tier))}

    def keys(self, tier: Tier = "disk") -> dict[bytes, int]:
        """All keys of a tier, with the size of each one's file. Reads the whole index."""
        return dict(self._read("SELECT key, bytes FROM chunks WHERE tier = ?", (tier,)))

    def holdings(self) -> list[Holding]:
        """What is held, by model, band, codec and fidelity. Reads the whole index."""
        query = (
            "SELECT model, band, codec, fidelity, COUNT(*), SUM(tokens), SUM(bytes), SUM(raw_bytes) FROM chunks"
            " GROUP BY model, band, codec, fidelity"
        )
        return [Holding(model.hex(), *row) for model, *row in self._read(query, ())]

    def fact(self, name: str) -> bytes | None:
        """What `note` kept under a name."""
        found = self._read("SELECT value FROM facts WHERE name = ?", (name,))
        return found[0][0] if found else None

    # writing

    def enter(self, row: Row) -> None:
        """Enters a chunk whose file is about to appear: nobody finds it before `stored`, but its bytes count."""
        self.add([replace(row, state="writing")])

    def stored(self, key: bytes) -> None:
        """Marks a chunk as stored: its file is there."""
        with self._transaction() as writer:
            writer.execute("UPDATE chunks SET state = 'stored' WHERE key = ?", (key,))

    def add(self, rows: Iterable[Row]) -> None:
        """Enters chunks as they are; one that is entered already keeps its hits and its last use."""
        with self._transaction() as writer:
            writer.executemany(INSERT + REPLACE, map(_values, rows))

    def moved(self, key: bytes, tier: Tier, size: int) -> bool:
        """Records that a chunk lies in another tier now; False where it is not entered any more."""
        with self._transaction() as writer:
            query = "UPDATE chunks SET tier = ?, bytes = ?, state = 'stored' WHERE key = ?"
            return writer.execute(query, (tier, size, key)).rowcount > 0

    def remove(self, keys: Iterable[bytes], tier: Tier | None = None) -> int:
        """Strikes chunks out, of one tier only where that is named; returns how many were entered."""
        query = "DELETE FROM chunks WHERE key = ?1 AND (?2 IS NULL OR tier = ?2)"
        with self._transaction() as writer:
            return writer.executemany(query, [(key, tier) for key in keys]).rowcount

    def correct_times(self, now: float) -> int:
        """Sets uses that lie ahead of the clock, which was set back, to `now`; returns how many there were.

        Else nothing that is stored from now on would be worth as much as they, until the clock has caught up.
        """
        query = (
            "UPDATE chunks SET worth = worth - (last_used - ?1), last_used = ?1"
            " WHERE tier = ?2 AND worth > ?1 AND last_used > ?1"
        )
        with self._transaction() as writer:
            return sum(writer.execute(query, (now, tier)).rowcount for tier in TIERS)

    def scrub(self) -> None:
        """Empties the log, so that nothing of rows that were struck out is left in the files."""
        with self._write_lock:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def touch(self, uses: Iterable[tuple[bytes, float, int]]) -> list[bytes]:
        """Records uses: key, time, and how many of them were hits. A chunk that is hit is no longer superseded.

        Returns the keys that are not entered.
        """
        with self._transaction() as writer:
            return [key for key, stamp, hits in uses if not writer.execute(TOUCH, (stamp, hits, key)).rowcount]

    def supersede(self, keys: Iterable[bytes]) -> None:
        """Marks chunks whose tokens a longer chunk holds as well."""
        with self._transaction() as writer:
            writer.executemany(SUPERSEDE, [(key,) for key in keys])

    def note(self, name: str, value: bytes) -> None:
        """Keeps a value under a name, as long as this index lasts."""
        with self._transaction() as writer:
            writer.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._read_lock, _telling_damage():
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock, _telling_damage():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise


@contextmanager
def _telling_damage() -> Iterator[None]:
    """What SQLite says of a damaged file may hold bytes of it, which are not text: then that is the error raised."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise IndexDamaged("the index holds text that is none") from error


def _create(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """All tables, filled first and indexed afterwards: a tenth of the time that it takes the other way round."""
    connection.executescript(TABLES)
    connection.execute("BEGIN")
    connection.executemany(INSERT, map(_values, rows))
    for index in INDICES.values():
        connection.execute(f"CREATE {index}")
    connection.execute(SUMS)
    connection.execute(ZEROS)
    connection.execute("COMMIT")
    connection.executescript(TRIGGERS)
    if connection.execute("PRAGMA database_list").fetchone()[2] == "":
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _seal(path: Path) -> None:
    """Makes a built index durable, and only then calls it complete."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    connection = connect(path, WRITE_TIMEOUT)
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    finally:
        connection.close()


def _values(row: Row) -> tuple[Any, ...]:
    return (
        row.key,
        row.parent,
        row.start,
        row.tokens,
        row.prefix,
        row.size,
        row.codec,
        row.fidelity,
        row.model,
        row.band,
        row.owner,
        row.expires,
        row.last_used,
        row.tier,
        row.state,
        row.raw_bytes,
    )


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _stored(row: Sequence[Any]) -> Stored:
    if [type(value) for value in row] != FOUND_TYPES or row[1] not in TIERS or row[5] not in RUNGS:
        raise IndexDamaged("a row of the index does not hold what it should")
    return Stored(*row)
