"""Bodies, errors, keys and limits: every refusal is a clear 4xx in OpenAI's shape."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request

from serve.gateway.app import _http_error, routes
from serve.gateway.auth import Auth
from serve.gateway.bodies import ChatBody, ResponsesBody, parse
from serve.gateway.errors import ApiError
from serve.gateway.settings import GatewaySettings, load_settings
from tests.serve.gateway.conftest import RunningGateway, gateway_settings
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model
HI: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def _refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "Missing"),
        ({"model": None}, "model", "Missing"),
        ({"model": 7}, "model", "string"),
        ({"n": 0}, "n", "greater"),
        ({"n": 99}, "n", "at most 16"),
        ({"temperature": 3}, "temperature", "less"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "string"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"top_logprobs": 2}, None, "logprobs"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "system"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": "x", "contnt": "y"}]}, "messages.0.contnt", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, ""),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "c"}]}]},
            "messages.0.tool_calls",
            "not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"presence_penalty": 1}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ],
)
def test_a_bad_request_says_what_is_wrong(
    gateway: RunningGateway, worker: FakeWorker, change: dict[str, Any], param: str | None, says: str
) -> None:
    error = _refused(gateway.post(CHAT, {"model": "kvloop", "messages": HI} | change), 400)
    assert says.lower() in error["message"].lower()
    if param is not None:
        assert error["param"] == param
    assert worker.seen.bodies == []


def test_what_asks_for_nothing_is_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="kvloop", messages=HI, tools=[], tool_choice="none", response_format={"type": "text"},
        frequency_penalty=0, presence_penalty=0, logit_bias={}, parallel_tool_calls=True, service_tier="auto",
        prompt_cache_key="k", safety_identifier="s", n=1, stop=None, seed=None,
    )  # fmt: skip
    assert answer.choices[0].message.content
    reply = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "annotations": []}
    answer = client.chat.completions.create(model="kvloop", messages=[*HI, reply, *HI])
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"x": NaN}', b'{"user": "\\ud800"}']
)
def test_malformed_bodies(gateway: RunningGateway, body: bytes) -> None:
    for path in (CHAT, "/v1/responses", "/v1/feedback"):
        _refused(httpx.post(gateway.url + path, content=body), 400)


def test_a_large_body_is_refused(start_gateway: Callable[..., RunningGateway]) -> None:
    gateway = start_gateway(max_body_bytes=2000)
    body = {"model": "kvloop", "messages": [{"role": "user", "content": "x" * 3000}]}
    assert _refused(gateway.post(CHAT, body), 413)["code"] == "body_too_large"
    chunks = iter([json.dumps(body).encode()[at : at + 100] for at in range(0, 3000, 100)])
    assert _refused(httpx.post(gateway.url + CHAT, content=chunks), 413)["code"] == "body_too_large"


def test_a_prompt_that_is_too_long(gateway: RunningGateway, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="kvloop", messages=[{"role": "user", "content": "word " * 9000}])
    assert refused.value.code == "context_length_exceeded"
    assert "8192" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="8192 tokens"):
        client.chat.completions.create(model="kvloop", messages=HI, max_tokens=8192)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="kvloop", input="word " * 9000)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
        ("GET", "/v1/sessions/none", 404), ("DELETE", "/v1/sessions/none", 404),
        ("POST", "/v1/sessions/none/fork", 404), ("GET", "/v1/sessions?after=none", 404),
        ("GET", "/v1/responses/none", 404), ("DELETE", "/v1/responses/none", 404), ("GET", "/v1/models/none", 404),
        ("GET", "/v1/sessions?limit=0", 400), ("GET", "/v1/sessions?limit=x", 400),
    ],
)  # fmt: skip
def test_what_is_not_there(gateway: RunningGateway, method: str, path: str, status: int) -> None:
    _refused(httpx.request(method, gateway.url + path), status)


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/sess_any/fork"])
def test_metadata_is_limited_everywhere(gateway: RunningGateway, path: str) -> None:
    for metadata in ({"a": "x" * 513}, {"k" * 65: "x"}, {str(number): "x" for number in range(17)}):
        error = _refused(gateway.post(path, {"metadata": metadata}), 400)
        assert (error["param"], error["code"]) == ("metadata", "invalid_value")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "not_found", "invalid_request_error"), (405, "method_not_allowed", "invalid_request_error"),
        (400, None, "invalid_request_error"), (503, None, "server_error"),
    ],
)  # fmt: skip
async def test_only_what_is_not_there_is_called_not_found(status: int, code: str | None, kind: str) -> None:
    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": []})
    answer = await _http_error(request, HTTPException(status, "cut off"))
    assert answer.status_code == status
    error = json.loads(bytes(answer.body))["error"]
    assert (error["code"], error["type"]) == (code, kind)


def test_unknown_models_and_sessions(gateway: RunningGateway) -> None:
    assert _refused(gateway.post(CHAT, {"model": "gpt-9", "messages": HI}), 404)["code"] == "model_not_found"
    body = {"model": "kvloop", "messages": HI, "session_id": "sess_none"}
    assert _refused(gateway.post(CHAT, body), 404)["param"] == "session_id"
    assert _refused(gateway.post(CHAT, body | {"stream": True}), 404)["param"] == "session_id"
    both = {"model": "kvloop", "input": "x", "session_id": "a", "previous_response_id": "b"}
    _refused(gateway.post("/v1/responses", both), 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ChatBody.model_fields, *ResponsesBody.model_fields, "tools", "response_format", "text"])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(FIELDS | st.text(max_size=6), JSON, max_size=8))
def test_any_body_is_taken_or_refused_by_name(body: dict[str, Any]) -> None:
    for kind in (ChatBody, ResponsesBody):
        for given_body in (body, {"model": "m", "messages": HI, "input": "x"} | body):
            refusal: ApiError | None = None
            try:
                parse(kind, given_body)
            except ApiError as error:
                refusal = error
            assert refusal is None or (refusal.status == 400 and refusal.message)


def test_without_keys_only_this_machine_is_served(gateway: RunningGateway, tmp_path: Path, model_dir: Path) -> None:
    body = {"model": "kvloop", "messages": HI}
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert _refused(gateway.post(CHAT, body, headers=headers), 403)["code"] == "not_local"
    assert gateway.post(CHAT, body, headers={"Origin": "http://localhost:3000"}).status_code == 200
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(ValueError, match="no API keys"):
            gateway_settings(tmp_path, model_dir, "http://w", host=host)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert gateway_settings(tmp_path, model_dir, "http://w", host=host).host == host
    (tmp_path / "keys.json").write_text('{"k": "t"}')
    assert gateway_settings(tmp_path, model_dir, "http://w", host="0.0.0.0", keys_file=tmp_path / "keys.json")


def test_keys_and_secrets_must_be_usable(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16"):
        Auth.read(None, secret, None)
    secret.write_bytes(b"long enough, this one")
    for text in ("{}", "[]", '{"key": 5}', '{"key": ""}', "not json"):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ValueError):
            Auth.read(tmp_path / "keys", secret, None)
    one, two = Auth({"a": "x"}, b"secret one, sixteen", None), Auth({"a": "x"}, b"secret two, sixteen", None)
    assert one.cache_salt("ann") != one.cache_salt("bob")
    assert one.cache_salt("ann") != two.cache_salt("ann")
    assert len(one.cache_salt("ann")) == 64


def test_settings_that_cannot_be_used_end_the_program(tmp_path: Path, model_dir: Path) -> None:
    good = gateway_settings(tmp_path, model_dir, "http://w").model_dump(mode="json")
    (tmp_path / "good.json").write_text(json.dumps(good))
    assert load_settings(tmp_path / "good.json") == GatewaySettings(**good)
    (tmp_path / "bad.json").write_text(json.dumps(good | {"prot": 5}))
    ended = subprocess.run(
        [sys.executable, "-m", "serve.gateway", "--settings", str(tmp_path / "bad.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "prot" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_gateway_starts_without_torch() -> None:
    heavy = ["torch", "transformers", "mlflow", "peft", "trl"]
    code = f"import sys, serve.gateway.__main__; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_count_what_happened(gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker) -> None:
    before = gateway.metric('kvloop_requests_total{route="/v1/chat/completions",status="200"}')
    cached = gateway.metric('kvloop_tokens_total{kind="cached"}')
    first = client.chat.completions.create(model="kvloop", messages=HI)
    again = client.chat.completions.create(model="kvloop", messages=HI, extra_body={"session_id": first.session_id})
    assert gateway.metric('kvloop_requests_total{route="/v1/chat/completions",status="200"}') == before + 2
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    grown = gateway.metric('kvloop_tokens_total{kind="cached"}') - cached
    assert grown >= again.usage.prompt_tokens_details.cached_tokens
    assert gateway.metric("kvloop_ttft_seconds_count") >= 2
    gateway.get("/nothing")
    assert gateway.metric('kvloop_requests_total{route="unmatched",status="404"}') >= 1


def test_every_route_answers_in_its_shape(gateway: RunningGateway) -> None:
    for route in routes():
        path = (
            route.path.replace("{session_id}", "none").replace("{response_id}", "none").replace("{model:path}", "none")
        )
        for method in (route.methods or set()) - {"HEAD"}:
            answer = httpx.request(method, gateway.url + path, content=b"{}")
            assert answer.status_code < 500, (method, path)
            if answer.status_code >= 400:
                _refused(answer, answer.status_code)
