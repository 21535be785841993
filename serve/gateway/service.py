"""What the routes share, and one turn from request to journal.

Invariants: whatever a turn holds (its session, its version) is given back when its context ends, also when the client
leaves; `commit` has returned before anything final is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from memory.journal.journal import Journal
from memory.journal.records import RefreshReason
from serve.backends.client import CompletionsClient
from serve.backends.router import Router
from serve.gateway.auth import Auth
from serve.gateway.bodies import Sampling as SamplingBody
from serve.gateway.errors import ApiError, invalid
from serve.gateway.forget import Abandoned
from serve.gateway.generate import Generation, Sampling, check_length
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics
from serve.gateway.output import Piece
from serve.gateway.prefetch import Prefetch
from serve.gateway.prefill import Prefill
from serve.gateway.refresh import Refresher
from serve.gateway.refresh_queue import RefreshQueue
from serve.gateway.settings import GatewaySettings
from serve.gateway.text import TextCodec
from serve.gateway.threads import Threads
from serve.gateway.turns import Asked, Plan, Reply, Turns, new_response_id
from serve.gateway.versions import Policy, Version, Versions


@dataclass(frozen=True)
class Gateway:
    """Everything a route needs; made once by `open_gateway`."""

    settings: GatewaySettings
    codec: TextCodec
    journal: Journal
    threads: Threads
    router: Router
    versions: Versions
    turns: Turns
    metrics: Metrics
    auth: Auth
    prefetch: Prefetch
    queue: RefreshQueue
    refresher: Refresher
    abandoned: Abandoned

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together: the model's, or the workers' where they hold less."""
        return min(self.codec.context_length, self.versions.context_length or self.codec.context_length)

    @asynccontextmanager
    async def turn(
        self, asked: Asked, body: SamplingBody, *, n: int, max_tokens: int | None, logprobs: int | None
    ) -> AsyncIterator[Turn]:
        """Plans a turn and holds its session and version until the context ends. Raises `ApiError`."""
        if n > self.settings.max_choices:
            raise invalid(f"'n' is at most {self.settings.max_choices} here, not {n}.", "n", "invalid_value")
        if len(body.stop) > self.settings.max_stop_strings:
            raise invalid(f"'stop' has at most {self.settings.max_stop_strings} strings here.", "stop", "invalid_value")
        version = await self.versions.resolve(body.model)
        plan = await self.threads.run(self.turns.plan, asked)
        follows = body.model == self.versions.served_name
        if follows and plan.origin is not None:
            version = self.versions.stays(plan.origin.version, plan.origin.updated_at) or version
        try:
            sampling = Sampling(
                max_tokens=check_length(
                    self.context_length, len(plan.prompt), max_tokens, self.settings.default_max_tokens
                ),
                temperature=body.temperature,
                top_p=body.top_p, n=n, seed=body.seed, stop=body.stop, logprobs=logprobs,
            )  # fmt: skip
            generation = Generation(
                plan, sampling, version, codec=self.codec, router=self.router, versions=self.versions,
                metrics=self.metrics, cache_salt=self.auth.cache_salt(asked.tenant), kv_owner=self._owner(plan),
            )  # fmt: skip
            self.metrics.turns.labels(plan.found).inc()
            with self.versions.pinned(version):
                waited = await self.prefetch.ready(plan.memory, version) if plan.memory and asked.store else 0
                turn = Turn(self, plan, version, generation, n, follows=follows, memory_computed=waited)
                try:
                    yield turn
                finally:
                    if plan.create and asked.store and generation.asked and not turn.committed:
                        self.abandoned.forget(self._owner(plan), self.auth.cache_salt(asked.tenant))
        finally:
            self.turns.release(plan)

    def _owner(self, plan: Plan) -> str:
        """On whose behalf a turn's KV is stored; nobody's where nothing is."""
        if plan.session_id is None or not plan.asked.store:
            return ""
        return self.auth.kv_owner("session", plan.asked.tenant, plan.session_id)


