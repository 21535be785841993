"""`/v1/responses`: create (also from `previous_response_id`), read, delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from memory.journal.errors import NotFound
from memory.journal.records import Response as Reply
from serve.gateway.bodies import ResponsesBody, read_body
from serve.gateway.deletion import delete_session
from serve.gateway.errors import not_found
from serve.gateway.generate import logprob_entries
from serve.gateway.output import Piece
from serve.gateway.service import Gateway, Turn
from serve.gateway.streaming import EventStream, named, told, until_gone
from serve.gateway.turns import Asked, new_response_id
from serve.gateway.versions import fingerprint_of

Json = dict[str, Any]


async def create(request: Request) -> Response:
    """Answers the input; `previous_response_id` or a session says what came before."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    body = await read_body(request, ResponsesBody)
    asked = Asked(
        tenant=tenant,
        messages=_messages(body),
        store=body.store,
        user=body.user or "",
        memory_ids=body.memory_ids,
        session_id=body.session_id
        or (request.headers.get("x-session-id") if body.previous_response_id is None else None),
        previous_response_id=body.previous_response_id,
    )
    if body.stream:
        return await EventStream.start(request, _events(gateway, asked, body), {})
    return await until_gone(request, _whole(gateway, asked, body))


async def read(request: Request) -> Response:
    """A stored response."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    reply = await _stored(gateway, tenant, request.path_params["response_id"])
    return JSONResponse(_shown(reply))


async def delete(request: Request) -> Response:
    """Deletes a response that is its session's only one, and the session with it. Others are part of a conversation's
    memory: 409 says which session to delete."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    reply = await _stored(gateway, tenant, request.path_params["response_id"])

    receipt = await delete_session(gateway, tenant, reply.session_id, only=reply.id)
    return JSONResponse({"id": reply.id, "object": "response", "deleted": True, "receipt": receipt})


async def _stored(gateway: Gateway, tenant: str, response_id: str) -> Reply:
    try:
        return await gateway.threads.run(gateway.journal.get_response, tenant, response_id)
    except NotFound as error:
        raise not_found(f"Response '{response_id}' was not found.", "response_id") from error


async def _whole(gateway: Gateway, asked: Asked, body: ResponsesBody) -> Response:
    async with _turn(gateway, asked, body) as turn:
        async with aclosing(turn.pieces()) as running:
            pieces = [piece async for piece in running]
        answer = _Answer(gateway, turn, body)
        await turn.commit(answer.params())
        return JSONResponse(answer.done(answer.entries(pieces)))


async def _events(gateway: Gateway, asked: Asked, body: ResponsesBody) -> AsyncGenerator[bytes]:
    async with _turn(gateway, asked, body) as turn:
        answer = _Answer(gateway, turn, body)
        begun = False
        pieces: list[Piece] = []
        try:
            async with aclosing(turn.pieces()) as running:
                async for piece in running:
                    if not begun:
                        begun = True
                        for entry in answer.opening():
                            yield entry
                    if answer.wants_logprobs:
                        pieces.append(piece)
                    yield answer.delta(piece)
            if not begun:
                begun = True
                for entry in answer.opening():
                    yield entry
            for entry in answer.closing(pieces):
                yield entry
            await turn.commit(answer.params())
        except Exception as error:
            if not begun:
                raise
            for entry in answer.failed(error):
                yield entry
            return
        yield answer.completed(pieces)


def _turn(gateway: Gateway, asked: Asked, body: ResponsesBody) -> Any:
    wanted = "message.output_text.logprobs" in body.include or body.top_logprobs is not None
    logprobs = (body.top_logprobs or 0) if wanted else None
    return gateway.turn(asked, body, n=1, max_tokens=body.max_output_tokens, logprobs=logprobs)


