"""A worker that computes nothing: a real HTTP server that speaks the workers' protocol from a script.

Its "weights" are a digest; its log-probabilities are a function of weights and token, so fingerprints can hold or fail.
Like a real worker it forgets its adapters when it restarts, and aborts what nobody reads any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.ports import free_port

BASE_NAME = "smollm2-135m-instruct"
BASE_WEIGHTS = "b" * 64
END = 2

Answer = Callable[[dict[str, Any]], Sequence[int]]


@dataclass
class Script:
    """What the fake does next; tests change it between requests."""

    answer: Answer
    token_seconds: float = 0.0
    gate: threading.Event | None = None
    """Holds back every token after the first until it is set."""
    die_after: int | None = None
    """Breaks the connection after this many tokens, once."""
    reject: tuple[int, str, dict[str, str]] | None = None
    weights_told: str | None = None
    """Weights id to claim in usage instead of the true one."""
    load_seconds: float = 0.0
    forget_gate: threading.Event | None = None
    """Holds back what is to be forgotten until it is set."""
    forget_status: int = 200
    """404 is a worker of another kind."""
    running: int = 0
    """Sequences that its metrics tell of."""
    metrics: str | None = None
    """All that its metrics say, in place of what they would."""
    fidelity: str = "exact"
    """Of what it says it reused."""
    prefill_gate: threading.Event | None = None
    """Holds back the answers to requests that generate nothing until it is set."""
    prefill_status: int = 200
    at_least_one: bool = False
    """Refuses to generate nothing, as vLLM's server does."""
    wrong_weights: bool = False
    """Loads adapters without applying them."""


