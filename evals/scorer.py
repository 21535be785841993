"""Asks one model of a worker. Bounded in flight, greedy, and nothing it asks is kept in KV memory.

Invariant: answers come back in the order of the prompts, however the requests overlap. A worker with a full queue is
asked again after the time it names; every other failure passes through as the client's typed error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from evals.settings import EvalSettings
from evals.suites.base import Advance, Reply
from serve.backends.base import Completion, CompletionRequest, Overloaded

Answer = TypeVar("Answer")

_SCORED_TOGETHER = 8


class Client(Protocol):
    """The part of `serve.backends.client.CompletionsClient` that scoring needs."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """The whole answer to one prompt."""
        ...

    async def prompt_logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of every token after each prompt's first."""
        ...


class ModelScorer:
    """One model's `Model` (see `evals.suites.base`). Counts the tokens it asked for and got."""

    def __init__(self, client: Client, model: str, decode: Callable[[list[int]], str], settings: EvalSettings) -> None:
        self._client = client
        self._model = model
        self._decode = decode
        self._patience = settings.patience_seconds
        self._generating = asyncio.Semaphore(settings.batch)
        # At least two requests in flight, so that the worker never waits for us.
        self._scored_together = min(_SCORED_TOGETHER, settings.batch)
        self._scoring = asyncio.Semaphore(max(2, settings.batch // self._scored_together))
        self.prompt_tokens = 0
        self.generated_tokens = 0

    async def generate(
        self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int], advance: Advance
    ) -> list[Reply]:
        """Greedy replies, decoded without special tokens."""

        async def one(prompt: Sequence[int], most: int) -> Reply:
            request = CompletionRequest(
                model=self._model, prompt=prompt, max_tokens=most, temperature=0.0, kv_save=False
            )
            async with self._generating:
                completion = await self._patiently(lambda: self._client.complete(request))
            token_ids = completion.choices[0].token_ids
            self.prompt_tokens += len(prompt)
            self.generated_tokens += len(token_ids)
            advance(1)
            return Reply(token_ids, self._decode(list(token_ids)))

        return await _all(one(prompt, most) for prompt, most in zip(prompts, most_tokens, strict=True))

    async def log_probs(self, prompts: Sequence[Sequence[int]], advance: Advance) -> list[list[float]]:
        """Prompts of like length travel together."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        groups = [order[at : at + self._scored_together] for at in range(0, len(order), self._scored_together)]
        found: dict[int, list[float]] = {}

        async def one(group: list[int]) -> None:
            together = [prompts[index] for index in group]
            async with self._scoring:
                values = await self._patiently(lambda: self._client.prompt_logprobs(self._model, together))
            found.update(zip(group, values, strict=True))
            self.prompt_tokens += sum(map(len, together))
            advance(len(group))

        await _all(one(group) for group in groups)
        return [found[index] for index in range(len(prompts))]

    async def _patiently(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        until = time.monotonic() + self._patience
        while True:
            try:
                return await ask()
            except Overloaded as refusal:
                if time.monotonic() + refusal.retry_after > until:
                    raise
                await asyncio.sleep(refusal.retry_after)


async def _all(tasks: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Runs `tasks` together and gives their results in order. The first failure cancels the others and is raised."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
