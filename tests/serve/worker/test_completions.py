"""`POST /v1/completions` over HTTP: shapes as vLLM's, honest usage, clear errors, disconnects."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.serve.tiny import prompt
from tests.serve.worker.conftest import Worker

GREEDY: dict[str, Any] = {"model": "base", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
PROMPT = list(prompt(30))


def post(worker: Worker, **fields: Any) -> httpx.Response:
    return worker.client.post("/v1/completions", json=GREEDY | {"prompt": PROMPT} | fields)


def complete(worker: Worker, **fields: Any) -> dict[str, Any]:
    response = post(worker, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chunks(worker: Worker, **fields: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; it must end with [DONE]."""
    body = GREEDY | {"prompt": PROMPT, "stream": True} | fields
    with worker.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_whole_reply(worker: Worker) -> None:
    body = complete(worker)
    assert body["object"] == "text_completion"
    assert body["model"] == "base"
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == 6
    assert (choice["index"], choice["text"], choice["finish_reason"], choice["stop_reason"]) == (0, "", "length", None)
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] is None
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 6, 36)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    extras = usage["kvloop"]
    assert (extras["computed_tokens"], extras["restored_tokens"], extras["ram_tokens"]) == (30, 0, 0)
    assert (extras["generated_tokens"], extras["fidelity"]) == (6, "exact")
    assert extras["weights_id"] == worker.engine.versions.base.weights_id
    assert [span["source"] for span in extras["spans"]] == ["computed", "generated"]
    assert extras["ttft_ms"] > 0


def test_a_stream_is_the_reply_in_pieces(worker: Worker) -> None:
    whole = complete(worker, logprobs=2, kv_transfer_params={"kv_save": False})
    *pieces, last = chunks(
        worker, logprobs=2, stream_options={"include_usage": True}, kv_transfer_params={"kv_save": False}
    )
    assert [piece["choices"][0]["token_ids"] for piece in pieces] == [[id_] for id_ in whole["choices"][0]["token_ids"]]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 5 + ["length"]
    assert len({piece["id"] for piece in (*pieces, last)}) == 1
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "prompt_tokens_details"):
        assert last["usage"][key] == whole["usage"][key]
    for at, piece in enumerate(pieces):
        logprobs, expected = piece["choices"][0]["logprobs"], whole["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [expected["tokens"][at]]
        assert logprobs["tokens"] == [f"token_id:{whole['choices'][0]['token_ids'][at]}"]
        assert logprobs["token_logprobs"] == [pytest.approx(expected["token_logprobs"][at], abs=1e-4)]
        assert len(logprobs["top_logprobs"][0]) == 2
        assert logprobs["top_logprobs"][0].keys() == expected["top_logprobs"][at].keys()


def test_usage_as_it_goes(worker: Worker) -> None:
    long = list(prompt(300))
    complete(worker, prompt=long)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = chunks(worker, prompt=long, stream_options=options)
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3, 4, 5, 6]
    first = pieces[0]["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 288
    for key in ("restored_tokens", "ram_tokens", "computed_tokens", "weights_id", "ttft_ms", "fidelity"):
        assert first["kvloop"][key] == last["usage"]["kvloop"][key]
    for piece in pieces[1:]:
        assert "kvloop" not in piece["usage"]
        for key in ("prompt_tokens", "prompt_tokens_details"):
            assert piece["usage"][key] == last["usage"][key]
    *pieces, last = chunks(worker, prompt=[long, long[:50]], n=2, stream_options=options)
    assert sum("kvloop" in piece["usage"] for piece in pieces) == 2
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == list(range(1, 25))
    assert pieces[-1]["usage"]["prompt_tokens_details"] == last["usage"]["prompt_tokens_details"]


def test_usage_comes_only_when_asked_for(worker: Worker) -> None:
    assert all(chunk["choices"] for chunk in chunks(worker))


def test_several_prompts_with_several_choices(worker: Worker) -> None:
    prompts = [list(prompt(5, 1)), list(prompt(9, 2))]
    body = complete(worker, prompt=prompts, n=2, temperature=1.0, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 14
    assert body["usage"]["completion_tokens"] == 24
    streamed: dict[int, list[int]] = {index: [] for index in range(4)}
    for chunk in chunks(worker, prompt=prompts, n=2, temperature=1.0, seed=5):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == {choice["index"]: choice["token_ids"] for choice in body["choices"]}


def test_prompt_logprobs(worker: Worker) -> None:
    body = complete(worker, prompt=[PROMPT, PROMPT[:3]], max_tokens=1, prompt_logprobs=1)
    first, second = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first[0] is None
    assert len(first) == 30
    assert second[1:] == [
        {key: value | {"logprob": pytest.approx(value["logprob"], abs=1e-4)} for key, value in entry.items()}
        for entry in first[1:3]
    ]
    for token, entry in zip(PROMPT[1:], first[1:], strict=True):
        assert entry[str(token)]["logprob"] < 0
        assert entry[str(token)]["rank"] >= 1
        assert entry[str(token)]["decoded_token"] is None
        assert any(value["rank"] == 1 for value in entry.values())


def test_the_next_turn_reuses_the_last(worker: Worker) -> None:
    turn = list(prompt(300))
    reply = complete(worker, prompt=turn, cache_salt="tenant")["choices"][0]["token_ids"]
    usage = complete(worker, prompt=[*turn, *reply, 7, 8], cache_salt="tenant")["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == usage["kvloop"]["ram_tokens"] == 305
    assert usage["kvloop"]["computed_tokens"] == 3
    other = complete(worker, prompt=[*turn, *reply, 7, 8], cache_salt="other")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [[]]}, 400, "empty"),
        ({"prompt": "words"}, 400, "prompt"),
        ({"prompt": [1, 97]}, 400, "outside 0 .. 96"),
        ({"prompt": [1] * 600}, 400, "context holds 512"),
        ({"max_tokens": 500}, 400, "context holds 512"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"logprobs": 50}, 400, "logprobs"),
        ({"beam_width": 3}, 400, "unknown field 'beam_width'"),
        ({"kv_transfer_params": {"x": 1}}, 400, "unknown field 'kv_transfer_params.x'"),
        ({"stream_options": {"include_usage": True}}, 400, "stream=true"),
        ({"stream": True, "prompt_logprobs": 1}, 400, "cannot be streamed"),
        ({"prompt": [[3]] * 65}, 400, "65 prompts"),
        ({"model": "other"}, 404, "'other'"),
    ],
)
def test_errors_say_what_was_wrong(worker: Worker, fields: dict[str, Any], status: int, message: str) -> None:
    response = post(worker, **fields)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["code"] == status
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


