"""Server-sent events, and noticing that a client has left.

Invariant: an event generator is run to its end or closed, whatever happens to the connection, so that what it holds
(a session, a version, a slot on a worker) is given back.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serve.gateway.errors import ApiError, internal
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; raises `ClientGone` then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watcher):
            pending.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await pending


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends a generator's events. Made by `start`, which waits for the first event: until then an error is an
    ordinary error response."""

    def __init__(self, events: AsyncGenerator[bytes], first: bytes, headers: Mapping[str, str]) -> None:
        self._events = events
        super().__init__(_with_first(first, events), media_type="text/event-stream", headers=dict(headers))

    @classmethod
    async def start(cls, request: Request, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> EventStream:
        """Waits for the first event. Raises what the generator raises, and `ClientGone`."""
        first = await until_gone(request, _next(events))
        return cls(events, first, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; closes the generator however this ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _with_first(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for entry in events:
        yield entry


def data(payload: Mapping[str, Any]) -> bytes:
    """One event without a name, as chat completions have them."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def named(name: str, payload: Mapping[str, Any]) -> bytes:
    """One event with a name, as responses have them."""
    return f"event: {name}\n".encode() + data(payload)


def told(error: Exception, metrics: Metrics) -> ApiError:
    """What a client hears of an exception in mid-stream. It is counted; a defect is logged with its traceback."""
    if not isinstance(error, ApiError):
        event("stream failed", level=logging.ERROR, error=error)
        error = internal()
    metrics.errors.labels(error.code or "none").inc()
    return error
