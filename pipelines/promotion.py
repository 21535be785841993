"""Moves the `champion` alias, by hand or for the gate, and back.

Invariants: the ledger has the move before the alias moves, so no move is without its who and why; each move can be
repeated after a kill and ends the same. Serving is not told: it follows the alias.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from memory.journal import Journal
from pipelines.registry import CHAMPION, PREVIOUS

BASE = "base"


class NothingToRollBack(RuntimeError):
    """There is no version before the one that serves; the message says what to do instead."""


class Aliases(Protocol):
    """What promotion needs of a registry."""

    def get_alias(self, alias: str) -> str | None: ...
    def set_alias(self, alias: str, version: str) -> None: ...
    def delete_alias(self, alias: str) -> None: ...
    def version_path(self, version: str) -> Path: ...


@dataclass(frozen=True, kw_only=True)
class Move:
    """One move of the champion. `BASE` stands for the base model, which has no version."""

    from_version: str
    to_version: str
    moved: bool
    """False when the version was champion already."""


class Promotions:
    """Promotes and rolls back."""

    def __init__(self, journal: Journal, registry: Aliases) -> None:
        self._journal = journal
        self._registry = registry

    def promote(self, version: str, who: str, reason: str, report: str | None = None, key: str | None = None) -> Move:
        """Makes `version` champion and the champion before it previous. `key` makes the ledger entry idempotent.

        Raises `VersionNotFound`; the ledger has no entry then.
        """
        self._registry.version_path(version)
        current = self._registry.get_alias(CHAMPION) or BASE
        if current == version and key is None:
            return Move(from_version=current, to_version=version, moved=False)
        entry = self._journal.add_promotion(who, "promote", current, version, reason, report=report, key=key)
        before = entry.from_version or BASE
        if before != version:
            self._point(PREVIOUS, before)
        self._point(CHAMPION, version)
        return Move(from_version=before, to_version=version, moved=True)

    def rollback(self, who: str, reason: str) -> Move:
        """Makes the previous version champion again, or the base model where the champion was the first version.

        The previous alias stays where it is, so that a second rollback cannot bring back what was rolled back.
        Raises `NothingToRollBack`.
        """
        current = self._registry.get_alias(CHAMPION)
        previous = self._registry.get_alias(PREVIOUS)
        if current is None:
            raise NothingToRollBack("the base model serves already: promote a version instead")
        if current == previous:
            raise NothingToRollBack(f"version {current} was rolled back to already: promote a version instead")
        target = previous or BASE
        self._journal.add_promotion(who, "rollback", current, target, reason)
        self._point(CHAMPION, target)
        return Move(from_version=current, to_version=target, moved=True)

    def _point(self, alias: str, version: str) -> None:
        if version == BASE:
            self._registry.delete_alias(alias)
        else:
            self._registry.set_alias(alias, version)
