"""Feedback of four kinds, and the demonstrations that training starts from.

Invariants: feedback points at a live session of its own tenant; a demonstration always points at the reply it
corrects; what was deleted is gone from here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, insert, select

from memory.journal.base import JournalPart, new_id
from memory.journal.errors import InvalidRecord, NotFound
from memory.journal.records import DemonstrationRow, Feedback, FeedbackKind, Json
from memory.journal.responses import read_chain
from memory.journal.sessions import read_session
from memory.journal.tables import feedback, responses, sessions

_KINDS = ("boolean", "float", "comment", "demonstration")
_PAGE = 64


def check_value(kind: str, value: object) -> bool | float | str:
    """The value as it is stored. Raises `InvalidRecord` when it does not fit the kind."""
    if kind not in _KINDS:
        raise InvalidRecord(f"feedback kind {kind!r} is unknown: use one of {', '.join(_KINDS)}")
    if kind == "boolean":
        if isinstance(value, bool):
            return value
        raise InvalidRecord(f"boolean feedback needs true or false, not {value!r}")
    if kind == "float":
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value):
            return float(value)
        raise InvalidRecord(f"float feedback needs a finite number, not {value!r}")
    if isinstance(value, str) and value.strip():
        return value
    raise InvalidRecord(f"{kind} feedback needs a text that is not empty")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _feedback(row: Row[Any]) -> Feedback:
    return Feedback(**row._mapping)


class FeedbackPart(JournalPart):
    """The part of the journal that knows feedback."""

    def add_feedback(
        self,
        tenant: str,
        kind: FeedbackKind,
        value: bool | float | str,
        response_id: str | None = None,
        session_id: str | None = None,
        source: str = "",
    ) -> Feedback:
        """Journals feedback on a reply or on a session; on disk when this returns.

        A demonstration on a session corrects its latest reply. `source` says who gave it.
        Raises `InvalidRecord` for a value that does not fit or without a target, `NotFound` for an unknown target.
        """
        stored = check_value(kind, value)
        identifier = new_id("fb")
        with self._writing() as connection:
            session_id, response_id = _target(connection, tenant, kind, response_id, session_id)
            target = {"tenant": tenant, "session_id": session_id, "response_id": response_id}
            given = {"kind": kind, "value": stored, "source": source, "created_at": self._clock()}
            connection.execute(insert(feedback).values(id=identifier, **target, **given))
            return _feedback(connection.execute(select(feedback).where(feedback.c.id == identifier)).one())

    def list_feedback(
        self,
        tenant: str | None = None,
        response_id: str | None = None,
        session_id: str | None = None,
        kind: FeedbackKind | None = None,
        since: float | None = None,
        limit: int = 100,
    ) -> list[Feedback]:
        """Newest first; every argument that is given narrows the list."""
        query = _narrowed(select(feedback), tenant=tenant, response_id=response_id, session_id=session_id, kind=kind)
        if since is not None:
            query = query.where(feedback.c.created_at > since)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(feedback.c.number.desc()).limit(limit)).all()
        return [_feedback(row) for row in rows]

    def count_feedback(
        self,
        since: float | None = None,
        after: int | None = None,
        kind: FeedbackKind | None = None,
        tenant: str | None = None,
    ) -> int:
        """How much feedback came after a time (`since`, UTC seconds) or after a feedback number (`after`)."""
        query = _narrowed(select(func.count()).select_from(feedback), tenant=tenant, kind=kind)
        if since is not None:
            query = query.where(feedback.c.created_at > since)
        if after is not None:
            query = query.where(feedback.c.number > after)
        with self._reading() as connection:
            return int(connection.execute(query).scalar_one())

    def last_feedback_number(self) -> int:
        """The highest feedback number given out, 0 when there is none: a mark for `count_feedback(after=...)`."""
        with self._reading() as connection:
            return connection.execute(select(func.max(feedback.c.number))).scalar_one() or 0

    def demonstrations(self, since: float | None = None, until: float | None = None) -> Iterator[DemonstrationRow]:
        """Corrected answers with their whole history, oldest first. `since` is excluded, `until` included.

        No transaction is held while the caller works on a row; a session deleted meanwhile does not appear.
        """
        number = 0
        while True:
            page, number = self._demonstrations_after(number, since, until)
            yield from page
            if number < 0:
                return

    def _demonstrations_after(
        self, number: int, since: float | None, until: float | None
    ) -> tuple[list[DemonstrationRow], int]:
        query = select(feedback).where(feedback.c.kind == "demonstration", feedback.c.number > number)
        if since is not None:
            query = query.where(feedback.c.created_at > since)
        if until is not None:
            query = query.where(feedback.c.created_at <= until)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(feedback.c.number).limit(_PAGE)).all()
            page = [_demonstration(connection, _feedback(row)) for row in rows]
        return page, (rows[-1].number if len(rows) == _PAGE else -1)


def _narrowed(query: Select[Any], **equal: str | None) -> Select[Any]:
    for column, value in equal.items():
        if value is not None:
            query = query.where(feedback.c[column] == value)
    return query


def _target(
    connection: Connection, tenant: str, kind: str, response_id: str | None, session_id: str | None
) -> tuple[str, str | None]:
    """Session and reply that the feedback is on."""
    if response_id is not None:
        mine = and_(responses.c.id == response_id, responses.c.tenant == tenant)
        owner = connection.execute(select(responses.c.session_id).where(mine)).scalar_one_or_none()
        if owner is None:
            raise NotFound("response", response_id)
        if session_id is not None and session_id != owner:
            raise InvalidRecord(f"response {response_id!r} is not in session {session_id!r}")
        return str(owner), response_id
    if session_id is None:
        raise InvalidRecord("feedback needs a response_id or a session_id")
    session = read_session(connection, tenant, session_id)
    if kind != "demonstration":
        return session_id, None
    if session.head_response is None:
        raise InvalidRecord(f"session {session_id!r} has no reply yet that a demonstration could correct")
    owner = connection.execute(select(responses.c.session_id).where(responses.c.id == session.head_response))
    return str(owner.scalar_one()), session.head_response


def _demonstration(connection: Connection, given: Feedback) -> DemonstrationRow:
    if given.response_id is None:
        raise InvalidRecord(f"demonstration {given.id!r} points at no reply")
    chain = read_chain(connection, given.response_id)
    history: list[Json] = []
    for earlier in chain[:-1]:
        history += [*earlier.input_messages, earlier.output_message]
    mine = and_(sessions.c.tenant == given.tenant, sessions.c.id == given.session_id)
    session = connection.execute(select(sessions.c.split, sessions.c.memory_ids).where(mine)).one()
    return DemonstrationRow(
        feedback=given,
        response=chain[-1],
        history=[*history, *chain[-1].input_messages],
        split=session.split,
        memory_ids=tuple(session.memory_ids),
        sessions=tuple(dict.fromkeys(response.session_id for response in chain)),
    )
