"""`POST /v1/completions`: passes requests to the engine and its events back, until the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from serve.engine.engine import Engine
from serve.engine.errors import EngineError, InvalidRequest
from serve.engine.request import DoneEvent, Event, FailedEvent, TokenEvent, Usage, collect
from serve.engine.sequence import Ticket
from serve.worker.errors import describe
from serve.worker.metrics import WorkerMetrics
from serve.worker.protocol import CompletionBody
from serve.worker.replies import CountedUsage, ReplyWriter

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do


class Submission:
    """The requests of one HTTP request in the engine. Closing it frees whatever of them still runs."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics, body: CompletionBody) -> None:
        self.body = body
        self._engine = engine
        self._metrics = metrics
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._open = len(body.prompts)
        self._ticket: Ticket = engine.submit(body.requests(), self._listen)

    def _listen(self, event: Event) -> None:
        """Runs on the engine's thread; the loop is gone when the process ends, and nobody waits then."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[Event]:
        """Yields events until each request has ended."""
        while self._open:
            event = await self._events.get()
            if isinstance(event, DoneEvent):
                self._open -= 1
                self._metrics.finished(event.usage)
            elif isinstance(event, FailedEvent):
                self._open -= 1
                self._metrics.ended("failed")
            yield event

    def close(self) -> None:
        """Ends what is left; call it however the HTTP request ended."""
        if self._open:
            self._open = 0
            self._metrics.ended("aborted")
            self._engine.abort(self._ticket)


class _Stream(StreamingResponse):
    """Server-sent events of a submission; closes it also when the client left before the first of them."""

    def __init__(self, submission: Submission, writer: ReplyWriter) -> None:
        super().__init__(_server_sent_events(submission, writer), media_type="text/event-stream")
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._submission.close()


def completions_router(engine: Engine, metrics: WorkerMetrics, max_prompts: int) -> APIRouter:
    """The endpoint, serving with `engine`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        try:
            _check(body, max_prompts)
            submission = Submission(engine, metrics, body)
        except EngineError:
            metrics.ended("refused")
            raise
        writer = ReplyWriter(f"cmpl-{uuid.uuid4().hex}", int(time.time()), body.model, body.n)
        return _Stream(submission, writer) if body.stream else await _whole(submission, writer, request)

    return router


def _check(body: CompletionBody, max_prompts: int) -> None:
    if not body.stream and body.stream_options is not None:
        raise InvalidRequest("stream_options needs stream=true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false")
    if len(body.prompts) > max_prompts:
        raise InvalidRequest(f"{len(body.prompts)} prompts are more than one request may hold ({max_prompts})")


async def _server_sent_events(submission: Submission, writer: ReplyWriter) -> AsyncIterator[bytes]:
    usages: list[Usage] = []
    options = submission.body.stream_options
    counted = CountedUsage() if options is not None and options.continuous_usage_stats else None
    async for event in submission.events():
        if isinstance(event, FailedEvent):
            yield _data(describe(event.error)[1])
            return
        if isinstance(event, TokenEvent):
            yield _data(writer.chunk(event) if counted is None else writer.counted_chunk(event, counted))
        else:
            usages.append(event.usage)
    if options is not None and options.include_usage:
        yield _data(writer.usage_chunk(usages))
    yield b"data: [DONE]\n\n"


def _data(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def _whole(submission: Submission, writer: ReplyWriter, request: Request) -> Response:
    """Waits for all replies, or for the client to leave."""
    gathering = asyncio.create_task(_gather(submission))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        by_request = gathering.result()
        return JSONResponse(writer.whole([collect(events, submission.body.n) for events in by_request]))
    finally:
        gathering.cancel()
        leaving.cancel()
        submission.close()


async def _gather(submission: Submission) -> list[list[Event]]:
    by_request: list[list[Event]] = [[] for _ in submission.body.prompts]
    async for event in submission.events():
        by_request[event.request].append(event)
    return by_request


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
