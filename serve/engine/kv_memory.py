"""The engine's side of KV memory: restores prompts and remembers sequences, in one thread of its own.

Requests are served in order, so a prompt that continues a reply which just ended finds that reply's KV. The engine's
thread never waits for this one. Everything is stored under the identity of the version that computed it, and as no
more exact than what it was computed over; what was computed over another version's KV is not stored at all.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from memory.kv.fidelity import RUNGS, Fidelity
from memory.kv.forget import Forgotten
from memory.kv.identity import Ids
from memory.kv.stats import KVStats
from memory.kv.store import KVStore
from serve.engine.bands import Band, as_array, entering_band, identity_of, kv_bands
from serve.engine.errors import EngineError
from serve.engine.pages import Buffer
from serve.engine.restore import Restorer
from serve.engine.sequence import NOTHING, Job, Restoration, Sequence
from serve.engine.settings import EngineSettings

__all__ = ["KVMemory", "MemoryStats", "as_array", "identity_of", "open_memory"]
log = logging.getLogger(__name__)

FORGET_SECONDS = 60.0
REMEMBERED_DELETIONS = 1 << 16  # of owners; those deleted longest ago have no request left that ran then
PROGRESS_TOKENS = 1024
"""While a prompt is computed, its KV is stored whenever so many tokens are complete, or an eighth of those there are:
each time costs a pass over the keys of the whole sequence, which would be quadratic in small steps."""
RUNGS_SECONDS = 60.0
ROOM_PAUSE, ROOM_SECONDS = 0.05, 5.0
"""How long the end of a long sequence waits for the writer while nothing else is asked of memory."""

Deliver = Callable[[Job, Buffer, Restoration], None]


@dataclass(frozen=True)
class Rung:
    """What the disk and the remote tier hold at one fidelity."""

    fidelity: Fidelity
    tokens: int
    """Tokens, each counted once for each band that is stored of it."""
    bytes: int


@dataclass(frozen=True)
class MemoryStats:
    """The store's own figures, and saves given up because too many were waiting. `rungs` may be a minute old."""

    store: KVStats
    rates: dict[str, float | None]
    dropped_saves: int
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True)
class _Save:
    """The tokens of a sequence from `start` on that are to be remembered; the buffer is held until `ended` is called.

    A `final` one waits where the writer has no room; the others are tried again as the prompt grows.
    """

    job: Job
    ids: Ids
    start: int
    buffer: Buffer
    fidelity: Fidelity
    entering_from: int
    ended: Callable[[_Save], None]
    final: bool
    waited: float = 0.0


