"""Sessions and memories whose time is over: gone for every reader at once, deleted by the sweeper."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serve.gateway.conftest import RunningGateway
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def _ask(client: openai.OpenAI, **extra: Any) -> Any:
    return client.chat.completions.create(model="kvloop", messages=HI, extra_body=extra)


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def test_an_expired_session_is_gone_before_it_is_swept(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker
) -> None:
    gateway = start_gateway(sweep_seconds=1000)
    session = gateway.post("/v1/sessions", {"ttl_seconds": 1.5}).json()
    assert session["expires_at"] == pytest.approx(time.time() + 1.5, abs=1.0)
    with gateway.client() as client:
        first = _ask(client, session_id=session["id"])
        assert worker.seen.bodies[-1]["kv_transfer_params"]["kv_expires_at"] == session["expires_at"]
        fork = gateway.post(f"/v1/sessions/{session['id']}/fork").json()
        assert fork["expires_at"] == session["expires_at"], "it holds the same words"
        _wait(lambda: time.time() > session["expires_at"])
        for call in (
            lambda: _ask(client, session_id=session["id"]),
            lambda: _ask(client, session_id=fork["id"]),
            lambda: client.responses.create(model="kvloop", input="Hi", previous_response_id=first.response_id),
            lambda: client.responses.retrieve(first.response_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        history: Any = [*HI, {"role": "assistant", "content": first.choices[0].message.content}, *HI]
        resent = client.chat.completions.create(model="kvloop", messages=history)
        assert resent.usage.kvloop["history"] == "new"  # type: ignore[union-attr]
    for name in (session["id"], fork["id"]):
        assert gateway.get(f"/v1/sessions/{name}").status_code == 404
    assert session["id"] not in [entry["id"] for entry in gateway.get("/v1/sessions").json()["data"]]
    assert gateway.delete(f"/v1/sessions/{session['id']}").status_code == 200, "deleting need not wait for the sweeper"


def test_the_sweeper_deletes_like_a_client(start_gateway: Callable[..., RunningGateway], worker: FakeWorker) -> None:
    gateway = start_gateway(sweep_seconds=0.05, session_ttl_seconds=1.0)
    with gateway.client() as client:
        session = _ask(client).session_id
        kept = gateway.post("/v1/sessions", {"ttl_seconds": 3600}).json()["id"]
        owner = worker.seen.bodies[0]["kv_transfer_params"]["kv_owner"]
        worker.script.forget_status = 500  # it stays until KV memory has forgotten it
        time.sleep(1.3)
        journal = gateway.journal()
        assert journal.expired_sessions() == [("default", session)]
        worker.script.forget_status = 200
        _wait(lambda: journal.expired_sessions() == [])
        assert owner in worker.seen.forgotten[-1]["owners"]
        _wait(lambda: gateway.metric('kvloop_expired_total{kind="session"}') == 1)
        journal.close()
        assert gateway.get(f"/v1/sessions/{kept}").status_code == 200


def test_an_expired_memory_ends_its_sessions(start_gateway: Callable[..., RunningGateway], worker: FakeWorker) -> None:
    gateway = start_gateway(sweep_seconds=0.05)
    memory = gateway.post("/v1/memories", {"text": "Until tonight.", "ttl_seconds": 1.5}).json()
    with gateway.client() as client:
        session = _ask(client, memory_ids=[memory["id"]]).session_id
        # No KV that was computed over it outlives it.
        for body in (*worker.seen.prefills, *worker.seen.bodies):
            assert body["kv_transfer_params"]["kv_expires_at"] == memory["expires_at"]
        _wait(lambda: gateway.get(f"/v1/memories/{memory['id']}").status_code == 410)
        with pytest.raises(openai.APIStatusError, match="has expired") as refused:
            _ask(client, session_id=session)
        assert refused.value.status_code == 410
    _wait(lambda: gateway.metric('kvloop_expired_total{kind="memory"}') == 1)
    assert len(worker.seen.forgotten[-1]["owners"]) == 2


def test_an_expired_memory_is_told_as_such_while_it_is_being_deleted(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker
) -> None:
    gateway = start_gateway(sweep_seconds=0.05)
    memory = gateway.post("/v1/memories", {"text": "Until tonight.", "ttl_seconds": 1.0}).json()
    with gateway.client() as client:
        session = _ask(client, memory_ids=[memory["id"]]).session_id
        worker.script.forget_gate = threading.Event()
        try:
            _wait(lambda: bool(worker.seen.forgotten))  # the sweeper's deletion hangs here
            with pytest.raises(openai.APIStatusError, match="has expired") as refused:
                _ask(client, session_id=session)
            assert refused.value.status_code == 410
        finally:
            worker.script.forget_gate.set()
            worker.script.forget_gate = None


def test_times_are_checked(gateway: RunningGateway) -> None:
    for wrong in (0, -1, "soon", 1e12):
        answer = gateway.post("/v1/sessions", {"ttl_seconds": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl_seconds")
    assert gateway.post("/v1/sessions").json()["expires_at"] is None
