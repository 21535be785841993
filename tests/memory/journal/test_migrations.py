"""The migrations lead to the tables, once, from any process and from an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

import memory.journal.migrations
from memory.journal import Journal, JournalError, SchemaTooNew
from memory.journal.tables import metadata
from tests.memory.journal.conftest import turn


def test_the_newest_schema_is_the_tables(journal: Journal, url: str) -> None:
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_the_database_is_durable(journal: Journal) -> None:
    with journal._reading() as connection:
        modes = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]


def test_reopening_changes_nothing(url: str) -> None:
    with Journal.open(url) as first:
        session = first.create_session("acme")
    with Journal.open(url) as second:
        assert second.get_session("acme", session.id) == session
        second.ping()


def test_sessions_of_the_first_schema_are_taken_along(url: str) -> None:
    engine = create_engine(url)
    config = Config()
    config.set_main_option("script_location", str(Path(next(iter(memory.journal.migrations.__path__)))))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(
            text(
                "INSERT INTO sessions (tenant, id, split, created_at, updated_at, metadata) "
                "VALUES ('acme', 'old', 'train', 1, 2, '{}')"
            )
        )
    engine.dispose()
    with Journal.open(url) as journal:
        session = journal.get_session("acme", "old")
        assert (session.memory_ids, session.version, session.expires_at) == ((), None, None)
        assert journal.add_response(turn("old", None)).session_id == "old"
    engine = create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        columns = {row.name for row in connection.execute(text("PRAGMA table_info(sessions)"))}
        assert not columns & {"memory_ids", "version", "expires_at"}
        assert connection.execute(text("SELECT id FROM sessions")).scalar() == "old"
    engine.dispose()


def test_a_newer_schema_is_refused(journal: Journal, url: str) -> None:
    with journal._writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNew, match="9999"):
        Journal.open(url)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_journal_in_memory_is_refused(url: str) -> None:
    with pytest.raises(JournalError, match="file"):
        Journal.open(url)


OPEN_INSTALLED = """
import sys, memory
from memory.journal import Journal

with Journal.open(sys.argv[1]) as journal:
    journal.create_session("acme")
print(memory.__file__)
"""


def test_an_installed_package_brings_its_migrations(tmp_path: Path) -> None:
    """Builds what setuptools would install, unpacks it elsewhere, and opens a fresh journal with that."""
    pytest.importorskip("setuptools", minversion="77")
    root = Path(memory.journal.migrations.__file__).parents[3]
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    (source / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    (source / "memory").symlink_to(root / "memory")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    made = _python("-W", "ignore", "-c", build, str(tmp_path), folder=source)
    with zipfile.ZipFile(tmp_path / made.split()[-1]) as wheel:
        wheel.extractall(installed)
    opened = _python("-c", OPEN_INSTALLED, f"sqlite:///{tmp_path}/journal.db", folder=installed)
    assert Path(opened.strip()).is_relative_to(installed)
    assert (installed / "memory/journal/migrations/script.py.mako").is_file()


def _python(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout
