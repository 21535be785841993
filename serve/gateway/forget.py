"""Making every worker's KV memory forget, and what each of them said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from serve.backends.base import NotSupported, WorkerError, WorkerUnavailable
from serve.backends.router import Router, Worker
from serve.gateway.errors import unavailable
from serve.gateway.logs import event

Json = dict[str, Any]


async def forget(router: Router, owners: Sequence[str], cache_salt: str) -> list[Json]:
    """Destroys the keys of these owners and what was stored on their behalf, on every worker. Returns what each said.

    Raises `ApiError` 503 when one failed, or when none that can do it could be asked.
    """

    async def ask(worker: Worker) -> Json:
        told: Json = {"worker": worker.url, "status": "forgotten"}
        try:
            account = await worker.client.forget(owners, cache_salt)
            told |= {name: value for name, value in account.items() if name != "object"}
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
