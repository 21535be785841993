"""The index of the disk tier: which chunks there are, what they follow, what they are worth.

Invariants:
- Everything in it can be read again from the chunk files, besides how often and when they were used. So it is
  written without syncing each commit, and a damaged one is thrown away.
- A row's `worth` orders eviction: the time of the last use, plus a bonus for reuse that is largest for the first
  chunk of a sequence (a shared prompt), minus a penalty once a longer chunk holds the same tokens. A sequence's
  earlier chunks are never worth less than its later ones.

Opening raises `OSError` or `sqlite3.Error`, the methods `sqlite3.Error`; `is_damage` tells which mean that the index
must be rebuilt.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory.kv.codec.factory import CODECS
from memory.kv.forget import Held
from memory.kv.tiers.base import Stored

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    key BLOB PRIMARY KEY NOT NULL,
    parent BLOB NOT NULL,
    start INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    ids BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    codec TEXT NOT NULL,
    hits INTEGER NOT NULL,
    last_used REAL NOT NULL,
    superseded INTEGER NOT NULL,
    worth REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS chunks_by_length ON chunks (parent, tokens);
CREATE INDEX IF NOT EXISTS chunks_by_use ON chunks (parent, last_used);
CREATE INDEX IF NOT EXISTS chunks_by_worth ON chunks (worth, start, bytes, tokens);
"""
REUSE_BONUS = 300.0
FIRST_CHUNK_BONUS = 3600.0
COUNTED_HITS = 64
SUPERSEDED_PENALTY = 1e9
"""Seconds that one reuse adds to a chunk's last use; the same for a first chunk; the most that count; what a
superseded chunk loses. A prompt that was reused 64 times outlives its last use by less than three days."""

WORTH = (
    f"last_used + MIN(hits, {COUNTED_HITS}) * (CASE WHEN start = 0 THEN {FIRST_CHUNK_BONUS} ELSE {REUSE_BONUS} END)"
    f" - superseded * {SUPERSEDED_PENALTY}"
)
COLUMNS = "key, tokens, bytes, codec, hits, ids"
BATCH = 500
READ_TIMEOUT, WRITE_TIMEOUT = 0.05, 5.0
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT}


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk to enter."""

    key: bytes
    parent: bytes
    start: int
    tokens: int
    ids: bytes
    size: int
    codec: str
    last_used: float


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk that may leave."""

    key: bytes
    size: int
    last_used: float


