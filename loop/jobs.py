"""What the command line does with versions and runs: thin wiring of `pipelines` to a configuration."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loop.config import Config, ConfigError
from memory.journal import Journal
from pipelines.promotion import Move, Promotions
from pipelines.registry import Registry
from pipelines.schedule import Schedule

HAND = "kvloop"


@contextmanager
def opened_journal(config: Config) -> Iterator[Journal]:
    config.home.mkdir(parents=True, exist_ok=True)
    journal = Journal.open(config.journal.url, config.journal)
    try:
        yield journal
    finally:
        journal.close()


def promote(config: Config, version: int, reason: str) -> Move:
    """Points the champion alias at a registered version. Raises `VersionNotFound`."""
    with opened_journal(config) as journal:
        return Promotions(journal, Registry(config.registry)).promote(str(version), HAND, reason)


def rollback(config: Config, reason: str) -> Move:
    """Points the champion alias back. Raises `NothingToRollBack`."""
    with opened_journal(config) as journal:
        return Promotions(journal, Registry(config.registry)).rollback(HAND, reason)


def list_versions(config: Config) -> list[dict[str, Any]]:
    """Registered versions, newest first."""
    return [
        {
            "version": version.number,
            "aliases": ", ".join(version.aliases),
            "verdict": version.tags.get("verdict"),
            "compared_with": version.tags.get("compared_with"),
            "created": _when(version.created_at),
            "path": str(version.path),
        }
        for version in Registry(config.registry).list_versions()
    ]


def list_moves(config: Config) -> list[dict[str, Any]]:
    """The ledger, newest first: moves of the alias, and serving following them."""
    with opened_journal(config) as journal:
        return [
            {
                "at": _when(entry.at),
                "who": entry.who,
                "action": entry.action,
                "from": entry.from_version,
                "to": entry.to_version,
                "why": entry.reason,
                "report": entry.report,
                "seconds": None if entry.seconds is None else round(entry.seconds, 2),
            }
            for entry in journal.list_promotions(limit=1000)
        ]


def edit_schedule(config: Config, *, cron: str | None, every_feedback: int | None, off: bool) -> list[dict[str, Any]]:
    """Changes what is given and returns the triggers in force; a running scheduler sees them within seconds.

    Raises `BadCron`, `ConfigError`, `FixedBySettings`.
    """
    if every_feedback is not None and every_feedback < 1:
        raise ConfigError(f"--every-feedback counts in ones or more, not {every_feedback}")
    schedule = Schedule(config.schedule)
    if off:
        schedule.set_cron(None)
        schedule.set_feedback(None)
    if cron is not None:
        schedule.set_cron(cron)
    if every_feedback is not None:
        schedule.set_feedback(every_feedback)
    return [planned.as_json() for planned in schedule.planned()]


def _when(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="seconds")
