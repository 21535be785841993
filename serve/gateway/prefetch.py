"""The KV of memories, computed before a session needs it and stored for the memories and not for the session.

Invariants: a beginning is computed at most once at a time; nothing of a memory is sent to a worker once its deletion
has begun. What fails here costs time later, and is told in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from memory.journal.errors import NotFound
from memory.journal.records import MemoryPrefix
from serve.backends.base import WorkerError
from serve.gateway.auth import Auth
from serve.gateway.busy import Busy
from serve.gateway.errors import ApiError
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics
from serve.gateway.prefill import BACKGROUND, Prefill
from serve.gateway.threads import Threads
from serve.gateway.versions import Version

Key = tuple[str, tuple[str, ...], str]
_REMEMBERED = 16_384


class Prefetch:
    """Beginnings that are computed or known to be. Lives in the gateway's event loop."""

    def __init__(
        self, prefill: Prefill, auth: Auth, threads: Threads, busy: Busy, metrics: Metrics,
        read: Callable[[str, Sequence[str]], MemoryPrefix],
    ) -> None:  # fmt: skip
        """`read` gives the beginning that memories make, blocking; it raises `NotFound` for one that ended."""
        self._prefill = prefill
        self._auth = auth
        self._threads = threads
        self._busy = busy
        self._metrics = metrics
        self._read = read
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._running: dict[Key, tuple[int, asyncio.Task[int]]] = {}
        self._background = asyncio.Lock()

    def soon(self, tenant: str, memory_ids: tuple[str, ...], version: Version) -> None:
        """Computes a beginning in the background, unless it is known."""
        key = (tenant, memory_ids, version.weights_id)
        if key not in self._known and key not in self._running:
            self._start(key, version, BACKGROUND)

    async def ready(self, prefix: MemoryPrefix, version: Version) -> int:
        """Returns when the beginning is stored, or could not be; how many tokens this call had to wait for."""
        key = (prefix.tenant, prefix.memory_ids, version.weights_id)
        if key in self._known:
            self._known.move_to_end(key)
            return 0
        priority, task = self._running.get(key, (BACKGROUND, None))
        if task is not None and priority == BACKGROUND:
            # It would wait until nothing else runs; somebody needs it now.
            await self._cancel(key)
            task = None
        if task is None:
            task = self._start(key, version, 0)
        # Whoever leaves early does not end it for the others.
        await asyncio.wait([task])
        return 0 if task.cancelled() or task.exception() is not None else task.result()

    async def stop(self, tenant: str, memory_id: str) -> None:
        """Ends what is computed of a memory, and knows nothing of it any more."""
        for key in [key for key in self._running if key[0] == tenant and memory_id in key[1]]:
            await self._cancel(key)
        for key in [key for key in self._known if key[0] == tenant and memory_id in key[1]]:
            del self._known[key]

    async def close(self) -> None:
        """Ends everything."""
        for key in list(self._running):
            await self._cancel(key)

    def _start(self, key: Key, version: Version, priority: int) -> asyncio.Task[int]:
        task = asyncio.get_running_loop().create_task(self._run(key, version, priority))
        task.add_done_callback(_note)
        self._running[key] = (priority, task)
        return task

    async def _cancel(self, key: Key) -> None:
        _, task = self._running.pop(key)
        task.cancel()
        await asyncio.wait([task])

    async def _run(self, key: Key, version: Version, priority: int) -> int:
        computed, outcome = 0, "failed"
        try:
            # In the background one at a time; what somebody waits for is not held up.
            async with self._background if priority == BACKGROUND else nullcontext():
                computed, outcome = await self._compute(key, version, priority)
        except NotFound:
            outcome = "gone"
        except (WorkerError, ApiError) as error:
            event("prefetch failed", level=logging.WARNING, version=version.name, reason=str(error))
        except asyncio.CancelledError:
            outcome = "stopped"
            raise
        finally:
            self._metrics.prefetches.labels(outcome).inc()
            entry = self._running.get(key)
            if entry is not None and entry[1] is asyncio.current_task():
                del self._running[key]
        return computed

    async def _compute(self, key: Key, version: Version, priority: int) -> tuple[int, str]:
        tenant, memory_ids, _ = key
        prefix = await self._threads.run(self._read, tenant, memory_ids)
        if self._busy.closed(tenant, memory_ids):
            return 0, "gone"
        usage = await self._prefill.run(
            version, prefix.token_ids, cache_salt=self._auth.cache_salt(tenant),
            owner=self._auth.kv_owner("memory", tenant, *memory_ids), expires_at=prefix.expires_at, priority=priority,
        )  # fmt: skip
        self._known[key] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return usage.prompt_tokens - usage.cached_tokens, "done"


def _note(task: asyncio.Task[int]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        event("prefetch failed", level=logging.ERROR, error=error)
