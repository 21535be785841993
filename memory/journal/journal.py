"""The journal as one object, made of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from sqlalchemy import text

from memory.journal.database import open_engine
from memory.journal.feedback import FeedbackPart
from memory.journal.ledger import Ledger
from memory.journal.lineage import Lineage
from memory.journal.memories import Memories
from memory.journal.refreshes import Refreshes
from memory.journal.responses import Responses
from memory.journal.runs import Runs
from memory.journal.sessions import Sessions
from memory.journal.settings import JournalSettings


class Journal(Sessions, Responses, FeedbackPart, Ledger, Runs, Lineage, Memories, Refreshes):
    """The durable record of sessions, responses, memories, feedback, promotions, refreshes and runs.

    Synchronous and thread-safe; several processes may have one database open. Whatever a method returned is on disk.
    """

    @classmethod
    def open(cls, url: str, settings: JournalSettings | None = None, clock: Callable[[], float] = time.time) -> Self:
        """Opens the database at `url` (`sqlite:////path/journal.db`, `postgresql://...`) and migrates it.

        Raises `SchemaTooNew` for a database of a newer release, and SQLAlchemy's errors where it cannot be reached.
        """
        settings = JournalSettings() if settings is None else settings
        return cls(open_engine(url, settings), settings, clock)

    def now(self) -> float:
        """The journal's time, in UTC seconds since 1970: what its records are stamped with."""
        return self._clock()

    def ping(self) -> None:
        """Raises when the database does not answer."""
        with self._reading() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        """Closes every connection. The journal must not be used after it."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
