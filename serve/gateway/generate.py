"""Runs one turn on a worker: tokens become pieces of text as they arrive.

Invariants: a turn runs on the version it was pinned to, and an answer that the worker made with other weights is an
error, not an answer; a worker that restarted gets the version back and the request is tried again, but only as long as
no text was given out; leaving `pieces` early aborts the request on the worker.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from serve.backends.base import (
    CompletionRequest,
    Delta,
    ModelNotFound,
    Overloaded,
    Usage,
    WorkerRejected,
    WorkerUnavailable,
)
from serve.backends.router import Router, Worker
from serve.gateway.errors import ApiError, invalid, overloaded, unavailable
from serve.gateway.metrics import Metrics
from serve.gateway.output import ChoiceOutput, Piece
from serve.gateway.text import TextCodec
from serve.gateway.turns import Plan
from serve.gateway.versions import Version, Versions

_MOST_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample, checked against the model's context."""

    max_tokens: int
    temperature: float
    top_p: float
    n: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None


class Generation:
    """One turn on a worker. Iterate `pieces` to its end, then read `choices`, `usage` and the times."""

    def __init__(
        self, plan: Plan, sampling: Sampling, version: Version, *, codec: TextCodec, router: Router,
        versions: Versions, metrics: Metrics, cache_salt: str, kv_owner: str = "",
    ) -> None:  # fmt: skip
        self._plan = plan
        self._sampling = sampling
        self._version = version
        self._codec = codec
        self._router = router
        self._versions = versions
        self._metrics = metrics
        self._started = time.monotonic()
        self._cache_salt = cache_salt
        self._kv_owner = kv_owner
        self._first_token: float | None = None
        self._given_out = False
        self.asked = False
        """Whether a worker was asked, and so may have stored something."""
        self.choices: list[ChoiceOutput] = []
        self.usage = Usage(len(plan.prompt), 0, 0)

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from the start of the turn to its first token."""
        return None if self._first_token is None else (self._first_token - self._started) * 1000

    @property
    def duration_ms(self) -> float:
        """Milliseconds since the start of the turn."""
        return (time.monotonic() - self._started) * 1000

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Text as it becomes certain. Raises `ApiError` when there is no answer to be had."""
        deadline = self._router.deadline()
        reloaded, broken = False, 0
        while True:
            self._reset()
            try:
                worker = await self._router.choose(self._plan.session_id, deadline)
                await self._ensure(worker)
                self.asked = True
                async with (
                    worker.busy(),
                    aclosing(worker.client.stream(self._request())) as events,
                    aclosing(self._run(events)) as pieces,
                ):
                    async for piece in pieces:
                        self._given_out = self._given_out or bool(piece.text)
                        yield piece
                if self._plan.session_id is not None:
                    self._router.remember(self._plan.session_id, worker)
                return
            except ModelNotFound as error:
                if reloaded:
                    raise unavailable(f"The worker does not keep '{self._version.name}': {error}.") from error
                reloaded = True
                self._metrics.worker_retries.labels("reloaded").inc()
                self._version.proven.discard(worker.url)
            except WorkerUnavailable as error:
                if self._given_out:
                    raise unavailable(f"The worker stopped in the middle of the answer: {error}.") from error
                broken += 1
                # A request that a worker dies of must not go on killing workers.
                if broken == _MOST_ATTEMPTS or time.monotonic() >= deadline:
                    raise unavailable(f"No worker answers: {error}.") from error
                self._metrics.worker_retries.labels("unavailable").inc()
                await self._router.probe()
            except Overloaded as error:
                raise overloaded(f"The worker is busy: {error}.", error.retry_after) from error
            except WorkerRejected as error:
                raise _rejected(error) from error

    async def _ensure(self, worker: Worker) -> None:
        try:
            await self._versions.ensure(worker, self._version)
        except WorkerRejected as error:
            raise unavailable(f"The worker refused '{self._version.name}': {error}.") from error

    async def _run(self, events: AsyncGenerator[Delta | Usage]) -> AsyncGenerator[Piece]:
        running = set(range(len(self.choices)))
        async for event in events:
            if isinstance(event, Usage):
                self._take_usage(event)
                continue
            if self._first_token is None and event.token_ids:
                self._first_token = time.monotonic()
                self._metrics.ttft.observe(self._first_token - self._started)
            choice = self.choices[event.index]
            piece = choice.push(event.token_ids, event.logprobs)
            if piece.text or piece.logprobs:
                yield piece
            if event.finish_reason is not None:
                running.discard(event.index)
                last = choice.finish(event.finish_reason)
                if last.text or last.logprobs:
                    yield last
            if running and all(entry.finish_reason is not None for entry in self.choices):
                # Stop strings ended what the worker still runs: it need not go on.
                self.usage = self._usage_so_far()
                return

    def _take_usage(self, usage: Usage) -> None:
        self.usage = usage
        made_with = usage.extras.get("weights_id")
        if made_with is not None and made_with != self._version.weights_id:
            raise ApiError(
                500, "The worker answered with other weights than the version that was asked for.",
                kind="server_error", code="weights_mismatch",
            )  # fmt: skip

    def _usage_so_far(self) -> Usage:
        """What the worker told with the first token, and what came since as it was counted here."""
        sampled = sum(choice.sampled for choice in self.choices)
        extras = dict(self.usage.extras)
        if extras:
            extras["generated_tokens"] = sampled
            extras["spans"] = [dict(span) for span in extras.get("spans") or []]
            for span in extras["spans"]:
                if span["source"] == "generated":
                    span["end"] = span["start"] + self.choices[0].sampled
        return replace(self.usage, completion_tokens=sampled, extras=extras)

    def _reset(self) -> None:
        self.usage = Usage(len(self._plan.prompt), 0, 0)
        self.choices = [ChoiceOutput(index, self._codec, self._sampling.stop) for index in range(self._sampling.n)]

    def _request(self) -> CompletionRequest:
        return CompletionRequest(
            model=self._version.name,
            prompt=self._plan.prompt,
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            n=self._sampling.n,
            seed=self._sampling.seed,
            logprobs=self._sampling.logprobs,
            cache_salt=self._cache_salt,
            kv_save=self._plan.asked.store,
            kv_owner=self._kv_owner,
            kv_expires_at=self._plan.kv_expires_at,
            kv_reuse_model=self._versions.reuse_for(self._version),
        )


def check_length(context_length: int, prompt_tokens: int, max_tokens: int | None, default: int) -> int:
    """How many tokens may be generated. Raises `ApiError` 400 with the numbers when the context cannot hold them."""
    room = context_length - prompt_tokens
    if room < (max_tokens or 1):
        asked = f"{prompt_tokens} in the messages" + (f", {max_tokens} in the completion" if max_tokens else "")
        raise invalid(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{prompt_tokens + (max_tokens or 1)} tokens ({asked}). Shorten the messages or the completion.",
            "messages",
            "context_length_exceeded",
        )
    return min(room, default) if max_tokens is None else max_tokens


def _rejected(error: WorkerRejected) -> ApiError:
    if 400 <= error.status < 500:
        return invalid(f"The worker refused the request: {error.message}")
    return ApiError(502, f"The worker failed: {error.message}", kind="server_error", code="worker_failed")


def logprob_entries(codec: TextCodec, pieces: Sequence[Piece], top: int) -> list[dict[str, object]]:
    """OpenAI's log-probability objects for the tokens of some pieces, with the `top` likeliest alternatives."""
    return [
        _entry(codec, entry.token_id, entry.logprob)
        | {"top_logprobs": [_entry(codec, token_id, logprob) for token_id, logprob in entry.top[:top]]}
        for piece in pieces
        for entry in piece.logprobs
    ]


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, object]:
    raw = codec.vocabulary.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}
