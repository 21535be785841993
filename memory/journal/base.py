"""What the journal's parts share: transactions, the clock, ids, and token ids as bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from sqlalchemy import Connection, Engine

from memory.journal.database import WRITES
from memory.journal.errors import InvalidRecord
from memory.journal.settings import JournalSettings


class JournalPart:
    """Base of the parts. Thread-safe: every call takes its own connection and holds it for one transaction."""

    def __init__(self, engine: Engine, settings: JournalSettings, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """One consistent snapshot; never waits for a writer."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction with the write lock; on disk when the block has ended without an exception."""
        with self._engine.connect().execution_options(**WRITES) as connection, connection.begin():
            yield connection


def new_id(prefix: str) -> str:
    """A fresh id: the prefix, an underscore, 32 hex digits."""
    return f"{prefix}_{secrets.token_hex(16)}"


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises `InvalidRecord` for an id that does not fit."""
    try:
        return np.asarray(token_ids, dtype="<u4").tobytes()
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRecord(f"token ids must be integers from 0 to 2**32-1: {error}") from error


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids
