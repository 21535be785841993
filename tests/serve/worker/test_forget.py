"""`POST /v1/kv/forget` over HTTP."""

from __future__ import annotations

import pytest

from serve.backends.client import CompletionsClient
from tests.serve.tiny import prompt
from tests.serve.worker.conftest import Worker

LONG = list(prompt(300))


def complete(worker: Worker, salt: str = "") -> int:
    body = {"model": "base", "prompt": LONG, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
    answer = worker.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert worker.engine.memory is not None
    assert worker.engine.memory.flush(20)
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_what_is_forgotten_is_not_reused(worker: Worker) -> None:
    complete(worker, "a")
    assert complete(worker, "a") == 299
    async with CompletionsClient(str(worker.client.base_url)) as client:
        chunks = await client.forget([LONG], [0], "a")
        assert chunks == {"ram": 2, "waiting": 0, "disk": 2, "quarantined": 0}
        assert await client.forget([LONG], [0], "a") == dict.fromkeys(chunks, 0)
    assert complete(worker, "a") == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompts": [[-5]]}, "token ids"), ({"prompts": [[1]], "keep_tokens": []}, "one for each"),
        ({"prompts": [[1]], "keep_tokens": [-1]}, "keep"), ({"prompts": 5}, "prompts"), ({"prompt": [[1]]}, "prompt"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(worker: Worker, body: dict[str, object], says: str) -> None:
    answer = worker.client.post("/v1/kv/forget", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