class Turn:
    """One running turn. Iterate `pieces`, then `commit`, then read the rest."""

    def __init__(
        self, gateway: Gateway, plan: Plan, version: Version, generation: Generation, n: int, *, follows: bool,
        memory_computed: int,
    ) -> None:  # fmt: skip
        """`follows`: the session goes with the served version, no other was named. `memory_computed`: how many tokens
        of its memories had to be computed first."""
        self.plan = plan
        self._follows = follows
        self._memory_computed = memory_computed
        self.committed = False
        self.version = version
        self.created = time.time()
        self._gateway = gateway
        self._generation = generation
        self._ids = [new_response_id() for _ in range(n)]

    @property
    def key(self) -> str:
        """Random part of the first response's id, for ids derived from it."""
        return self._ids[0].removeprefix("resp_")

    def response_id(self, index: int = 0) -> str | None:
        """The id under which a choice is kept; None when nothing is kept."""
        return self._ids[index] if self.plan.asked.store else None

    def pieces(self) -> AsyncGenerator[Piece]:
        """Text as it becomes certain; see `Generation.pieces`."""
        return self._generation.pieces()

    def text(self, index: int = 0) -> str:
        """A choice's whole text; final after `pieces` ended."""
        return self._generation.choices[index].text

    def finish_reason(self, index: int = 0) -> str:
        """ "stop" or "length"."""
        return self._generation.choices[index].finish_reason or "length"

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled for all choices, those after a stop string's beginning included."""
        return sum(choice.sampled for choice in self._generation.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens the model read."""
        return len(self.plan.prompt)

    @property
    def cached_tokens(self) -> int:
        """Of these, the ones whose KV was reused, as the worker counted them."""
        return self._generation.usage.cached_tokens

    def extras(self) -> dict[str, Any]:
        """The worker's own account, and how the history was found."""
        times = {"gateway_ttft_ms": self._generation.ttft_ms, "gateway_ms": self._generation.duration_ms}
        memory = {"memory_computed_tokens": self._memory_computed} if self.plan.memory is not None else {}
        return {**self._generation.usage.extras, "history": self.plan.found, **memory, **times}

    async def commit(self, params: dict[str, Any]) -> None:
        """Journals the turn, unless the client asked for nothing to be stored. On disk when this returns."""
        metrics = self._gateway.metrics
        if self.plan.asked.store:
            replies = [self._reply(index, params) for index in range(len(self._ids))]
            key = self._gateway.versions.key(self.version)
            turns, moves_to = self._gateway.turns, key if self._follows else None
            await self._gateway.threads.run(turns.commit, self.plan, replies, moves_to)
            self.committed = True
            if moves_to is not None and self.plan.origin is not None and self.plan.origin.version not in (None, key):
                metrics.flips.labels("turn").inc()
            await self._queue()
        metrics.count_tokens(self._generation.usage, self.completion_tokens)
        metrics.turn.observe(self._generation.duration_ms / 1000)

    async def _queue(self) -> None:
        """Has the session refreshed where it needs to be and nobody knows of it yet."""
        serving, reason = self._gateway.versions.known(), self._refresh_reason()
        if self.plan.session_id is None or serving is None or reason is None:
            return
        tenant, tokens = self.plan.asked.tenant, self.prompt_tokens + self.completion_tokens
        try:
            await self._gateway.queue.add(tenant, self.plan.session_id, tokens, serving, reason)
        except ApiError as error:  # the turn is kept all the same; the next one will ask again
            event("a session was not queued", level=logging.WARNING, reason=error.message)

    def _refresh_reason(self) -> RefreshReason | None:
        serving, origin = self._gateway.versions.known(), self.plan.origin
        if serving is not None and serving.weights_id == self.version.weights_id:
            exact = str(self._generation.usage.extras.get("fidelity") or "exact") == "exact"
            return None if exact else "climb"
        # The served version changed while the first turn ran, after the sessions there were had been queued.
        came_late = self.plan.create or origin is None or origin.version is None
        return "promote" if self._follows and came_late else None

    def _reply(self, index: int, params: dict[str, Any]) -> Reply:
        choice, usage = self._generation.choices[index], self._generation.usage
        extras = usage.extras
        return Reply(
            response_id=self._ids[index],
            text=choice.text,
            output_ids=choice.output_ids(),
            finish_reason=self.finish_reason(index),
            model=self.version.name,
            weights_id=self.version.weights_id,
            cached_tokens=usage.cached_tokens,
            restored_tokens=int(extras.get("restored_tokens") or 0),
            computed_tokens=self.prompt_tokens - usage.cached_tokens,
            generated_tokens=choice.sampled,
            fidelity=str(extras.get("fidelity") or "exact"),
            spans=list(extras.get("spans") or []),
            ttft_ms=self._generation.ttft_ms,
            duration_ms=self._generation.duration_ms,
            created_at=self.created,
            params=params,
        )


async def open_gateway(settings: GatewaySettings) -> Gateway:
    """Opens the journal, loads tokenizer and template, and takes up the serving version. Raises `ValueError` or
    `OSError` for settings that point at something unusable. Close with `close_gateway`."""
    auth = Auth.read(settings.keys_file, settings.secret_file, settings.admin_token_file)
    codec = TextCodec(settings.model_dir)
    threads = Threads(settings.journal_threads)
    journal = await threads.run(Journal.open, settings.journal.url, settings.journal)
    clients = [
        CompletionsClient(url, read_seconds=settings.worker_read_seconds, load_seconds=settings.load_seconds)
        for url in settings.workers
    ]
    router = Router(clients, wait_seconds=settings.worker_wait_seconds, poll_seconds=settings.worker_poll_seconds)
    metrics = Metrics()
    policy = Policy(settings.pin_seconds, settings.kv_policy == "reuse", settings.reuse_max_kl)
    versions = Versions(journal, threads, router, metrics, settings.served_name, policy)
    await versions.restore()
    turns, prefill = Turns(journal, codec, settings.session_ttl_seconds), Prefill(router, versions)
    prefetch = Prefetch(prefill, auth, threads, turns.busy, metrics, turns.prefix)
    queue = RefreshQueue(settings, journal, threads, versions, metrics, codec.digest)
    refresher = Refresher(settings, journal, threads, versions, turns, prefill, prefetch, auth, metrics, queue)
    return Gateway(
        settings, codec, journal, threads, router, versions, turns, metrics, auth, prefetch, queue, refresher,
        Abandoned(router),
    )  # fmt: skip


async def close_gateway(gateway: Gateway) -> None:
    """Ends prefetches, finishes unloads, closes connections and the journal."""
    await gateway.prefetch.close()
    await gateway.abandoned.close()
    await gateway.versions.close()
    await gateway.router.close()
    await gateway.threads.run(gateway.journal.close)
