"""The durable record of sessions, responses, feedback, promotions and runs (SQL).

Holds no KV bytes and no weights: tokens, words and decisions only.
"""

from memory.journal.errors import Conflict, Gone, InvalidRecord, JournalError, LeaseLost, NotFound, SchemaTooNew
from memory.journal.journal import Journal
from memory.journal.records import (
    DeletionReceipt,
    DemonstrationRow,
    Feedback,
    FeedbackKind,
    Json,
    Lease,
    Memory,
    MemoryPrefix,
    MemoryReceipt,
    NewResponse,
    Promotion,
    Refresh,
    RefreshCounts,
    Response,
    Run,
    Serving,
    Session,
    Sleeper,
    Step,
    VersionMove,
)
from memory.journal.settings import JournalSettings

__all__ = [
    "Conflict",
    "DeletionReceipt",
    "DemonstrationRow",
    "Feedback",
    "FeedbackKind",
    "Gone",
    "InvalidRecord",
    "Journal",
    "JournalError",
    "JournalSettings",
    "Json",
    "Lease",
    "LeaseLost",
    "Memory",
    "MemoryPrefix",
    "MemoryReceipt",
    "NewResponse",
    "NotFound",
    "Promotion",
    "Refresh",
    "RefreshCounts",
    "Response",
    "Run",
    "SchemaTooNew",
    "Serving",
    "Session",
    "Sleeper",
    "Step",
    "VersionMove",
]
