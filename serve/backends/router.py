"""Which worker takes a request: the one that held the session last, else the one with the least in flight.

The KV memory is shared on disk, so any worker can take any session; the one that had it last has it in RAM.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from serve.backends.base import NotSupported, WorkerError, WorkerUnavailable
from serve.backends.client import CompletionsClient

_REMEMBERED_SESSIONS = 65_536


class Worker:
    """One worker and what is known of it. `up` is a belief: it is corrected by the next request either way."""

    def __init__(self, client: CompletionsClient) -> None:
        self.client = client
        self.in_flight = 0
        self.up = True

    @property
    def url(self) -> str:
        """Base URL; names the worker in logs and metrics."""
        return self.client.url

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Counts one request as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Router:
    """Chooses among workers. Not thread-safe: lives in the gateway's event loop."""

    def __init__(self, clients: Sequence[CompletionsClient], *, wait_seconds: float, poll_seconds: float) -> None:
        self.workers = tuple(Worker(client) for client in clients)
        self._wait_seconds = wait_seconds
        self._poll_seconds = poll_seconds
        self._last: OrderedDict[str, Worker] = OrderedDict()

    async def choose(self, session: str | None = None, deadline: float | None = None) -> Worker:
        """A worker believed to be up. Waits for one to come back, up to `deadline` (of `time.monotonic`; by default
        the configured wait from now), then raises `WorkerUnavailable`."""
        deadline = self.deadline() if deadline is None else deadline
        while True:
            usable = [worker for worker in self.workers if worker.up]
            if usable:
                return self._best(usable, session)
            await self.probe()
            if any(worker.up for worker in self.workers):
                continue
            if time.monotonic() >= deadline:
                raise WorkerUnavailable("no worker answers")
            await asyncio.sleep(self._poll_seconds)

    def deadline(self) -> float:
        """Until when a request that starts now may wait for a worker, in `time.monotonic` seconds."""
        return time.monotonic() + self._wait_seconds

    def remember(self, session: str, worker: Worker) -> None:
        """Notes who holds a session's KV in RAM."""
        self._last[session] = worker
        self._last.move_to_end(session)
        if len(self._last) > _REMEMBERED_SESSIONS:
            self._last.popitem(last=False)

    async def probe(self) -> None:
        """Asks every worker whether it is there."""
        await asyncio.gather(*(self._probe(worker) for worker in self.workers))

    async def idle(self, most_running: int) -> bool:
        """Whether no worker that is up has requests waiting, or more than `most_running` running, whoever sent them.
        A worker that tells no load, or does not answer, is not asked to wait for."""
        return all(await asyncio.gather(*(_has_time(worker, most_running) for worker in self.workers if worker.up)))

    async def close(self) -> None:
        """Closes the clients."""
        for worker in self.workers:
            await worker.client.close()

    async def _probe(self, worker: Worker) -> None:
        try:
            await worker.client.health()
        except WorkerError:
            worker.up = False
        else:
            worker.up = True

    def _best(self, usable: list[Worker], session: str | None) -> Worker:
        last = self._last.get(session) if session is not None else None
        if last is not None and last.up:
            return last
        return min(usable, key=lambda worker: worker.in_flight)


async def _has_time(worker: Worker, most_running: int) -> bool:
    try:
        load = await worker.client.load()
    except (NotSupported, WorkerUnavailable):
        return True
    return load.waiting == 0 and load.running <= most_running
