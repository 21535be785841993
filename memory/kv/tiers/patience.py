"""Calls that may hang, on threads of their own: the caller waits only so long.

Invariants:
- No more than `at_once` calls run or hang at a time; beyond them a call fails at once when its time is over.
- A thread that hangs never keeps the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Patience:
    """Thread-safe."""

    def __init__(self, name: str, at_once: int) -> None:
        self._name = name
        self._free = threading.BoundedSemaphore(at_once)
        self._closed = threading.Event()

    def call(self, function: Callable[..., Any], *values: Any, seconds: float) -> Any:
        """What `function` returns or raises. Raises `TimeoutError` after `seconds`, and when this is closed."""
        deadline = time.monotonic() + seconds
        if self._closed.is_set() or not self._free.acquire(timeout=seconds):
            raise TimeoutError(f"no answer to earlier calls for {seconds} s")
        call = _Call(function, values, self._free.release)
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        while not call.done.wait(min(CLOSE_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._closed.is_set():
                raise TimeoutError(f"no answer for {seconds} s")
        if call.error is not None:
            raise call.error
        return call.result

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed.set()


CLOSE_LOOK_SECONDS = 0.25
"""How often one who waits looks whether it is worth it still."""


class _Call:
    """One call and what came of it."""

    def __init__(self, function: Callable[..., Any], values: tuple[Any, ...], after: Callable[[], None]) -> None:
        self._function = function
        self._values = values
        self._after = after
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """On a thread of its own."""
        try:
            self.result = self._function(*self._values)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self.error = error
        finally:
            self._after()
            self.done.set()
