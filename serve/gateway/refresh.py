"""Computing the KV of sleeping sessions under the version that serves, before they return, and moving them to it.

Invariants: one refresh runs at a time, only while the workers have time for it, at a priority that gives way to every
request; a session is moved by compare-and-swap from the reply and the version that were refreshed, so a turn that came
between is never overtaken; nothing of a session is sent to a worker once its deletion has begun; the queue is in the
journal, so a gateway that restarts goes on with it.
Lives in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memory.journal.errors import NotFound
from memory.journal.journal import Journal
from memory.journal.records import Refresh, RefreshState, Session
from serve.backends.base import WorkerError, WorkerRejected
from serve.gateway.auth import Auth
from serve.gateway.errors import ApiError
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics
from serve.gateway.prefetch import Prefetch
from serve.gateway.prefill import Prefill
from serve.gateway.refresh_queue import RefreshQueue
from serve.gateway.settings import GatewaySettings
from serve.gateway.threads import Threads
from serve.gateway.turns import Turns, stored_ids
from serve.gateway.versions import Version, Versions

Json = dict[str, Any]
_MOST_ATTEMPTS = 5
_LOOK_SECONDS = 1.0
# Weight of the newest refresh in the measured speed.
_NEWEST = 0.3


@dataclass(frozen=True)
class _Asleep:
    """What a refresh is computed from."""

    session: Session
    head: str
    prompt: list[int]
    expires_at: float | None


@dataclass(frozen=True)
class _Running:
    refresh: Refresh
    tokens: int
    since: float


class Refresher:
    """Runs the queue. `run` is the gateway's task; the rest may be called by routes."""

    def __init__(
        self, settings: GatewaySettings, journal: Journal, threads: Threads, versions: Versions, turns: Turns,
        prefill: Prefill, prefetch: Prefetch, auth: Auth, metrics: Metrics, queue: RefreshQueue,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._journal = journal
        self._threads = threads
        self._versions = versions
        self._turns = turns
        self._prefill = prefill
        self._prefetch = prefetch
        self._auth = auth
        self._metrics = metrics
        self._queue = queue
        self._current: _Running | None = None
        self._task: asyncio.Task[None] | None = None
        self._tokens_per_second: float | None = None
        self._waits_for: str | None = None

    async def run(self) -> None:
        """Runs for ever: queues sessions whenever the served version changes, and works on them while there is time."""
        planned: float | None = None
        while True:
            self._versions.news.clear()
            try:
                if planned != (flipped_at := self._versions.flipped_at):
                    await self._plan()
                    planned = flipped_at
                worked = self._settings.refresh and await self._step()
            except (WorkerError, ApiError) as error:
                # No worker, or the journal is busy: both are told elsewhere, and both pass.
                self._waits_for, worked = str(error), False
                await asyncio.sleep(_LOOK_SECONDS)
            except Exception as error:  # noqa: BLE001  (a defect here must not end refreshing for good)
                event("refreshing failed", level=logging.ERROR, error=error)
                await asyncio.sleep(_LOOK_SECONDS)
                worked = False
            await self._pause(self._settings.refresh_pause_seconds if worked else _LOOK_SECONDS)

    async def stop(self, tenant: str, session_ids: Iterable[str]) -> None:
        """Ends the refresh that runs for one of these sessions; returns when nothing of it is sent any more."""
        current, task = self._current, self._task
        if current is None or task is None or current.refresh.tenant != tenant:
            return
        if current.refresh.session_id in set(session_ids):
            task.cancel()
            await asyncio.wait([task])

    async def status(self) -> Json:
        """How far the refreshes for the version that serves are; `eta_seconds` is None where nothing tells it."""
        counts, version = await self._queue.counts()
        current, speed = self._current, self._tokens_per_second
        return {
            "version": None if version is None else self._versions.key(version),
            "policy": self._settings.kv_policy,
            "reuses": self._versions.status()["reuses"],
            "enabled": self._settings.refresh,
            "waiting": counts.waiting, "done": counts.done, "failed": counts.failed, "skipped": counts.skipped,
            "tokens_waiting": counts.tokens_waiting, "tokens_done": counts.tokens_done,
            "tokens_per_second": speed,
            "eta_seconds": counts.tokens_waiting / speed if speed and counts.waiting else None,
            "current": None if current is None else {
                "session_id": current.refresh.session_id, "reason": current.refresh.reason, "tokens": current.tokens,
                "seconds": time.monotonic() - current.since,
            },
            "waits_for": self._waits_for if counts.waiting and current is None else None,
        }  # fmt: skip

    async def _plan(self) -> None:
        version = await self._versions.current()
        queued = await self._queue.fill(version)
        if queued:
            event("sessions queued for refresh", version=self._versions.key(version), sessions=queued)
        for prefix in await self._queue.prefixes():
            self._prefetch.soon(prefix.tenant, prefix.memory_ids, version)

    async def _step(self) -> bool:
        """Works on the most valuable session; False when there is none, or no time for it."""
        version = await self._versions.current()
        refresh = await self._queue.best(version)
        if refresh is None:
            self._waits_for = None
            return False
        if not await self._prefill.idle(self._settings.refresh_running):
            self._waits_for = "the workers are busy"
            return False
        self._waits_for = None
        self._current = _Running(refresh, refresh.tokens, time.monotonic())
        # A task of its own, so that a deletion can end it without ending everything.
        self._task = asyncio.get_running_loop().create_task(self._work(refresh, version))
        try:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()
        finally:
            self._task.cancel()
            self._current = self._task = None
        return True

    async def _work(self, refresh: Refresh, version: Version) -> None:
        state: RefreshState = "waiting"
        outcome, attempts = "stopped", refresh.attempts + 1
        try:
            asleep = await self._threads.run(self._read, refresh)
            if asleep is None:
                state = outcome = "skipped"
                return
            if self._turns.busy.closed(refresh.tenant, [refresh.session_id, *asleep.session.memory_ids]):
                return  # it, or a memory of it, is being deleted: when that is done there is another answer
            await self._compute(refresh, version, asleep)
            moved = await self._threads.run(self._flip, refresh, asleep)
            # A turn was faster: what it added is computed next time; who never rests moves when the pin ends.
            state = "done" if moved or attempts >= _MOST_ATTEMPTS else "waiting"
            outcome = "done" if moved else "moved"
        except (WorkerError, ApiError) as error:
            refused = isinstance(error, WorkerRejected)
            state = "failed" if refused or attempts >= _MOST_ATTEMPTS else "waiting"
            outcome = "failed"
            event("refresh failed", level=logging.WARNING, session=refresh.session_id, reason=str(error))
            await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._metrics.refreshes.labels(refresh.reason, outcome).inc()
            if outcome != "stopped":
                await self._queue.end(replace(refresh, attempts=attempts, state=state))

    async def _compute(self, refresh: Refresh, version: Version, asleep: _Asleep) -> None:
        started = time.monotonic()
        usage = await self._prefill.run(
            version, asleep.prompt, cache_salt=self._auth.cache_salt(refresh.tenant),
            owner=self._auth.kv_owner("session", refresh.tenant, refresh.session_id), expires_at=asleep.expires_at,
            session=refresh.session_id, least="exact" if refresh.reason == "climb" else "compact",
        )  # fmt: skip
        computed = usage.prompt_tokens - usage.cached_tokens
        self._metrics.refresh_tokens.inc(computed)
        speed = len(asleep.prompt) / max(1e-6, time.monotonic() - started)
        before = self._tokens_per_second
        self._tokens_per_second = speed if before is None else before + _NEWEST * (speed - before)
        event("session refreshed", level=logging.DEBUG, session=refresh.session_id, version=version.name,
              reason=refresh.reason, tokens=len(asleep.prompt), computed=computed)  # fmt: skip

    def _read(self, refresh: Refresh) -> _Asleep | None:
        """What to compute; None when there is nothing to refresh any more. Blocks."""
        try:
            session = self._journal.get_session(refresh.tenant, refresh.session_id)
            if session.head_response is None or (refresh.reason == "promote" and session.version == refresh.version):
                return None
            chain = self._journal.chain(session.head_response)
            memory = self._turns.prefix(refresh.tenant, session.memory_ids) if session.memory_ids else None
        except NotFound:
            return None
        prompt = [*(memory.token_ids if memory is not None else ()), *stored_ids(chain)]
        ends = [end for end in (session.expires_at, memory.expires_at if memory else None) if end is not None]
        return _Asleep(session, session.head_response, prompt, min(ends, default=None))

    def _flip(self, refresh: Refresh, asleep: _Asleep) -> bool:
        """Whether the session is at the version now. Blocks."""
        if refresh.reason == "climb":
            return True
        moved = self._journal.flip_session(
            refresh.tenant, refresh.session_id, asleep.head, asleep.session.version, refresh.version
        )
        if moved:
            self._metrics.flips.labels("refresh").inc()
        return moved

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._versions.news.wait(), seconds)
        except TimeoutError:
            return
