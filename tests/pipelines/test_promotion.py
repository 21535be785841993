"""Promoting by hand and rolling back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.journal import Journal
from pipelines.promotion import NothingToRollBack, Promotions
from pipelines.registry import CHAMPION, PREVIOUS, VersionNotFound
from tests.pipelines.fakes import FakeRegistry, Stages


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(f"sqlite:///{tmp_path}/journal.db") as opened:
        yield opened


@pytest.fixture
def registry(tmp_path: Path) -> FakeRegistry:
    made = FakeRegistry(tmp_path, Stages(tmp_path / "stages"))
    for name in ("one", "two", "three"):
        made.register(tmp_path, {}, {}, None, name)
    return made


def test_there_and_back_again(journal: Journal, registry: FakeRegistry) -> None:
    promotions = Promotions(journal, registry)
    promotions.promote("1", "ann", "first")
    assert (registry.get_alias(CHAMPION), registry.get_alias(PREVIOUS)) == ("1", None)
    promotions.promote("2", "ann", "second")
    assert (registry.get_alias(CHAMPION), registry.get_alias(PREVIOUS)) == ("2", "1")
    move = promotions.rollback("bob", "complaints")
    assert (move.from_version, move.to_version) == ("2", "1")
    assert registry.get_alias(CHAMPION) == "1"
    with pytest.raises(NothingToRollBack, match="already"):
        promotions.rollback("bob", "again")
    promotions.promote("3", "ann", "third")
    assert promotions.rollback("bob", "worse").to_version == "1"
    assert [(entry.who, entry.action, entry.to_version) for entry in reversed(journal.list_promotions())] == [
        ("ann", "promote", "1"),
        ("ann", "promote", "2"),
        ("bob", "rollback", "1"),
        ("ann", "promote", "3"),
        ("bob", "rollback", "1"),
    ]


def test_the_first_version_rolls_back_to_the_base(journal: Journal, registry: FakeRegistry) -> None:
    promotions = Promotions(journal, registry)
    with pytest.raises(NothingToRollBack, match="base"):
        promotions.rollback("bob", "nothing there")
    promotions.promote("1", "ann", "first")
    assert promotions.rollback("bob", "worse").to_version == "base"
    assert registry.get_alias(CHAMPION) is None


def test_the_champion_is_not_promoted_twice(journal: Journal, registry: FakeRegistry) -> None:
    promotions = Promotions(journal, registry)
    assert promotions.promote("1", "ann", "first").moved
    assert not promotions.promote("1", "ann", "first").moved
    assert len(journal.list_promotions()) == 1


def test_an_unknown_version_leaves_no_trace(journal: Journal, registry: FakeRegistry) -> None:
    with pytest.raises(VersionNotFound):
        Promotions(journal, registry).promote("9", "ann", "typo")
    assert journal.list_promotions() == []


def test_promoting_the_base_is_not_a_version(journal: Journal, registry: FakeRegistry) -> None:
    with pytest.raises(VersionNotFound):
        Promotions(journal, registry).promote("base", "ann", "use rollback")
