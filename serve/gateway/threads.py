"""The journal and the tokenizer block; the event loop must not. They run in a small pool of threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy.exc import OperationalError

from serve.gateway.errors import ApiError
from serve.gateway.logs import event

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Runs blocking calls, at most `count` at a time."""

    def __init__(self, count: int) -> None:
        self._limiter = anyio.CapacityLimiter(count)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, or what it raises. A call that began is finished even when the request is cancelled.

        A database that is locked, full or gone is `ApiError` 503: nothing was written, and trying again may help.
        """
        try:
            return await anyio.to_thread.run_sync(lambda: call(*args, **kwargs), limiter=self._limiter)
        except OperationalError as error:
            event("journal failed", level=logging.ERROR, reason=str(error.orig))
            raise ApiError(
                503,
                f"The journal could not be used ({error.orig}); nothing of this request was kept. Try again later.",
                kind="server_error",
                code="journal_unavailable",
                retry_after=5.0,
            ) from error
