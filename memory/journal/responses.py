"""Responses: one transaction for each turn, and the chain of turns that is a session's history.

Invariants: a reply is on disk when `add_response` returns; a session's head moves only from the reply's parent, so of
two turns that race one gets `Conflict` and leaves nothing behind; token ids come back exactly as they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, and_, case, insert, select, update
from sqlalchemy.exc import IntegrityError

from memory.journal.base import JournalPart, new_id, pack_ids, unpack_ids
from memory.journal.errors import Conflict, InvalidRecord, NotFound
from memory.journal.records import NewResponse, Response, VersionMove
from memory.journal.sessions import read_session, unexpired, with_forks
from memory.journal.tables import responses, sessions

_in_session = and_(sessions.c.tenant == responses.c.tenant, sessions.c.id == responses.c.session_id)


def response_from(row: Row[Any]) -> Response:
    """A record from a row of the table."""
    values = dict(row._mapping)
    values["input_ids"] = unpack_ids(values["input_ids"])
    values["output_ids"] = unpack_ids(values["output_ids"])
    return Response(**values)


def read_chain(connection: Connection, response_id: str) -> list[Response]:
    """The reply and its ancestors, root first, inside the caller's transaction. Raises `NotFound`."""
    chain = select(responses.c.id, responses.c.parent_response).where(responses.c.id == response_id).cte(recursive=True)
    step = select(responses.c.id, responses.c.parent_response).join(chain, responses.c.id == chain.c.parent_response)
    chain = chain.union_all(step)
    query = select(responses).join(chain, responses.c.id == chain.c.id).order_by(responses.c.number)
    rows = connection.execute(query).all()
    if not rows:
        raise NotFound("response", response_id)
    return [response_from(row) for row in rows]


class Responses(JournalPart):
    """The part of the journal that knows replies."""

    def add_response(self, new: NewResponse) -> Response:
        """Journals one reply and moves its session's head to it. On disk when this returns.

        Raises `Conflict` when the session's head is no longer `new.parent_response` or the id is taken,
        `NotFound` when the tenant has no such session, `InvalidRecord` for token ids that are none.
        """
        return self.add_responses([new])[0]

    def add_responses(self, choices: Sequence[NewResponse], version: VersionMove | None = None) -> list[Response]:
        """Journals the choices of one turn together; the session's head moves to the first. See `add_response`.

        The session's version moves by `version`, unless another writer moved it while the turn ran.
        """
        first = choices[0]
        turn = (first.tenant, first.session_id, first.parent_response)
        if any((choice.tenant, choice.session_id, choice.parent_response) != turn for choice in choices):
            raise InvalidRecord("the choices of one turn share tenant, session and parent response")
        now = self._clock()
        rows = [_row(choice, now) for choice in choices]
        with self._writing() as connection:
            session = read_session(connection, first.tenant, first.session_id, now)
            try:
                connection.execute(insert(responses), rows)
            except IntegrityError as error:
                raise Conflict(f"response {rows[0]['id']!r} exists already, or its parent does not") from error
            at_parent = sessions.c.head_response.is_not_distinct_from(first.parent_response)
            mine = and_(sessions.c.number == session.number, sessions.c.deleted_at.is_(None), at_parent)
            moved: dict[str, Any] = {"head_response": rows[0]["id"], "updated_at": now}
            if version is not None:
                unmoved = sessions.c.version.is_not_distinct_from(version.was)
                moved["version"] = case((unmoved, version.now), else_=sessions.c.version)
            if not connection.execute(update(sessions).where(mine).values(moved)).rowcount:
                raise Conflict(
                    f"session {first.session_id!r} is at {session.head_response!r}, not at {first.parent_response!r}: "
                    "another turn was first; read the session again"
                )
            stored = select(responses).where(responses.c.id.in_([row["id"] for row in rows]))
            return [response_from(row) for row in connection.execute(stored.order_by(responses.c.number))]

    def get_response(self, tenant: str, response_id: str) -> Response:
        """Raises `NotFound` also for another tenant's, and for one of a session that has expired."""
        with self._reading() as connection:
            mine = and_(responses.c.id == response_id, responses.c.tenant == tenant)
            query = select(responses).join(sessions, _in_session).where(mine, unexpired(self._clock()))
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound("response", response_id)
        return response_from(row)

    def chain(self, response_id: str) -> list[Response]:
        """The reply and all before it, root first, across forks. Raises `NotFound`."""
        with self._reading() as connection:
            return read_chain(connection, response_id)

    def session_token_ids(self, response_id: str) -> list[int]:
        """Every token id up to and with this reply, in order. Raises `NotFound`."""
        ids: list[int] = []
        for response in self.chain(response_id):
            ids += response.input_ids
            ids += response.output_ids
        return ids

    def doomed_with(self, tenant: str, session_id: str) -> tuple[tuple[str, ...], list[Response]]:
        """What `delete_session` would delete now: the sessions, and their replies, parents before children.

        Raises `NotFound`.
        """
        with self._reading() as connection:
            read_session(connection, tenant, session_id)
            doomed = with_forks(connection, tenant, session_id)
            theirs = and_(responses.c.tenant == tenant, responses.c.session_id.in_(doomed))
            rows = connection.execute(select(responses).where(theirs).order_by(responses.c.number)).all()
        return tuple(doomed), [response_from(row) for row in rows]

    def find_by_history(self, tenant: str, history_digest: bytes) -> Response | None:
        """The newest reply whose rendered history, itself included, has this digest."""
        mine = and_(responses.c.tenant == tenant, responses.c.history_digest == history_digest)
        query = select(responses).join(sessions, _in_session).where(mine, unexpired(self._clock()))
        with self._reading() as connection:
            row = connection.execute(query.order_by(responses.c.number.desc()).limit(1)).one_or_none()
        return None if row is None else response_from(row)

    def list_responses(self, tenant: str, session_id: str) -> list[Response]:
        """The replies made in this session, oldest first, other choices included. Raises `NotFound`."""
        mine = and_(responses.c.tenant == tenant, responses.c.session_id == session_id)
        with self._reading() as connection:
            read_session(connection, tenant, session_id, self._clock())
            rows = connection.execute(select(responses).where(mine).order_by(responses.c.number)).all()
        return [response_from(row) for row in rows]


def _row(new: NewResponse, now: float) -> dict[str, Any]:
    values = asdict(new)
    values["id"] = new_id("resp") if new.id is None else new.id
    values["created_at"] = now if new.created_at is None else new.created_at
    values["input_ids"] = pack_ids(new.input_ids)
    values["output_ids"] = pack_ids(new.output_ids)
    return values
