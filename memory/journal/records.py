"""The journal's records: frozen, plain values. All times are UTC seconds since 1970 (float)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Split = Literal["train", "eval"]
FeedbackKind = Literal["boolean", "float", "comment", "demonstration"]
Action = Literal["promote", "rollback", "follow"]
RunStatus = Literal["running", "done", "failed"]
RefreshReason = Literal["promote", "climb"]
RefreshState = Literal["waiting", "done", "skipped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """One conversation of one tenant. `head_response` is its latest reply, or the one it forked from.

    `memory_ids` come before everything said in it. `version` is the one whose KV it has; None before its first turn.
    After `expires_at` it is gone.
    """

    number: int
    id: str
    tenant: str
    split: Split
    created_at: float
    updated_at: float
    parent_session: str | None
    head_response: str | None
    metadata: Json
    deleted_at: float | None
    memory_ids: tuple[str, ...] = ()
    version: str | None = None
    expires_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class VersionMove:
    """The version a session is to be at from now on, unless it is no longer at `was`."""

    was: str | None
    now: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A text that sessions attach. `digest` is BLAKE3 of its UTF-8 bytes; `tokens` is its length in the prompt."""

    number: int
    id: str
    tenant: str
    name: str
    digest: str
    text: str
    tokens: int
    created_at: float
    expires_at: float | None
    deleted_at: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryPrefix:
    """The exact token ids with which every session begins that attaches these memories in this order."""

    tenant: str
    memory_ids: tuple[str, ...]
    tokenizer: str
    token_ids: list[int]
    expires_at: float | None
    """When the first of the memories does."""


@dataclass(frozen=True, kw_only=True)
class MemoryReceipt:
    """What deleting a memory ended: the live sessions that attached it, and what had already learned from those."""

    memory_id: str
    deleted_at: float
    sessions: tuple[str, ...]
    datasets: tuple[str, ...]
    versions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """A session whose KV is to be computed under `version`, or was. At most one for each session."""

    tenant: str
    session_id: str
    version: str
    weights_id: str
    reason: RefreshReason
    live: bool
    """Whether the session was in use when it was queued: such go first."""
    score: float
    """Chance that it returns, times the tokens that its return would have to compute."""
    tokens: int
    state: RefreshState
    attempts: int
    updated_at: float


@dataclass(frozen=True, kw_only=True)
class Sleeper:
    """A session that may return: when it was last used, and how many tokens its next turn builds on."""

    tenant: str
    session_id: str
    version: str | None
    updated_at: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RefreshCounts:
    """How far the refreshes for one set of weights are. Tokens are those of the sessions counted."""

    waiting: int
    done: int
    failed: int
    skipped: int
    tokens_waiting: int
    tokens_done: int


@dataclass(frozen=True, kw_only=True)
class NewResponse:
    """One reply, ready to be journalled.

    `parent_response` must be the session's head: it is what the compare-and-swap compares.
    `input_ids` and `output_ids` are only this turn's token ids; the history is the chain of parents.
    """

    session_id: str
    tenant: str
    parent_response: str | None
    input_messages: list[Json]
    output_message: Json
    input_ids: Sequence[int]
    output_ids: Sequence[int]
    history_digest: bytes
    finish_reason: str
    model: str
    weights_id: str
    cached_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    fidelity: str = "exact"
    spans: list[Json] = field(default_factory=list)
    params: Json = field(default_factory=dict)
    choice_index: int = 0
    ttft_ms: float | None = None
    duration_ms: float | None = None
    id: str | None = None
    """Given where the client already knows the id from the stream; made here otherwise."""
    created_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """One reply as stored. `number` grows with every insert: the newest has the highest."""

    number: int
    id: str
    session_id: str
    tenant: str
    parent_response: str | None
    created_at: float
    input_messages: list[Json]
    output_message: Json
    input_ids: list[int]
    output_ids: list[int]
    history_digest: bytes
    finish_reason: str
    model: str
    weights_id: str
    cached_tokens: int
    restored_tokens: int
    computed_tokens: int
    generated_tokens: int
    fidelity: str
    spans: list[Json]
    params: Json
    choice_index: int
    ttft_ms: float | None
    duration_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """What somebody said about a reply. `response_id` is None only for feedback on a whole session."""

    number: int
    id: str
    tenant: str
    kind: FeedbackKind
    value: bool | float | str
    response_id: str | None
    session_id: str
    source: str
    created_at: float


@dataclass(frozen=True, kw_only=True)
class DemonstrationRow:
    """A corrected answer with everything that led to it. `history` ends with the messages the reply answered."""

    feedback: Feedback
    response: Response
    history: list[Json]
    split: Split
    sessions: tuple[str, ...]
    """Every session whose words are in the history: more than one where the session is a fork."""
    memory_ids: tuple[str, ...]
    """The memories that stood before the history. Their text is not in it."""

    @property
    def answer(self) -> str:
        """The corrected answer."""
        return str(self.feedback.value)


@dataclass(frozen=True, kw_only=True)
class DeletionReceipt:
    """What a deletion removed, and what had already learned from it."""

    tenant: str
    session_id: str
    deleted_at: float
    sessions: tuple[str, ...]
    """The session itself, then the forks that held its words."""
    responses: int
    feedback: int
    datasets: tuple[str, ...]
    """Digests of the datasets that any of these sessions went into."""
    versions: tuple[str, ...]
    """Versions trained on those datasets."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One line of the ledger."""

    number: int
    id: str
    at: float
    who: str
    action: Action
    from_version: str | None
    to_version: str
    reason: str
    report: str | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The version that answers requests, as of the last completed swap."""

    name: str
    path: str | None
    version: str | None
    weights_id: str
    fingerprint: Json | None
    since: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a pipeline. `reason` is set when it failed, `outcome` when it is done."""

    number: int
    id: str
    kind: str
    params: Json
    status: RunStatus
    attempts: int
    reason: str | None
    outcome: Json | None
    created_at: float
    updated_at: float
    finished_at: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that finished, with what it left for the next ones."""

    name: str
    result: Json
    finished_at: float


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who may run pipelines of this kind, and until when."""

    kind: str
    owner: str
    acquired_at: float
    expires_at: float
