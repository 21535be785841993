"""Pages of lists, newest first: `limit` (1 to 100) and `after` (the last id of the page before) page through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from memory.journal.errors import NotFound
from serve.gateway.errors import invalid, not_found
from serve.gateway.service import Gateway

Json = dict[str, Any]
Entry = TypeVar("Entry")
_MOST = 100


async def page(
    request: Request, kind: str, read: Callable[[str, int, str | None], list[Entry]], show: Callable[[Entry], Json]
) -> JSONResponse:
    """The page of the tenant's entries that the client asked for; `read` is given tenant, count and `after`.

    Raises `ApiError`: 400 for a limit that is none, 404 for an `after` that is not there.
    """
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    limit = _limit(request)
    after = request.query_params.get("after")
    try:
        # One more than asked for tells whether there is another page.
        found = await gateway.threads.run(read, tenant, limit + 1, after)
    except NotFound as error:
        raise not_found(f"{kind.capitalize()} '{after}' was not found.", "after") from error
    shown = [show(entry) for entry in found[:limit]]
    edges = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return JSONResponse({"object": "list", "data": shown, "has_more": len(found) > limit, **edges})


def _limit(request: Request) -> int:
    """`limit` of the query, by default 20. Raises `ApiError` 400."""
    given = request.query_params.get("limit", "20")
    if given.isdigit() and 1 <= int(given) <= _MOST:
        return int(given)
    raise invalid(f"'limit' is a number from 1 to {_MOST}, not '{given}'.", "limit", "invalid_value")
