"""The one client for workers, ours and vLLM's. Every failure becomes a `WorkerError`; nothing is retried here."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from serve.backends.base import (
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    ModelNotFound,
    NotSupported,
    Overloaded,
    TokenLogprob,
    Usage,
    WorkerError,
    WorkerHealth,
    WorkerLoad,
    WorkerModel,
    WorkerRejected,
    WorkerUnavailable,
)

_TOKEN_PREFIX = "token_id:"
_FORGET_SECONDS = 90.0
# Ours, then vLLM's.
_WAITING = ("kvloop_worker_waiting_requests", "vllm:num_requests_waiting")
_RUNNING = ("kvloop_worker_running_sequences", "vllm:num_requests_running")


class CompletionsClient:
    """Talks to one worker. Use as an async context manager, or call `close`; bound to one event loop."""

    def __init__(self, url: str, *, read_seconds: float = 600.0, load_seconds: float = 120.0) -> None:
        """`read_seconds` is the longest silence within an answer, `load_seconds` the longest load of an adapter."""
        self.url = url.rstrip("/")
        self._load_seconds = load_seconds
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(read_seconds, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[Delta | Usage]:
        """Tokens as they are made, then the `Usage`; a worker that tells it as it goes has it yielded as it goes.
        Its extras are complete in the last one only. Closing the iterator early aborts the request on the worker.

        Raises `WorkerUnavailable` also when the answer ends before its usage.
        """
        usage: Usage | None = None
        ended = False
        try:
            async with self._http.stream("POST", "/v1/completions", json=request.body(stream=True)) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _failure(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        ended = True
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _error(event["error"].get("code"), str(event["error"].get("message", "failed")), 1.0)
                    if event.get("usage"):
                        usage = _usage(event["usage"], usage)
                        yield usage
                    for choice in event["choices"]:
                        yield _delta(choice)
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"worker {self.url}: {error or type(error).__name__}") from error
        if usage is None or not ended:
            raise WorkerUnavailable(f"worker {self.url} ended its answer early")

    async def complete(self, request: CompletionRequest) -> Completion:
        """The whole answer at once."""
        body = await self._post("/v1/completions", request.body(stream=False))
        choices = []
        for choice in sorted(body["choices"], key=lambda entry: int(entry["index"])):
            delta = _delta(choice)
            choices.append(Choice(delta.index, delta.token_ids, delta.logprobs, delta.finish_reason or "length"))
        return Completion(tuple(choices), _usage(body["usage"]))

    async def prompt_logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each prompt, the log-probability of every token after the first: `len(prompt) - 1` numbers."""
        body = {
            "model": model, "prompt": [list(prompt) for prompt in prompts], "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": 0, "return_token_ids": True, "kv_transfer_params": {"kv_save": False},
        }  # fmt: skip
        answer = await self._post("/v1/completions", body)
        choices = sorted(answer["choices"], key=lambda entry: int(entry["index"]))
        scores = []
        for prompt, choice in zip(prompts, choices, strict=True):
            entries = choice["prompt_logprobs"]
            scores.append(
                [
                    float(entry[str(token_id)]["logprob"])
                    for token_id, entry in zip(prompt[1:], entries[1:], strict=True)
                ]
            )
        return scores

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter folder under `name`. Raises `WorkerRejected` when the worker finds it unfit."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, self._load_seconds)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Raises `ModelNotFound` or `WorkerRejected` when there is none of this name."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def forget(self, owners: Sequence[str], cache_salt: str) -> Mapping[str, Any]:
        """Destroys the keys of these owners and every byte stored on their behalf, whatever version computed it.

        Returns the worker's account. Raises `NotSupported` for a worker without this endpoint.
        """
        body = {"owners": list(owners), "cache_salt": cache_salt}
        try:
            return await self._post("/v1/kv/forget", body, _FORGET_SECONDS)
        except ModelNotFound as error:
            raise NotSupported(f"worker {self.url} cannot forget") from error

    async def divergence(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[int],
        versions: Sequence[str] = (),
        codecs: Sequence[str] = (),
        answer_tokens: int = 0,
    ) -> Mapping[str, Any]:
        """How far the model's next-token distributions move when the first `prefixes` tokens of each prompt are read
        from KV of another version or codec, and how far greedy answers of `answer_tokens` agree. Raises `NotSupported`
        for a worker without this endpoint."""
        body = {
            "model": model, "prompts": [list(ids) for ids in prompts], "prefixes": list(prefixes),
            "versions": list(versions), "codecs": list(codecs), "answer_tokens": answer_tokens,
        }  # fmt: skip
        try:
            return await self._post("/v1/kv/divergence", body)
        except ModelNotFound as error:
            raise NotSupported(f"worker {self.url} does not measure divergence: {error}") from error

    async def models(self) -> list[WorkerModel]:
        """The base first, then the loaded adapters."""
        entries = (await self._get("/v1/models"))["data"]
        return [
            WorkerModel(entry["id"], entry.get("parent"), entry.get("root"), entry.get("weights_id"))
            for entry in entries
        ]

    async def health(self) -> WorkerHealth:
        """Raises `WorkerUnavailable` when the worker is not ready."""
        body = await self._get("/health")
        return WorkerHealth(body.get("boot_id"), body.get("model"), body.get("context_length"))

    async def load(self) -> WorkerLoad:
        """How busy the worker is now. Raises `NotSupported` where it tells nothing that is understood."""
        try:
            response = await self._http.get("/metrics", timeout=10.0)
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"worker {self.url}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise NotSupported(f"worker {self.url} has no metrics")
        return _load(response.text)

    async def _get(self, path: str) -> Mapping[str, Any]:
        try:
            response = await self._http.get(path, timeout=10.0)
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"worker {self.url}: {error or type(error).__name__}") from error
        return _body(response)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> Mapping[str, Any]:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds, connect=5.0)
        try:
            response = await self._http.post(path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"worker {self.url}: {error or type(error).__name__}") from error
        return _body(response)


