"""Computing the KV of a prompt ahead of its use: nothing is generated, what is computed is stored for its owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve.backends.base import CompletionRequest, ModelNotFound, Usage, WorkerRejected
from serve.backends.router import Router, Worker
from serve.gateway.versions import Version, Versions

BACKGROUND = 1


class Prefill:
    """Sends prompts to workers for their KV alone. Lives in the gateway's event loop."""

    def __init__(self, router: Router, versions: Versions) -> None:
        self._router = router
        self._versions = versions

    async def run(
        self, version: Version, prompt: Sequence[int], *, cache_salt: str, owner: str, expires_at: float | None,
        session: str | None = None, least: str = "compact", priority: int = BACKGROUND,
    ) -> Usage:  # fmt: skip
        """What it cost. `least` is the fidelity below which stored KV is computed anew. Raises `WorkerError`, and
        `ApiError` where a worker does not prove the version. Cancelling it aborts the request on the worker."""
        worker = await self._router.choose(session)
        request = CompletionRequest(
            model=version.name, prompt=prompt, max_tokens=0, temperature=0.0, cache_salt=cache_salt, kv_owner=owner,
            kv_expires_at=expires_at, kv_least_fidelity=least, priority=priority,
        )  # fmt: skip
        with self._versions.pinned(version):
            await self._versions.ensure(worker, version)
            try:
                return await _computed(worker, request)
            except ModelNotFound:
                version.proven.discard(worker.url)  # it restarted: the version is brought back, once
                await self._versions.ensure(worker, version)
                return await _computed(worker, request)

    async def idle(self, most_running: int) -> bool:
        """Whether the workers have time: no request of this gateway runs beyond `most_running`, and they say the same
        of all their requests."""
        if sum(worker.in_flight for worker in self._router.workers) > most_running:
            return False
        return await self._router.idle(most_running)


async def _computed(worker: Worker, request: CompletionRequest) -> Usage:
    try:
        return (await worker.client.complete(request)).usage
    except WorkerRejected as error:
        if "max_tokens" not in error.message:
            raise
        # vLLM's server generates at least one token; it is thrown away.
        return (await worker.client.complete(replace(request, max_tokens=1))).usage
