"""Workers that die, refuse or hang; clients that leave; a gateway that stops."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from memory.journal.settings import JournalSettings
from tests.serve.gateway.conftest import RunningGateway, Say
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def worker(say: Say) -> Iterator[FakeWorker]:
    """Of each test alone: it dies."""
    fake = FakeWorker(say("Hello there, friend."))
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def gateway(start_gateway: Callable[..., RunningGateway]) -> RunningGateway:
    return start_gateway()


def _ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="kvloop", messages=HI, **more)


def test_requests_wait_for_a_worker_that_is_down(client: openai.OpenAI, worker: FakeWorker) -> None:
    _ask(client)
    worker.stop()
    threading.Timer(0.5, worker.start).start()
    assert _ask(client).choices[0].message.content == "Hello there, friend."


def test_a_worker_that_stays_away_is_told(start_gateway: Callable[..., RunningGateway], worker: FakeWorker) -> None:
    gateway = start_gateway(worker_wait_seconds=0.3)
    worker.stop()
    answer = gateway.post("/v1/chat/completions", {"model": "kvloop", "messages": HI})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    assert gateway.get("/health").json()["workers_up"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_was_never_there_is_waited_for_and_then_told(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, stream: bool
) -> None:
    worker.stop()
    gateway = start_gateway(worker_wait_seconds=0.3)
    answer = gateway.post("/v1/chat/completions", {"model": "kvloop", "messages": HI, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    gateway.stop()
    patient = start_gateway(worker_wait_seconds=30)
    threading.Timer(0.3, worker.start).start()
    assert patient.post("/v1/chat/completions", {"model": "kvloop", "messages": HI}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_death_before_the_first_text_is_not_noticed(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, stream: bool
) -> None:
    worker.script.die_after = 0
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in _ask(client, stream=True))
    else:
        text = _ask(client).choices[0].message.content
    assert text == "Hello there, friend."
    assert gateway.metric('kvloop_worker_retries_total{reason="unavailable"}') == 1


def test_a_death_in_mid_stream_ends_it_with_an_error(client: openai.OpenAI, worker: FakeWorker) -> None:
    session = _ask(client).session_id
    worker.script.die_after = 2
    texts: list[str] = []

    def listen() -> None:
        for chunk in _ask(client, stream=True, extra_body={"session_id": session}):
            texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401

    with pytest.raises(openai.APIError, match="stopped in the middle"):
        listen()
    assert "".join(texts)
    # Nothing of it was kept, and the session goes on.
    assert _ask(client, extra_body={"session_id": session}).session_id == session


def test_a_request_that_workers_die_of_is_given_up(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker
) -> None:
    worker.script.answer = lambda body: 1 / 0
    with pytest.raises(openai.InternalServerError) as refused:
        _ask(client)
    assert refused.value.status_code == 503
    assert len(worker.seen.bodies) == 4


def test_a_full_queue_is_429(gateway: RunningGateway, worker: FakeWorker) -> None:
    worker.script.reject = (429, "queue full", {"Retry-After": "7"})
    for stream in (False, True):
        answer = gateway.post("/v1/chat/completions", {"model": "kvloop", "messages": HI, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "rate_limit_error"
    worker.script.reject = (400, "no such thing", {})
    answer = gateway.post("/v1/chat/completions", {"model": "kvloop", "messages": HI})
    assert (answer.status_code, "no such thing" in answer.text) == (400, True)
    worker.script.reject = (500, "broken", {})
    assert gateway.post("/v1/chat/completions", {"model": "kvloop", "messages": HI}).status_code == 502


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(gateway: RunningGateway, worker: FakeWorker, stream: bool) -> None:
    worker.script.gate = threading.Event()
    body = {"model": "kvloop", "messages": HI, "stream": stream}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=0.5) as response,
    ):
        next(response.iter_lines())
    for _ in range(500):
        if worker.seen.aborted and gateway.get("/v1/kvloop/status").json()["workers"][0]["in_flight"] == 0:
            break
        time.sleep(0.02)
    assert worker.seen.aborted == 1
    status = gateway.get("/v1/kvloop/status").json()
    assert status["workers"][0]["in_flight"] == 0
    assert sum(version["in_flight"] for version in status["versions"]) == 0
    for _ in range(500):
        if "kvloop_disconnects_total 1.0" in gateway.get("/metrics").text:
            break
        time.sleep(0.02)
    metrics = gateway.get("/metrics").text
    assert "kvloop_disconnects_total 1.0" in metrics
    assert 'kvloop_requests_total{route="/v1/chat/completions",status="499"} 1.0' in metrics


def test_a_stopping_gateway_finishes_its_streams(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker
) -> None:
    worker.script.gate = threading.Event()
    stream = iter(_ask(client, stream=True))
    next(stream)
    stopping = threading.Thread(target=gateway.stop)
    stopping.start()
    threading.Timer(0.5, worker.script.gate.set).start()
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"
    stopping.join()


def test_several_workers_share_the_load_and_keep_their_sessions(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, say: Say
) -> None:
    other = FakeWorker(say("Hello there, friend."))
    other.start()
    gateway = start_gateway(worker.url, other.url)
    try:
        with gateway.client() as client:
            worker.script.gate = other.script.gate = threading.Event()
            threads = [threading.Thread(target=_ask, args=(client,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(1000):
                if len(worker.seen.bodies) + len(other.seen.bodies) == 4:
                    break
                time.sleep(0.01)
            worker.script.gate.set()
            for thread in threads:
                thread.join()
            assert len(worker.seen.bodies) == len(other.seen.bodies) == 2
            session = _ask(client).session_id
            held = worker if len(worker.seen.bodies) > len(other.seen.bodies) else other
            before = len(held.seen.bodies)
            for _ in range(3):
                _ask(client, extra_body={"session_id": session})
            assert len(held.seen.bodies) == before + 3
            held.stop()
            assert _ask(client, extra_body={"session_id": session}).session_id == session
    finally:
        gateway.stop()
        other.stop()


def test_a_journal_that_stays_locked_is_a_503(start_gateway: Callable[..., RunningGateway], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'locked.db'}"
    gateway = start_gateway(journal=JournalSettings(url=url, busy_timeout=0.2))
    body = {"model": "kvloop", "messages": [{"role": "user", "content": "Hello"}]}
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    with contextlib.closing(sqlite3.connect(tmp_path / "locked.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = gateway.post("/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "journal_unavailable")
        assert answer.headers["retry-after"]
        other.execute("ROLLBACK")
    assert gateway.post("/v1/chat/completions", body).status_code == 200
