"""`/v1/memories`: create from a text or a file, list, read, delete."""

from __future__ import annotations

from typing import Any

from blake3 import blake3
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memory.journal.errors import Conflict, NotFound
from memory.journal.records import Memory
from serve.gateway.bodies import MemoryBody, parse, read_body
from serve.gateway.deletion import delete_memory
from serve.gateway.errors import conflict, invalid
from serve.gateway.paging import page
from serve.gateway.service import Gateway
from serve.gateway.turns import gone_error

Json = dict[str, Any]
_FORM_FIELDS = ("name", "ttl_seconds")


async def create(request: Request) -> Response:
    """A memory of a text, as JSON, or of a file, as a form. 201 when it is new, 200 when it is there already."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
    body = await _read_form(request) if is_form else await read_body(request, MemoryBody)
    field = "file" if is_form else "text"
    text = _checked(body.text, field)

    def make() -> tuple[Memory, bool]:
        tokens = gateway.turns.memory_tokens(text)
        _check_fits(tokens, gateway.context_length, field)
        digest = blake3(text.encode()).hexdigest()
        name = body.name or f"memory-{digest[:16]}"
        expires_at = None if body.ttl_seconds is None else gateway.journal.now() + body.ttl_seconds
        return gateway.journal.create_memory(tenant, name, digest, text, tokens, expires_at)

    version = await gateway.versions.current()  # the context's length is known then
    try:
        memory, new = await gateway.threads.run(make)
    except Conflict as error:
        raise conflict(
            f"{str(error)[:1].upper()}{str(error)[1:]}. Choose another name, or delete that memory first.",
            "memory_conflict",
        ) from error
    except ValueError as error:
        raise invalid(f"{str(error)[:1].upper()}{str(error)[1:]}.", field, "invalid_value") from error
    gateway.prefetch.soon(tenant, (memory.id,), version)
    return JSONResponse(_shown(memory), 201 if new else 200)


async def index(request: Request) -> Response:
    """The tenant's memories, newest first, without their texts."""
    gateway: Gateway = request.app.state.gateway
    return await page(request, "memory", gateway.journal.list_memories, _shown)


async def read(request: Request) -> Response:
    """One memory with its text."""
    gateway: Gateway = request.app.state.gateway
    tenant, memory_id = gateway.auth.tenant(request), request.path_params["memory_id"]
    try:
        memory = await gateway.threads.run(gateway.journal.get_memory, tenant, memory_id)
    except NotFound as error:
        raise gone_error(error) from error
    return JSONResponse(_shown(memory) | {"text": memory.text})


async def delete(request: Request) -> Response:
    """Removes a memory for good; the receipt names the sessions that attached it."""
    gateway: Gateway = request.app.state.gateway
    tenant, memory_id = gateway.auth.tenant(request), request.path_params["memory_id"]
    receipt = await delete_memory(gateway, tenant, memory_id)
    return JSONResponse({"id": memory_id, "object": "memory.deleted", "deleted": True, "receipt": receipt})


async def _read_form(request: Request) -> MemoryBody:
    async with request.form(max_files=1, max_fields=8) as form:
        given: Json = {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise invalid(f"The file is expected as 'file', not '{name}'.", name, "unknown_parameter")
                given["text"] = _decoded(await value.read())
                given.setdefault("name", (value.filename or "")[:128] or None)
            elif name in _FORM_FIELDS:
                given[name] = _number(name, value) if name == "ttl_seconds" else value
            else:
                raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        if "text" not in given:
            raise invalid("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        return parse(MemoryBody, given)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise invalid(f"'{name}' is a number of seconds, not '{value}'.", name, "invalid_value") from error


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(
            f"The file is not UTF-8 text ({error.reason} at byte {error.start}): convert it first.", "file", "not_utf8"
        ) from error


def _checked(text: str, field: str) -> str:
    if not text.strip():
        raise invalid("The memory is empty.", field, "invalid_value")
    if "\0" in text:
        raise invalid("The memory holds NUL characters: it is no text.", field, "invalid_value")
    return text


def _check_fits(tokens: int, context_length: int, field: str) -> None:
    if tokens >= context_length:
        raise invalid(
            f"This model's maximum context length is {context_length} tokens, and the memory alone has {tokens}. "
            "Shorten it, or split it and attach what a session needs.", field, "context_length_exceeded",
        )  # fmt: skip


def _shown(memory: Memory) -> Json:
    return {
        "id": memory.id,
        "object": "memory",
        "created_at": int(memory.created_at),
        "expires_at": memory.expires_at,
        "name": memory.name,
        "digest": memory.digest,
        "tokens": memory.tokens,
        "bytes": len(memory.text.encode()),
    }