class _Answer:
    """The objects and events of one response."""

    def __init__(self, gateway: Gateway, turn: Turn, body: ResponsesBody) -> None:
        self._codec = gateway.codec
        self._metrics = gateway.metrics
        self._turn = turn
        self._body = body
        self._id = turn.response_id() or new_response_id()
        self._item = f"msg_{turn.key}"
        self._number = -1
        self.wants_logprobs = "message.output_text.logprobs" in body.include or body.top_logprobs is not None

    def params(self) -> Json:
        """What the journal keeps of the request beside its messages; enough to show the response again."""
        kept = self._body.model_dump(
            include={"model", "temperature", "top_p", "seed", "stop", "metadata", "user", "instructions",
                     "previous_response_id", "max_output_tokens"},
            mode="json",
        )  # fmt: skip
        usage = _usage(self._turn.prompt_tokens, self._turn.cached_tokens, self._turn.completion_tokens)
        return kept | {"api": "responses", "usage": usage, "max_tokens": self._body.max_output_tokens}

    def done(self, logprobs: list[Json]) -> Json:
        """The finished response."""
        length = self._turn.finish_reason() == "length"
        return self._object("incomplete" if length else "completed", [self._message(logprobs)])

    def entries(self, pieces: list[Piece]) -> list[Json]:
        """Log-probabilities of the answer's tokens; empty when they were not asked for."""
        return logprob_entries(self._codec, pieces, self._body.top_logprobs or 0) if self.wants_logprobs else []

    def opening(self) -> list[bytes]:
        """The events before the first text."""
        started = self._object("in_progress", [])
        item = {"id": self._item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", item_id=self._item, output_index=0, content_index=0, part=part),
        ]

    def delta(self, piece: Piece) -> bytes:
        """New text."""
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=piece.text, logprobs=self.entries([piece]))

    def closing(self, pieces: list[Piece]) -> list[bytes]:
        """The events after the last text; the response itself is completed only once it is journalled."""
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        message = self._message(self.entries(pieces))
        part = message["content"][0]
        return [
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=message),
        ]

    def completed(self, pieces: list[Piece]) -> bytes:
        """The last event of a response that went well."""
        whole = self.done(self.entries(pieces))
        return self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: Exception) -> list[bytes]:
        """The last events of one that did not."""
        heard = told(error, self._metrics)
        failed = self._object("failed", []) | {"error": {"code": "server_error", "message": heard.message}}
        details = heard.body()["error"]
        return [
            self._event("response.failed", response=failed),
            self._event("error", code=details["code"], message=details["message"], param=details["param"],
                        error=details),
        ]  # fmt: skip

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return named(name, {"type": name, "sequence_number": self._number, **fields})

    def _message(self, logprobs: list[Json]) -> Json:
        whole = self._turn.finish_reason() != "length"
        return _message(self._item, self._turn.text(), whole, logprobs)

    def _object(self, status: str, output: list[Json]) -> Json:
        turn, body = self._turn, self._body
        finished = status in ("completed", "incomplete")
        usage = _usage(turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens) if finished else None
        if usage is not None:
            usage["kvloop"] = turn.extras()
        return _response(
            response_id=self._id, created=turn.created, status=status, model=turn.version.name, output=output,
            usage=usage, session_id=turn.plan.session_id, stored=turn.plan.asked.store,
            system_fingerprint=turn.version.system_fingerprint,
            params=body.model_dump(mode="json"), previous=body.previous_response_id or turn.plan.parent,
        )  # fmt: skip


def _shown(reply: Reply) -> Json:
    """A journalled reply as the object it was."""
    whole = reply.finish_reason != "length"
    usage = reply.params.get("usage")
    if usage is None:
        prompt = reply.cached_tokens + reply.computed_tokens
        usage = _usage(prompt, reply.cached_tokens, reply.generated_tokens)
    return _response(
        response_id=reply.id, created=reply.created_at, status="completed" if whole else "incomplete",
        model=reply.model, output=[_message(f"msg_{reply.id.removeprefix('resp_')}", reply.output_message["content"],
                                            whole, [])],
        usage=usage, session_id=reply.session_id, stored=True,
        system_fingerprint=fingerprint_of(reply.weights_id),
        params=reply.params, previous=reply.parent_response,
    )  # fmt: skip


def _message(item: str, text: str, whole: bool, logprobs: list[Json]) -> Json:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    status = "completed" if whole else "incomplete"
    return {"id": item, "type": "message", "status": status, "role": "assistant", "content": [content]}


def _usage(prompt: int, cached: int, completion: int) -> Json:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _response(
    *, response_id: str, created: float, status: str, model: str, output: list[Json], usage: Json | None,
    session_id: str | None, stored: bool, system_fingerprint: str, params: Json, previous: str | None,
) -> Json:  # fmt: skip
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": params.get("instructions"),
        "max_output_tokens": params.get("max_output_tokens"),
        "metadata": params.get("metadata") or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": previous,
        "reasoning": {"effort": None, "summary": None},
        "store": stored,
        "temperature": params.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
        "user": params.get("user"),
        "session_id": session_id,
        "system_fingerprint": system_fingerprint,
    }


def _messages(body: ResponsesBody) -> list[Json]:
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    return [*first, *(message.plain() for message in body.input)]
