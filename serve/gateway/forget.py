"""Making every worker's KV memory forget, and what each of them said."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from serve.backends.base import NotSupported, WorkerError, WorkerUnavailable
from serve.backends.router import Router, Worker
from serve.gateway.errors import ApiError, unavailable
from serve.gateway.logs import event

Json = dict[str, Any]
_AT_ONCE = 10_000
# What a worker counts that is no chunk that went: keys destroyed, and objects that a remote could not delete yet.
_NOT_CHUNKS = ("keys", "remote_waiting")


async def forget(router: Router, owners: Sequence[str], cache_salt: str) -> list[Json]:
    """Destroys the keys of these owners and what was stored on their behalf, on every worker. Returns what each said.

    Raises `ApiError` 503 when one failed, or when none that can do it could be asked.
    """

    async def ask(worker: Worker) -> Json:
        told: Json = {"worker": worker.url, "status": "forgotten"}
        account: Counter[str] = Counter()
        try:
            for some in (owners[at : at + _AT_ONCE] for at in range(0, len(owners), _AT_ONCE)):
                account.update(_counts(await worker.client.forget(some, cache_salt)))
            told |= _shown(account)
        except NotSupported:
            told["status"] = "not_supported"
        except WorkerUnavailable:
            told["status"] = "unreachable"
        except WorkerError as error:
            event("a worker did not forget", worker=worker.url, reason=str(error))
            told["status"] = "failed"
        return told

    told = await asyncio.gather(*(ask(worker) for worker in router.workers))
    states = {entry["status"] for entry in told}
    if "failed" in states or ("unreachable" in states and "forgotten" not in states):
        raise unavailable("KV memory could not be made to forget, so nothing was deleted: try again.")
    return list(told)


class Abandoned:
    """Forgets what was stored for sessions that never came to be: nobody could name them to delete them. Lives in the
    gateway's event loop. Best effort: where no worker answers, their KV lasts until its room is needed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    def forget(self, owner: str, cache_salt: str) -> None:
        """Has an owner forgotten soon."""
        task = asyncio.get_running_loop().create_task(self._forget(owner, cache_salt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Waits for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _forget(self, owner: str, cache_salt: str) -> None:
        try:
            await forget(self._router, [owner], cache_salt)
        except ApiError as error:
            event("an abandoned turn was not forgotten", level=logging.WARNING, reason=error.message)


def _counts(account: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in account.items() if isinstance(value, int)}


def _shown(account: Mapping[str, int]) -> Json:
    chunks = {name: count for name, count in account.items() if name not in _NOT_CHUNKS}
    return {name: account.get(name, 0) for name in _NOT_CHUNKS} | {"chunks": chunks}
