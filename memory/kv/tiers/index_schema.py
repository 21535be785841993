"""The tables of the index, and what its rows look like from outside.

Invariants:
- `totals` holds the sums over `chunks` for each tier; triggers keep them, so that no write adds up all rows.
- A row holds no token ids, only digests of prefixes that nobody can compute without the tenant's secret.
- An index is complete when its `user_version` is `SCHEMA_VERSION`: it is set last.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memory.kv.fidelity import Fidelity

SCHEMA_VERSION = 2
Tier = Literal["disk", "remote"]
TIERS: tuple[Tier, ...] = ("disk", "remote")
State = Literal["writing", "stored"]

TABLES = """
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    parent BLOB NOT NULL,
    start INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    raw_bytes INTEGER NOT NULL,
    codec TEXT NOT NULL,
    fidelity TEXT NOT NULL,
    tier TEXT NOT NULL,
    state TEXT NOT NULL,
    hits INTEGER NOT NULL,
    last_used REAL NOT NULL,
    superseded INTEGER NOT NULL,
    worth REAL NOT NULL,
    expires REAL NOT NULL,
    owner BLOB NOT NULL,
    model BLOB NOT NULL,
    band TEXT NOT NULL,
    prefix BLOB NOT NULL
);
CREATE TABLE totals (tier TEXT PRIMARY KEY NOT NULL, chunks INTEGER NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
"""
INDICES = {
    "chunks_by_key": "UNIQUE INDEX chunks_by_key ON chunks (key)",
    "chunks_by_length": "INDEX chunks_by_length ON chunks (parent, tokens)",
    "chunks_by_use": "INDEX chunks_by_use ON chunks (parent, last_used)",
    "chunks_by_worth": "INDEX chunks_by_worth ON chunks (tier, worth, start DESC)",
    "chunks_by_age": "INDEX chunks_by_age ON chunks (model, codec, last_used) WHERE tier = 'disk'",
    "chunks_by_owner": "INDEX chunks_by_owner ON chunks (owner)",
    "chunks_by_end": "INDEX chunks_by_end ON chunks (expires) WHERE expires > 0",
    "chunks_unfinished": "INDEX chunks_unfinished ON chunks (state) WHERE state = 'writing'",
}
SUMS = "INSERT INTO totals SELECT tier, COUNT(*), SUM(tokens), SUM(bytes) FROM chunks GROUP BY tier"
ZEROS = "INSERT OR IGNORE INTO totals VALUES ('disk', 0, 0, 0), ('remote', 0, 0, 0)"
_ADD = (
    "UPDATE totals SET chunks = chunks + 1, tokens = tokens + NEW.tokens, bytes = bytes + NEW.bytes"
    " WHERE tier = NEW.tier;"
)
_TAKE = (
    "UPDATE totals SET chunks = chunks - 1, tokens = tokens - OLD.tokens, bytes = bytes - OLD.bytes"
    " WHERE tier = OLD.tier;"
)
TRIGGERS = f"""
CREATE TRIGGER chunk_entered AFTER INSERT ON chunks BEGIN {_ADD} END;
CREATE TRIGGER chunk_removed AFTER DELETE ON chunks BEGIN {_TAKE} END;
CREATE TRIGGER chunk_changed AFTER UPDATE OF tier, tokens, bytes ON chunks BEGIN {_TAKE} {_ADD} END;
"""
BUILD_CACHE_KIBIBYTES = 65536
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT}


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk as it is entered."""

    key: bytes
    parent: bytes
    start: int
    tokens: int
    prefix: bytes = field(repr=False)
    """8 bytes for each full 16 tokens: see `prefix_digests`."""
    size: int
    """Bytes of its file or object."""
    codec: str
    fidelity: Fidelity
    model: bytes
    band: str
    owner: bytes
    """16 bytes; zeros where it is not encrypted."""
    expires: float
    """Seconds since the epoch; 0 is never."""
    last_used: float
    tier: Tier = "disk"
    state: State = "stored"
    raw_bytes: int = 0
    """Bytes of the KV before it was encoded."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk that may leave."""

    key: bytes
    size: int
    last_used: float
    codec: str
    worth: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies, as the scrubber walks over them."""

    key: bytes
    size: int
    tier: Tier


class IndexDamaged(sqlite3.DatabaseError):
    """The file is a database of another kind, or not whole: build it anew from the chunk files."""


class IndexMissing(IndexDamaged):
    """There is no index yet, or its building was interrupted: build it from the chunk files."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the index itself is broken, rather than busy or on a disk that fails."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, IndexDamaged) or (code is not None and code & 0xFF in DAMAGE)


def connect(path: Path | None, timeout: float) -> sqlite3.Connection:
    """A connection in autocommit mode; None is a database in memory."""
    name = ":memory:" if path is None else str(path)
    connection = sqlite3.connect(name, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")  # damaged text must not raise on reading
    return connection


def discard(path: Path) -> None:
    """Deletes the index's files. Only the holder of the folder's lock may."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
