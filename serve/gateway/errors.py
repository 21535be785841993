"""What a client is told when a request cannot be answered. Always OpenAI's error shape, never a traceback."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error with an HTTP status and OpenAI's four fields; raised anywhere below a route, answered at its edge."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds where trying again later can help."""
        return {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field OpenAI knows and this server does not carry out."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    """404; also the answer for what belongs to another tenant, so that nothing about it is told."""
    return ApiError(404, message, param=param, code=code)


def gone(message: str, param: str | None = None, code: str = "memory_gone") -> ApiError:
    """410: it was there and is not any more; trying again cannot help."""
    return ApiError(410, message, param=param, code=code)


def conflict(message: str, code: str) -> ApiError:
    """409: another request won; the client may try again."""
    return ApiError(409, message, code=code)


def overloaded(message: str, retry_after: float) -> ApiError:
    """429: the worker's queue is full."""
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", retry_after=retry_after)


def unavailable(message: str, retry_after: float = 5.0) -> ApiError:
    """503: no worker answers; the supervisor is expected to bring one back."""
    return ApiError(503, message, kind="server_error", code="worker_unavailable", retry_after=retry_after)


def internal() -> ApiError:
    """500: a defect here; the details are in the log, not in the answer."""
    return ApiError(
        500, "The server failed to answer this request; its log has the details.", kind="server_error", code="internal"
    )