class IndexDamaged(sqlite3.DatabaseError):
    """The file is a database of another kind."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the index itself is broken, rather than busy or on a disk that fails."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, IndexDamaged) or (code is not None and code & 0xFF in DAMAGE)


class Index:
    """Thread-safe; many processes may have the same file open. Reading waits for no writer."""

    def __init__(self, path: Path | None) -> None:
        """Opens or creates the index at `path`; None keeps it in memory (the folder cannot be written to)."""
        self.path = path
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # it holds token ids
        self._write_lock = threading.RLock()
        self._writer = _connect(path, WRITE_TIMEOUT)
        self._reader, self._read_lock = self._writer, self._write_lock
        try:
            self._prepare()
            if path is not None:
                self._reader, self._read_lock = _connect(path, READ_TIMEOUT), threading.RLock()
            self._inode = path.stat().st_ino if path else 0
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = NORMAL")
        self._writer.execute("PRAGMA secure_delete = ON")  # token ids are words: what is struck out is overwritten
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise IndexDamaged(f"index has schema {version}, this program uses {SCHEMA_VERSION}")
        if version == 0:
            self._writer.executescript(SCHEMA)
            self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._writer.execute(f"SELECT {COLUMNS}, parent, start, superseded, worth FROM chunks LIMIT 1")

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

    # reading

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Those of `keys` that are entered."""
        found: dict[bytes, Stored] = {}
        for at in range(0, len(keys), BATCH):
            batch = keys[at : at + BATCH]
            marks = ",".join("?" * len(batch))
            found |= {
                row[0]: _stored(row)
                for row in self._read(f"SELECT {COLUMNS} FROM chunks WHERE key IN ({marks})", batch)
            }
        return found

    def lengths(self, parent: bytes) -> list[int]:
        """The different token counts of the chunks that follow `parent`."""
        rows = self._read("SELECT DISTINCT tokens FROM chunks WHERE parent = ? ORDER BY tokens", (parent,))
        return [row[0] for row in rows]

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """Up to `limit` chunks that follow `parent`, the most recently used first."""
        query = f"SELECT {COLUMNS} FROM chunks WHERE parent = ? ORDER BY last_used DESC LIMIT ?"
        return [_stored(row) for row in self._read(query, (parent, limit))]

    def keys(self) -> dict[bytes, int]:
        """All keys, with the size of each one's file."""
        return dict(self._read("SELECT key, bytes FROM chunks", ()))

    def held(self) -> list[Held]:
        """Every chunk that is entered, with its token ids."""
        return [Held(*row) for row in self._read("SELECT key, parent, start, ids FROM chunks", ())]

    def totals(self) -> tuple[int, int, int]:
        """Chunks, tokens and bytes."""
        query = "SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(SUM(bytes), 0) FROM chunks"
        chunks, tokens, size = self._read(query, ())[0]
        return chunks, tokens, size

    def used_bytes(self) -> int:
        """Bytes of all files entered."""
        return int(self._read("SELECT COALESCE(SUM(bytes), 0) FROM chunks", ())[0][0])

    def least_worth(self, limit: int) -> list[Victim]:
        """The chunks that should leave first, in order; of equals the one furthest from its sequence's start."""
        query = "SELECT key, bytes, last_used FROM chunks ORDER BY worth, start DESC LIMIT ?"
        return [Victim(*row) for row in self._read(query, (limit,))]

    # writing

    def add(self, rows: Iterable[Row]) -> None:
        """Enters chunks; one that is entered already keeps its hits."""
        values = [
            (row.key, row.parent, row.start, row.tokens, row.ids, row.size, row.codec, row.last_used, row.last_used)
            for row in rows
        ]
        with self._transaction() as writer:
            writer.executemany(
                "INSERT INTO chunks (key, parent, start, tokens, ids, bytes, codec, hits, last_used, superseded, worth)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, 0, ?)"
                " ON CONFLICT (key) DO UPDATE SET bytes = excluded.bytes, codec = excluded.codec",
                values,
            )

    def remove(self, keys: Iterable[bytes]) -> int:
        """Strikes chunks out; returns how many were entered."""
        with self._transaction() as writer:
            return writer.executemany("DELETE FROM chunks WHERE key = ?", [(key,) for key in keys]).rowcount

    def scrub(self) -> None:
        """Empties the log, so that nothing of rows that were struck out is left in the files."""
        with self._write_lock:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def touch(self, uses: Iterable[tuple[bytes, float, int]]) -> list[bytes]:
        """Records uses: key, time, and how many of them were hits. A chunk that is hit is no longer superseded.

        Returns the keys that are not entered.
        """
        missing: list[bytes] = []
        with self._transaction() as writer:
            for key, stamp, hits in uses:
                found = writer.execute(
                    "UPDATE chunks SET last_used = MAX(last_used, ?), hits = hits + ?,"
                    " superseded = CASE WHEN ? > 0 THEN 0 ELSE superseded END WHERE key = ?",
                    (stamp, hits, hits, key),
                ).rowcount
                if found:
                    writer.execute(f"UPDATE chunks SET worth = {WORTH} WHERE key = ?", (key,))
                else:
                    missing.append(key)
        return missing

    def supersede(self, keys: Iterable[bytes]) -> None:
        """Marks chunks whose tokens a longer chunk holds as well."""
        with self._transaction() as writer:
            values = [(key,) for key in keys]
            writer.executemany("UPDATE chunks SET superseded = 1 WHERE key = ?", values)
            writer.executemany(f"UPDATE chunks SET worth = {WORTH} WHERE key = ?", values)

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._read_lock:
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise


def _connect(path: Path | None, timeout: float) -> sqlite3.Connection:
    name = ":memory:" if path is None else str(path)
    connection = sqlite3.connect(name, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")  # damaged text must not raise on reading
    return connection


def _stored(row: tuple[bytes, int, int, str, int, bytes]) -> Stored:
    if [type(value) for value in row] != [bytes, int, int, str, int, bytes] or len(row[5]) != 4 * row[1]:
        raise IndexDamaged("a row of the index does not hold what it should")
    key, tokens, size, codec, hits, ids = row
    fidelity = CODECS[codec].fidelity if codec in CODECS else codec
    return Stored(key, "disk", tokens, size, fidelity, hits, ids)
