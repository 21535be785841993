"""The engine's side of KV memory: restores prompts and remembers sequences, in one thread of its own.

Requests are served in order, so a prompt that continues a reply which just ended finds that reply's KV. The engine's
thread never waits for this one. Everything is stored under the identity of the version that computed it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from memory.kv.identity import LAYOUT, KVIdentity
from memory.kv.stats import KVStats
from memory.kv.store import KVStore
from serve.engine.sequence import Job, Restored, Sequence
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version

log = logging.getLogger(__name__)
LEAST_OBSERVED_TOKENS = 64  # shorter prefills say more about a step's fixed cost than about prefill speed

Deliver = Callable[[Job, tuple[Restored, ...]], None]


@dataclass(frozen=True)
class MemoryStats:
    """The store's own figures, and saves given up because too many were waiting."""

    store: KVStats
    rates: dict[str, float | None]
    dropped_saves: int


def open_memory(settings: EngineSettings) -> KVMemory | None:
    """Opens the memory that `settings` describes; None when there is no folder for it."""
    if settings.kv_folder is None:
        return None
    return KVMemory(KVStore(settings.kv, settings.kv_folder))


def identity_of(version: Version, cache_salt: str) -> KVIdentity:
    """Everything that the KV of `version` depends on besides the token ids."""
    decoder = version.decoder
    return KVIdentity(
        weights_id=version.weights_id,
        compute_format=version.compute_format,
        kv_dtype=str(decoder.dtype).removeprefix("torch."),
        layers=decoder.config.layers,
        kv_heads=decoder.config.kv_heads,
        head_dim=decoder.config.head_dim,
        layout=LAYOUT,
        rope=decoder.config.rope_json,
        attention=decoder.config.attention_json,
        tenant_secret=cache_salt,
    )


def as_array(kv: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the same memory as a numpy array; bf16 as its bits in uint16."""
    if kv.dtype == torch.bfloat16:
        bits: np.ndarray[Any, Any] = kv.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray[Any, Any] = kv.numpy()
    return array


class KVMemory:
    """`restore`, `save` and `observe_prefill` are called from the engine's thread and return at once."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped_saves = 0
        self._thread = threading.Thread(target=self._run, name="kv-memory", daemon=True)
        self._thread.start()

    def restore(self, job: Job, deliver: Deliver) -> bool:
        """Fills the buffer of the job's first sequence with what is stored; `deliver` is told how far, once.

        False when there is nothing to look for; then `deliver` is not called.
        """
        buffer = job.leader.buffer
        if job.scores_prompt or buffer is None or len(job.request.prompt) <= self.store.settings.min_tokens:
            return False
        self._tasks.put(partial(self._restore, job, buffer.kv, deliver))
        return True

    def save(self, sequence: Sequence) -> None:
        """Remembers the computed tokens of a sequence that ends here. Its buffer is read later, and not changed.

        Sequences that wait for this keep their buffers; beyond `KVSettings.queue_bytes` of them, one is dropped.
        """
        job, buffer = sequence.job, sequence.buffer
        if buffer is None or not job.request.kv_save or job.scores_prompt:
            return
        if sequence.computed < self.store.settings.min_tokens:
            return
        size = buffer.reserved
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > self.store.settings.queue_bytes:
                self._dropped_saves += 1
                return
            self._waiting_bytes += size
        token_ids = sequence.tokens[: sequence.computed]
        self._tasks.put(partial(self._save, job, token_ids, buffer.kv, size))

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tells the cost model how long computing `tokens` prompt tokens took."""
        if tokens >= LEAST_OBSERVED_TOKENS:
            self.store.cost.observe_prefill(tokens, seconds)

    def stats(self) -> MemoryStats:
        """Returns what memory holds and did."""
        return MemoryStats(self.store.stats(), self.store.cost.rates(), self._dropped_saves)

    def flush(self, timeout: float) -> bool:
        """Waits until everything given to `save` so far is on disk; False when `timeout` seconds were not enough."""
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout) and self.store.flush(timeout)

    def close(self) -> None:
        """Writes out what was given to `save` and ends the threads."""
        self._tasks.put(None)
        self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # memory may cost time, never an answer: later tasks still run
                log.exception("KV memory failed at a task; what it was to restore is computed")

    def _restore(self, job: Job, kv: torch.Tensor, deliver: Deliver) -> None:
        restored: tuple[Restored, ...] = ()
        try:
            if not job.ticket.aborted:
                restored = self._load(job, kv)
        finally:
            deliver(job, restored)

    def _load(self, job: Job, kv: torch.Tensor) -> tuple[Restored, ...]:
        """Loads what pays; the prompt's last token is always left to compute, since its logits are needed."""
        identity = identity_of(job.version, job.request.cache_salt)
        prompt = job.request.prompt
        match = self.store.match(identity, prompt[:-1])
        match = match.limited(self.store.cost.tokens_to_load(match, len(prompt)))
        if not match.chunks:
            return ()
        restored: list[Restored] = []
        for tokens, source in self.store.load_from(identity, match, as_array(kv)):
            if restored and restored[-1].source == source:
                tokens += restored.pop().tokens
            restored.append(Restored(tokens, source))
        return tuple(restored)

    def _save(self, job: Job, token_ids: list[int], kv: torch.Tensor, size: int) -> None:
        try:
            identity = identity_of(job.version, job.request.cache_salt)
            self.store.save(identity, token_ids, as_array(kv)[:, :, :, : len(token_ids)])
        finally:
            with self._lock:
                self._waiting_bytes -= size
