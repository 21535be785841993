"""Memories: named texts that sessions attach, so that they are said and kept once.

Invariants: a live name stands for one text within its tenant; a memory past its `expires_at` is never read again; a
deleted one leaves a tombstone (id and times) and nothing that was said in it; a prefix lives no longer than each of its
memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from sqlalchemy import ColumnElement, Connection, Row, String, and_, cast, delete, insert, or_, select, update
from sqlalchemy.sql.schema import Table

from memory.journal.base import JournalPart, new_id, pack_ids, unpack_ids
from memory.journal.database import truncate_log
from memory.journal.errors import Conflict, Gone, NotFound
from memory.journal.records import Json, Memory, MemoryPrefix, MemoryReceipt
from memory.journal.sessions import check_memories, lineage
from memory.journal.tables import memories, memory_prefixes, sessions


class Memories(JournalPart):
    """The part of the journal that knows memories."""

    def create_memory(
        self, tenant: str, name: str, digest: str, text: str, tokens: int, expires_at: float | None = None
    ) -> tuple[Memory, bool]:
        """The memory, and whether it is new: the same name and digest again give the one there is, as it is.

        Raises `Conflict` when the name stands for another text.
        """
        now = self._clock()
        with self._writing() as connection:
            mine = and_(memories.c.tenant == tenant, memories.c.name == name, _live(now))
            known = connection.execute(select(memories).where(mine)).first()
            if known is not None:
                if known.digest != digest:
                    raise Conflict(f"the name {name!r} stands for another text: memory {known.id!r}")
                return Memory(**known._mapping), False
            memory_id = new_id("mem")
            values: Json = {"tenant": tenant, "id": memory_id, "name": name, "digest": digest, "text": text}
            values |= {"tokens": tokens, "created_at": now, "expires_at": expires_at}
            connection.execute(insert(memories).values(values))
            return _read(connection, tenant, memory_id, now), True

    def get_memory(self, tenant: str, memory_id: str) -> Memory:
        """Raises `NotFound`, as `Gone` for one of this tenant that was deleted or has expired."""
        with self._reading() as connection:
            return _read(connection, tenant, memory_id, self._clock())

    def list_memories(self, tenant: str, limit: int = 20, after: str | None = None) -> list[Memory]:
        """Newest first; `after` is the last id of the page before. Raises `NotFound` for an unknown `after`."""
        now = self._clock()
        query = select(memories).where(memories.c.tenant == tenant, _live(now))
        with self._reading() as connection:
            if after is not None:
                query = query.where(memories.c.number < _read(connection, tenant, after, now).number)
            rows = connection.execute(query.order_by(memories.c.number.desc()).limit(limit)).all()
        return [Memory(**row._mapping) for row in rows]

    def read_memories(self, tenant: str, memory_ids: Sequence[str]) -> list[Memory]:
        """The memories in this order. Raises `NotFound` or `Gone` for the first that is not there."""
        now = self._clock()
        with self._reading() as connection:
            return [_read(connection, tenant, memory_id, now) for memory_id in memory_ids]

    def memory_sessions(self, tenant: str, memory_id: str) -> list[str]:
        """The live sessions that attach a memory, oldest first."""
        with self._reading() as connection:
            return _attached(connection, tenant, memory_id)

    def expired_memories(self, limit: int = 100) -> list[tuple[str, str]]:
        """Tenant and id of memories whose time is over and that are not deleted yet."""
        overdue = and_(memories.c.deleted_at.is_(None), memories.c.expires_at <= self._clock())
        query = select(memories.c.tenant, memories.c.id).where(overdue).order_by(memories.c.expires_at).limit(limit)
        with self._reading() as connection:
            return [(row.tenant, row.id) for row in connection.execute(query)]

    def delete_memory(self, tenant: str, memory_id: str) -> MemoryReceipt:
        """Removes a memory's text and token ids, expired or not. The sessions that attach it stay, and cannot go on.

        Raises `NotFound`, as `Gone` when it is deleted already.
        """
        now = self._clock()
        with self._writing() as connection:
            row = _row(connection, tenant, memory_id)
            if row.deleted_at is not None:
                raise Gone("memory", memory_id, "deleted")
            attached = _attached(connection, tenant, memory_id)
            for prefix in _prefixes(connection, tenant, memory_id):
                connection.execute(delete(memory_prefixes).where(memory_prefixes.c.number == prefix.number))
            tombstone = {"name": "", "digest": "", "text": "", "deleted_at": now}
            connection.execute(update(memories).where(memories.c.number == row.number).values(tombstone))
            datasets, versions = lineage(connection, tenant, attached)
        truncate_log(self._engine)
        return MemoryReceipt(
            memory_id=memory_id, deleted_at=now, sessions=tuple(attached), datasets=datasets, versions=versions
        )

    def get_prefix(self, tenant: str, memory_ids: Sequence[str], tokenizer: str) -> MemoryPrefix | None:
        """The stored beginning of sessions that attach these memories; None before `put_prefix`.

        Raises `NotFound` or `Gone` for a memory that is not there.
        """
        with self._reading() as connection:
            ends = check_memories(connection, tenant, memory_ids, self._clock())
            mine = and_(memory_prefixes.c.tenant == tenant, memory_prefixes.c.key == _key(memory_ids))
            row = connection.execute(select(memory_prefixes).where(mine)).one_or_none()
        return None if row is None or row.tokenizer != tokenizer else _prefix(row, ends)

    def put_prefix(
        self, tenant: str, memory_ids: Sequence[str], tokenizer: str, token_ids: Sequence[int]
    ) -> MemoryPrefix:
        """Stores the beginning; of two writers the first is kept, and both get what is stored. Raises as above."""
        now = self._clock()
        with self._writing() as connection:
            ends = check_memories(connection, tenant, memory_ids, now)
            mine = and_(memory_prefixes.c.tenant == tenant, memory_prefixes.c.key == _key(memory_ids))
            row = connection.execute(select(memory_prefixes).where(mine)).one_or_none()
            if row is not None and row.tokenizer == tokenizer:
                return _prefix(row, ends)
            connection.execute(delete(memory_prefixes).where(mine))
            values: Json = {
                "tenant": tenant,
                "key": _key(memory_ids),
                "memory_ids": list(memory_ids),
                "created_at": now,
            }
            values |= {"tokenizer": tokenizer, "token_ids": pack_ids(token_ids)}
            connection.execute(insert(memory_prefixes).values(values))
            return _prefix(connection.execute(select(memory_prefixes).where(mine)).one(), ends)

    def memory_prefixes(self, tenant: str, memory_id: str) -> list[tuple[str, ...]]:
        """Every combination of memories with this one that sessions began with, in their order."""
        with self._reading() as connection:
            return [tuple(row.memory_ids) for row in _prefixes(connection, tenant, memory_id)]

    def latest_prefixes(self, tokenizer: str, limit: int) -> list[MemoryPrefix]:
        """The newest stored beginnings of all tenants whose memories are all there."""
        query = select(memory_prefixes).where(memory_prefixes.c.tokenizer == tokenizer)
        now, found = self._clock(), []
        with self._reading() as connection:
            for row in connection.execute(query.order_by(memory_prefixes.c.number.desc()).limit(limit)).all():
                try:
                    found.append(_prefix(row, check_memories(connection, row.tenant, row.memory_ids, now)))
                except Gone:
                    continue  # expired; whoever sweeps will delete it
        return found


def _live(now: float) -> ColumnElement[bool]:
    return and_(memories.c.deleted_at.is_(None), or_(memories.c.expires_at.is_(None), memories.c.expires_at > now))


def _row(connection: Connection, tenant: str, memory_id: str) -> Row[Any]:
    mine = and_(memories.c.tenant == tenant, memories.c.id == memory_id)
    row = connection.execute(select(memories).where(mine)).one_or_none()
    if row is None:
        raise NotFound("memory", memory_id)
    return row


def _read(connection: Connection, tenant: str, memory_id: str, now: float) -> Memory:
    check_memories(connection, tenant, [memory_id], now)
    return Memory(**_row(connection, tenant, memory_id)._mapping)


def _holds(table: Table, memory_id: str) -> ColumnElement[bool]:
    """A first sieve on the JSON's text; the caller compares the values themselves."""
    return cast(table.c.memory_ids, String).contains(memory_id, autoescape=True)


