"""Changing the served version: proven first, nothing dropped, nothing mixed, back at once."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serve.gateway.text import TextCodec
from tests.serve.gateway.conftest import RunningGateway, Say
from tests.serve.gateway.fake_worker import BASE_NAME, BASE_WEIGHTS, END, FakeWorker, logprob, make_adapter

pytestmark = pytest.mark.model
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ACTIVATE = "/internal/versions/activate"
BASE = {"name": "base", "path": None, "who": "test", "reason": "back"}


@pytest.fixture
def worker(say: Say) -> Iterator[FakeWorker]:
    """Of each test alone: adapters stay."""
    fake = FakeWorker(say("Hello there, friend."))
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def gateway(start_gateway: Callable[..., RunningGateway]) -> RunningGateway:
    return start_gateway()


def _ask(client: openai.OpenAI, model: str = "kvloop", **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=HI, **more)


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def test_promote_and_roll_back(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    one = make_adapter(tmp_path / "v1", "one")
    assert _ask(client).model == BASE_NAME
    done = gateway.admin(ACTIVATE, one)
    assert done.status_code == 200, done.text
    assert done.json()["changed"] is True
    answer = _ask(client)
    assert answer.model == "v1"
    assert answer.system_fingerprint == "fp_" + "b" * 12 + "_" + one["weights_id"].split("+")[1][:12]
    assert answer.usage.kvloop["weights_id"] == one["weights_id"]
    assert worker.seen.bodies[-1]["model"] == "v1"
    # The base and every resident version can be named.
    assert _ask(client, BASE_NAME).model == BASE_NAME
    assert [model.id for model in client.models.list()] == ["kvloop", BASE_NAME, "v1"]
    assert client.models.retrieve("v1").id == "v1"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        _ask(client, "v9")
    # Repeating it changes nothing.
    assert gateway.admin(ACTIVATE, one).json()["changed"] is False
    assert gateway.admin(ACTIVATE, BASE).json()["changed"] is True
    assert _ask(client).model == BASE_NAME
    # The version served before stays loaded: the way back needs no load.
    assert gateway.admin(ACTIVATE, one).json()["changed"] is True
    assert worker.seen.loads == ["v1"]
    ledger = gateway.get("/internal/versions", headers={"Authorization": "Bearer admin-token-of-the-tests"}).json()[
        "ledger"
    ]
    assert [(move["from"], move["to"], move["action"]) for move in reversed(ledger)] == [
        ("base", "v1", "promote"), ("v1", "base", "rollback"), ("base", "v1", "rollback"),
    ]  # fmt: skip
    assert gateway.metric('kvloop_swaps_total{outcome="done"}') == 3
    assert gateway.metric(f'kvloop_serving{{version="v1",weights_id="{one["weights_id"]}"}}') == 1


def test_old_versions_are_unloaded_when_nothing_runs_on_them(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    for name in ("v1", "v2"):
        gateway.admin(ACTIVATE, make_adapter(tmp_path / name, name))
        if name == "v1":
            worker.script.gate = threading.Event()
            slow = iter(client.chat.completions.create(model="kvloop", messages=HI, stream=True))
            next(slow)
    gateway.admin(ACTIVATE, make_adapter(tmp_path / "v3", "v3"))
    assert "v1" in worker.adapters
    worker.script.gate.set()
    chunks = list(slow)
    assert {chunk.model for chunk in chunks} == {"v1"}
    assert chunks[-1].choices[0].finish_reason == "stop"
    _wait(lambda: worker.adapters == ["v2", "v3"])
    assert worker.seen.unloads == ["v1"]


def test_a_version_that_fails_its_proof_never_serves(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    one = make_adapter(tmp_path / "v1", "one")
    worker.script.wrong_weights = True
    refused = gateway.admin(ACTIVATE, one)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "fingerprint_mismatch"
    assert worker.adapters == []
    assert _ask(client).model == BASE_NAME
    worker.script.wrong_weights = False
    for change, code in (
        ({"weights_id": f"{BASE_WEIGHTS}+{'0' * 64}"}, "adapter_refused"),
        ({"weights_id": f"{'a' * 64}+{'0' * 64}"}, "base_mismatch"),
        ({"fingerprint": {"probes": [], "tolerance": 1}}, "no_fingerprint"),
        ({"path": str(tmp_path / "nowhere")}, "adapter_missing"),
        ({"path": None}, "path_missing"),
        ({"name": BASE_NAME}, "name_in_use"),
    ):
        refused = gateway.admin(ACTIVATE, one | change)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, code), change
    (tmp_path / "v1" / "adapter_model.safetensors").rename(tmp_path / "v1" / "adapter_model.bin")
    assert gateway.admin(ACTIVATE, one).json()["error"]["code"] == "adapter_refused"
    (tmp_path / "v1" / "adapter_model.bin").rename(tmp_path / "v1" / "adapter_model.safetensors")
    assert gateway.admin(ACTIVATE, one).status_code == 200
    other = make_adapter(tmp_path / "x" / "v1", "other")
    assert gateway.admin(ACTIVATE, other).json()["error"]["code"] == "name_in_use"
    assert _ask(client).model == "v1"


def test_the_same_numbers_as_the_base_prove_nothing(gateway: RunningGateway, tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "v1", "one")
    for probe in one["fingerprint"]["probes"]:
        probe["base_logprobs"] = probe["adapter_logprobs"] = [
            logprob(one["weights_id"], token) for token in probe["token_ids"][1:]
        ]
        probe["adapter_logprobs"] = [value + 0.01 for value in probe["adapter_logprobs"]]
    assert gateway.admin(ACTIVATE, one).json()["error"]["code"] == "fingerprint_mismatch"


def test_the_internal_api_needs_its_token(gateway: RunningGateway, start_gateway: Any, tmp_path: Path) -> None:
    assert gateway.post(ACTIVATE, BASE).status_code == 401
    assert gateway.post(ACTIVATE, BASE, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert gateway.get("/internal/versions").status_code == 401


def test_a_swap_under_load_drops_and_mixes_nothing(
    gateway: RunningGateway, worker: FakeWorker, codec: TextCodec, tmp_path: Path
) -> None:
    # The fake answers with the name of the model it was asked for: a mixed answer would show.
    worker.script.answer = lambda body: [*codec.encode_plain(f"I am {body['model']} and still {body['model']}."), END]
    worker.script.token_seconds = 0.002
    worker.script.load_seconds = 0.2
    stop = threading.Event()
    seen: list[tuple[str, str]] = []
    failures: list[Exception] = []

    def ask() -> None:
        with gateway.client() as client:
            while not stop.is_set():
                try:
                    chunks = list(client.chat.completions.create(model="kvloop", messages=HI, stream=True))
                except openai.OpenAIError as error:
                    failures.append(error)
                    continue
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert len({(chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
                seen.append((chunks[0].model, text))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    bodies = [make_adapter(tmp_path / name, name) for name in ("v1", "v2", "v3")]
    for body in (*bodies, bodies[1], BASE):
        assert gateway.admin(ACTIVATE, body).status_code == 200
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(text == f"I am {model} and still {model}." for model, text in seen)
    assert {model for model, _ in seen} == {"v1", "v2", "v3", BASE_NAME}


def test_a_restarted_gateway_serves_the_same_version(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    one, two = make_adapter(tmp_path / "v1", "one"), make_adapter(tmp_path / "v2", "two")
    gateway.admin(ACTIVATE, one)
    gateway.admin(ACTIVATE, two)
    gateway.stop()
    worker.stop()
    worker.start()
    gateway.start()
    assert _ask(client).model == "v2"
    # The version before is brought back too, so that a rollback is as fast as ever.
    _wait(lambda: worker.adapters == ["v1", "v2"])
    assert gateway.admin(ACTIVATE, one).json()["changed"] is True
    assert _ask(client).model == "v1"


def test_a_restarted_worker_gets_its_versions_back(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    gateway.admin(ACTIVATE, make_adapter(tmp_path / "v1", "one"))
    worker.stop()
    worker.start()
    assert _ask(client).model == "v1"
    assert worker.adapters == ["v1"]


def test_a_restarted_worker_must_prove_its_versions_again(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    gateway.admin(ACTIVATE, make_adapter(tmp_path / "v1", "one"))
    assert _ask(client).model == "v1"
    worker.stop()
    worker.script.wrong_weights = True  # loaded under the right digest, but not applied
    worker.start()
    with pytest.raises(openai.InternalServerError, match="fingerprint") as refused:
        _ask(client)
    assert refused.value.status_code == 503
    _wait(lambda: "v1" in worker.seen.unloads)
    assert worker.seen.finished == 1
    worker.script.wrong_weights = False
    assert _ask(client).model == "v1"


def test_weights_that_changed_on_disk_are_not_served_under_the_old_name(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    gateway.admin(ACTIVATE, make_adapter(tmp_path / "v1", "one"))
    worker.stop()
    shutil.rmtree(tmp_path / "v1")
    make_adapter(tmp_path / "v1", "tampered")
    worker.start()
    with pytest.raises(openai.InternalServerError) as refused:
        _ask(client)
    assert refused.value.status_code == 503


def test_an_answer_made_with_other_weights_is_an_error(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script.weights_told = "c" * 64
    with pytest.raises(openai.InternalServerError) as refused:
        _ask(client)
    assert refused.value.code == "weights_mismatch"
