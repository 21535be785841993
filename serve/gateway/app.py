"""The ASGI application: routes, and the edge where every failure becomes an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.gateway import chat, feedback, memories, responses, sessions, system
from serve.gateway.bodies import ActivateBody, ChatBody, FeedbackBody, ForkBody, MemoryBody, ResponsesBody, SessionBody
from serve.gateway.deletion import sweep
from serve.gateway.errors import ApiError, internal, not_found
from serve.gateway.logs import event
from serve.gateway.service import Gateway, close_gateway, open_gateway
from serve.gateway.settings import GatewaySettings
from serve.gateway.streaming import ClientGone

# A body cut off by its client is answered like this, for the log's sake: nobody hears it.
_CLIENT_GONE = 499
_KEEP_SECONDS = 1.0
_POLLED = ("/health", "/metrics", "/internal/versions", "/internal/refresh")


def routes() -> list[APIRoute]:
    """Every route the gateway has, with the body it takes as OpenAPI is told."""
    router = APIRouter()
    for path, method, handler, body in (
        ("/v1/chat/completions", "POST", chat.create, ChatBody),
        ("/v1/responses", "POST", responses.create, ResponsesBody),
        ("/v1/responses/{response_id}", "GET", responses.read, None),
        ("/v1/responses/{response_id}", "DELETE", responses.delete, None),
        ("/v1/models", "GET", system.models, None),
        ("/v1/models/{model:path}", "GET", system.model, None),
        ("/v1/sessions", "POST", sessions.create, SessionBody),
        ("/v1/sessions", "GET", sessions.index, None),
        ("/v1/sessions/{session_id}", "GET", sessions.read, None),
        ("/v1/sessions/{session_id}", "DELETE", sessions.delete, None),
        ("/v1/sessions/{session_id}/fork", "POST", sessions.fork, ForkBody),
        ("/v1/memories", "POST", memories.create, MemoryBody),
        ("/v1/memories", "GET", memories.index, None),
        ("/v1/memories/{memory_id}", "GET", memories.read, None),
        ("/v1/memories/{memory_id}", "DELETE", memories.delete, None),
        ("/v1/feedback", "POST", feedback.create, FeedbackBody),
        ("/v1/kvloop/status", "GET", system.status, None),
        ("/internal/versions", "GET", system.versions, None),
        ("/internal/refresh", "GET", system.refresh, None),
        ("/internal/versions/activate", "POST", system.activate, ActivateBody),
        ("/health", "GET", system.health, None),
        ("/metrics", "GET", system.metrics, None),
    ):
        # Handlers read their bodies themselves: an unknown field must be answered in OpenAI's shape.
        content = {"application/json": {"schema": body.model_json_schema()}} if body else {}
        described = {"requestBody": {"required": True, "content": content}} if body else {}
        router.add_api_route(path, handler, methods=[method], response_model=None, openapi_extra=described)
    return [route for route in router.routes if isinstance(route, APIRoute)]


def create_app(settings: GatewaySettings) -> ASGIApp:
    """The application; it opens everything when its lifespan starts, and closes it when that ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = await open_gateway(settings)
        app.state.gateway = gateway
        loop = asyncio.get_running_loop()
        keepers = [
            loop.create_task(gateway.versions.keep(_KEEP_SECONDS)),
            loop.create_task(gateway.refresher.run()),
            loop.create_task(sweep(gateway, settings.sweep_seconds)),
        ]
        event("gateway started", workers=list(settings.workers), served=settings.served_name)
        try:
            yield
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
            await close_gateway(gateway)
            event("gateway stopped")

    app = FastAPI(
        title="kvloop",
        routes=list(routes()),
        lifespan=lifespan,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, ClientGone: _gone, Exception: _defect},
    )
    return Edge(app, settings.max_body_bytes)


class Edge:
    """Outermost: limits bodies, counts and logs requests, and keeps a defect from ending the connection badly."""

    def __init__(self, app: FastAPI, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._path_of = {route.endpoint: route.path for route in routes()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, ended = time.monotonic(), 0, False

        async def watched_send(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, self._limited(scope, receive), watched_send)
            if not ended:  # a stream that its client did not hear out
                status = _CLIENT_GONE
        except Exception as error:  # noqa: BLE001  (the edge of every request)
            # Starlette has answered already; what is left is to say why in the log.
            event("request failed", level=logging.ERROR, error=error, path=scope["path"])
        finally:
            route = self._path_of.get(scope.get("endpoint", _http_error), "unmatched")
            self._note(scope, route, status or _CLIENT_GONE, time.monotonic() - started)

    def _note(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        gateway: Gateway | None = getattr(self._app.state, "gateway", None)
        if gateway is not None:
            gateway.metrics.requests.labels(route, str(status)).inc()
            if status == _CLIENT_GONE:
                gateway.metrics.disconnects.inc()
        level = logging.DEBUG if route in _POLLED else logging.INFO
        event("request", level=level, method=scope["method"], route=route, status=status, seconds=round(seconds, 4))

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        declared = dict(scope["headers"]).get(b"content-length", b"")
        received = int(declared) if declared.isdigit() and int(declared) > self._max_body_bytes else 0

        async def limited_receive() -> Message:
            nonlocal received
            if received <= self._max_body_bytes:
                message = await receive()
                received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise ApiError(
                    413, f"The request body is larger than {self._max_body_bytes} bytes.", code="body_too_large"
                )
            return message

        return limited_receive


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    gateway: Gateway = request.app.state.gateway
    gateway.metrics.errors.labels(error.code or "none").inc()
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    place = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        told = not_found(f"There is no route {place}.")
    elif error.status_code == 405:
        told = ApiError(405, f"{place} is not allowed here.", code="method_not_allowed")
    else:
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        told = ApiError(error.status_code, error.detail, kind=kind)
    return JSONResponse(told.body(), error.status_code, headers=dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _defect(request: Request, error: Exception) -> Response:
    told = internal()
    return JSONResponse(told.body(), told.status)
