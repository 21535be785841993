"""The engine's side of KV memory: restores prompts and remembers sequences, in one thread of its own.

Requests are served in order, so a prompt that continues a reply which just ended finds that reply's KV. The engine's
thread never waits for this one. Everything is stored under the identity of the version that computed it.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from memory.kv.forget import Doomed, Forgotten
from memory.kv.identity import LAYOUT, KVIdentity, pack_ids
from memory.kv.stats import KVStats
from memory.kv.store import KVStore
from serve.engine.errors import EngineError
from serve.engine.sequence import Job, Restored, Sequence
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version

log = logging.getLogger(__name__)
LEAST_OBSERVED_TOKENS = 64  # shorter prefills say more about a step's fixed cost than about prefill speed

FORGET_SECONDS = 60.0
DELETION_BYTES = 1 << 26  # of token ids that are kept of deletions; the oldest have no request left that ran then

Deliver = Callable[[Job, tuple[Restored, ...]], None]


@dataclass(frozen=True)
class MemoryStats:
    """The store's own figures, and saves given up because too many were waiting."""

    store: KVStats
    rates: dict[str, float | None]
    dropped_saves: int


@dataclass(frozen=True)
class _Deletion:
    """What was forgotten, and when: requests that ran at that time must not bring it back."""

    at: float
    doomed: tuple[Doomed, ...]
    cache_salt: str

    @property
    def bytes(self) -> int:
        return sum(len(sequence.ids) for sequence in self.doomed)

    def covers(self, job: Job, token_ids: list[int]) -> bool:
        """Whether the job began before this deletion and holds what was deleted."""
        if job.submitted_at > self.at or job.request.cache_salt != self.cache_salt:
            return False
        ids = pack_ids(token_ids).tobytes()
        return any(sequence.is_held_by(0, ids) for sequence in self.doomed)


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
        self._deletions: deque[_Deletion] = deque()
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

    def forget(self, doomed: Many[Doomed], cache_salt: str) -> Forgotten:
        """Removes what holds these sequences from every tier; requests of the tenant that run now do not save them.

        Waits, after saves that were asked for before. Raises `EngineError` where it cannot be done.
        """
        done: Future[Forgotten] = Future()
        self._tasks.put(partial(self._forget, _Deletion(time.monotonic(), tuple(doomed), cache_salt), done))
        try:
            return done.result(FORGET_SECONDS)
        except (OSError, sqlite3.Error, TimeoutError) as error:
            raise EngineError(f"KV memory cannot forget: {error or type(error).__name__}") from error

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

    def _forget(self, deletion: _Deletion, done: Future[Forgotten]) -> None:
        self._deletions.append(deletion)
        while len(self._deletions) > 1 and sum(entry.bytes for entry in self._deletions) > DELETION_BYTES:
            self._deletions.popleft()
        try:
            done.set_result(self.store.forget_tokens(deletion.doomed))
        except Exception as error:
            done.set_exception(error)
            raise

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
            if any(deletion.covers(job, token_ids) for deletion in self._deletions):
                return
            identity = identity_of(job.version, job.request.cache_salt)
            self.store.save(identity, token_ids, as_array(kv)[:, :, :, : len(token_ids)])
        finally:
            with self._lock:
                self._waiting_bytes -= size
