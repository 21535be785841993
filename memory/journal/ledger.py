"""The ledger of promotions, and which version serves.

Invariants: the ledger only grows; an entry with a key is written once, however often it is tried.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, insert, select, update

from memory.journal.base import JournalPart, new_id
from memory.journal.records import Action, Json, Promotion, Serving
from memory.journal.tables import promotions, serving

_SLOT = 1


def _promotion(row: Row[Any]) -> Promotion:
    values = dict(row._mapping)
    del values["key"]
    return Promotion(**values)


class Ledger(JournalPart):
    """The part of the journal that knows what served when, and why."""

    def add_promotion(
        self,
        who: str,
        action: Action,
        from_version: str | None,
        to_version: str,
        reason: str,
        report: str | None = None,
        seconds: float | None = None,
        key: str | None = None,
    ) -> Promotion:
        """Adds a line to the ledger. `key` makes it idempotent: a second call with it returns the first's line."""
        identifier = new_id("promo")
        with self._writing() as connection:
            if key is not None:
                known = connection.execute(select(promotions).where(promotions.c.key == key)).one_or_none()
                if known is not None:
                    return _promotion(known)
            values = {"id": identifier, "at": self._clock(), "who": who, "action": action, "reason": reason}
            values |= {"from_version": from_version, "to_version": to_version, "report": report}
            connection.execute(insert(promotions).values(values | {"seconds": seconds, "key": key}))
            return _promotion(connection.execute(select(promotions).where(promotions.c.id == identifier)).one())

    def list_promotions(self, limit: int = 100, to_version: str | None = None) -> list[Promotion]:
        """Newest first."""
        query = select(promotions).order_by(promotions.c.number.desc()).limit(limit)
        if to_version is not None:
            query = query.where(promotions.c.to_version == to_version)
        with self._reading() as connection:
            return [_promotion(row) for row in connection.execute(query)]

    def set_serving(
        self, name: str, path: str | None, version: str | None, weights_id: str, fingerprint: Json | None = None
    ) -> Serving:
        """Records the version that serves from now on, so that a restarted gateway needs nothing else to go on."""
        values: dict[str, Any] = {"name": name, "path": path, "version": version, "weights_id": weights_id}
        values |= {"fingerprint": fingerprint, "since": self._clock()}
        with self._writing() as connection:
            changed = connection.execute(update(serving).where(serving.c.slot == _SLOT).values(values)).rowcount
            if not changed:
                connection.execute(insert(serving).values(values | {"slot": _SLOT}))
        return self._serving_now()

    def get_serving(self) -> Serving | None:
        """The version that serves; None before the first `set_serving`."""
        with self._reading() as connection:
            row = connection.execute(select(serving).where(serving.c.slot == _SLOT)).one_or_none()
        if row is None:
            return None
        values = dict(row._mapping)
        del values["slot"]
        return Serving(**values)

    def _serving_now(self) -> Serving:
        state = self.get_serving()
        if state is None:
            raise LookupError("the serving row vanished")
        return state
