"""Pages of lists: how many entries a client wants."""

from __future__ import annotations

from starlette.requests import Request

from serve.gateway.errors import invalid

_MOST = 100


def page_limit(request: Request) -> int:
    """`limit` of the query, 1 to 100, by default 20. Raises `ApiError` 400."""
    given = request.query_params.get("limit", "20")
    if given.isdigit() and 1 <= int(given) <= _MOST:
        return int(given)
    raise invalid(f"'limit' is a number from 1 to {_MOST}, not '{given}'.", "limit", "invalid_value")
