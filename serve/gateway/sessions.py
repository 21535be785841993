"""`/v1/sessions`: create, list, read, fork, delete."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memory.journal.errors import NotFound
from memory.journal.records import Response as Reply
from memory.journal.records import Session
from serve.gateway.bodies import ForkBody, SessionBody, read_body
from serve.gateway.deletion import delete_session
from serve.gateway.errors import invalid, not_found
from serve.gateway.paging import page
from serve.gateway.service import Gateway
from serve.gateway.turns import gone_error, new_session_id, stored_ids

Json = dict[str, Any]


async def create(request: Request) -> Response:
    """A new, empty session."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    body = await read_body(request, SessionBody, empty_ok=True)
    ttl = body.ttl_seconds or gateway.settings.session_ttl_seconds

    def make() -> Session:
        return gateway.journal.create_session(
            tenant, new_session_id(), dict(body.metadata), memory_ids=body.memory_ids,
            expires_at=None if ttl is None else gateway.journal.now() + ttl,
        )  # fmt: skip

    try:
        session = await gateway.threads.run(make)
    except NotFound as error:
        raise gone_error(error) from error
    if session.memory_ids and (version := gateway.versions.known()) is not None:
        gateway.prefetch.soon(tenant, session.memory_ids, version)
    return JSONResponse(_shown(session))


async def index(request: Request) -> Response:
    """The tenant's sessions, newest first."""
    gateway: Gateway = request.app.state.gateway
    return await page(request, "session", gateway.journal.list_sessions, _shown)


async def read(request: Request) -> Response:
    """One session with its conversation: each message, and for replies the response that feedback can point at."""
    gateway: Gateway = request.app.state.gateway
    tenant, session_id = gateway.auth.tenant(request), request.path_params["session_id"]

    def look() -> tuple[Session, list[Reply]]:
        session = gateway.journal.get_session(tenant, session_id)
        return session, [] if session.head_response is None else gateway.journal.chain(session.head_response)

    try:
        session, chain = await gateway.threads.run(look)
    except NotFound as error:
        raise _missing(session_id) from error
    messages: list[Json] = []
    for reply in chain:
        messages += [{**message, "response_id": None} for message in reply.input_messages]
        messages.append({**reply.output_message, "response_id": reply.id})
    tokens = len(stored_ids(chain)) + await gateway.threads.run(_memory_tokens, gateway, session)
    return JSONResponse(_shown(session) | {"messages": messages, "tokens": tokens})


async def fork(request: Request) -> Response:
    """A new session that shares the past of this one, up to its latest reply or an earlier one."""
    gateway: Gateway = request.app.state.gateway
    tenant, session_id = gateway.auth.tenant(request), request.path_params["session_id"]
    body = await read_body(request, ForkBody, empty_ok=True)

    def make() -> Session:
        session = gateway.journal.get_session(tenant, session_id)
        head = body.response_id or session.head_response
        if head is None:
            raise invalid(f"Session '{session_id}' has no reply to fork from yet.", "session_id")
        if body.response_id is not None:
            reply = gateway.journal.get_response(tenant, head)
            within = {entry.id for entry in gateway.journal.list_responses(tenant, session_id)}
            if session.head_response is not None:
                within |= {entry.id for entry in gateway.journal.chain(session.head_response)}
            if reply.id not in within:
                raise not_found(f"Response '{head}' is not part of session '{session_id}'.", "response_id")
        return gateway.journal.create_session(
            tenant, new_session_id(), dict(body.metadata), head=head, parent=session_id
        )

    try:
        return JSONResponse(_shown(await gateway.threads.run(make)))
    except NotFound as error:
        raise gone_error(error, session_id) from error


async def delete(request: Request) -> Response:
    """Removes a session's words and their KV; the receipt names what had already learned from them."""
    gateway: Gateway = request.app.state.gateway
    tenant, session_id = gateway.auth.tenant(request), request.path_params["session_id"]
    receipt = await delete_session(gateway, tenant, session_id)
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True, "receipt": receipt})


def _shown(session: Session) -> Json:
    return {
        "id": session.id,
        "object": "session",
        "created_at": int(session.created_at),
        "updated_at": int(session.updated_at),
        "parent_session": session.parent_session,
        "head_response": session.head_response,
        "metadata": session.metadata,
        "split": session.split,
        "memory_ids": list(session.memory_ids),
        "version": session.version,
        "expires_at": session.expires_at,
    }


def _memory_tokens(gateway: Gateway, session: Session) -> int:
    """Of the session's memories; 0 where one is gone: its tokens are, too. Blocks."""
    try:
        return len(gateway.turns.prefix(session.tenant, session.memory_ids).token_ids) if session.memory_ids else 0
    except NotFound:
        return 0


def _missing(session_id: str) -> Exception:
    return not_found(f"Session '{session_id}' was not found.", "session_id")
