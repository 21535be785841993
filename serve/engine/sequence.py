"""A request while it is being served. Owned by the engine's thread; other threads hold `Ticket`s only."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from memory.kv.identity import Ids, pack_ids
from serve.engine.pages import Buffer
from serve.engine.request import Event, Exactness, Listener, Request, Source, Span, TokenLogprob, Usage
from serve.engine.versions import Version

log = logging.getLogger(__name__)
EXACTNESS: tuple[Exactness, ...] = ("exact", "int8", "int4", "compact", "stale")
"""From the best to the worst."""


class Ticket:
    """Stands for one submission; used to abort it."""

    def __init__(self) -> None:
        self.aborted = False
        self.failed = False


@dataclass(frozen=True)
class Restored:
    """A run of `tokens` tokens whose KV was loaded: from where, whose it is, and how exact."""

    tokens: int
    source: Source
    weights_id: str
    fidelity: Exactness = "exact"


@dataclass(frozen=True)
class Restoration:
    """What memory put into a sequence's buffer: the KV of its first tokens, and for `lifted` tokens after those the KV
    below the first layer that is not shared, and what enters that layer.

    `fidelity` is the worst of all that. What enters the layer is in the buffer from `entering_from` on, where the KV
    was not restored whole.
    """

    runs: tuple[Restored, ...] = ()
    lifted: int = 0
    fidelity: Exactness = "exact"
    entering_from: int = 0

    @property
    def tokens(self) -> int:
        """Tokens whose KV is complete."""
        return sum(run.tokens for run in self.runs)


NOTHING = Restoration()


@dataclass(eq=False)
class Sequence:
    """One choice of a job: `tokens` are the prompt and the reply so far, the first `computed` have KV in `buffer`.

    Tokens up to `lift_until` are computed from the first layer that is not shared. What is computed is of `fidelity`,
    for it attends to what was restored. `entering_from` is where the buffer's states of that layer begin. The first
    `saved` tokens were handed to memory while the prompt was being computed.
    """

    job: Job
    choice: int
    tokens: list[int]
    generator: torch.Generator
    buffer: Buffer | None = None
    computed: int = 0
    lift_until: int = 0
    fidelity: Exactness = "exact"
    entering_from: int = 0
    saved: int = 0
    saving: bool = False
    finish_reason: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens without KV: 1 while decoding, more while the prompt is computed."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.job.request.prompt)

    @property
    def lifts(self) -> bool:
        """Whether its next tokens are computed from the first layer that is not shared."""
        return self.computed < self.lift_until

    @property
    def in_prompt(self) -> bool:
        """Whether its next tokens are of the prompt, or of a reply that it had to give its KV away for."""
        return self.remaining > 1 or not self.generated

    def begin(self, restoration: Restoration) -> None:
        """Takes over what memory put into the buffer."""
        self.computed = restoration.tokens
        self.lift_until = self.computed + restoration.lifted
        self.fidelity = restoration.fidelity
        self.entering_from = restoration.entering_from

    def begin_as(self, other: Sequence) -> None:
        """Takes over another choice's KV, which is copied here."""
        if self.buffer is None or other.buffer is None:
            raise RuntimeError("a running sequence has no KV buffer")
        self.buffer.kv[:, :, :, : other.computed] = other.buffer.kv[:, :, :, : other.computed]
        if self.buffer.entering is not None and other.buffer.entering is not None:
            self.buffer.entering[:, :, :, : other.computed] = other.buffer.entering[:, :, :, : other.computed]
        self.computed, self.lift_until = other.computed, other.lift_until
        self.fidelity, self.entering_from, self.saved = other.fidelity, other.entering_from, other.saved

    def rewind(self) -> None:
        """Back to where nothing has KV; the tokens stay."""
        self.begin(NOTHING)
        self.saved = 0

    def ids(self, tokens: int) -> Ids:
        """The first `tokens` token ids, packed; those of the prompt are packed once."""
        prompt = self.job.prompt_ids
        if tokens <= len(prompt):
            return prompt[:tokens]
        return np.concatenate((prompt, pack_ids(self.tokens[len(prompt) : tokens])))


@dataclass(eq=False)
class Job:
    """One request. The first sequence computes the prompt; the other choices start from copies of its KV.

    `reuse` is another version whose KV may stand in for what this one's memory lacks.
    """

    request: Request
    version: Version
    max_tokens: int
    place: int
    listener: Listener
    ticket: Ticket
    reuse: Version | None = None
    sequences: list[Sequence] = field(default_factory=list)
    restored: Restoration | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended: bool = False

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def background(self) -> bool:
        """Whether it gives way to everything else."""
        return self.request.priority > 0

    @property
    def capacity(self) -> int:
        """Most tokens that one of its sequences can hold."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def remembers(self) -> bool:
        """Whether what it computes goes to memory."""
        return self.request.kv.save and not self.scores_prompt

    @cached_property
    def prompt_ids(self) -> Ids:
        """The prompt, packed."""
        return pack_ids(self.request.prompt)

    def begin(self, restoration: Restoration) -> None:
        """Lets its first sequence go on from what memory found. The first time counts: what is found when a job comes
        back that had to give way is what it computed itself."""
        if self.restored is None:
            self.restored = restoration
        self.leader.begin(restoration)

    def rewind(self) -> None:
        """Undoes what is lost with the buffers of a job that gives way."""
        for sequence in self.sequences:
            sequence.rewind()
        self.prompt_logprobs.clear()

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
        restored = self.restored or NOTHING
        prompt = len(self.request.prompt)
        waited = None if self.first_token_at is None else (self.first_token_at - self.submitted_at) * 1e3
        return Usage(
            prompt_tokens=prompt,
            generated_tokens=sum(sequence.generated for sequence in self.sequences),
            ram_tokens=_tokens_from(restored, "ram"),
            disk_tokens=_tokens_from(restored, "disk"),
            remote_tokens=_tokens_from(restored, "remote"),
            lifted_tokens=restored.lifted,
            computed_tokens=prompt - restored.tokens - restored.lifted,
            fidelity=restored.fidelity,
            weights_id=self.version.weights_id,
            ttft_ms=waited,
            spans=tuple(self._spans(restored)),
        )

    def _spans(self, restored: Restoration) -> list[Span]:
        """Where the KV of the first choice came from, without gaps."""
        own = self.version.weights_id
        parts = [(run.tokens, run.source, run.weights_id, run.fidelity) for run in restored.runs]
        parts.append((restored.lifted, "lifted", own, restored.fidelity))
        prompt, total = len(self.request.prompt), len(self.leader.tokens)
        parts.append((prompt - restored.tokens - restored.lifted, "computed", own, restored.fidelity))
        parts.append((total - prompt, "generated", own, restored.fidelity))
        spans, end = [], 0
        for tokens, source, weights_id, fidelity in parts:
            if tokens or source == "computed":
                spans.append(Span(end, end + tokens, source, weights_id, fidelity))
                end += tokens
        return spans


def worst(*fidelities: Exactness) -> Exactness:
    """The least exact of them."""
    return max(fidelities, key=EXACTNESS.index, default="exact")


def _tokens_from(restored: Restoration, source: Source) -> int:
    return sum(run.tokens for run in restored.runs if run.source == source)
