"""Connections and migrations.

Invariants: a commit that returned is on disk (SQLite: WAL with synchronous=FULL); a writing transaction takes the
write lock when it begins, so it never fails half-way because another writer was faster; a migration is one
transaction, so that a killed or a second process finds the old schema or the new one.
"""

from __future__ import annotations

import importlib
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection

from memory.journal.errors import JournalError, SchemaTooNew
from memory.journal.settings import JournalSettings

_MIGRATION_LOCK = 0x6B766C6F6F70
WRITES = {"kvloop_writes": True}


def open_engine(url: str, settings: JournalSettings) -> Engine:
    """An engine on `url`, migrated to the newest schema. The folder of a SQLite file is made if it is missing."""
    parsed = make_url(url)
    engine = _sqlite_engine(parsed, settings) if parsed.get_backend_name() == "sqlite" else create_engine(parsed)
    try:
        migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _sqlite_engine(url: URL, settings: JournalSettings) -> Engine:
    if not url.database or url.database == ":memory:":
        raise JournalError("the journal needs a file: give a URL such as sqlite:////var/lib/kvloop/journal.db")
    Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_size=settings.pool_size, max_overflow=32)

    @event.listens_for(engine, "connect")
    def connected(connection: DBAPIConnection, _record: object) -> None:
        _prepare_sqlite(connection, settings.busy_timeout)

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get("kvloop_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _prepare_sqlite(connection: Any, busy_timeout: float) -> None:
    connection.isolation_level = None  # the driver would begin transactions late, and commit before DDL
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        _write_ahead_log(cursor, time.monotonic() + busy_timeout)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # deleted words are overwritten, not only unlinked
    finally:
        cursor.close()


def _write_ahead_log(cursor: sqlite3.Cursor, deadline: float) -> None:
    """Turns the write-ahead log on. SQLite's busy timeout does not cover this switch, so it is retried here."""
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def migrate(engine: Engine) -> None:
    """Brings the schema to the newest revision, in one transaction under the write lock.

    Raises `SchemaTooNew` when the database has a revision that this release does not know.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    migrations = importlib.import_module("memory.journal.migrations")
    config.set_main_option("script_location", str(Path(next(iter(migrations.__path__)))).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    with engine.connect().execution_options(**WRITES) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        _refuse_unknown_revision(connection, known)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _refuse_unknown_revision(connection: Connection, known: set[str]) -> None:
    from alembic.migration import MigrationContext

    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in known:
        raise SchemaTooNew(f"the journal has schema revision {current!r}, which a newer release of kvloop wrote")


def truncate_log(engine: Engine) -> None:
    """Moves SQLite's write-ahead log into the database file, so that deleted words leave the disk.

    Best effort: with a reader in the way SQLite keeps the log and truncates at a later checkpoint.
    """
    if engine.dialect.name != "sqlite":
        return
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            cursor.close()
    finally:
        connection.close()
