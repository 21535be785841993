"""The durable record of sessions, responses, feedback, promotions and runs (SQL).

Holds no KV bytes and no weights: tokens, words and decisions only.
"""

from memory.journal.errors import Conflict, InvalidRecord, JournalError, LeaseLost, NotFound, SchemaTooNew
from memory.journal.journal import Journal
from memory.journal.records import (
    DeletionReceipt,
    DemonstrationRow,
    Feedback,
    FeedbackKind,
    Json,
    Lease,
    NewResponse,
    Promotion,
    Response,
    Run,
    Serving,
    Session,
    Step,
)
from memory.journal.settings import JournalSettings

__all__ = [
    "Conflict",
    "DeletionReceipt",
    "DemonstrationRow",
    "Feedback",
    "FeedbackKind",
    "InvalidRecord",
    "Journal",
    "JournalError",
    "JournalSettings",
    "Json",
    "Lease",
    "LeaseLost",
    "NewResponse",
    "NotFound",
    "Promotion",
    "Response",
    "Run",
    "SchemaTooNew",
    "Serving",
    "Session",
    "Step",
]
