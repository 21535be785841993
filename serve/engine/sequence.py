"""A request while it is being served. Owned by the engine's thread; other threads hold `Ticket`s only."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch

from serve.engine.pages import Buffer
from serve.engine.request import Event, Listener, Request, Span, TokenLogprob, Usage
from serve.engine.versions import Version

log = logging.getLogger(__name__)


class Ticket:
    """Stands for one submission; used to abort it."""

    def __init__(self) -> None:
        self.aborted = False
        self.failed = False


@dataclass(frozen=True)
class Restored:
    """A run of `tokens` tokens whose KV was loaded; `source` is "ram" or "disk"."""

    tokens: int
    source: str


@dataclass(eq=False)
class Sequence:
    """One choice of a job: `tokens` are the prompt and the reply so far, the first `computed` have KV in `buffer`."""

    job: Job
    choice: int
    tokens: list[int]
    generator: torch.Generator
    buffer: Buffer | None = None
    computed: int = 0
    finish_reason: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens without KV: 1 while decoding, more while the prompt is computed."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.job.request.prompt)


@dataclass(eq=False)
class Job:
    """One request. The first sequence computes the prompt; the other choices start from copies of its KV."""

    request: Request
    version: Version
    max_tokens: int
    place: int
    listener: Listener
    ticket: Ticket
    sequences: list[Sequence] = field(default_factory=list)
    restored: tuple[Restored, ...] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended: bool = False

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def capacity(self) -> int:
        """Most tokens that one of its sequences can hold."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def emit(self, event: Event) -> None:
        """Passes an event on, unless nobody listens any more. A listener that fails hears nothing after that."""
        if self.ticket.aborted:
            return
        try:
            self.listener(event)
        except Exception:  # the engine must outlive whoever listens to it
            log.exception("a listener failed; its requests are given up")
            self.ticket.aborted = True
            self.ticket.failed = True

    def usage(self) -> Usage:
        """What was done for this job so far."""
        spans, end = [], 0
        for run in self.restored:
            spans.append(Span(end, end + run.tokens, run.source, self.version.weights_id))
            end += run.tokens
        prompt, total = len(self.request.prompt), len(self.leader.tokens)
        spans.append(Span(end, prompt, "computed", self.version.weights_id))
        if total > prompt:
            spans.append(Span(prompt, total, "generated", self.version.weights_id))
        waited = None if self.first_token_at is None else (self.first_token_at - self.submitted_at) * 1e3
        return Usage(
            prompt_tokens=prompt,
            generated_tokens=sum(sequence.generated for sequence in self.sequences),
            ram_tokens=sum(run.tokens for run in self.restored if run.source == "ram"),
            disk_tokens=sum(run.tokens for run in self.restored if run.source != "ram"),
            computed_tokens=prompt - end,
            weights_id=self.version.weights_id,
            ttft_ms=waited,
            spans=tuple(spans),
        )
