"""An install with three registered versions, made once: MLflow takes seconds to set up its database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loop.config import load
from pipelines.registry import Registry
from tests.loop.versions import register


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder; use `home_with_versions`."""
    folder = tmp_path_factory.mktemp("with-versions")
    registry = Registry(load((), folder / "home", {}).registry)
    measured = {"compared_with": "1", "stale_kl": "0.004"}
    for number, verdict in enumerate(("pass", "inconclusive", "pass"), start=1):
        tags = measured if number == 2 else {}
        register(registry, folder / f"adapter-{number}", str(number) * 64, verdict, **tags)
    return folder / "home"


@pytest.fixture
def home_with_versions(shared_home: Path) -> Iterator[Path]:
    """A home whose registry has versions 1, 2 and 3, no alias, and no journal yet.

    What stale KV costs was measured for version 2 against version 1.
    """
    yield shared_home
    registry = Registry(load((), shared_home, {}).registry)
    for alias in registry.aliases():
        registry.delete_alias(alias)
    for file in shared_home.glob("journal.db*"):
        file.unlink()
