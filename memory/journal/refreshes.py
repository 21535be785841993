"""The queue of sessions whose KV is to be computed anew, and what tells how likely a session is to return.

Invariants: a session is in the queue at most once; a refresh moves a session to a version only from the version and
the reply that it was computed for (compare-and-swap), so a turn that came between is never overtaken; whoever restarts
finds the queue as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, and_, delete, func, insert, select, update

from memory.journal.base import JournalPart
from memory.journal.records import Refresh, RefreshCounts, RefreshState, Sleeper
from memory.journal.sessions import unexpired
from memory.journal.tables import refreshes, responses, sessions


class Refreshes(JournalPart):
    """The part of the journal that knows refreshes."""

    def sleepers(self, version: str, limit: int, since: float) -> list[Sleeper]:
        """Sessions with a reply that are not at `version` and were used after `since`, the latest used first."""
        query = _sleepers().where(
            unexpired(self._clock()), sessions.c.updated_at >= since, sessions.c.version.is_distinct_from(version)
        )
        with self._reading() as connection:
            rows = connection.execute(query.order_by(sessions.c.updated_at.desc()).limit(limit)).all()
        return [Sleeper(**row._mapping) for row in rows]

    def queue_refreshes(self, wanted: Sequence[Refresh]) -> None:
        """Queues sessions; one that is queued already waits for what is asked for now instead."""
        with self._writing() as connection:
            for refresh in wanted:
                mine = _of(refresh.tenant, refresh.session_id)
                values = _values(refresh) | {"updated_at": self._clock()}
                if not connection.execute(update(refreshes).where(mine).values(values)).rowcount:
                    connection.execute(insert(refreshes).values(values))

    def next_refresh(self, weights_id: str) -> Refresh | None:
        """The most valuable session that waits: those in use first, then by score."""
        waiting = and_(refreshes.c.weights_id == weights_id, refreshes.c.state == "waiting")
        order = (refreshes.c.live.desc(), refreshes.c.score.desc(), refreshes.c.number)
        with self._reading() as connection:
            row = connection.execute(select(refreshes).where(waiting).order_by(*order).limit(1)).one_or_none()
        return None if row is None else _refresh(row)

    def end_refresh(self, refresh: Refresh, state: RefreshState, attempts: int) -> None:
        """Notes what became of a refresh, unless another one was queued for the session meanwhile."""
        same = and_(_of(refresh.tenant, refresh.session_id), refreshes.c.updated_at == refresh.updated_at)
        values = {"state": state, "attempts": attempts, "updated_at": self._clock()}
        with self._writing() as connection:
            connection.execute(update(refreshes).where(same).values(values))

    def flip_session(self, tenant: str, session_id: str, head: str, was: str | None, now: str) -> bool:
        """Moves a session to version `now` if it is still at reply `head` and version `was`; whether it did."""
        there = and_(
            sessions.c.tenant == tenant, sessions.c.id == session_id, sessions.c.deleted_at.is_(None),
            sessions.c.head_response == head, sessions.c.version.is_not_distinct_from(was),
        )  # fmt: skip
        with self._writing() as connection:
            return bool(connection.execute(update(sessions).where(there).values(version=now)).rowcount)

    def drop_refreshes(self, weights_id: str) -> int:
        """Takes out of the queue what waits for other weights than these; returns how many."""
        stale = and_(refreshes.c.weights_id != weights_id, refreshes.c.state == "waiting")
        with self._writing() as connection:
            return connection.execute(delete(refreshes).where(stale)).rowcount

    def count_refreshes(self, weights_id: str) -> RefreshCounts:
        """How far the refreshes for these weights are."""
        query = select(refreshes.c.state, func.count(), func.sum(refreshes.c.tokens))
        with self._reading() as connection:
            rows = connection.execute(
                query.where(refreshes.c.weights_id == weights_id).group_by(refreshes.c.state)
            ).all()
        found = {state: (int(count), int(tokens or 0)) for state, count, tokens in rows}
        count = {state: found.get(state, (0, 0)) for state in ("waiting", "done", "failed", "skipped")}
        return RefreshCounts(
            waiting=count["waiting"][0], done=count["done"][0], failed=count["failed"][0],
            skipped=count["skipped"][0], tokens_waiting=count["waiting"][1], tokens_done=count["done"][1],
        )  # fmt: skip

    def return_gaps(self, limit: int) -> tuple[list[float], list[float]]:
        """Seconds between the turns of sessions, from the newest `limit` replies: gaps that ended with a return, and
        for each session in them the time since its last turn."""
        now = self._clock()
        newest = (
            select(responses.c.number, responses.c.tenant, responses.c.session_id, responses.c.created_at)
            .where(responses.c.choice_index == 0)
            .order_by(responses.c.number.desc())
            .limit(limit)
            .subquery()
        )
        with self._reading() as connection:
            rows = connection.execute(select(newest).order_by(newest.c.number)).all()
        latest: dict[tuple[str, str], float] = {}
        gaps: list[float] = []
        for row in rows:
            session = (row.tenant, row.session_id)
            if session in latest:
                gaps.append(max(0.0, row.created_at - latest[session]))
            latest[session] = row.created_at
        return gaps, [max(0.0, now - used) for used in latest.values()]


def _of(tenant: str, session_id: str) -> Any:
    return and_(refreshes.c.tenant == tenant, refreshes.c.session_id == session_id)


def _sleepers() -> Any:
    tokens = responses.c.cached_tokens + responses.c.computed_tokens + responses.c.generated_tokens
    return select(
        sessions.c.tenant, sessions.c.id.label("session_id"), sessions.c.version, sessions.c.updated_at,
        tokens.label("tokens"),
    ).join(responses, responses.c.id == sessions.c.head_response)  # fmt: skip


def _values(refresh: Refresh) -> dict[str, Any]:
    return {
        "tenant": refresh.tenant, "session_id": refresh.session_id, "version": refresh.version,
        "weights_id": refresh.weights_id, "reason": refresh.reason, "live": refresh.live, "score": refresh.score,
        "tokens": refresh.tokens, "state": refresh.state, "attempts": refresh.attempts,
    }  # fmt: skip


def _refresh(row: Row[Any]) -> Refresh:
    values = dict(row._mapping)
    del values["number"]
    return Refresh(**values)
