"""Sessions: creating, reading, deleting.

Invariants: a session's split is drawn once, from its id, when it is created, and a fork has its parent's; a deleted
session leaves a tombstone (ids and times, no words), so that its id is never given out again; every fork that holds
its words goes with it; a session past its `expires_at` is not found by anything but its deletion, and a fork expires
with what it forked from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from memory.journal.base import JournalPart, new_id
from memory.journal.database import truncate_log
from memory.journal.errors import Conflict, Gone, InvalidRecord, NotFound
from memory.journal.records import DeletionReceipt, Json, Session, Split
from memory.journal.tables import dataset_sessions, dataset_versions, feedback, memories, refreshes, responses, sessions


def draw_split(session_id: str, salt: str, eval_share: float) -> Split:
    """The split of a session: the same for the same id and salt, `eval` with probability `eval_share`."""
    drawn = int.from_bytes(blake3(f"{salt}\0{session_id}".encode()).digest()[:8], "big") / 2**64
    return "eval" if drawn < eval_share else "train"


def _session(row: Row[Any]) -> Session:
    values = dict(row._mapping)
    return Session(**(values | {"memory_ids": tuple(values["memory_ids"])}))


def unexpired(now: float) -> ColumnElement[bool]:
    """Whether a session is there to be read."""
    return and_(sessions.c.deleted_at.is_(None), or_(sessions.c.expires_at.is_(None), sessions.c.expires_at > now))


def read_session(connection: Connection, tenant: str, session_id: str, now: float | None = None) -> Session:
    """The live session, inside the caller's transaction; with `now`, only if it has not expired. Raises `NotFound`."""
    live = sessions.c.deleted_at.is_(None) if now is None else unexpired(now)
    row = connection.execute(
        select(sessions).where(sessions.c.tenant == tenant, sessions.c.id == session_id, live)
    ).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    return _session(row)


