"""The background writer: one thread that encodes chunks and stores them, so that serving waits for no disk.

Invariants:
- Chunks are written in the order they came, after the uses reported before them. A chunk stays visible here until
  it is written or has failed.
- What waits never exceeds the budget; `submit` refuses instead of waiting.
- Of two that wait for one key the more exact is written; one that comes while the other is being written, after it.
- What is to be done later is done when nothing waits to be written or recorded, one step at a time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from memory.kv.fidelity import at_least
from memory.kv.tiers.base import ChunkData, Stored
from memory.kv.tiers.ram import usable

logger = logging.getLogger(__name__)
Use = tuple[bytes, float, int]
LATER = 64  # of what is done only where there is time, the oldest is left undone


class Writer:
    """Thread-safe. `write`, `touch` and what is given to `later` run on the writer's thread only. Close it."""

    def __init__(
        self,
        write: Callable[[ChunkData], bool],
        touch: Callable[[Iterable[Use]], None],
        written: Callable[[ChunkData], None],
        queue_bytes: int,
        nice: int,
    ) -> None:
        self._write = write
        self._touch = touch
        self._written = written
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._chunks: OrderedDict[bytes, ChunkData] = OrderedDict()
        self._uses: dict[bytes, Use] = {}
        self._bytes = 0
        self._busy: ChunkData | None = None
        self._later: deque[Iterator[None]] = deque(maxlen=LATER)
        self._touching = self._stepping = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(nice,), name="kvloop-kv-writer", daemon=True)
        self._thread.start()

    def submit(self, chunk: ChunkData) -> bool:
        """Takes a chunk to write; False where the queue is full or closed."""
        with self._changed:
            before = self._chunks.get(chunk.key)
            if before is not None and at_least(before.fidelity, chunk.fidelity) and not before.expired(time.time()):
                return True
            if self._closing or self._bytes + chunk.kv.nbytes > self._queue_bytes:
                return False
            self._bytes += chunk.kv.nbytes - (before.kv.nbytes if before is not None else 0)
            self._chunks[chunk.key] = chunk
            self._changed.notify_all()
            return True

    def use(self, keys: Iterable[bytes], stamp: float, hits: int) -> None:
        """Takes uses of stored chunks to record, when there is time."""
        with self._changed:
            for key in keys:
                before = self._uses.get(key, (key, 0.0, 0))
                self._uses[key] = (key, max(stamp, before[1]), hits + before[2])
            self._changed.notify_all()

    def later(self, steps: Iterator[None]) -> None:
        """Takes work to do step by step where there is time, or never."""
        with self._changed:
            self._later.append(steps)
            self._changed.notify_all()

    def get(self, key: bytes) -> ChunkData | None:
        """The chunk, if it still waits and has not expired."""
        with self._changed:
            chunk = self._chunks.get(key)
        return None if chunk is None or chunk.expired(time.time()) else chunk

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Those of `keys` that still wait. See `Lookup.find`."""
        with self._changed:
            chunks = [self._chunks[key] for key in keys if key in self._chunks]
        return usable(chunks)

    def lengths(self, parent: bytes) -> list[int]:
        """See `Lookup.lengths`."""
        with self._changed:
            return sorted({chunk.tokens for chunk in self._chunks.values() if chunk.parent == parent})

    def siblings(self, parent: bytes, limit: int) -> list[Stored]:
        """See `Lookup.siblings`."""
        with self._changed:
            waiting = [chunk for chunk in reversed(self._chunks.values()) if chunk.parent == parent]
        return list(usable(waiting).values())[:limit]

    def owned_by(self, owners: Collection[bytes]) -> list[bytes]:
        """Keys of the chunks of these owners that wait or are being written."""
        with self._changed:
            return [chunk.key for chunk in self._chunks.values() if chunk.owner in owners]

    @property
    def waiting_bytes(self) -> int:
        """Raw KV that waits."""
        with self._changed:
            return self._bytes

    def cancel(self, keys: Iterable[bytes] | None = None) -> int:
        """Forgets chunks that wait; returns how many, when none of them is being written any more. By default all, and
        what was to be done later."""
        with self._changed:
            if keys is None:
                self._later.clear()
                self._changed.wait_for(lambda: not self._stepping)
            wanted = set(self._chunks) if keys is None else set(keys)
            waiting = [key for key in wanted & set(self._chunks) if self._chunks[key] is not self._busy]
            for key in waiting:
                self._bytes -= self._chunks.pop(key).kv.nbytes
            self._changed.wait_for(lambda: self._busy is None or self._busy.key not in wanted)
            self._changed.notify_all()
            return len(waiting)

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is left to do; False when it takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waits() or self._touching or self._stepping), timeout)

    def close(self, timeout: float) -> bool:
        """Takes nothing more, waits up to `timeout` seconds for what is queued, drops the rest, ends the thread."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._later.clear()
        done = self.flush(timeout)
        with self._changed:
            for key in [key for key, chunk in self._chunks.items() if chunk is not self._busy]:
                self._bytes -= self._chunks.pop(key).kv.nbytes
            self._changed.notify_all()
        self._thread.join(max(1.0, deadline - time.monotonic()))
        return done

    def _waits(self) -> bool:
        return bool(self._chunks or self._uses or self._later)

    def _run(self, nice: int) -> None:
        _lower_priority(nice)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waits() or self._closing)
                chunk = next(iter(self._chunks.values()), None)
                uses = list(self._uses.values())
                steps = self._later[0] if self._later and not (chunk or uses) else None
                if not (chunk or uses or steps):
                    return
                self._busy = chunk
                self._touching, self._stepping = bool(uses), steps is not None
                self._uses.clear()
            if uses:
                self._record(uses)  # first: a chunk must not drive out the beginning of its own sequence
            if chunk is not None:
                self._store(chunk)
            if steps is not None:
                self._step(steps)

    def _store(self, chunk: ChunkData) -> None:
        try:
            if self._write(chunk):
                self._written(chunk)
        except Exception:
            logger.exception("writing a chunk of KV memory failed")
        finally:
            with self._changed:
                if self._chunks.get(chunk.key) is chunk:
                    self._bytes -= self._chunks.pop(chunk.key).kv.nbytes
                self._busy = None
                self._changed.notify_all()

    def _record(self, uses: list[Use]) -> None:
        try:
            self._touch(uses)
        except Exception:
            logger.exception("recording uses of KV memory failed")
        finally:
            with self._changed:
                self._touching = False
                self._changed.notify_all()

    def _step(self, steps: Iterator[None]) -> None:
        more = False
        try:
            more = next(steps, steps) is not steps
        except Exception:
            logger.exception("moving KV memory to RAM failed")
        finally:
            with self._changed:
                self._stepping = False
                if not more and self._later and self._later[0] is steps:
                    self._later.popleft()
                self._changed.notify_all()


def _lower_priority(nice: int) -> None:
    """On Linux a thread has a niceness of its own: encoding then takes only time that serving leaves."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        logger.info("the writer of KV memory keeps its priority: %s", error)