@dataclass
class Seen:
    """What the fake was asked."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)
    """Requests that generate nothing."""
    finished: int = 0
    aborted: int = 0
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    forgotten: list[dict[str, Any]] = field(default_factory=list)


class FakeWorker:
    """Start with `start`; `stop` and `start` again is a restart."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.script = Script(answer)
        self.seen = Seen()
        self._adapters: dict[str, tuple[str, str]] = {}
        self._known: dict[tuple[str, str], list[tuple[str, list[int]]]] = {}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._boot = 0
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def adapters(self) -> list[str]:
        return sorted(self._adapters)

    def reset(self) -> None:
        """As new, but for the process: the script, what was seen, and what is remembered."""
        self.script = Script(self._answer)
        self.seen = Seen()
        self._known = {}

    def start(self) -> None:
        self._boot += 1
        self._adapters = {}
        config = uvicorn.Config(
            self._app(),
            host="127.0.0.1",
            port=self.port,
            log_level="critical",
            timeout_graceful_shutdown=0,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join()
            self._server = self._thread = None

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/v1/kv/forget", self._forget, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "boot_id": str(self._boot), "model": BASE_NAME, "context_length": 8192})

    async def _models(self, request: Request) -> Response:
        base = {"id": BASE_NAME, "object": "model", "root": "/m", "parent": None, "weights_id": BASE_WEIGHTS}
        adapters = [
            {"id": name, "object": "model", "root": path, "parent": BASE_NAME, "weights_id": weights}
            for name, (path, weights) in self._adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [base, *adapters]})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep(self.script.load_seconds)
        digest = adapter_digest(Path(body["lora_path"]))
        if digest is None:
            return _error(400, "the adapter does not match the model")
        self._adapters[body["lora_name"]] = (body["lora_path"], f"{BASE_WEIGHTS}+{digest}")
        self.seen.loads.append(body["lora_name"])
        return PlainTextResponse("ok")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self._adapters:
            return _error(404, f"no adapter {name}")
        del self._adapters[name]
        self.seen.unloads.append(name)
        return PlainTextResponse("ok")

    async def _forget(self, request: Request) -> Response:
        if self.script.forget_status != 200:
            return _error(self.script.forget_status, "as scripted")
        body = await request.json()
        self.seen.forgotten.append(body)
        while self.script.forget_gate is not None and not self.script.forget_gate.is_set():
            await asyncio.sleep(0.005)
        gone = 0
        for known in self._known.values():
            doomed = [entry for entry in known if entry[0] in body["owners"]]
            for entry in doomed:
                known.remove(entry)
            gone += len(doomed)
        counts = {"keys": len(body["owners"]), "ram": gone, "waiting": 0, "disk": 0, "remote": 0, "remote_waiting": 2}
        return JSONResponse({"object": "kv.forgotten", **counts, "quarantined": 0})

    async def _metrics(self, request: Request) -> Response:
        running = f"kvloop_worker_running_sequences {float(self.script.running)}"
        told = f"# HELP load\nkvloop_worker_waiting_requests 0.0\n{running}\n"
        return PlainTextResponse(told if self.script.metrics is None else self.script.metrics)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        (self.seen.prefills if body.get("max_tokens") == 0 else self.seen.bodies).append(body)
        if self.script.reject is not None:
            status, message, headers = self.script.reject
            return _error(status, message, headers)
        weights = self._weights(body["model"])
        if weights is None:
            return _error(404, f"The model {body['model']} does not exist.")
        if body.get("prompt_logprobs") is not None:
            return JSONResponse({"choices": self._scores(body, weights), "usage": _no_usage()})
        if body.get("max_tokens") == 0 and self.script.at_least_one:
            return _error(400, "max_tokens must be at least 1, got 0.")
        if not body["stream"]:
            return await self._prefill(request, body, weights)
        return StreamingResponse(self._stream(body, weights), media_type="text/event-stream")

    async def _prefill(self, request: Request, body: dict[str, Any], weights: str) -> Response:
        while self.script.prefill_gate is not None and not self.script.prefill_gate.is_set():
            if await request.is_disconnected():
                self.seen.aborted += 1
                return PlainTextResponse("nobody reads it", 499)
            await asyncio.sleep(0.005)
        if self.script.prefill_status != 200:
            return _error(self.script.prefill_status, "as scripted")
        cached = self._reused(body, weights)
        self._remember(body, weights, body["prompt"])
        usage = self._usage(body["prompt"], cached, 0, weights, whole=True)
        choice = {"index": 0, "text": "", "token_ids": [], "logprobs": None, "finish_reason": "length"}
        return JSONResponse({"id": "cmpl", "model": body["model"], "choices": [choice], "usage": usage})

    def _weights(self, model: str) -> str | None:
        if model == BASE_NAME:
            return BASE_WEIGHTS
        return self._adapters[model][1] if model in self._adapters else None

    def _scores(self, body: dict[str, Any], weights: str) -> list[dict[str, Any]]:
        applied = BASE_WEIGHTS if self.script.wrong_weights else weights
        return [
            {
                "index": index, "text": "", "token_ids": [0], "logprobs": None, "finish_reason": "length",
                "prompt_logprobs": [None, *(
                    {str(token): {"logprob": logprob(applied, token), "rank": 1, "decoded_token": None}}
                    for token in prompt[1:]
                )],
            }
            for index, prompt in enumerate(body["prompt"])
        ]  # fmt: skip

    async def _stream(self, body: dict[str, Any], weights: str) -> AsyncIterator[bytes]:
        prompt = body["prompt"]
        cached = self._reused(body, weights)
        answers = [list(self.script.answer(body | {"index": index})) for index in range(body.get("n", 1))]
        budget = body.get("max_tokens") or 10_000
        made = 0
        done = False
        try:
            for index, answer in enumerate(answers):
                reason = "stop" if len(answer) < budget or (len(answer) == budget and answer[-1] == END) else "length"
                answer = answer[:budget]
                for at, token in enumerate(answer):
                    await asyncio.sleep(self.script.token_seconds)
                    while at and self.script.gate is not None and not self.script.gate.is_set():
                        await asyncio.sleep(0.005)
                    if self.script.die_after is not None and made >= self.script.die_after:
                        self.script.die_after = None
                        raise ConnectionError("scripted death")
                    made += 1
                    last = at + 1 == len(answer)
                    chunk = self._chunk(body, index, [token], weights, reason if last else None)
                    if body["stream_options"].get("continuous_usage_stats"):
                        chunk["usage"] = self._usage(prompt, cached, made, weights, whole=made == 1)
                    yield _event(chunk)
                self._remember(body, weights, [*prompt, *answer])
            usage = self._usage(prompt, cached, made, weights, whole=True)
            yield _event(
                {"id": "cmpl", "object": "text_completion", "model": body["model"], "choices": [], "usage": usage}
            )
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            if done:
                self.seen.finished += 1
            else:
                self.seen.aborted += 1

    def _usage(self, prompt: list[int], cached: int, made: int, weights: str, *, whole: bool) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        ends = {"ram": cached, "computed": len(prompt), "generated": len(prompt) + made}
        spans, start = [], 0
        for source, end in ends.items():
            spans.append({"start": start, "end": end, "source": source, "weights_id": weights})
            start = end
        if whole:
            usage["kvloop"] = {
                "restored_tokens": 0, "ram_tokens": cached, "computed_tokens": len(prompt) - cached,
                "generated_tokens": made, "fidelity": self.script.fidelity,
                "weights_id": self.script.weights_told or weights, "ttft_ms": 1.0, "spans": spans,
            }  # fmt: skip
        return usage

    def _chunk(self, body: dict[str, Any], index: int, tokens: list[int], weights: str, reason: str | None) -> Any:
        logprobs = None
        if body.get("logprobs") is not None:
            tops = [{f"token_id:{t + k}": logprob(weights, t + k) for k in range(body["logprobs"])} for t in tokens]
            logprobs = {
                "tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": [logprob(weights, t) for t in tokens],
                "top_logprobs": tops, "text_offset": [],
            }  # fmt: skip
        choice = {
            "index": index, "text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason,
            "stop_reason": None,
        }  # fmt: skip
        return {"id": "cmpl", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}

    def _reused(self, body: dict[str, Any], weights: str) -> int:
        prompt = body["prompt"]
        known = self._known.get((weights, body.get("cache_salt", "")), [])
        return min(max((_common(prompt, other) for _, other in known), default=0), len(prompt) - 1)

    def _remember(self, body: dict[str, Any], weights: str, ids: list[int]) -> None:
        kv = body.get("kv_transfer_params", {})
        if kv.get("kv_save", True):
            known = self._known.setdefault((weights, body.get("cache_salt", "")), [])
            known.append((kv.get("kv_owner", ""), ids))


