"""What a worker is asked and what it answers, in tokens. The same for the embedded worker and for vLLM's server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class WorkerError(Exception):
    """Any failure to get an answer from a worker."""


class WorkerUnavailable(WorkerError):
    """The worker does not answer, or stopped in the middle of an answer. Trying again later, or elsewhere, can help."""


class ModelNotFound(WorkerError):
    """The worker has no model of this name; it may have restarted since the adapter was loaded."""


class WorkerRejected(WorkerError):
    """The worker refused the request, with its HTTP status and message. Trying again cannot help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class NotSupported(WorkerError):
    """The worker has no such endpoint: it is a server of another kind."""


class Overloaded(WorkerError):
    """The worker's queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One prompt of token ids. `max_tokens` None means as many as fit; `logprobs` is how many alternatives to name
    for each token (0: only the token's own). `max_tokens` 0 stores the prompt's KV and generates nothing."""

    model: str
    prompt: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    cache_salt: str | None = None
    kv_save: bool = True
    kv_owner: str = ""
    """On whose behalf KV is stored: destroying the owner's key makes it unreadable. Empty is the tenant itself."""
    kv_expires_at: float | None = None
    """UTC seconds since 1970 after which the KV that this request stores is never used again."""
    kv_least_fidelity: str = "compact"
    """Stored KV that is less exact than this is computed anew."""
    kv_reuse_model: str | None = None
    """A resident version whose stored KV may be used where this model's own is missing."""
    priority: int = 0
    """As vLLM's: lower first. Above 0 it is work in the background, which gives way to everything else."""

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The JSON body of `POST /v1/completions`; fields at their default are left out."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(self.prompt),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "kv_transfer_params": self._kv(),
        }
        if stream:
            # Usage as it goes, for a reader who leaves early: at a stop string the answer is closed before its end.
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        for name in ("max_tokens", "seed", "logprobs", "cache_salt"):
            if getattr(self, name) is not None:
                body[name] = getattr(self, name)
        if self.n != 1:
            body["n"] = self.n
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = self.min_tokens
        if self.priority:
            body["priority"] = self.priority
        return body

    def _kv(self) -> dict[str, Any]:
        kv: dict[str, Any] = {"kv_save": self.kv_save}
        if self.kv_owner:
            kv["kv_owner"] = self.kv_owner
        if self.kv_expires_at is not None:
            kv["kv_expires_at"] = self.kv_expires_at
        if self.kv_least_fidelity != "compact":
            kv["kv_least_fidelity"] = self.kv_least_fidelity
        if self.kv_reuse_model is not None:
            kv["kv_reuse_model"] = self.kv_reuse_model
        return kv


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability (natural) of one sampled token, and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice. `logprobs` has one entry for each of `token_ids`, or is empty when not asked for."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Usage:
    """What a request cost. `extras` is the worker's own account (restored, computed, spans, weights id, ...), empty
    for a worker that gives none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One whole answer."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str


@dataclass(frozen=True)
class Completion:
    """The answers to one request, in the order of their index."""

    choices: tuple[Choice, ...]
    usage: Usage


@dataclass(frozen=True)
class WorkerModel:
    """A model a worker can run now. `parent` is None for the base; `weights_id` is None where the worker tells none."""

    id: str
    parent: str | None
    root: str | None
    weights_id: str | None


@dataclass(frozen=True)
class WorkerLoad:
    """How busy a worker is, with requests of all its clients together."""

    waiting: int
    running: int


@dataclass(frozen=True)
class WorkerHealth:
    """`boot_id` changes when the worker restarts: its adapters are gone then."""

    boot_id: str | None
    model: str | None
    context_length: int | None
