"""Run by Alembic. The caller's connection is used where there is one: its transaction holds the whole migration."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from memory.journal.tables import metadata


def migrate(connection: Connection) -> None:
    """Runs the pending revisions on `connection`."""
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:  # `alembic revision --autogenerate` by a developer
    with create_engine(context.config.get_main_option("sqlalchemy.url") or "").connect() as opened:
        migrate(opened)
