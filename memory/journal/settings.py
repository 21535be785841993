"""Settings of the journal."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class JournalSettings(BaseModel):
    """How sessions are split, and how the database is used."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str = "sqlite:///.kvloop/journal.db"
    """Database URL; SQLite needs a file. Follows `home` unless it is set."""

    eval_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """Share of new sessions that are kept for evaluation and never reach a trainer."""

    split_salt: str = "kvloop-split-1"
    """Enters the hash that assigns a session its split. Changing it never moves a session that exists."""

    busy_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a writer waits for another writer before it gives up."""

    pool_size: int = Field(default=8, ge=1)
    """Database connections kept open; up to 32 more are opened for a burst."""
