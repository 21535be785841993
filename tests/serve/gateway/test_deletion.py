"""Deleting a session reaches KV memory, and is told only when it did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from serve.gateway.busy import Busy
from tests.serve.gateway.conftest import RunningGateway, Say
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model


@pytest.fixture
def other(say: Say) -> Iterator[FakeWorker]:
    fake = FakeWorker(say("Hello there, friend."))
    fake.start()
    yield fake
    fake.stop()


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(400):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def _turn(client: openai.OpenAI, text: str, session: str | None = None, **more: Any) -> Any:
    extra = {} if session is None else {"session_id": session}
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="kvloop", messages=messages, extra_body=extra, **more)


def test_every_worker_forgets_the_session_and_nobody_else(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, other: FakeWorker
) -> None:
    gateway = start_gateway(worker.url, other.url)
    with gateway.client() as client:
        session = _turn(client, "My name is Ada.").session_id
        _turn(client, "What is it?", session)
        _turn(client, "Somebody else")
    bodies = [*worker.seen.bodies, *other.seen.bodies]
    owners = {body["kv_transfer_params"]["kv_owner"] for body in bodies}
    assert len(owners) == 2, "each session is an owner of its own"
    receipt = gateway.delete(f"/v1/sessions/{session}").json()["receipt"]
    for fake in (worker, other):
        (asked,) = fake.seen.forgotten
        assert asked["cache_salt"] == bodies[0]["cache_salt"] != ""
        assert asked["owners"] == [bodies[0]["kv_transfer_params"]["kv_owner"]]
        assert session not in asked["owners"][0]
    assert receipt["responses"] == 2
    assert [entry["worker"] for entry in receipt["kv"]] == [worker.url, other.url]
    assert {entry["status"] for entry in receipt["kv"]} == {"forgotten"}
    assert sum(entry["chunks"]["ram"] for entry in receipt["kv"]) == 2
    assert [(entry["keys"], entry["remote_waiting"]) for entry in receipt["kv"]] == [(1, 2)] * 2
    assert all(entry["chunks"].keys() == {"ram", "waiting", "disk", "remote", "quarantined"} for entry in receipt["kv"])


def test_a_deleted_fork_leaves_what_the_living_still_say(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    first = _turn(client, "Hi")
    fork = gateway.post(f"/v1/sessions/{first.session_id}/fork").json()["id"]
    _turn(client, "Elsewhere", fork)
    assert gateway.delete(f"/v1/sessions/{fork}").json()["receipt"]["sessions"] == [fork]
    (asked,) = worker.seen.forgotten
    of_first, of_fork = (body["kv_transfer_params"]["kv_owner"] for body in worker.seen.bodies)
    assert asked["owners"] == [of_fork] != [of_first]


def test_nothing_is_deleted_while_bytes_remain(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, other: FakeWorker
) -> None:
    gateway = start_gateway(worker.url, other.url)
    with gateway.client() as client:
        session = _turn(client, "Hi").session_id
    worker.script.forget_status = 500
    refused = gateway.delete(f"/v1/sessions/{session}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert gateway.get(f"/v1/sessions/{session}").status_code == 200
    worker.script.forget_status = 503
    other.stop()
    assert gateway.delete(f"/v1/sessions/{session}").status_code == 503
    worker.script.forget_status = 200
    receipt = gateway.delete(f"/v1/sessions/{session}").json()["receipt"]
    assert [entry["status"] for entry in receipt["kv"]] == ["forgotten", "unreachable"]
    assert gateway.get(f"/v1/sessions/{session}").status_code == 404
    assert gateway.delete(f"/v1/sessions/{session}").status_code == 404


def test_a_worker_that_cannot_forget_is_in_the_receipt(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    session = _turn(client, "Hi").session_id
    worker.script.forget_status = 404
    receipt = gateway.delete(f"/v1/sessions/{session}").json()["receipt"]
    assert receipt["kv"] == [{"worker": worker.url, "status": "not_supported"}]


def test_deleting_a_response_forgets_it_too(client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker) -> None:
    made = client.responses.create(model="kvloop", input="Hi")
    answer = gateway.delete(f"/v1/responses/{made.id}").json()
    assert answer["receipt"]["kv"][0]["status"] == "forgotten"
    assert len(worker.seen.forgotten) == 1


def test_no_turn_goes_on_from_what_is_being_deleted(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    first = _turn(client, "Hi")
    _turn(client, "Go on", first.session_id)
    worker.script.gate = threading.Event()
    resent: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "More"},
    ]
    # It goes on from a reply that is not the latest one, so it runs in a fork.
    forked = iter(client.chat.completions.create(model="kvloop", messages=resent, stream=True))
    assert next(forked).session_id != first.session_id
    assert gateway.delete(f"/v1/sessions/{first.session_id}").status_code == 409
    worker.script.gate.set()
    list(forked)
    receipt = gateway.delete(f"/v1/sessions/{first.session_id}").json()["receipt"]
    assert len(receipt["sessions"]) == 2


def test_a_turn_that_was_never_kept_leaves_no_kv(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    session = _turn(client, "Hi").session_id
    worker.script.gate = threading.Event()
    for extra in ({}, {"session_id": session}):
        with client.chat.completions.create(
            model="kvloop", messages=[{"role": "user", "content": "More"}], stream=True, extra_body=extra
        ) as stream:
            next(iter(stream))
    _wait(lambda: worker.seen.aborted == 2)
    _wait(lambda: len(worker.seen.forgotten) == 1)
    # The first would have made a session that nobody can delete now; the second is the session's own to retry.
    first, second = (body["kv_transfer_params"]["kv_owner"] for body in worker.seen.bodies[1:])
    assert worker.seen.forgotten[0]["owners"] == [first] != [second]
    # What asks for nothing to be kept is nobody's.
    worker.script.gate.set()
    _turn(client, "Hi", store=False)
    assert worker.seen.bodies[-1]["kv_transfer_params"] == {"kv_save": False}
    time.sleep(0.1)
    assert len(worker.seen.forgotten) == 1


def test_busy_sessions_and_deletions_exclude_each_other() -> None:
    busy = Busy()
    assert busy.acquire("t", "a")
    assert not busy.close("t", ["a", "b"])
    busy.release("t", "a")
    assert busy.read("t", "b")
    assert busy.read("t", "b")
    busy.done_reading("t", "b")
    assert not busy.close("t", ["a", "b"])
    busy.done_reading("t", "b")
    assert busy.close("t", ["a", "b"])
    assert not busy.acquire("t", "a")
    assert not busy.read("t", "b")
    assert not busy.close("t", ["b"])
    assert busy.acquire("u", "a"), "another tenant's"
    busy.open("t", ["a", "b"])
    assert busy.acquire("t", "a")
