"""The engine: requests in from any thread, events out, one thread that computes.

Invariants: a submission is accepted whole or refused whole; each accepted request ends with exactly one `DoneEvent`
or `FailedEvent`, unless it was aborted; a request keeps the version it began with to its end; KV goes to memory under
the identity of exactly that version.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import torch

from memory.kv.codec.factory import Codecs
from memory.kv.forget import Forgotten
from serve.engine.adapters import read_adapter
from serve.engine.errors import EngineError, InvalidRequest, WeightsError
from serve.engine.kv_memory import KVMemory, open_memory
from serve.engine.loop import EngineLoop, use_threads
from serve.engine.pages import PageBudget
from serve.engine.probing import Probing
from serve.engine.request import Completion, DoneEvent, Event, FailedEvent, Listener, Request, collect
from serve.engine.sampler import new_generator
from serve.engine.sequence import Job, Sequence, Ticket
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version, Versions
from serve.engine.warm import warm_up
from serve.engine.weights import load_decoder
from serve.weights_id import base_weights_id, weights_id

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FORMATS = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class EngineLoad:
    """How busy the engine is, and what it has done since it started, in tokens."""

    waiting: int
    background: int
    """Background requests that wait; `waiting` leaves them out."""
    running: int
    kv_reserved_bytes: int
    kv_budget_bytes: int
    computed_tokens: int
    lifted_tokens: int
    background_tokens: int
    """Of both, those of background requests."""
    generated_tokens: int


class Engine:
    """One base model with its adapters. All public methods are thread-safe; `close` it when done."""

    def __init__(self, settings: EngineSettings, base: Version, memory: KVMemory | None) -> None:
        self.settings = settings
        self.versions = Versions(base, settings.max_resident_adapters)
        self.context = base.decoder.context
        self.memory = memory
        store = memory.store if memory is not None else None
        codecs, records = (store.codecs, store.fidelity) if store is not None else (Codecs(), None)
        self.probing = Probing(self.versions, codecs, records)
        self._budget = PageBudget(base.decoder, settings.kv_buffer_bytes, settings.kv_warm_bytes)
        if memory is not None:
            use_threads(settings)
            warm_up(base.decoder, settings, self._budget, memory.store.cost)
        self._loop = EngineLoop(settings, self._budget, self.versions, memory)

    @classmethod
    def load(cls, settings: EngineSettings) -> Engine:
        """Loads the base model of `settings`. Raises `WeightsError` or `UnsupportedModel`."""
        if settings.model is None:
            raise WeightsError("no model is set: give the folder of a Hugging Face model as `model`")
        dtype = DTYPES[settings.dtype]
        decoder = load_decoder(settings.model, dtype, settings.context_length, settings.kv_shared_layers)
        digest = base_weights_id(settings.model)
        base = Version(settings.served_name, settings.model, digest, FORMATS[settings.dtype], decoder)
        return cls(settings, base, open_memory(settings))

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests: not closed, and its thread runs."""
        return self._loop.alive

    @property
    def load_now(self) -> EngineLoad:
        """How busy the engine is right now."""
        scheduler, stepper = self._loop.scheduler, self._loop.stepper
        return EngineLoad(
            waiting=self._loop.waiting,
            background=self._loop.background,
            running=scheduler.running,
            kv_reserved_bytes=self._budget.used,
            kv_budget_bytes=self._budget.budget,
            computed_tokens=stepper.computed_tokens,
            lifted_tokens=stepper.lifted_tokens,
            background_tokens=stepper.background_tokens,
            generated_tokens=stepper.generated_tokens,
        )

    def submit(self, requests: Many[Request], listener: Listener) -> Ticket:
        """Queues `requests` together; their events go to `listener`, on the engine's thread, which it must not hold up.

        Raises `InvalidRequest`, `VersionNotFound`, `QueueFull` or `EngineClosed`; then none of them was queued.
        """
        limits = [self._check(request) for request in requests]
        ticket = Ticket()
        jobs: list[Job] = []
        try:
            for place, (request, limit) in enumerate(zip(requests, limits, strict=True)):
                reuse = self.versions.find(request.kv.reuse_model) if request.kv.reuse_model else None
                version = self.versions.acquire(request.model)
                jobs.append(_new_job(request, version, reuse, limit, place, listener, ticket))
            self._loop.put(jobs)
        except EngineError:
            for job in jobs:
                self.versions.release(job.version)
            raise
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Ends what is left of a submission soon; its listener hears nothing more. Aborting twice is fine."""
        self._loop.abort(ticket)

    def generate(self, requests: Many[Request]) -> list[Completion]:
        """Submits `requests` and waits for all of them. Raises the error of the first that failed."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = self.submit(requests, events.put)
        by_request: list[list[Event]] = [[] for _ in requests]
        still_open = len(requests)
        try:
            while still_open:
                event = events.get()
                by_request[event.request].append(event)
                still_open -= isinstance(event, DoneEvent | FailedEvent)
        finally:
            self.abort(ticket)
        return [collect(found, requests[place].sampling.n) for place, found in enumerate(by_request)]

    def load_adapter(self, name: str, folder: Path) -> Version:
        """Makes the PEFT adapter in `folder` servable as `name`, in the caller's thread. Raises `AdapterError`."""
        base = self.versions.base
        adapter = read_adapter(folder, base.decoder.config, base.weights_id)
        identity = weights_id(base.weights_id, adapter.digest)

        def load() -> Version:
            use_threads(self.settings)
            with torch.inference_mode():
                decoder = adapter.merge_into(base.decoder)
            compute_format = f"{base.compute_format}-merged"
            return Version(name, folder, identity, compute_format, decoder, base, adapter.first_layer)

        return self.versions.add(name, identity, load)

    def unload_adapter(self, name: str) -> int:
        """Takes an adapter out of service; its memory goes with its last request. Returns how many still run.

        Raises `VersionNotFound`, or `AdapterError` for the base.
        """
        return self.versions.retire(name)

    def forget(self, owners: Many[str], cache_salt: str) -> Forgotten:
        """Destroys what was stored on behalf of these owners, whatever version computed it; their requests that run
        now store nothing.

        Raises `InvalidRequest`, or `EngineError` where memory cannot be made to forget.
        """
        if "" in owners:
            raise InvalidRequest("owners must not be empty: what has no owner is the tenant's, and nobody's to delete")
        return self.memory.forget(owners, cache_salt) if self.memory is not None else Forgotten()

    def close(self) -> None:
        """Fails what is still in flight, writes out what memory was given, and ends the engine's threads."""
        self._loop.close()
        if self.memory is not None:
            self.memory.close()

    def _check(self, request: Request) -> int:
        """Returns how many tokens `request` may generate. Raises `InvalidRequest`."""
        request.check()
        vocabulary = self.versions.base.decoder.config.vocabulary
        count, wanted, n = len(request.prompt), request.sampling.max_tokens, request.sampling.n
        if not count:
            raise InvalidRequest("the prompt is empty: give at least one token id")
        for name, ids in (("the prompt", request.prompt), ("stop_token_ids", request.sampling.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                raise InvalidRequest(f"{name} has token ids outside 0 .. {vocabulary - 1}")
        limit = self.context - count if wanted is None else wanted
        if count + limit > self.context or (wanted is None and limit < 1):
            raise InvalidRequest(
                f"the prompt has {count} tokens and max_tokens is {wanted}, "
                f"but the context holds {self.context} tokens: shorten one of them"
            )
        if n > self.settings.max_batch:
            raise InvalidRequest(f"n is {n}, but at most {self.settings.max_batch} sequences run at the same time")
        if n * self._budget.size(count + limit) > self._budget.budget:
            raise InvalidRequest(
                f"{n} replies of up to {count + limit} tokens need more KV than this worker has "
                f"({self._budget.budget} bytes): lower n or max_tokens"
            )
        return limit


def _new_job(
    request: Request,
    version: Version,
    reuse: Version | None,
    limit: int,
    place: int,
    listener: Listener,
    ticket: Ticket,
) -> Job:
    job = Job(request, version, limit, place, listener, ticket, reuse)
    for choice in range(request.sampling.n):
        generator = new_generator(request.sampling.seed, choice)
        job.sequences.append(Sequence(job, choice, list(request.prompt), generator))
    return job
