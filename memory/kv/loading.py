"""Loading the chunks of a match on threads that may hang, without hanging who asked.

Invariants:
- Results come in order, and none after the first chunk that did not come.
- Once `run` has returned or raised, nothing writes into the caller's memory any more: a thread that wakes up on a disk
  that had stalled finds its place taken back. So writing happens inside `Place.writing`, and only there.
- A thread that hangs keeps no process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class TakenBack(Exception):
    """Who asked has gone on without this chunk."""


class Place:
    """Memory of the caller, lent for one chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken_back = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the place; short, for the caller may wait for it. Raises `TakenBack`."""
        with self._lock:
            if self._taken_back:
                raise TakenBack
            yield

    def take_back(self) -> None:
        """Waits for who is writing; nobody writes afterwards."""
        with self._lock:
            self._taken_back = True


class Loaders:
    """So many threads, started at the first use. Thread-safe. Close it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0

    def run(
        self, items: Sequence[Item], load: Callable[[Item, Place], Result | None], patience: float
    ) -> tuple[list[Result], bool]:
        """What `load` made of the items, up to the first None, and whether that took too long: `patience` seconds
        without a result. Raises what `load` raises."""
        work = _Work(items, load)
        for _ in range(min(self.threads, len(items))):
            self._tasks.put(work.run)
        self._start()
        return work.wait(patience)

    def _start(self) -> None:
        with self._lock:
            while self._started < self.threads:
                self._started += 1
                threading.Thread(target=self._serve, name="kvloop-kv-load", daemon=True).start()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        """Ends the threads when they have nothing left to do; waits for none."""
        for _ in range(self.threads):
            self._tasks.put(None)


class _Work(Generic[Item, Result]):
    """The items of one load, and what has become of them."""

    def __init__(self, items: Sequence[Item], load: Callable[[Item, Place], Result | None]) -> None:
        self._items = items
        self._load = load
        self._places = [Place() for _ in items]
        self._results: list[Result | None] = [None] * len(items)
        self._done = [False] * len(items)
        self._changed = threading.Condition()
        self._next = 0
        self._end = len(items)  # no item from here on is wanted
        self._error: BaseException | None = None

    def run(self) -> None:
        """On each of the threads: takes the next item until there is none."""
        while (number := self._take()) is not None:
            result: Result | None = None
            error: BaseException | None = None
            try:
                result = self._load(self._items[number], self._places[number])
            except TakenBack:
                return
            except BaseException as raised:  # noqa: BLE001  # raised again where it is waited for
                error = raised
            self._finish(number, result, error)

    def _take(self) -> int | None:
        with self._changed:
            if self._next >= self._end:
                return None
            self._next += 1
            return self._next - 1

    def _finish(self, number: int, result: Result | None, error: BaseException | None) -> None:
        with self._changed:
            self._results[number] = result
            self._done[number] = True
            self._error = self._error or error
            if result is None:
                self._end = min(self._end, number)
            self._changed.notify_all()

    def wait(self, patience: float) -> tuple[list[Result], bool]:
        """See `Loaders.run`."""
        stalled = False
        with self._changed:
            seen = -1
            deadline = 0.0
            while not all(self._done[: self._end]):
                done = sum(self._done)
                if done != seen:
                    seen, deadline = done, time.monotonic() + patience
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    stalled = True
                    self._end = self._done.index(False)
            end = self._end
        for place in self._places[end:]:
            place.take_back()
        if self._error is not None:
            raise self._error
        return [result for result in self._results[:end] if result is not None], stalled