def test_a_body_that_is_no_json(worker: Worker) -> None:
    headers = {"content-type": "application/json"}
    response = worker.client.post("/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


def test_a_full_queue_is_429(worker: Worker) -> None:
    body = {"prompt": [[5]] * 20, "max_tokens": 400, "stream": True}
    with worker.client.stream("POST", "/v1/completions", json=GREEDY | body):
        wait_for(lambda: worker.engine.load_now.waiting >= 4)
        response = post(worker)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == 429
    wait_for(lambda: worker.engine.load_now.waiting == worker.engine.load_now.running == 0)
    complete(worker)


def test_a_client_that_leaves_a_stream_frees_its_place(worker: Worker) -> None:
    body = GREEDY | {"prompt": PROMPT, "stream": True, "max_tokens": 480}
    with worker.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert worker.engine.load_now.running == 1
    wait_for(lambda: worker.engine.load_now.running == 0)
    metrics = worker.client.get("/metrics").text
    assert 'kvloop_worker_requests_total{outcome="aborted"} 1.0' in metrics


def test_a_client_that_does_not_wait_frees_its_place(worker: Worker) -> None:
    with pytest.raises(httpx.ReadTimeout):
        worker.client.post("/v1/completions", json=GREEDY | {"prompt": [PROMPT] * 8, "max_tokens": 480}, timeout=0.2)
    wait_for(lambda: worker.engine.load_now.running == worker.engine.load_now.waiting == 0)
    assert 'outcome="aborted"' in worker.client.get("/metrics").text
    complete(worker)
