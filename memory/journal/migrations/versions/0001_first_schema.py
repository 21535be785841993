"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    _create_datasets()
    _create_leases()
    _create_promotions()
    _create_runs()
    _create_serving()
    _create_sessions()
    _create_dataset_sessions()
    _create_dataset_versions()
    _create_responses()
    _create_run_steps()
    _create_feedback()


def downgrade() -> None:
    """Back from it: every table and all it holds is gone."""
    for table in (
        "feedback",
        "run_steps",
        "responses",
        "dataset_versions",
        "dataset_sessions",
        "sessions",
        "serving",
        "runs",
        "promotions",
        "leases",
        "datasets",
    ):
        op.drop_table(table)


def _create_datasets() -> None:
    op.create_table(
        "datasets",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_datasets")),
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=256), nullable=False),
        sa.Column("acquired_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("kind", name=op.f("pk_leases")),
    )


def _create_promotions() -> None:
    op.create_table(
        "promotions",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("who", sa.String(length=256), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("from_version", sa.String(length=256), nullable=True),
        sa.Column("to_version", sa.String(length=256), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("report", sa.String(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("key", sa.String(length=256), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_promotions")),
        sa.UniqueConstraint("id", name=op.f("uq_promotions_id")),
        sa.UniqueConstraint("key", name=op.f("uq_promotions_key")),
        sqlite_autoincrement=True,
    )


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_kind_status", "runs", ["kind", "status"], unique=False)


def _create_serving() -> None:
    op.create_table(
        "serving",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("path", sa.String(), nullable=True),
        sa.Column("version", sa.String(length=256), nullable=True),
        sa.Column("weights_id", sa.String(length=160), nullable=False),
        sa.Column("fingerprint", sa.JSON(), nullable=True),
        sa.Column("since", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("slot", name=op.f("pk_serving")),
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("parent_session", sa.String(length=128), nullable=True),
        sa.Column("head_response", sa.String(length=128), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_sessions")),
        sa.UniqueConstraint("tenant", "id", name=op.f("uq_sessions_tenant_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_sessions_head_response"), "sessions", ["head_response"], unique=False)


def _create_dataset_sessions() -> None:
    op.create_table(
        "dataset_sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["datasets.digest"], name=op.f("fk_dataset_sessions_digest")),
        sa.PrimaryKeyConstraint("digest", "tenant", "session_id", name=op.f("pk_dataset_sessions")),
    )
    op.create_index("ix_dataset_sessions_tenant_session_id", "dataset_sessions", ["tenant", "session_id"], unique=False)


def _create_dataset_versions() -> None:
    op.create_table(
        "dataset_versions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=256), nullable=False),
        sa.Column("recorded_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["datasets.digest"], name=op.f("fk_dataset_versions_digest")),
        sa.PrimaryKeyConstraint("digest", "version", name=op.f("pk_dataset_versions")),
    )


def _create_responses() -> None:
    op.create_table(
        "responses",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("parent_response", sa.String(length=128), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("input_messages", sa.JSON(), nullable=False),
        sa.Column("output_message", sa.JSON(), nullable=False),
        sa.Column("input_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False),
        sa.Column("history_digest", sa.LargeBinary(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("weights_id", sa.String(length=160), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("restored_tokens", sa.Integer(), nullable=False),
        sa.Column("computed_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("fidelity", sa.String(length=32), nullable=False),
        sa.Column("spans", sa.JSON(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("choice_index", sa.Integer(), nullable=False),
        sa.Column("ttft_ms", sa.Float(), nullable=True),
        sa.Column("duration_ms", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["parent_response"], ["responses.id"], name=op.f("fk_responses_parent_response")),
        sa.ForeignKeyConstraint(
            ["tenant", "session_id"], ["sessions.tenant", "sessions.id"], name=op.f("fk_responses_tenant_session_id")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_responses")),
        sa.UniqueConstraint("id", name=op.f("uq_responses_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_responses_parent_response"), "responses", ["parent_response"], unique=False)
    op.create_index("ix_responses_tenant_history_digest", "responses", ["tenant", "history_digest"], unique=False)
    op.create_index("ix_responses_tenant_session_id", "responses", ["tenant", "session_id"], unique=False)


def _create_run_steps() -> None:
    op.create_table(
        "run_steps",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_run_steps")),
    )


def _create_feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=256), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("response_id", sa.String(length=128), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("source", sa.String(length=256), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["response_id"], ["responses.id"], name=op.f("fk_feedback_response_id")),
        sa.ForeignKeyConstraint(
            ["tenant", "session_id"], ["sessions.tenant", "sessions.id"], name=op.f("fk_feedback_tenant_session_id")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_feedback_created_at"), "feedback", ["created_at"], unique=False)
    op.create_index(op.f("ix_feedback_response_id"), "feedback", ["response_id"], unique=False)
    op.create_index("ix_feedback_tenant_session_id", "feedback", ["tenant", "session_id"], unique=False)
