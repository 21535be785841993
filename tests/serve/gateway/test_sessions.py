"""Sessions, feedback and tenants through HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from memory.journal.records import NewResponse
from tests.serve.gateway.conftest import RunningGateway
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def _turn(client: openai.OpenAI, session: str | None = None, text: str = "Hi") -> Any:
    extra = {} if session is None else {"session_id": session}
    return client.chat.completions.create(
        model="kvloop", messages=[{"role": "user", "content": text}], extra_body=extra
    )


def test_the_life_of_a_session(client: openai.OpenAI, gateway: RunningGateway) -> None:
    made = gateway.post("/v1/sessions", {"metadata": {"who": "me"}}).json()
    assert made["object"] == "session"
    first = _turn(client, made["id"])
    assert first.session_id == made["id"]
    second = _turn(client, made["id"], "More")
    shown = gateway.get(f"/v1/sessions/{made['id']}").json()
    assert shown["head_response"] == second.response_id
    assert shown["metadata"] == {"who": "me"}
    fork = gateway.post(f"/v1/sessions/{made['id']}/fork", {"response_id": first.response_id}).json()
    assert fork["parent_session"] == made["id"]
    assert fork["head_response"] == first.response_id
    assert fork["split"] == made["split"]
    assert _turn(client, fork["id"], "Elsewhere").session_id == fork["id"]
    listed = gateway.get("/v1/sessions?limit=1").json()
    assert (listed["data"][0]["id"], listed["has_more"]) == (fork["id"], True)
    rest = gateway.get(f"/v1/sessions?after={listed['last_id']}").json()
    assert rest["data"][0]["id"] == made["id"]
    receipt = gateway.delete(f"/v1/sessions/{made['id']}").json()
    assert receipt["deleted"] is True
    assert receipt["receipt"]["responses"] == 3
    assert gateway.get(f"/v1/sessions/{made['id']}").status_code == 404
    assert gateway.get(f"/v1/sessions/{fork['id']}").status_code == 404


def test_one_turn_at_a_time(client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker) -> None:
    session = _turn(client).session_id
    worker.script.gate = threading.Event()
    with client.chat.completions.create(
        model="kvloop", messages=HI, stream=True, extra_body={"session_id": session}
    ) as stream:
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as refused:
            _turn(client, session)
        assert refused.value.code == "session_busy"
        assert gateway.delete(f"/v1/sessions/{session}").status_code == 409
    # The client left in mid-stream: the slot and the session are free again, and nothing was kept.
    for _ in range(500):
        if worker.seen.aborted:
            break
        threading.Event().wait(0.02)
    assert worker.seen.aborted == 1
    worker.script.gate.set()
    assert _turn(client, session).session_id == session
    assert len(gateway.get(f"/v1/sessions/{session}").json()["messages"]) == 4


def test_concurrent_resends_of_one_history_all_succeed(client: openai.OpenAI, worker: FakeWorker) -> None:
    first = _turn(client)
    worker.script.token_seconds = 0.02
    history = [*HI, {"role": "assistant", "content": "Hello there, friend."}, {"role": "user", "content": "?"}]
    sessions: list[str] = []

    def ask() -> None:
        sessions.append(client.chat.completions.create(model="kvloop", messages=history).session_id)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(sessions)) == 4
    assert first.session_id in sessions


def test_a_resend_inside_a_named_session(client: openai.OpenAI) -> None:
    first = _turn(client)
    history = [*HI, {"role": "assistant", "content": "Hello there, friend."}, {"role": "user", "content": "?"}]
    second = client.chat.completions.create(
        model="kvloop",
        messages=history,
        extra_body={"session_id": first.session_id},
    )
    assert second.session_id == first.session_id
    again = client.chat.completions.create(
        model="kvloop",
        messages=history,
        extra_body={"session_id": first.session_id},
    )
    assert again.session_id != first.session_id
    assert _turn(client, first.session_id).session_id == first.session_id


def test_a_repeated_system_message_is_not_repeated(client: openai.OpenAI, gateway: RunningGateway) -> None:
    system = {"role": "system", "content": "Be kind."}
    first = client.chat.completions.create(model="kvloop", messages=[system, *HI])
    client.chat.completions.create(
        model="kvloop",
        messages=[system, *HI],
        extra_body={"session_id": first.session_id},
    )
    shown = gateway.get(f"/v1/sessions/{first.session_id}").json()
    assert [message["role"] for message in shown["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_feedback_of_every_kind(client: openai.OpenAI, gateway: RunningGateway) -> None:
    turn = _turn(client)
    for body in (
        {"kind": "boolean", "value": True, "response_id": turn.response_id},
        {"kind": "float", "value": 0.25, "response_id": turn.id, "source": "me"},
        {"kind": "comment", "value": "nice", "session_id": turn.session_id},
        {"kind": "demonstration", "value": "Hello.", "response_id": turn.response_id},
        {"kind": "demonstration", "value": {"role": "assistant", "content": "Hey."}, "response_id": turn.response_id},
    ):
        given = gateway.post("/v1/feedback", body)
        assert given.status_code == 200, given.text
        assert given.json()["session_id"] == turn.session_id
    with gateway.journal() as journal:
        given = journal.list_feedback(session_id=turn.session_id)
        assert [entry.value for entry in given] == ["Hey.", "Hello.", "nice", 0.25, True]
        assert [row.answer for row in journal.demonstrations()] == ["Hello.", "Hey."]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"kind": "boolean", "value": 1, "response_id": "?"}, 400, "value"),
        ({"kind": "float", "value": "high", "response_id": "?"}, 400, "value"),
        ({"kind": "float", "value": 10**400, "response_id": "?"}, 400, "value"),
        ({"kind": "thumb", "value": True, "response_id": "?"}, 400, "kind"),
        ({"kind": "comment", "value": "x"}, 400, "response_id"),
        ({"kind": "comment", "value": "x", "response_id": "resp_none"}, 404, "response_id"),
        ({"kind": "comment", "value": "x", "session_id": "sess_none"}, 404, "session_id"),
        ({"kind": "comment", "response_id": "?"}, 400, "value"),
        ({"kind": "comment", "value": "x", "respons_id": "?"}, 400, "respons_id"),
        ({"kind": "demonstration", "value": {"role": "user", "content": "x"}, "response_id": "?"}, 400, "value"),
    ],
)
def test_feedback_that_is_refused(
    client: openai.OpenAI, gateway: RunningGateway, body: dict[str, Any], status: int, param: str
) -> None:
    if body.get("response_id") == "?":
        body = body | {"response_id": _turn(client).response_id}
    answer = gateway.post("/v1/feedback", body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_tenants_do_not_see_each_other(keyed: RunningGateway, worker: FakeWorker) -> None:
    with keyed.client("key-ann") as ann, keyed.client("key-bob") as bob:
        turn = _turn(ann)
        salt = worker.seen.bodies[-1]["cache_salt"]
        with pytest.raises(openai.NotFoundError):
            _turn(bob, turn.session_id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(turn.response_id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="kvloop", input="x", previous_response_id=turn.response_id)
        history = [*HI, {"role": "assistant", "content": "Hello there, friend."}, {"role": "user", "content": "?"}]
        other = bob.chat.completions.create(model="kvloop", messages=history)
        assert other.session_id != turn.session_id
        assert worker.seen.bodies[-1]["cache_salt"] != salt
        assert other.usage is not None
        assert other.usage.prompt_tokens_details is not None
        assert other.usage.prompt_tokens_details.cached_tokens == 0
        headers = {"Authorization": "Bearer key-bob"}
        refused = keyed.post("/v1/feedback", {"kind": "comment", "value": "x", "response_id": turn.id}, headers=headers)
        assert refused.status_code == 404
        assert keyed.get(f"/v1/sessions/{turn.session_id}", headers=headers).status_code == 404
        assert keyed.delete(f"/v1/sessions/{turn.session_id}", headers=headers).status_code == 404
        assert len(keyed.get("/v1/sessions", headers=headers).json()["data"]) == 1
    with keyed.client("key-eve") as eve, pytest.raises(openai.AuthenticationError):
        _turn(eve)
    assert keyed.get("/v1/models").status_code == 401


def test_users_of_one_tenant_are_not_mixed_up(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="kvloop", messages=HI, user="ann")
    history = [*HI, {"role": "assistant", "content": "Hello there, friend."}, {"role": "user", "content": "?"}]
    other = client.chat.completions.create(model="kvloop", messages=history, user="bob")
    same = client.chat.completions.create(model="kvloop", messages=history, user="ann")
    assert other.session_id != first.session_id
    assert same.session_id == first.session_id


def test_a_session_goes_on_after_a_restart_of_everything(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    first = _turn(client)
    one = worker.seen.bodies[-1]["prompt"]
    worker.stop()
    gateway.stop()
    worker.start()
    gateway.start()
    second = _turn(client, first.session_id, "Still there?")
    assert second.session_id == first.session_id
    assert worker.seen.bodies[-1]["prompt"][: len(one)] == one


def test_tokens_of_a_session_are_those_after_its_last_rerender(gateway: RunningGateway) -> None:
    with gateway.journal() as journal:
        session = journal.create_session("default")
        head = None
        for rerendered, input_ids, output_ids in ((False, [1, 2, 3], [4, 5]), (True, [6, 7, 8, 9], [10])):
            head = journal.add_response(
                NewResponse(
                    session_id=session.id,
                    tenant="default",
                    parent_response=head,
                    input_messages=HI,
                    output_message={"role": "assistant", "content": "x"},
                    input_ids=input_ids,
                    output_ids=output_ids,
                    history_digest=bytes(32),
                    finish_reason="stop",
                    model="base",
                    weights_id="w",
                    params={"rerendered": rerendered},
                )
            ).id
    assert gateway.get(f"/v1/sessions/{session.id}").json()["tokens"] == 5


@pytest.mark.parametrize(("share", "split"), [(1.0, "eval"), (0.0, "train")])
def test_the_split_is_drawn_by_the_journals_settings(
    start_gateway: Callable[..., RunningGateway], share: float, split: str
) -> None:
    base = start_gateway()
    base.stop()
    gateway = start_gateway(journal=base.settings.journal.model_copy(update={"eval_share": share}))
    splits = {gateway.post("/v1/sessions").json()["split"] for _ in range(8)}
    assert splits == {split}
