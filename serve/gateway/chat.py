"""`POST /v1/chat/completions`, as the official client speaks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.gateway.bodies import ChatBody, read_body
from serve.gateway.generate import logprob_entries
from serve.gateway.service import Gateway, Turn
from serve.gateway.streaming import EventStream, data, told, until_gone
from serve.gateway.turns import Asked

Json = dict[str, Any]


async def create(request: Request) -> Response:
    """Answers the messages; with a session, remembers them."""
    gateway: Gateway = request.app.state.gateway
    tenant = gateway.auth.tenant(request)
    body = await read_body(request, ChatBody)
    asked = Asked(
        tenant=tenant,
        messages=[message.plain() for message in body.messages],
        store=body.store,
        user=body.user or "",
        memory_ids=body.memory_ids,
        session_id=body.session_id or request.headers.get("x-session-id"),
    )
    if body.stream:
        return await EventStream.start(request, _events(gateway, asked, body), {})
    return await until_gone(request, _whole(gateway, asked, body))


async def _whole(gateway: Gateway, asked: Asked, body: ChatBody) -> Response:
    async with _turn(gateway, asked, body) as turn:
        async with aclosing(turn.pieces()) as running:
            pieces = [piece async for piece in running]
        await turn.commit(_params(body))
        choices, top = [], body.top_logprobs or 0
        for index in range(body.n):
            choice = _choice(turn, index, turn.finish_reason(index))
            choice["message"] = {"role": "assistant", "content": turn.text(index), "refusal": None}
            if body.logprobs:
                entries = logprob_entries(gateway.codec, [piece for piece in pieces if piece.index == index], top)
                choice["logprobs"] = {"content": entries, "refusal": None}
            choices.append(choice)
        answer = _head(turn, "chat.completion") | {"choices": choices, "usage": _usage(turn)}
        return JSONResponse(answer, headers=_headers(turn))


async def _events(gateway: Gateway, asked: Asked, body: ChatBody) -> AsyncGenerator[bytes]:
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    async with _turn(gateway, asked, body) as turn:
        head = _head(turn, "chat.completion.chunk")
        # OpenAI's shape: with usage asked for, every other chunk says null.
        tail: Json = {"usage": None} if with_usage else {}
        begun, top = False, body.top_logprobs or 0

        def chunk(index: int, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> bytes:
            choice = _choice(turn, index, finish) | {"delta": delta, "logprobs": logprobs}
            return data({**head, "choices": [choice], **tail})

        try:
            async with aclosing(turn.pieces()) as running:
                async for piece in running:
                    if not begun:
                        for index in range(body.n):
                            yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
                        begun = True
                    entries = {"content": logprob_entries(gateway.codec, [piece], top)} if body.logprobs else None
                    yield chunk(piece.index, {"content": piece.text}, logprobs=entries)
            await turn.commit(_params(body))
        except Exception as error:
            if not begun:
                raise
            yield data(told(error, gateway.metrics).body())
            return
        for index in range(body.n):
            if not begun:
                yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
            yield chunk(index, {}, turn.finish_reason(index))
        if with_usage:
            yield data({**head, "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"


def _turn(gateway: Gateway, asked: Asked, body: ChatBody) -> Any:
    return gateway.turn(
        asked,
        body,
        n=body.n,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _head(turn: Turn, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{turn.key}",
        "object": kind,
        "created": int(turn.created),
        "model": turn.version.name,
        "system_fingerprint": turn.version.system_fingerprint,
        "service_tier": "default",
        "session_id": turn.plan.session_id,
        "response_id": turn.response_id(),
    }


def _choice(turn: Turn, index: int, finish: str | None) -> Json:
    return {
        "index": index,
        "finish_reason": finish,
        "logprobs": None,
        "session_id": turn.plan.session_id,
        "response_id": turn.response_id(index),
    }


def _usage(turn: Turn) -> Json:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        "kvloop": turn.extras(),
    }


def _headers(turn: Turn) -> dict[str, str]:
    return {} if turn.plan.session_id is None else {"X-Session-Id": turn.plan.session_id}


def _params(body: ChatBody) -> Json:
    """What the journal keeps of the request beside its messages."""
    kept = body.model_dump(
        include={"model", "temperature", "top_p", "n", "seed", "stop", "metadata", "user"}, mode="json"
    )
    return kept | {"api": "chat", "max_tokens": body.max_completion_tokens or body.max_tokens}