def _body(response: httpx.Response) -> Mapping[str, Any]:
    if response.status_code != 200:
        raise _failure(response)
    # vLLM answers /health and adapter calls with plain text or nothing.
    if not response.headers.get("content-type", "").startswith("application/json"):
        return {}
    body = response.json()
    return body if isinstance(body, dict) else {}


def _failure(response: httpx.Response) -> WorkerError:
    return _error(response.status_code, _message(response), _retry_after(response))


def _error(status: int | None, message: str, retry_after: float) -> WorkerError:
    if status == 404:
        return ModelNotFound(message)
    if status == 429:
        return Overloaded(message, retry_after)
    if status in (502, 503, 504):
        return WorkerUnavailable(message)
    return WorkerRejected(status or 500, message)


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500] or f"HTTP {response.status_code}"
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _retry_after(response: httpx.Response) -> float:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdigit() else 1.0


def _delta(choice: Mapping[str, Any]) -> Delta:
    token_ids = tuple(choice.get("token_ids") or ())
    return Delta(choice["index"], token_ids, _logprobs(choice.get("logprobs"), token_ids), choice.get("finish_reason"))


def _logprobs(given: Mapping[str, Any] | None, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    if not given:
        return ()
    tops = given.get("top_logprobs") or [None] * len(token_ids)
    entries = []
    for token_id, logprob, top in zip(token_ids, given["token_logprobs"], tops, strict=True):
        ranked = sorted((top or {}).items(), key=lambda item: -item[1])
        entries.append(
            TokenLogprob(token_id, logprob, tuple((int(k.removeprefix(_TOKEN_PREFIX)), v) for k, v in ranked))
        )
    return tuple(entries)


def _usage(given: Mapping[str, Any], before: Usage | None = None) -> Usage:
    """`before` is what was told earlier in the same answer; the account is not told with every chunk."""
    details = given.get("prompt_tokens_details") or {}
    return Usage(
        given["prompt_tokens"],
        given["completion_tokens"],
        details.get("cached_tokens") or 0,
        given.get("kvloop") or (before.extras if before is not None else {}),
    )


def _load(exposition: str) -> WorkerLoad:
    values: dict[str, float] = {}
    for line in exposition.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name in _WAITING or name in _RUNNING:
            values[name] = values.get(name, 0.0) + float(value)
    if values.keys().isdisjoint(_WAITING) or values.keys().isdisjoint(_RUNNING):
        raise NotSupported("its metrics tell no load")
    return WorkerLoad(*(int(sum(values.get(name, 0.0) for name in names)) for names in (_WAITING, _RUNNING)))
