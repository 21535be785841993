"""Errors as HTTP answers, in the shape of vLLM's server."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from serve.engine.errors import AdapterError, EngineClosed, EngineError, InvalidRequest, QueueFull, VersionNotFound

STATUS: dict[type[EngineError], tuple[int, str]] = {
    InvalidRequest: (400, "BadRequestError"),
    AdapterError: (400, "BadRequestError"),
    VersionNotFound: (404, "NotFoundError"),
    QueueFull: (429, "TooManyRequestsError"),
    EngineClosed: (503, "ServiceUnavailableError"),
}


def error_body(status: int, kind: str, message: str) -> dict[str, object]:
    """The body of every error."""
    return {"error": {"message": message, "type": kind, "code": status}}


def describe(error: EngineError) -> tuple[int, dict[str, object]]:
    """Returns the status and the body for an engine's error."""
    status, kind = STATUS.get(type(error), (500, "InternalServerError"))
    return status, error_body(status, kind, str(error))


async def on_engine_error(_: Request, error: Exception) -> JSONResponse:
    """Answers a request that the engine refused."""
    if not isinstance(error, EngineError):
        raise error
    status, body = describe(error)
    headers = {"Retry-After": f"{error.retry_after:.0f}"} if isinstance(error, QueueFull) else None
    return JSONResponse(body, status, headers)


async def on_invalid_body(_: Request, error: Exception) -> JSONResponse:
    """Answers a malformed body, naming the first field that is wrong."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    message = f"unknown field {where!r}" if first["type"] == "extra_forbidden" else f"{where}: {first['msg']}"
    return JSONResponse(error_body(400, "BadRequestError", message), 400)
