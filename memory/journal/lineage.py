"""Which sessions went into which dataset, and which versions came out of it: what a deletion receipt names."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import and_, insert, select

from memory.journal.base import JournalPart
from memory.journal.errors import NotFound
from memory.journal.tables import dataset_sessions, dataset_versions, datasets, sessions


class Lineage(JournalPart):
    """The part of the journal that knows what was learned from whom."""

    def record_dataset(self, digest: str, path: str, used: Iterable[tuple[str, str]]) -> None:
        """Records a dataset and the (tenant, session id) pairs in it. The same digest again changes nothing."""
        with self._writing() as connection:
            if connection.execute(select(datasets.c.digest).where(datasets.c.digest == digest)).one_or_none():
                return
            connection.execute(insert(datasets).values(digest=digest, path=path, created_at=self._clock()))
            rows = [{"digest": digest, "tenant": tenant, "session_id": name} for tenant, name in sorted(set(used))]
            if rows:
                connection.execute(insert(dataset_sessions), rows)

    def record_version(self, digest: str, version: str) -> None:
        """Records that `version` was trained on a dataset. Idempotent. Raises `NotFound` for an unknown dataset."""
        with self._writing() as connection:
            if not connection.execute(select(datasets.c.digest).where(datasets.c.digest == digest)).one_or_none():
                raise NotFound("dataset", digest)
            mine = and_(dataset_versions.c.digest == digest, dataset_versions.c.version == version)
            if connection.execute(select(dataset_versions.c.version).where(mine)).one_or_none() is None:
                values = {"digest": digest, "version": version, "recorded_at": self._clock()}
                connection.execute(insert(dataset_versions).values(values))

    def deleted_in_dataset(self, digest: str) -> list[str]:
        """Ids of the sessions of a dataset that were deleted since it was built."""
        same = and_(sessions.c.tenant == dataset_sessions.c.tenant, sessions.c.id == dataset_sessions.c.session_id)
        query = select(sessions.c.id).join(dataset_sessions, same)
        gone = query.where(dataset_sessions.c.digest == digest, sessions.c.deleted_at.is_not(None))
        with self._reading() as connection:
            return sorted(connection.execute(gone).scalars())
