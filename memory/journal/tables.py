"""The tables, as they are after the newest migration (a test compares the two).

Every table that pages or orders has `number`, which grows with each insert. A session id is unique within its
tenant only, so that one tenant cannot take an id from another.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_Id = String(128)
_Name = String(256)


def _number() -> Column[int]:
    return Column("number", Integer, primary_key=True, autoincrement=True)


sessions = Table(
    "sessions",
    metadata,
    _number(),
    Column("tenant", _Name, nullable=False),
    Column("id", _Id, nullable=False),
    Column("split", String(8), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False, index=True),
    Column("parent_session", _Id),
    Column("head_response", _Id, index=True),
    Column("metadata", JSON, nullable=False),
    Column("deleted_at", Float),
    Column("memory_ids", JSON, nullable=False, server_default=text("'[]'")),
    Column("version", _Name),
    Column("expires_at", Float, index=True),
    UniqueConstraint("tenant", "id"),
    sqlite_autoincrement=True,
)

memories = Table(
    "memories",
    metadata,
    _number(),
    Column("tenant", _Name, nullable=False),
    Column("id", _Id, nullable=False),
    Column("name", _Name, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("text", String, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("deleted_at", Float),
    UniqueConstraint("tenant", "id"),
    Index("ix_memories_tenant_name", "tenant", "name"),
    sqlite_autoincrement=True,
)

memory_prefixes = Table(
    "memory_prefixes",
    metadata,
    _number(),
    Column("tenant", _Name, nullable=False),
    Column("key", String(64), nullable=False),
    Column("memory_ids", JSON, nullable=False),
    Column("tokenizer", String(64), nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("tenant", "key"),
    sqlite_autoincrement=True,
)

refreshes = Table(
    "refreshes",
    metadata,
    _number(),
    Column("tenant", _Name, nullable=False),
    Column("session_id", _Id, nullable=False),
    Column("version", _Name, nullable=False),
    Column("weights_id", String(160), nullable=False),
    Column("reason", String(16), nullable=False),
    Column("live", Boolean, nullable=False),
    Column("score", Float, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("updated_at", Float, nullable=False),
    ForeignKeyConstraint(["tenant", "session_id"], ["sessions.tenant", "sessions.id"]),
    UniqueConstraint("tenant", "session_id"),
    Index("ix_refreshes_weights_id_state", "weights_id", "state"),
    sqlite_autoincrement=True,
)

responses = Table(
    "responses",
    metadata,
    _number(),
    Column("id", _Id, nullable=False, unique=True),
    Column("tenant", _Name, nullable=False),
    Column("session_id", _Id, nullable=False),
    Column("parent_response", _Id, ForeignKey("responses.id"), index=True),
    Column("created_at", Float, nullable=False),
    Column("input_messages", JSON, nullable=False),
    Column("output_message", JSON, nullable=False),
    Column("input_ids", LargeBinary, nullable=False),
    Column("output_ids", LargeBinary, nullable=False),
    Column("history_digest", LargeBinary, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("model", _Name, nullable=False),
    Column("weights_id", String(160), nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("restored_tokens", Integer, nullable=False),
    Column("computed_tokens", Integer, nullable=False),
    Column("generated_tokens", Integer, nullable=False),
    Column("fidelity", String(32), nullable=False),
    Column("spans", JSON, nullable=False),
    Column("params", JSON, nullable=False),
    Column("choice_index", Integer, nullable=False),
    Column("ttft_ms", Float),
    Column("duration_ms", Float),
    ForeignKeyConstraint(["tenant", "session_id"], ["sessions.tenant", "sessions.id"]),
    Index("ix_responses_tenant_session_id", "tenant", "session_id"),
    Index("ix_responses_tenant_history_digest", "tenant", "history_digest"),
    sqlite_autoincrement=True,
)

feedback = Table(
    "feedback",
    metadata,
    _number(),
    Column("id", _Id, nullable=False, unique=True),
    Column("tenant", _Name, nullable=False),
    Column("session_id", _Id, nullable=False),
    Column("response_id", _Id, ForeignKey("responses.id"), index=True),
    Column("kind", String(16), nullable=False),
    Column("value", JSON, nullable=False),
    Column("source", _Name, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
    ForeignKeyConstraint(["tenant", "session_id"], ["sessions.tenant", "sessions.id"]),
    Index("ix_feedback_tenant_session_id", "tenant", "session_id"),
    sqlite_autoincrement=True,
)

promotions = Table(
    "promotions",
    metadata,
    _number(),
    Column("id", _Id, nullable=False, unique=True),
    Column("at", Float, nullable=False),
    Column("who", _Name, nullable=False),
    Column("action", String(16), nullable=False),
    Column("from_version", _Name),
    Column("to_version", _Name, nullable=False),
    Column("reason", String, nullable=False),
    Column("report", String),
    Column("seconds", Float),
    Column("key", _Name, unique=True),
    sqlite_autoincrement=True,
)

serving = Table(
    "serving",
    metadata,
    Column("slot", Integer, primary_key=True, autoincrement=False),
    Column("name", _Name, nullable=False),
    Column("path", String),
    Column("version", _Name),
    Column("weights_id", String(160), nullable=False),
    Column("fingerprint", JSON),
    Column("since", Float, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    _number(),
    Column("id", _Id, nullable=False, unique=True),
    Column("kind", String(64), nullable=False),
    Column("params", JSON, nullable=False),
    Column("status", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("reason", String),
    Column("outcome", JSON),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("finished_at", Float),
    Index("ix_runs_kind_status", "kind", "status"),
    sqlite_autoincrement=True,
)

run_steps = Table(
    "run_steps",
    metadata,
    Column("run_id", _Id, ForeignKey("runs.id"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("result", JSON, nullable=False),
    Column("finished_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("kind", String(64), primary_key=True),
    Column("owner", _Name, nullable=False),
    Column("acquired_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("path", String, nullable=False),
    Column("created_at", Float, nullable=False),
)

dataset_sessions = Table(
    "dataset_sessions",
    metadata,
    Column("digest", String(64), ForeignKey("datasets.digest"), primary_key=True),
    Column("tenant", _Name, primary_key=True),
    Column("session_id", _Id, primary_key=True),
    Index("ix_dataset_sessions_tenant_session_id", "tenant", "session_id"),
)

dataset_versions = Table(
    "dataset_versions",
    metadata,
    Column("digest", String(64), ForeignKey("datasets.digest"), primary_key=True),
    Column("version", _Name, primary_key=True),
    Column("recorded_at", Float, nullable=False),
)
