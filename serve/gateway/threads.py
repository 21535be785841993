"""The journal and the tokenizer block; the event loop must not. They run in a small pool of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Runs blocking calls, at most `count` at a time."""

    def __init__(self, count: int) -> None:
        self._limiter = anyio.CapacityLimiter(count)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, or what it raises. A call that began is finished even when the request is cancelled."""
        return await anyio.to_thread.run_sync(lambda: call(*args, **kwargs), limiter=self._limiter)
