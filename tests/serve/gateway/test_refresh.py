"""Promotion and sessions: those in use stay, are refreshed in the background, and flip; nothing is dropped or lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.gateway.conftest import ADMIN, RunningGateway, Say
from tests.serve.gateway.fake_worker import BASE_NAME, BASE_WEIGHTS, FakeWorker, make_adapter

pytestmark = pytest.mark.model
ACTIVATE = "/internal/versions/activate"
BACK = {"name": "base", "path": None, "who": "test", "reason": "back"}


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


def _ask(client: openai.OpenAI, session: str | None = None, model: str = "kvloop", text: str = "Hi") -> Any:
    extra = {} if session is None else {"session_id": session}
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, extra_body=extra)


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def _progress(gateway: RunningGateway) -> Any:
    answer = gateway.get("/internal/refresh", headers={"Authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _promote(gateway: RunningGateway, adapter: Any, **more: Any) -> None:
    answer = gateway.admin(ACTIVATE, adapter | more)
    assert answer.status_code == 200, answer.text


def _version(gateway: RunningGateway, session: str) -> str:
    return str(gateway.get(f"/v1/sessions/{session}").json()["version"])


def test_a_session_in_use_stays_until_it_is_refreshed(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    first = _ask(client)
    assert _version(gateway, first.session_id) == "base"
    worker.script.prefill_gate = threading.Event()
    one = make_adapter(tmp_path / "v1", "one")
    _promote(gateway, one)
    _wait(lambda: bool(worker.seen.prefills))
    (refresh,) = worker.seen.prefills
    assert (refresh["model"], refresh["max_tokens"], refresh["priority"]) == ("v1", 0, 1)
    assert refresh["prompt"] == worker.seen.bodies[0]["prompt"] + refresh["prompt"][-first.usage.completion_tokens :]
    owner = worker.seen.bodies[0]["kv_transfer_params"]["kv_owner"]
    assert refresh["kv_transfer_params"]["kv_owner"] == owner
    progress = _progress(gateway)
    assert (progress["version"], progress["waiting"], progress["done"]) == ("v1", 1, 0)
    assert progress["current"]["session_id"] == first.session_id
    # New sessions take the new version at once, who names a version gets that one, this session stays.
    assert _ask(client).model == "v1"
    assert _ask(client, model="v1").model == "v1"
    second = _ask(client, first.session_id)
    assert second.model == BASE_NAME
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    worker.script.prefill_gate.set()
    _wait(lambda: _version(gateway, first.session_id) == "v1")
    # Its turn came while it was refreshed: it was refreshed once more, and only what was new was left to compute.
    third = _ask(client, first.session_id)
    assert third.model == "v1"
    assert third.usage.prompt_tokens_details.cached_tokens >= second.usage.total_tokens
    _wait(lambda: _progress(gateway)["waiting"] == 0)
    progress = _progress(gateway)
    assert (progress["done"], progress["failed"], progress["current"]) == (1, 0, None)
    assert progress["tokens_done"] >= first.usage.total_tokens
    assert progress["tokens_per_second"] > 0
    assert gateway.metric('kvloop_flips_total{by="refresh"}') == 1
    assert gateway.metric('kvloop_refreshes_total{outcome="moved",reason="promote"}') == 1
    assert gateway.metric('kvloop_refreshes_total{outcome="done",reason="promote"}') == 1
    assert gateway.metric("kvloop_refresh_waiting") == 0


def test_a_session_that_began_while_the_version_changed_is_taken_along(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    worker.script.gate = threading.Event()
    messages: Any = [{"role": "user", "content": "Hi"}]
    running = iter(client.chat.completions.create(model="kvloop", messages=messages, stream=True))
    session = next(running).session_id  # type: ignore[attr-defined]
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: _progress(gateway)["version"] == "v1")
    time.sleep(0.1)
    worker.script.gate.set()
    assert {chunk.model for chunk in running} == {BASE_NAME}
    _wait(lambda: _version(gateway, session) == "v1")
    assert [body["model"] for body in worker.seen.prefills] == ["v1"]


def test_a_client_that_names_a_version_gets_it(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    session = _ask(client).session_id
    worker.script.running = 1  # no time to refresh
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    assert _ask(client, session, "v1").model == "v1"
    assert _version(gateway, session) == "base", "it named a version; it did not move"
    assert _ask(client, session).model == BASE_NAME
    assert _ask(client, session, BASE_NAME).model == BASE_NAME


def test_the_pin_ends(start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path) -> None:
    gateway = start_gateway(pin_seconds=1.0)
    worker.script.running = 1
    with gateway.client() as client:
        session = _ask(client).session_id
        _promote(gateway, make_adapter(tmp_path / "v1", "one"))
        assert _ask(client, session).model == BASE_NAME
        _wait(lambda: _ask(client, session).model == "v1")
        assert _version(gateway, session) == "v1"
        assert gateway.metric('kvloop_flips_total{by="turn"}') == 1


def test_a_session_that_slept_at_the_change_is_not_pinned(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path
) -> None:
    gateway = start_gateway(pin_seconds=0.05)
    worker.script.running = 1
    with gateway.client() as client:
        session = _ask(client).session_id
        time.sleep(0.1)
        _promote(gateway, make_adapter(tmp_path / "v1", "one"))
        assert _ask(client, session).model == "v1"


def test_the_pin_ends_when_the_version_leaves(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    worker.script.running = 1
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    session = _ask(client).session_id
    _promote(gateway, make_adapter(tmp_path / "v2", "two"))
    assert _ask(client, session).model == "v1"
    _promote(gateway, make_adapter(tmp_path / "v3", "three"))
    _wait(lambda: worker.adapters == ["v2", "v3"])
    assert _ask(client, session).model == "v3"


def test_a_rollback_takes_sessions_back(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    session = _ask(client).session_id
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: _version(gateway, session) == "v1")
    ahead = _ask(client, session)
    assert ahead.model == "v1"
    worker.script.running = 1
    assert gateway.admin(ACTIVATE, BACK).json()["changed"] is True
    assert _ask(client, session).model == "v1"
    worker.script.running = 0
    _wait(lambda: _version(gateway, session) == "base")
    after = _ask(client, session)
    assert after.model == BASE_NAME
    assert after.usage.prompt_tokens_details.cached_tokens >= ahead.usage.total_tokens
    assert {span["weights_id"] for span in after.usage.kvloop["spans"]} == {BASE_WEIGHTS}


def test_it_waits_while_the_workers_are_busy(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    session = _ask(client).session_id
    worker.script.running = 3
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: _progress(gateway)["waits_for"] == "the workers are busy")
    time.sleep(0.2)
    assert worker.seen.prefills == []
    assert _version(gateway, session) == "base"
    worker.script.running = 0
    _wait(lambda: _version(gateway, session) == "v1")


def test_the_likeliest_and_longest_go_first(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path
) -> None:
    gateway = start_gateway(pin_seconds=0)
    worker.script.running = 1
    with gateway.client() as client:
        sessions = [_ask(client, text="word " * count).session_id for count in (10, 400, 100)]
        _promote(gateway, make_adapter(tmp_path / "v1", "one"))
        _wait(lambda: _progress(gateway)["waiting"] == 3)
        worker.script.running = 0
        _wait(lambda: _progress(gateway)["done"] == 3)
    lengths = [len(body["prompt"]) for body in worker.seen.prefills]
    assert lengths == sorted(lengths, reverse=True)
    assert {_version(gateway, session) for session in sessions} == {"v1"}


def test_a_restarted_gateway_goes_on(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    sessions = [_ask(client).session_id for _ in range(3)]
    worker.script.running = 1
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: _progress(gateway)["waiting"] == 3)
    gateway.stop()
    worker.script.running = 0
    gateway.start()
    _wait(lambda: _progress(gateway)["done"] == 3)
    assert {_version(gateway, session) for session in sessions} == {"v1"}
    asked = len(worker.seen.prefills)
    gateway.restart()
    assert _ask(client, sessions[0]).model == "v1"
    time.sleep(0.3)
    assert len(worker.seen.prefills) == asked == 3, "what is done is not done again"


def test_a_deleted_session_is_not_refreshed(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    session = _ask(client).session_id
    worker.script.prefill_gate = threading.Event()
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: bool(worker.seen.prefills))
    # While its refresh runs: it is ended first, then everything of the session goes.
    receipt = gateway.delete(f"/v1/sessions/{session}").json()["receipt"]
    assert receipt["kv"][0]["status"] == "forgotten"
    _wait(lambda: worker.seen.aborted == 1)
    worker.script.prefill_gate.set()
    _wait(lambda: _progress(gateway)["waiting"] == 0)
    assert len(worker.seen.prefills) == 1
    assert (_progress(gateway)["done"], _progress(gateway)["current"]) == (0, None)
    # The queue goes on with others.
    other = _ask(client).session_id
    gateway.admin(ACTIVATE, BACK)
    _wait(lambda: _version(gateway, other) == "base")


def test_a_refresh_that_fails_is_tried_again_and_given_up(
    gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker, tmp_path: Path
) -> None:
    session = _ask(client).session_id
    worker.script.prefill_status = 503
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: len(worker.seen.prefills) >= 2)
    worker.script.prefill_status = 400
    _wait(lambda: _progress(gateway)["failed"] == 1)
    tried = len(worker.seen.prefills)
    time.sleep(0.2)
    assert len(worker.seen.prefills) == tried
    assert _ask(client, session).model == BASE_NAME  # pinned, for it was never refreshed


def test_refreshing_can_be_switched_off(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path
) -> None:
    gateway = start_gateway(refresh=False, pin_seconds=0)
    with gateway.client() as client:
        session = _ask(client).session_id
        _promote(gateway, make_adapter(tmp_path / "v1", "one"))
        time.sleep(0.3)
        assert worker.seen.prefills == []
        assert _progress(gateway)["enabled"] is False
        assert _ask(client, session).model == "v1"


def test_a_turn_over_lossy_kv_climbs_back(gateway: RunningGateway, client: openai.OpenAI, worker: FakeWorker) -> None:
    session = _ask(client).session_id
    time.sleep(0.1)
    assert worker.seen.prefills == []
    worker.script.fidelity = "int4"
    answer = _ask(client, session)
    assert answer.usage.kvloop["fidelity"] == "int4"
    worker.script.fidelity = "exact"
    _wait(lambda: _progress(gateway)["done"] == 1)
    (climb,) = worker.seen.prefills
    assert climb["kv_transfer_params"]["kv_least_fidelity"] == "exact"
    assert len(climb["prompt"]) == answer.usage.total_tokens
    assert gateway.metric('kvloop_refreshes_total{outcome="done",reason="climb"}') == 1
    journal = gateway.journal()
    stored = journal.get_response("default", answer.response_id)
    journal.close()
    assert stored.fidelity == "int4"


@pytest.mark.parametrize(
    ("settings", "stale_kl", "reuses"),
    [
        ({"kv_policy": "reuse", "reuse_max_kl": 0.01}, 0.004, True),
        ({"kv_policy": "reuse", "reuse_max_kl": 0.01}, 0.01, False),
        ({"kv_policy": "reuse", "reuse_max_kl": 0.01}, None, False),
        ({}, 0.0, False),
    ],
)
def test_old_kv_is_reused_only_where_it_was_measured_to_be_cheap(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path, settings: Any, stale_kl: Any,
    reuses: bool,
) -> None:  # fmt: skip
    gateway = start_gateway(**settings)
    worker.script.running = 1
    with gateway.client() as client:
        session = _ask(client).session_id
        _promote(gateway, make_adapter(tmp_path / "v1", "one"), stale_kl=stale_kl)
        gateway.restart()
        answer = _ask(client, session)
        asked = worker.seen.bodies[-1]["kv_transfer_params"].get("kv_reuse_model")
        # With permission it moves at once and takes the old KV along; without, it stays.
        assert (answer.model, asked) == (("v1", BASE_NAME) if reuses else (BASE_NAME, None))
        assert _progress(gateway)["reuses"] == (BASE_NAME if reuses else None)
        # The permission is for this pair of versions, in this direction.
        _ask(client, session, BASE_NAME)
        assert "kv_reuse_model" not in worker.seen.bodies[-1]["kv_transfer_params"]
        _promote(gateway, make_adapter(tmp_path / "v2", "two"))
        _ask(client)
        assert "kv_reuse_model" not in worker.seen.bodies[-1]["kv_transfer_params"]


def test_stale_kv_is_told_and_replaced(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker, tmp_path: Path
) -> None:
    gateway = start_gateway(kv_policy="reuse")
    with gateway.client() as client:
        worker.script.running = 1
        session = _ask(client).session_id
        _promote(gateway, make_adapter(tmp_path / "v1", "one"), stale_kl=0.001)
        worker.script.fidelity = "stale"
        answer = _ask(client, session)
        assert (answer.model, answer.usage.kvloop["fidelity"]) == ("v1", "stale")
        worker.script.running, worker.script.fidelity = 0, "exact"
        _wait(lambda: _progress(gateway)["done"] == 1)
    (refresh,) = worker.seen.prefills
    assert refresh["model"] == "v1"
    assert "kv_reuse_model" not in refresh["kv_transfer_params"]
    journal = gateway.journal()
    assert journal.get_response("default", answer.response_id).fidelity == "stale"
    journal.close()


def test_memories_are_computed_for_the_new_version_too(
    gateway: RunningGateway, worker: FakeWorker, tmp_path: Path
) -> None:
    memory = gateway.post("/v1/memories", {"text": "The shop opens at nine."}).json()
    with gateway.client() as client:
        client.chat.completions.create(
            model="kvloop", messages=[{"role": "user", "content": "Hi"}], extra_body={"memory_ids": [memory["id"]]}
        )
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: any(len(b["prompt"]) == memory["tokens"] and b["model"] == "v1" for b in worker.seen.prefills))


def test_nothing_of_a_memory_is_sent_while_it_is_deleted(
    gateway: RunningGateway, worker: FakeWorker, tmp_path: Path
) -> None:
    memory = gateway.post("/v1/memories", {"text": "The shop opens at nine."}).json()
    with gateway.client() as client:
        client.chat.completions.create(
            model="kvloop", messages=[{"role": "user", "content": "Hi"}], extra_body={"memory_ids": [memory["id"]]}
        )
    worker.script.running = 1
    _promote(gateway, make_adapter(tmp_path / "v1", "one"))
    _wait(lambda: _progress(gateway)["waiting"] == 1)
    _wait(lambda: any(body["model"] == "v1" for body in worker.seen.prefills))  # the memory's own
    sent = len(worker.seen.prefills)
    worker.script.forget_gate = threading.Event()
    deletion = threading.Thread(target=lambda: gateway.delete(f"/v1/memories/{memory['id']}"))
    deletion.start()
    _wait(lambda: bool(worker.seen.forgotten))
    worker.script.running = 0  # there is time now to refresh the session that attaches it
    time.sleep(1.5)
    assert len(worker.seen.prefills) == sent
    worker.script.forget_gate.set()
    deletion.join()
    _wait(lambda: _progress(gateway)["skipped"] == 1)
    assert len(worker.seen.prefills) == sent


def test_progress_needs_the_admin_token(gateway: RunningGateway) -> None:
    assert gateway.get("/internal/refresh").status_code == 401