def make_adapter(folder: Path, seed: str) -> dict[str, Any]:
    """An adapter folder the fake accepts, with a manifest whose fingerprint holds. Returns the activation's body."""
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_text(seed)
    digest = adapter_digest(folder)
    weights = f"{BASE_WEIGHTS}+{digest}"
    probes = [
        {
            "token_ids": ids,
            "adapter_logprobs": [logprob(weights, token) for token in ids[1:]],
            "base_logprobs": [logprob(BASE_WEIGHTS, token) for token in ids[1:]],
        }
        for ids in ([1, 50, 60, 70], [1, 9, 8, 7, 6])
    ]
    manifest = {
        "format": 1, "name": folder.name, "base_weights_id": BASE_WEIGHTS, "adapter_digest": digest,
        "fingerprint": {"probes": probes, "tolerance": 0.15},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return {
        "name": folder.name, "path": str(folder), "version": "1", "weights_id": weights,
        "fingerprint": manifest["fingerprint"], "who": "test", "reason": "because", "report": None,
    }  # fmt: skip


def adapter_digest(folder: Path) -> str | None:
    file = folder / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def logprob(weights: str, token: int) -> float:
    drawn = hashlib.sha256(f"{weights}/{token}".encode()).digest()
    return -int.from_bytes(drawn[:4], "big") / 2**32 * 5


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "Error", "code": status}}, status, headers=headers)


def _no_usage() -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