def _attached(connection: Connection, tenant: str, memory_id: str) -> list[str]:
    mine = and_(sessions.c.tenant == tenant, sessions.c.deleted_at.is_(None), _holds(sessions, memory_id))
    rows = connection.execute(select(sessions.c.id, sessions.c.memory_ids).where(mine).order_by(sessions.c.number))
    return [row.id for row in rows if memory_id in row.memory_ids]


def _prefixes(connection: Connection, tenant: str, memory_id: str) -> list[Any]:
    mine = and_(memory_prefixes.c.tenant == tenant, _holds(memory_prefixes, memory_id))
    query = select(memory_prefixes.c.number, memory_prefixes.c.memory_ids).where(mine)
    rows = connection.execute(query.order_by(memory_prefixes.c.number)).all()
    return [row for row in rows if memory_id in row.memory_ids]


def _prefix(row: Row[Any], expires_at: float | None) -> MemoryPrefix:
    return MemoryPrefix(
        tenant=row.tenant, memory_ids=tuple(row.memory_ids), tokenizer=row.tokenizer,
        token_ids=unpack_ids(row.token_ids), expires_at=expires_at,
    )  # fmt: skip


def _key(memory_ids: Sequence[str]) -> str:
    return blake3("\0".join(memory_ids).encode()).hexdigest()
