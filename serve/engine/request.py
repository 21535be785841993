"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from memory.kv.fidelity import RUNGS, Fidelity
from serve.engine.errors import EngineError, InvalidRequest

MAX_LOGPROBS = 20
MAX_OWNER_LENGTH = 256
Source = Literal["ram", "disk", "remote", "lifted", "computed", "generated"]
Exactness = Literal["exact", "int8", "int4", "compact", "stale"]
"""The fidelity of KV memory's rungs; "stale" is KV of other weights, and what was computed over it."""


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn. `temperature` 0 is greedy; `max_tokens` None means as many as fit the context."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def check(self) -> None:
        """Raises `InvalidRequest` naming the first field that is out of range."""
        if not 0 <= self.temperature <= 10:
            raise InvalidRequest(f"temperature must be between 0 and 10, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.n < 1:
            raise InvalidRequest(f"n must be at least 1, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, got {self.max_tokens}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequest(f"min_tokens must be between 0 and max_tokens, got {self.min_tokens}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}")


@dataclass(frozen=True)
class KVOptions:
    """What KV memory may do for a request."""

    save: bool = True
    """Whether what is computed is remembered."""
    owner: str = ""
    """On whose behalf: what is stored can be forgotten by it. "" is the tenant itself."""
    expires_at: float | None = None
    """When it must not be used any more, in seconds since the epoch."""
    least_fidelity: Fidelity = "compact"
    """The least exact KV that may be restored."""
    reuse_model: str | None = None
    """A version whose KV may be used where the request's own is missing. One that is not resident is left out."""

    def check(self) -> None:
        """Raises `InvalidRequest` naming the first field that is out of range."""
        if len(self.owner) > MAX_OWNER_LENGTH:
            raise InvalidRequest(f"kv_owner has {len(self.owner)} characters, at most {MAX_OWNER_LENGTH} are taken")
        if self.expires_at is not None and not self.expires_at > 0:
            raise InvalidRequest(f"kv_expires_at must be seconds since the epoch, got {self.expires_at}")
        if self.least_fidelity not in RUNGS:
            raise InvalidRequest(f"kv_least_fidelity must be one of {', '.join(RUNGS)}, got {self.least_fidelity!r}")


@dataclass(frozen=True)
class Request:
    """One prompt for one version. `cache_salt` is the tenant's secret: KV is shared only where it is equal.

    `priority` above 0 is work in the background: it runs while there is nothing else to do, and gives way between
    steps. A request that asks for prompt log-probs computes its whole prompt and leaves KV memory alone.
    """

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: str = ""
    kv: KVOptions = KVOptions()
    priority: int = 0

    def check(self) -> None:
        """Raises `InvalidRequest` naming the first field that is out of range."""
        self.sampling.check()
        self.kv.check()
        if self.priority > 0 and self.sampling.n > 1:
            raise InvalidRequest(f"n is {self.sampling.n}, but a background request (priority above 0) has one reply")


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of `token_id`, its rank (1 is the likeliest), and the `top` alternatives, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def with_top(self, count: int) -> TokenLogprob:
        """Returns this with the `count` likeliest alternatives only."""
        return self if len(self.top) == count else replace(self, top=self.top[:count])


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a sequence, where their KV came from, which weights made it, and how exact it is.

    KV that was computed over less exact KV is no more exact than that.
    """

    start: int
    end: int
    source: Source
    weights_id: str
    fidelity: Exactness = "exact"


@dataclass(frozen=True)
class Usage:
    """What one request really cost, in tokens; `ttft_ms` is None when it asked for no token.

    `spans` describe the first choice.
    """

    prompt_tokens: int
    generated_tokens: int
    ram_tokens: int
    disk_tokens: int
    remote_tokens: int
    lifted_tokens: int
    """Prompt tokens whose KV was restored up to the first layer that is not shared, and computed from there on."""
    computed_tokens: int
    fidelity: Exactness
    """The least exact of what was restored."""
    weights_id: str
    ttft_ms: float | None
    spans: tuple[Span, ...]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused whole."""
        return self.ram_tokens + self.disk_tokens + self.remote_tokens


@dataclass(frozen=True)
class TokenEvent:
    """One new token of choice `choice`; a choice's last one has a `finish_reason` ("stop" or "length").

    A request's very first one has the `usage` so far: what its prompt cost is known from then on.
    """

    request: int
    choice: int
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: str | None
    stop_reason: int | None
    usage: Usage | None = None


@dataclass(frozen=True)
class DoneEvent:
    """Request `request` (its place in the submission) has ended well; nothing follows for it."""

    request: int
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class FailedEvent:
    """Request `request` could not be finished; nothing follows for it."""

    request: int
    error: EngineError


Event = TokenEvent | DoneEvent | FailedEvent
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Choice:
    """A whole reply."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True)
class Completion:
    """All replies to one request."""

    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] | None


def collect(events: list[Event], n: int) -> Completion:
    """Puts all events of one request of `n` choices together. Raises the error of one that failed."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(n)]
    done: DoneEvent | None = None
    for event in events:
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, DoneEvent):
            done = event
        else:
            tokens[event.choice].append(event)
    if done is None:
        raise EngineError("the request has not ended yet")
    return Completion(tuple(_choice(events) for events in tokens), done.usage, done.prompt_logprobs)


def _choice(events: list[TokenEvent]) -> Choice:
    return Choice(
        token_ids=tuple(event.token_id for event in events),
        logprobs=tuple(event.logprob for event in events if event.logprob is not None),
        finish_reason=(events[-1].finish_reason if events else None) or "length",
        stop_reason=events[-1].stop_reason if events else None,
    )
