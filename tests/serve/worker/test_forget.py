"""`POST /v1/kv/forget` over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from serve.backends.client import CompletionsClient
from tests.serve.tiny import prompt
from tests.serve.worker.conftest import Worker

LONG = list(prompt(300))


def complete(worker: Worker, salt: str = "", owner: str = "") -> int:
    body = {
        "model": "base",
        "prompt": LONG,
        "max_tokens": 4,
        "temperature": 0,
        "cache_salt": salt,
        "kv_transfer_params": {"kv_owner": owner},
    }
    answer = worker.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert worker.engine.memory is not None
    assert worker.engine.memory.flush(20)
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_what_is_forgotten_is_not_reused(worker: Worker) -> None:
    complete(worker, "a", "session")
    assert complete(worker, "a", "session") == 288
    async with CompletionsClient(str(worker.client.base_url)) as client:
        assert (await client.forget(["another"], "a"))["disk"] == 0
        assert (await client.forget(["session"], "b"))["disk"] == 0, "another tenant's session"
        gone = await client.forget(["session"], "a")
        assert (gone["object"], gone["keys"], gone["ram"], gone["disk"]) == ("kv.forgotten", 1, 2, 2)
        assert (await client.forget(["session"], "a"))["disk"] == 0
    assert complete(worker, "a", "session") == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "owners"),
    ({"owners": "one"}, "owners"),
    ({"owners": [""]}, "owners.0"),
    ({"owners": ["x" * 300]}, "owners.0"),
    ({"owners": [5]}, "owners.0"),
    ({"owners": [], "prompts": [[1]]}, "prompts"),
    ({"owners": [], "cache_salt": 3}, "cache_salt"),
]


@pytest.mark.parametrize(("body", "says"), BAD)
def test_bad_bodies_are_refused(worker: Worker, body: dict[str, Any], says: str) -> None:
    answer = worker.client.post("/v1/kv/forget", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
