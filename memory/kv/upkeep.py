"""The work that KV memory does when nobody waits: expiry, the ladder, moving out, the scrubber.

Invariants:
- One thread a process, at the lowest priority; over all processes of a folder one at a time works, and another takes
  over when it ends or dies: the kernel frees its lock.
- What fails is counted, logged when it begins to fail, and tried again the next time; it stops none of the rest.
- Closing ends the thread within a second: it looks between two chunks, and waits for no remote.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory.kv.counters import Counters
from memory.kv.fidelity import FidelityRecords
from memory.kv.ladder import SETTLE_SECONDS, Ladder, Moved
from memory.kv.offload import Offload
from memory.kv.scrub import Scrubbed, Scrubber
from memory.kv.settings import KVSettings
from memory.kv.tiers.disk import DiskTier

logger = logging.getLogger(__name__)
LOCK_NAME = "upkeep.lock"
NICE = 19
TICK_SECONDS = 5.0
"""How often it looks for pressure and for a lock that became free, and scrubs a little."""
STEP_CHUNKS = 512
"""Chunks that one step rewrites at most, or deletes at once."""
LONGEST_SCRUB_SECONDS = 60.0
RECONCILE_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class UpkeepStats:
    """What the upkeep of this process has done."""

    active: bool
    """Whether it is this process that works on the folder."""
    moved: Moved
    scrubbed: Scrubbed
    expired: int
    offloaded: int
    errors: int
    trouble: str
    """What failed in the last step; empty while all is well."""


class Upkeep:
    """Thread-safe. `start` makes the thread; tests call `step`. Close it."""

    def __init__(
        self,
        disk: DiskTier,
        settings: KVSettings,
        records: FidelityRecords,
        counters: Counters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._remote = disk.remote
        self._clock = clock
        self._stop = threading.Event()
        stopped = self._stop.is_set
        self._ladder = Ladder(disk, settings, records, stopped, clock)
        self._scrubber = Scrubber(disk, counters, settings.disk_bytes, stopped, clock)
        self._offload = Offload(disk, disk.remote, stopped) if disk.remote is not None else None
        self._lock: int | None = None
        self._working = threading.Lock()
        self._failing: dict[str, str] = {}
        self._expired = self._offloaded = self._errors = 0
        self._round_at = self._scrubbed_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, unless `upkeep_seconds` is 0."""
        if self._settings.upkeep_seconds > 0 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvloop-kv-upkeep", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and lets another process work. The remote tier is closed, so that nothing waits for it."""
        self._stop.set()
        if self._remote is not None:
            self._remote.close()
        if self._thread is not None:
            self._thread.join(5.0)
            if self._thread.is_alive():
                logger.warning("the upkeep of KV memory does not end: a disk hangs")
                return
        self._release()

    def stats(self) -> UpkeepStats:
        """What was done so far."""
        return UpkeepStats(
            active=self._lock is not None,
            moved=self._ladder.done,
            scrubbed=self._scrubber.done,
            expired=self._expired,
            offloaded=self._offloaded,
            errors=self._errors,
            trouble="; ".join(f"{name}: {error}" for name, error in self._failing.items()),
        )

    # the work

    def step(self, scrub_bytes: int = 0) -> bool:
        """One round of everything; False where another process works on the folder."""
        return self._do(
            [
                ("what killed writers left", self._disk.settle),
                ("expiry", self._expire),
                ("agreeing after a start of the machine", self._scrubber.after_boot),
                ("the ladder by age", lambda: self._ladder.by_age(STEP_CHUNKS)),
                ("room", self._relieve),
                ("the remote tier", self._mind_remote),
                ("the scrubber", lambda: self._scrubber.step(scrub_bytes) if scrub_bytes else None),
            ]
        )

    def tick(self) -> bool:
        """What cannot wait for the next round: room, and a little scrubbing."""
        elapsed = min(time.monotonic() - self._scrubbed_at, LONGEST_SCRUB_SECONDS)
        self._scrubbed_at = time.monotonic()
        size = int(elapsed * self._settings.scrub_bytes_per_second)
        return self._do([("room", self._relieve), ("the scrubber", lambda: self._scrubber.step(size))])

    def _do(self, parts: Sequence[tuple[str, Callable[[], object]]]) -> bool:
        with self._working:
            if not self._try("the lock", self._acquire) or self._lock is None:
                return False
            if not self._try("the index", self._disk.maintain) or self._disk.index.path is None:
                return True
            for name, part in parts:
                if not self._stop.is_set():
                    self._try(name, part)
            return True

    def _try(self, name: str, part: Callable[[], object]) -> bool:
        """Does one part of the work; whether it did not fail."""
        try:
            part()
        except Exception as error:
            self._errors += 1
            if name not in self._failing:
                logger.warning(
                    "upkeep of KV memory: %s fails: %s", name, error, exc_info=not isinstance(error, OSError)
                )
            self._failing[name] = str(error)
            return False
        self._failing.pop(name, None)
        return True

    def _expire(self) -> None:
        """Deletes what may not be handed out any more."""
        while keys := self._disk.index.expired(self._clock(), STEP_CHUNKS):
            gone = self._disk.drop(keys)
            self._expired += gone
            if self._stop.is_set() or not gone:
                return

    def _relieve(self) -> None:
        """Makes room ahead of need: down the ladder first, then out to the remote tier."""
        if self._ladder.pressed():
            self._ladder.by_budget(STEP_CHUNKS)
        excess = self._ladder.excess()
        if self._offload is not None and excess > 0:
            self._offloaded += self._offload.step(excess, self._clock() - SETTLE_SECONDS)

    def _mind_remote(self) -> None:
        if self._remote is None or not self._remote.available:
            return
        self._remote.retry()
        if self._remote.listed_at() + RECONCILE_SECONDS < self._clock():
            self._remote.reconcile(lambda owner: not self._disk.keys.is_destroyed(owner), self._stop.is_set)

    # the thread

    def _run(self) -> None:
        _lower_priority()
        pause = min(self._settings.upkeep_seconds, TICK_SECONDS)
        while not self._stop.wait(pause):
            if time.monotonic() - self._round_at >= self._settings.upkeep_seconds:
                self._round_at = time.monotonic()
                self.step()
            self.tick()

    def _acquire(self) -> None:
        """Takes the folder's lock for upkeep, if nobody has it. Raises `OSError` where that cannot be told."""
        if self._lock is not None and _is_at(self._lock, self._path):
            return
        self._release()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            return
        self._lock = descriptor

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            os.close(lock)
        except OSError as error:  # the descriptor is gone, and with it the lock, whatever closing says
            logger.warning("upkeep of KV memory: closing its lock fails: %s", error)

    @property
    def _path(self) -> Path:
        return self._disk.folder.root / LOCK_NAME


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is open is the one at `path`: the folder may have been deleted and made again."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _lower_priority() -> None:
    """On Linux a thread has a niceness of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError as error:
        logger.info("the upkeep of KV memory keeps its priority: %s", error)