class Sessions(JournalPart):
    """The part of the journal that knows sessions."""

    def create_session(
        self,
        tenant: str,
        session_id: str | None = None,
        metadata: Json | None = None,
        head: str | None = None,
        parent: str | None = None,
        memory_ids: Sequence[str] = (),
        expires_at: float | None = None,
    ) -> Session:
        """Creates a session, or a fork: `parent` is the session forked from, `head` the reply it continues from.

        `head` alone is enough for a fork: the parent is then the session that made that reply. A fork has the memories
        and the version of that session, and expires no later.
        Raises `Conflict` when the tenant has, or had, a session of this id; `NotFound` for an unknown parent, head or
        memory, as `Gone` for a memory that was deleted or expired.
        """
        session_id = new_id("sess") if session_id is None else session_id
        if not 0 < len(session_id) <= 128:
            raise InvalidRecord(f"a session id has 1 to 128 characters, not {len(session_id)}")
        now = self._clock()
        with self._writing() as connection:
            values: Json = {
                "tenant": tenant, "id": session_id, "created_at": now, "updated_at": now, "metadata": metadata or {},
                "split": draw_split(session_id, self._settings.split_salt, self._settings.eval_share),
                "memory_ids": list(memory_ids), "expires_at": expires_at,
            }  # fmt: skip
            origin = None if parent is None else read_session(connection, tenant, parent, now)
            if origin is not None:
                values["split"] = origin.split
            if head is not None:
                # Of whose words it goes on with, whatever the parent is said to be.
                owner = _owner(connection, tenant, head, now)
                parent = owner.id if parent is None else parent
                values |= _inherited(owner, expires_at)
            check_memories(connection, tenant, values["memory_ids"], now)
            values |= {"parent_session": parent, "head_response": head}
            try:
                connection.execute(insert(sessions).values(values))
            except IntegrityError as error:
                raise Conflict(f"session {session_id!r} exists or has existed: choose another id") from error
            return read_session(connection, tenant, session_id)

    def attach_memories(self, tenant: str, session_id: str, memory_ids: Sequence[str]) -> Session:
        """Attaches memories to a session before its first turn; the same ones again are no change.

        Raises `Conflict` when it has others or has had a turn, `NotFound` as `create_session` does.
        """
        now = self._clock()
        with self._writing() as connection:
            session = read_session(connection, tenant, session_id, now)
            if session.memory_ids == tuple(memory_ids):
                return session
            if session.memory_ids or session.head_response is not None:
                raise Conflict(f"session {session_id!r} has begun: memories are attached before the first turn")
            check_memories(connection, tenant, memory_ids, now)
            mine = sessions.c.number == session.number
            connection.execute(update(sessions).where(mine).values(memory_ids=list(memory_ids)))
            return read_session(connection, tenant, session_id)

    def get_session(self, tenant: str, session_id: str) -> Session:
        """Raises `NotFound` also for a deleted session and for another tenant's."""
        with self._reading() as connection:
            return read_session(connection, tenant, session_id, self._clock())

    def list_sessions(self, tenant: str, limit: int = 20, after: str | None = None) -> list[Session]:
        """Newest first; `after` is the last id of the page before. Raises `NotFound` for an unknown `after`."""
        now = self._clock()
        query = select(sessions).where(sessions.c.tenant == tenant, unexpired(now))
        with self._reading() as connection:
            if after is not None:
                query = query.where(sessions.c.number < read_session(connection, tenant, after, now).number)
            rows = connection.execute(query.order_by(sessions.c.number.desc()).limit(limit)).all()
        return [_session(row) for row in rows]

    def delete_session(self, tenant: str, session_id: str) -> DeletionReceipt:
        """Removes the words of a session, expired or not, and of the forks that hold them. Returns a receipt.

        KV chunks and dataset files are not the journal's: the caller forgets those by what the receipt names.
        """
        now = self._clock()
        with self._writing() as connection:
            read_session(connection, tenant, session_id)
            doomed = with_forks(connection, tenant, session_id)
            counts = []
            for table in (feedback, responses, refreshes):
                theirs = and_(table.c.tenant == tenant, table.c.session_id.in_(doomed))
                counts.append(connection.execute(delete(table).where(theirs)).rowcount)
            theirs = and_(sessions.c.tenant == tenant, sessions.c.id.in_(doomed))
            empty: Json = {}
            tombstone: Json = {"metadata": empty, "head_response": None, "updated_at": now, "deleted_at": now}
            connection.execute(update(sessions).where(theirs).values(tombstone))
            receipt = _receipt(connection, tenant, doomed, now, counts)
        truncate_log(self._engine)
        return receipt

    def expired_sessions(self, limit: int = 100) -> list[tuple[str, str]]:
        """Tenant and id of sessions whose time is over and that are not deleted yet, the longest overdue first."""
        overdue = and_(sessions.c.deleted_at.is_(None), sessions.c.expires_at <= self._clock())
        query = select(sessions.c.tenant, sessions.c.id).where(overdue).order_by(sessions.c.expires_at).limit(limit)
        with self._reading() as connection:
            return [(row.tenant, row.id) for row in connection.execute(query)]

    def trained_on(self, tenant: str, session_id: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Dataset digests and version names that a session, deleted or not, went into."""
        with self._reading() as connection:
            return lineage(connection, tenant, [session_id])


def _inherited(owner: Session, expires_at: float | None) -> Json:
    ends = [end for end in (owner.expires_at, expires_at) if end is not None]
    return {
        "split": owner.split, "memory_ids": list(owner.memory_ids), "version": owner.version,
        "expires_at": min(ends, default=None),
    }  # fmt: skip


def check_memories(connection: Connection, tenant: str, memory_ids: Sequence[str], now: float) -> float | None:
    """When the first of the memories expires; None when none does.

    Raises `NotFound` for a memory the tenant never had, `Gone` for one that was deleted or has expired.
    """
    ends: list[float] = []
    for memory_id in memory_ids:
        mine = and_(memories.c.tenant == tenant, memories.c.id == memory_id)
        row = connection.execute(select(memories.c.deleted_at, memories.c.expires_at).where(mine)).one_or_none()
        if row is None:
            raise NotFound("memory", memory_id)
        if row.expires_at is not None and row.expires_at <= now:
            raise Gone("memory", memory_id, "expired")
        if row.deleted_at is not None:
            raise Gone("memory", memory_id, "deleted")
        if row.expires_at is not None:
            ends.append(row.expires_at)
    return min(ends, default=None)


def _owner(connection: Connection, tenant: str, response_id: str, now: float) -> Session:
    """The session that a reply was made in. Raises `NotFound`."""
    mine = and_(responses.c.id == response_id, responses.c.tenant == tenant)
    session_id = connection.execute(select(responses.c.session_id).where(mine)).scalar_one_or_none()
    if session_id is None:
        raise NotFound("response", response_id)
    return read_session(connection, tenant, session_id, now)


def with_forks(connection: Connection, tenant: str, session_id: str) -> list[str]:
    """The session, and every live session whose chain of replies passes through it, nearest first."""
    found = [session_id]
    frontier = [session_id]
    parents = responses.alias("parents")
    while frontier:
        within: ColumnElement[bool] = and_(parents.c.tenant == tenant, parents.c.session_id.in_(frontier))
        by_reply = select(responses.c.session_id).join(parents, responses.c.parent_response == parents.c.id)
        by_head = select(sessions.c.id).join(parents, sessions.c.head_response == parents.c.id)
        rows = (
            connection.execute(by_reply.where(within).union(by_head.where(within, sessions.c.tenant == tenant)))
            .scalars()
            .all()
        )
        frontier = sorted(set(rows) - set(found))
        found += frontier
    return found


def _receipt(connection: Connection, tenant: str, doomed: list[str], now: float, counts: list[int]) -> DeletionReceipt:
    trained, versions = lineage(connection, tenant, doomed)
    return DeletionReceipt(
        tenant=tenant,
        session_id=doomed[0],
        deleted_at=now,
        sessions=tuple(doomed),
        feedback=counts[0],
        responses=counts[1],
        datasets=trained,
        versions=versions,
    )


def lineage(connection: Connection, tenant: str, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Digests of the datasets that these sessions went into, and the versions trained on those."""
    theirs = and_(dataset_sessions.c.tenant == tenant, dataset_sessions.c.session_id.in_(names))
    digests = sorted(connection.execute(select(dataset_sessions.c.digest).where(theirs).distinct()).scalars())
    trained = select(dataset_versions.c.version).where(dataset_versions.c.digest.in_(digests)).distinct()
    return tuple(digests), tuple(sorted(connection.execute(trained).scalars()))
