"""`POST /v1/feedback`: what somebody thinks of a reply or of a session; the loop learns from it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memory.journal.errors import InvalidRecord, NotFound
from serve.gateway.bodies import FeedbackBody, read_body
from serve.gateway.errors import invalid, not_found
from serve.gateway.service import Gateway


async def create(request: Request) -> Response:
    """Journals feedback; it is on disk when the client hears of it."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    body = await read_body(request, FeedbackBody)
    if (body.response_id is None) == (body.session_id is None):
        raise invalid("Give either response_id or session_id.", "response_id")
    value = body.value
    if isinstance(value, dict):
        # A demonstration may come as the assistant message it should have been.
        if body.kind != "demonstration" or value.get("role") != "assistant" or set(value) != {"role", "content"}:
            raise invalid("An object as value is {'role': 'assistant', 'content': text} of a demonstration.", "value")
        value = value["content"]
    response_id = body.response_id
    if response_id is not None and response_id.startswith("chatcmpl-"):
        response_id = f"resp_{response_id.removeprefix('chatcmpl-')}"
    try:
        given = await gateway.threads.run(
            gateway.journal.add_feedback, tenant, body.kind, value, response_id, body.session_id, body.source
        )
    except InvalidRecord as error:
        raise invalid(f"{error}.", "value", "invalid_value") from error
    except NotFound as error:
        raise not_found(f"{error.kind.capitalize()} '{error.name}' was not found.", f"{error.kind}_id") from error
    gateway.metrics.feedback.labels(body.kind).inc()
    return JSONResponse(
        {
            "id": given.id,
            "object": "feedback",
            "created_at": int(given.created_at),
            "kind": given.kind,
            "value": given.value,
            "response_id": given.response_id,
            "session_id": given.session_id,
            "source": given.source,
        }
    )
