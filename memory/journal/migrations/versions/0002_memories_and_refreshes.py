"""Memories, what sessions attach of them, until when sessions last, and which sessions' KV is to be computed anew."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    op.add_column("sessions", sa.Column("memory_ids", sa.JSON(), server_default=sa.text("'[]'"), nullable=False))
    op.add_column("sessions", sa.Column("version", sa.String(length=256), nullable=True))
    op.add_column("sessions", sa.Column("expires_at", sa.Float(), nullable=True))
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)
    op.create_index(op.f("ix_sessions_updated_at"), "sessions", ["updated_at"], unique=False)
    _create_memories()
    _create_memory_prefixes()
    _create_refreshes()


def downgrade() -> None:
    """Back from it: memories and the queue of refreshes are gone."""
    for table in ("refreshes", "memory_prefixes", "memories"):
        op.drop_table(table)
    op.drop_index(op.f("ix_sessions_updated_at"), table_name="sessions")
    op.drop_index(op.f("ix_sessions_expires_at"), table_name="sessions")
    with op.batch_alter_table("sessions") as sessions:
        for column in ("expires_at", "version", "memory_ids"):
            sessions.drop_column(column)


def _create_memories() -> None:
    op.create_table(
        "memories",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_memories")),
        sa.UniqueConstraint("tenant", "id", name=op.f("uq_memories_tenant_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_memories_expires_at"), "memories", ["expires_at"], unique=False)
    op.create_index("ix_memories_tenant_name", "memories", ["tenant", "name"], unique=False)


def _create_memory_prefixes() -> None:
    op.create_table(
        "memory_prefixes",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("memory_ids", sa.JSON(), nullable=False),
        sa.Column("tokenizer", sa.String(length=64), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_memory_prefixes")),
        sa.UniqueConstraint("tenant", "key", name=op.f("uq_memory_prefixes_tenant_key")),
        sqlite_autoincrement=True,
    )


def _create_refreshes() -> None:
    op.create_table(
        "refreshes",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=256), nullable=False),
        sa.Column("weights_id", sa.String(length=160), nullable=False),
        sa.Column("reason", sa.String(length=16), nullable=False),
        sa.Column("live", sa.Boolean(), nullable=False),
        sa.Column("score", sa.Float(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "session_id"], ["sessions.tenant", "sessions.id"], name=op.f("fk_refreshes_tenant_session_id")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_refreshes")),
        sa.UniqueConstraint("tenant", "session_id", name=op.f("uq_refreshes_tenant_session_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_refreshes_weights_id_state", "refreshes", ["weights_id", "state"], unique=False)
