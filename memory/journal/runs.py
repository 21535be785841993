"""Pipeline runs: a row with steps, and a lease that keeps two runs of a kind from overlapping.

Invariants: a finished step keeps its first result; a step is recorded only while its lease is held (checked in the same
transaction), so a process that slept cannot write over the one that took its lease; a run ends once.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, and_, delete, insert, or_, select, update

from memory.journal.base import JournalPart, new_id
from memory.journal.errors import Conflict, LeaseLost, NotFound
from memory.journal.records import Json, Lease, Run, RunStatus, Step
from memory.journal.tables import leases, run_steps, runs


def _run(row: Row[Any]) -> Run:
    return Run(**row._mapping)


def _read_run(connection: Connection, run_id: str) -> Run:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFound("run", run_id)
    return _run(row)


class Runs(JournalPart):
    """The part of the journal that knows pipeline runs."""

    def create_run(self, kind: str, params: Json) -> Run:
        """A new run, `running` and without steps."""
        identifier, now = new_id("run"), self._clock()
        values = {"id": identifier, "kind": kind, "params": params, "status": "running", "attempts": 0}
        with self._writing() as connection:
            connection.execute(insert(runs).values(values | {"created_at": now, "updated_at": now}))
            return _read_run(connection, identifier)

    def get_run(self, run_id: str) -> Run:
        """Raises `NotFound`."""
        with self._reading() as connection:
            return _read_run(connection, run_id)

    def list_runs(self, kind: str | None = None, status: RunStatus | None = None, limit: int = 100) -> list[Run]:
        """Newest first."""
        query = select(runs).order_by(runs.c.number.desc()).limit(limit)
        if kind is not None:
            query = query.where(runs.c.kind == kind)
        if status is not None:
            query = query.where(runs.c.status == status)
        with self._reading() as connection:
            return [_run(row) for row in connection.execute(query)]

    def begin_attempt(self, run_id: str, owner: str | None = None) -> int:
        """Counts one more process that works on the run, and returns which one it is: 1 for the first.

        Raises `LeaseLost` when `owner` is given and no longer holds the lease of the run's kind.
        """
        with self._writing() as connection:
            attempts = self._mine(connection, run_id, owner).attempts + 1
            values = {"attempts": attempts, "updated_at": self._clock()}
            connection.execute(update(runs).where(runs.c.id == run_id).values(values))
        return attempts

    def step(self, run_id: str, name: str) -> Json | None:
        """The result of a finished step; None while it is not finished."""
        mine = and_(run_steps.c.run_id == run_id, run_steps.c.name == name)
        with self._reading() as connection:
            result: Json | None = connection.execute(select(run_steps.c.result).where(mine)).scalar_one_or_none()
        return result

    def list_steps(self, run_id: str) -> list[Step]:
        """The finished steps of a run, in the order they finished."""
        columns = select(run_steps.c.name, run_steps.c.result, run_steps.c.finished_at)
        query = columns.where(run_steps.c.run_id == run_id).order_by(run_steps.c.finished_at, run_steps.c.name)
        with self._reading() as connection:
            return [Step(**row._mapping) for row in connection.execute(query)]

    def finish_step(self, run_id: str, name: str, result: Json, owner: str | None = None) -> Json:
        """Records a step's result and returns it; a step that was finished before keeps and returns its first result.

        Raises `LeaseLost` when `owner` is given and no longer holds the lease of the run's kind.
        """
        mine = and_(run_steps.c.run_id == run_id, run_steps.c.name == name)
        with self._writing() as connection:
            run = self._mine(connection, run_id, owner)
            known: Json | None = connection.execute(select(run_steps.c.result).where(mine)).scalar_one_or_none()
            if known is not None:
                return known
            now = self._clock()
            values = {"run_id": run.id, "name": name, "result": result, "finished_at": now}
            connection.execute(insert(run_steps).values(values))
            connection.execute(update(runs).where(runs.c.id == run.id).values(updated_at=now))
        return result

    def forget_step(self, run_id: str, name: str, owner: str | None = None) -> None:
        """Makes a step run again, because what it made is no longer valid. Raises as `finish_step` does."""
        with self._writing() as connection:
            self._mine(connection, run_id, owner)
            mine = and_(run_steps.c.run_id == run_id, run_steps.c.name == name)
            connection.execute(delete(run_steps).where(mine))

    def finish_run(self, run_id: str, outcome: Json, owner: str | None = None) -> Run:
        """Ends a run as done. Raises `LeaseLost` as `finish_step` does, `Conflict` when it has ended before."""
        return self._end(run_id, "done", None, outcome, owner)

    def fail_run(self, run_id: str, reason: str, owner: str | None = None) -> Run:
        """Ends a run as failed. Raises as `finish_run` does."""
        return self._end(run_id, "failed", reason, None, owner)

    def acquire_lease(self, kind: str, owner: str, ttl: float) -> bool:
        """Takes the lease of a kind for `ttl` seconds; False while somebody else holds it. Renews one's own."""
        now = self._clock()
        free = or_(leases.c.expires_at <= now, leases.c.owner == owner)
        values = {"owner": owner, "acquired_at": now, "expires_at": now + ttl}
        with self._writing() as connection:
            taken = connection.execute(update(leases).where(leases.c.kind == kind, free).values(values)).rowcount
            if taken:
                return True
            held = connection.execute(select(leases.c.owner).where(leases.c.kind == kind)).one_or_none()
            if held is None:
                connection.execute(insert(leases).values(values | {"kind": kind}))
            return held is None

    def heartbeat(self, kind: str, owner: str, ttl: float) -> None:
        """Keeps the lease for another `ttl` seconds, also one that ran out and that nobody took since.

        Raises `LeaseLost` when somebody else has it.
        """
        mine = and_(leases.c.kind == kind, leases.c.owner == owner)
        with self._writing() as connection:
            if not connection.execute(update(leases).where(mine).values(expires_at=self._clock() + ttl)).rowcount:
                raise LeaseLost(f"{owner!r} no longer holds the lease of {kind!r}")

    def release_lease(self, kind: str, owner: str) -> None:
        """Gives the lease back; nothing happens when somebody else has it."""
        with self._writing() as connection:
            connection.execute(delete(leases).where(leases.c.kind == kind, leases.c.owner == owner))

    def get_lease(self, kind: str) -> Lease | None:
        """The lease of a kind while it is valid."""
        valid = and_(leases.c.kind == kind, leases.c.expires_at > self._clock())
        with self._reading() as connection:
            row = connection.execute(select(leases).where(valid)).one_or_none()
        return None if row is None else Lease(**row._mapping)

    def _mine(self, connection: Connection, run_id: str, owner: str | None) -> Run:
        """The run, after proof that nobody took its lease from `owner`."""
        run = _read_run(connection, run_id)
        if owner is None:
            return run
        valid = and_(leases.c.kind == run.kind, leases.c.owner == owner)
        if connection.execute(select(leases.c.kind).where(valid)).one_or_none() is None:
            raise LeaseLost(f"{owner!r} no longer holds the lease of {run.kind!r}")
        return run

    def _end(self, run_id: str, status: RunStatus, reason: str | None, outcome: Json | None, owner: str | None) -> Run:
        now = self._clock()
        values = {"status": status, "reason": reason, "outcome": outcome, "updated_at": now, "finished_at": now}
        with self._writing() as connection:
            self._mine(connection, run_id, owner)
            running = and_(runs.c.id == run_id, runs.c.status == "running")
            if not connection.execute(update(runs).where(running).values(values)).rowcount:
                raise Conflict(f"run {run_id!r} has ended before")
            return _read_run(connection, run_id)