class _Rungs:
    """Sums over the whole index, which are read anew once a minute at most."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read_at = -RUNGS_SECONDS
        self._rungs: tuple[Rung, ...] = ()

    def get(self) -> tuple[Rung, ...]:
        """One entry for each fidelity that something is stored at."""
        with self._lock:
            if time.monotonic() - self._read_at >= RUNGS_SECONDS:
                holdings = self._store.report()
                self._read_at = time.monotonic()
                self._rungs = tuple(
                    Rung(
                        fidelity,
                        sum(each.tokens for each in holdings if each.fidelity == fidelity),
                        sum(each.bytes for each in holdings if each.fidelity == fidelity),
                    )
                    for fidelity in RUNGS
                    if any(each.fidelity == fidelity for each in holdings)
                )
            return self._rungs


def open_memory(settings: EngineSettings) -> KVMemory | None:
    """Opens the memory that `settings` describes; None when there is no folder for it."""
    if settings.kv_folder is None:
        return None
    return KVMemory(KVStore(settings.kv, settings.kv_folder))


class KVMemory:
    """`restore`, `save`, `save_progress` and the `observe_` methods are called from the engine's thread and return at
    once."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._coming_back = 0  # saves among the tasks that found no room; the thread's own
        self._dropped_saves = 0
        self._rungs = _Rungs(store)
        self._deletions: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="kv-memory", daemon=True)
        self._thread.start()

    def restore(self, job: Job, deliver: Deliver) -> bool:
        """Fills the buffer of the job's first sequence with what is stored; `deliver` is told how far, once.

        False when there is nothing to look for; then `deliver` is not called.
        """
        sequence = job.leader
        if job.scores_prompt or sequence.buffer is None or len(sequence.tokens) <= self.store.settings.min_tokens:
            return False
        ids = sequence.ids(len(sequence.tokens))
        self._tasks.put(partial(self._restore, job, ids, sequence.buffer.hold(), deliver))
        return True

    def save(self, sequence: Sequence) -> None:
        """Remembers the computed tokens of a sequence that ends here. Its buffer is read later, and not changed.

        Sequences that wait for this keep their buffers; beyond `KVSettings.queue_bytes` of them, one is dropped.
        """
        buffer = sequence.buffer
        if buffer is None or not self._is_to_be_saved(sequence):
            return
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + buffer.reserved > self.store.settings.queue_bytes:
                self._dropped_saves += 1
                return
            self._waiting_bytes += buffer.reserved
        self._tasks.put(partial(self._save, self._save_of(sequence, sequence.computed, 0, self._end_save, final=True)))

    def save_progress(self, sequence: Sequence) -> None:
        """Remembers what is complete of a prompt that is still being computed, now and then."""
        size = self.store.settings.chunk_tokens
        complete = sequence.computed // size * size
        pause = max(PROGRESS_TOKENS, min(sequence.computed // 8, self._batch_tokens(sequence.job)))
        if sequence.buffer is None or sequence.saving or complete - sequence.saved < pause:
            return
        if not self._is_to_be_saved(sequence):
            return
        sequence.saving = True

        def ended(save: _Save) -> None:
            save.buffer.let_go()
            if sequence.buffer is save.buffer:
                sequence.saved = save.start
            sequence.saving = False

        self._tasks.put(partial(self._save, self._save_of(sequence, complete, sequence.saved, ended, final=False)))

    def observe_prefill(self, tokens: int, seconds: float, start: int) -> None:
        """Tells the cost model how long a step with `tokens` prompt tokens from position `start` on took."""
        self.store.cost.observe_prefill(tokens, seconds, start)

    def observe_lift(self, tokens: int, seconds: float, start: int) -> None:
        """The same of tokens that were computed from the first layer on that is not shared."""
        self.store.cost.observe_lift(tokens, seconds, start)

    def forget(self, owners: Many[str], cache_salt: str) -> Forgotten:
        """Removes what was stored on behalf of these owners from every tier; their requests that run now save nothing.

        Waits, after saves that were asked for before. Raises `EngineError` where it cannot be done.
        """
        done: Future[Forgotten] = Future()
        self._tasks.put(partial(self._forget, tuple(owners), cache_salt, time.monotonic(), done))
        try:
            return done.result(FORGET_SECONDS)
        except (OSError, sqlite3.Error, TimeoutError) as error:
            raise EngineError(f"KV memory cannot forget: {error or type(error).__name__}") from error

    def stats(self) -> MemoryStats:
        """Returns what memory holds and did."""
        return MemoryStats(self.store.stats(), self.store.cost.rates(), self._dropped_saves, self._rungs.get())

    def flush(self, timeout: float) -> bool:
        """Waits until everything given to `save` so far is on disk; False when `timeout` seconds were not enough."""
        deadline = time.monotonic() + timeout
        done = threading.Event()

        def pass_by() -> None:
            if self._coming_back and time.monotonic() < deadline:
                self._tasks.put(pass_by)  # behind the saves that wait for room
            else:
                done.set()

        self._tasks.put(pass_by)
        return done.wait(timeout) and self.store.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Writes out what was given to `save` and ends the threads."""
        self._tasks.put(None)
        self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None or self._coming_back:
            if task is None:
                self._tasks.put(None)  # the end comes after the saves that wait for room
                continue
            try:
                task()
            except Exception:  # memory may cost time, never an answer: later tasks still run
                log.exception("KV memory failed at a task; what it was to restore is computed")

    def _forget(self, owners: tuple[str, ...], cache_salt: str, at: float, done: Future[Forgotten]) -> None:
        for owner in owners:
            self._deletions[cache_salt, owner] = at
            self._deletions.move_to_end((cache_salt, owner))
        while len(self._deletions) > REMEMBERED_DELETIONS:
            self._deletions.popitem(last=False)
        try:
            done.set_result(self.store.forget_owners(cache_salt, owners))
        except Exception as error:
            done.set_exception(error)
            raise

    def _is_forgotten(self, job: Job) -> bool:
        """Whether the job's owner was deleted since it began."""
        deleted_at = self._deletions.get((job.request.cache_salt, job.request.kv.owner))
        return deleted_at is not None and job.submitted_at <= deleted_at

    def _restore(self, job: Job, ids: Ids, buffer: Buffer, deliver: Deliver) -> None:
        restored = NOTHING
        try:
            if not job.ticket.aborted:
                restored = Restorer(self.store, job, ids, buffer).run()
        finally:
            buffer.let_go()
            deliver(job, buffer, restored)

    # saving

    def _is_to_be_saved(self, sequence: Sequence) -> bool:
        if not sequence.job.remembers or sequence.fidelity == "stale":
            return False
        return sequence.computed >= self.store.settings.min_tokens

    def _save_of(
        self, sequence: Sequence, tokens: int, start: int, ended: Callable[[_Save], None], *, final: bool
    ) -> _Save:
        if sequence.buffer is None or sequence.fidelity == "stale":
            raise RuntimeError("a sequence without KV of its own cannot be remembered")
        return _Save(
            job=sequence.job,
            ids=sequence.ids(tokens),
            start=start,
            buffer=sequence.buffer.hold(),
            fidelity=sequence.fidelity,
            entering_from=sequence.entering_from,
            ended=ended,
            final=final,
        )

    def _batch_tokens(self, job: Job) -> int:
        """Tokens whose raw KV takes a quarter of the writer's queue, in whole chunks."""
        size = self.store.settings.chunk_tokens
        per_token = job.version.decoder.buffer_bytes_per_token
        return max(1, self.store.settings.queue_bytes // 4 // per_token // size) * size

    def _end_save(self, save: _Save) -> None:
        save.buffer.let_go()
        with self._lock:
            self._waiting_bytes -= save.buffer.reserved

    def _save(self, save: _Save) -> None:
        """Stores the sequence batch by batch, as long as the writer has room."""
        comes_back = False
        self._coming_back -= bool(save.waited)
        try:
            while save.start < len(save.ids) and self._has_room(save) and not self._is_forgotten(save.job):
                end = min(len(save.ids), save.start + self._batch_tokens(save.job))
                self._store(save, end)
                save = replace(save, start=end)
            left = save.start < len(save.ids) and not self._is_forgotten(save.job)
            comes_back = left and save.final and save.waited < ROOM_SECONDS
        finally:
            if not comes_back:
                save.ended(save)
        if comes_back:
            began = time.monotonic()
            self.store.flush(ROOM_PAUSE if self._tasks.empty() else ROOM_PAUSE / 50)
            waited = save.waited + time.monotonic() - began
            self._coming_back += 1
            self._tasks.put(partial(self._save, replace(save, waited=waited)))

    def _has_room(self, save: _Save) -> bool:
        """Whether the next batch fits the writer's queue. The first of a sequence is always tried."""
        if not save.start:
            return True
        size = self._batch_tokens(save.job) * save.job.version.decoder.buffer_bytes_per_token
        return self.store.stats().waiting_bytes + size <= self.store.settings.queue_bytes

    def _store(self, save: _Save, end: int) -> None:
        """Stores the tokens [start, end) of every band."""
        salt = save.job.request.cache_salt
        for band in kv_bands(save.job.version, salt):
            self._store_band(save, band, save.start, end)
        entering = entering_band(save.job.version, salt)
        if entering is not None:
            start = max(save.start, self._first_entering(save, entering))
            if start < end:
                self._store_band(save, entering, start, end)

    def _store_band(self, save: _Save, band: Band, start: int, end: int) -> None:
        kv = save.job.request.kv
        self.store.save(
            band.identity,
            save.ids[:end],
            band.of(save.buffer)[:, :, :, start:end],
            start,
            owner=kv.owner,
            fidelity=save.fidelity,
            expires=kv.expires_at,
        )

    def _first_entering(self, save: _Save, band: Band) -> int:
        """The first position from which states can be stored. A chunk that begins among tokens which were restored
        without them is completed from what is stored."""
        size = self.store.settings.chunk_tokens
        first = save.entering_from // size * size
        if first == save.entering_from or save.start > first:
            return first
        match = self.store.match(band.identity, save.ids[: save.entering_from])
        last = match.chunks[-1] if match.chunks else None
        if last is not None and last.start == first and last.start + last.tokens == save.entering_from:
            loaded = self.store.load_from(band.identity, replace(match, chunks=(last,)), band.of(save.buffer))
            if loaded and loaded[0].fidelity == "exact":
                return first
        return first + size
