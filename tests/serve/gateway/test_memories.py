"""`/v1/memories`: said once, shared by sessions, gone for good when deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from blake3 import blake3

from serve.gateway.attach import MemoryTemplate
from serve.gateway.text import TextCodec
from tests.serve.gateway.conftest import RunningGateway
from tests.serve.gateway.fake_worker import FakeWorker

pytestmark = pytest.mark.model

HANDBOOK = "The shop opens at nine. Lamps are repaired on Tuesdays. " * 20


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(400):
        if true():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def _create(gateway: RunningGateway, text: str = HANDBOOK, **more: Any) -> Any:
    answer = gateway.post("/v1/memories", {"text": text, **more})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def _ask(client: openai.OpenAI, text: str = "When?", **extra: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="kvloop", messages=messages, extra_body=extra)


def _gone(gateway: RunningGateway, memory: str) -> None:
    assert gateway.delete(f"/v1/memories/{memory}").status_code == 200


@pytest.fixture(autouse=True)
def _clean(gateway: RunningGateway, worker: FakeWorker) -> None:
    """No memory of an earlier test: a name stands for one text."""
    for memory in gateway.get("/v1/memories?limit=100").json()["data"]:
        _gone(gateway, memory["id"])
    worker.reset()


def test_the_life_of_a_memory(gateway: RunningGateway, worker: FakeWorker, codec: TextCodec) -> None:
    answer = gateway.post("/v1/memories", {"text": HANDBOOK, "name": "handbook"})
    made = answer.json()
    assert (answer.status_code, made["object"], made["name"]) == (201, "memory", "handbook")
    assert made["digest"] == blake3(HANDBOOK.encode()).hexdigest()
    ids = MemoryTemplate(codec).prefix_ids([HANDBOOK])
    assert made["tokens"] == len(ids)
    assert made["expires_at"] is None
    # It is computed ahead, in the background, for the memory and for nobody else.
    _wait(lambda: bool(worker.seen.prefills))
    (prefill,) = worker.seen.prefills
    assert (prefill["prompt"], prefill["max_tokens"], prefill["priority"]) == (ids, 0, 1)
    assert len(prefill["kv_transfer_params"]["kv_owner"]) == 64
    again = gateway.post("/v1/memories", {"text": HANDBOOK, "name": "handbook"})
    assert (again.status_code, again.json()) == (200, made)
    other = gateway.post("/v1/memories", {"text": "Something else.", "name": "handbook"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "memory_conflict")
    assert made["id"] in other.json()["error"]["message"]
    assert gateway.get(f"/v1/memories/{made['id']}").json() == made | {"text": HANDBOOK}
    listed = gateway.get("/v1/memories").json()
    assert (listed["data"], listed["has_more"]) == ([made], False)
    gone = gateway.delete(f"/v1/memories/{made['id']}").json()
    assert (gone["object"], gone["deleted"]) == ("memory.deleted", True)
    assert gone["receipt"]["sessions"] == []
    for call in (gateway.get, gateway.delete):
        answer = call(f"/v1/memories/{made['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "memory_gone")
    assert gateway.get("/v1/memories").json()["data"] == []
    # The name is free again, for any text.
    assert gateway.post("/v1/memories", {"text": "Something else.", "name": "handbook"}).status_code == 201


def test_pages(gateway: RunningGateway) -> None:
    names = [_create(gateway, f"Text {number}.")["id"] for number in range(3)]
    first = gateway.get("/v1/memories?limit=2").json()
    rest = gateway.get(f"/v1/memories?limit=2&after={first['last_id']}").json()
    assert [memory["id"] for memory in first["data"] + rest["data"]] == names[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert gateway.get("/v1/memories?after=mem_none").status_code == 404


def test_a_file_is_a_memory(gateway: RunningGateway) -> None:
    def send(content: bytes, **fields: str) -> Any:
        return gateway.post("/v1/memories", files={"file": ("notes.txt", content)}, data=fields)

    made = send("\ufeffGrüße an alle".encode()).json()
    assert made["name"] == "notes.txt"
    assert gateway.get(f"/v1/memories/{made['id']}").json()["text"] == "Grüße an alle"
    form = {"name": "more", "ttl_seconds": "60"}
    named = gateway.post("/v1/memories", files={"file": ("a.txt", b"More")}, data=form)
    assert named.json()["name"] == "more"
    assert named.json()["expires_at"] > time.time()
    for content in (b"\xff\xfe broken", b"  ", b"a\0b"):
        assert send(content).json()["error"]["param"] == "file"
    body = b'--Edge\r\nContent-Disposition: form-data; name="file"; filename="b.txt"\r\n\r\nB\r\n--Edge--\r\n'
    shouted = {"Content-Type": "Multipart/Form-Data; boundary=Edge"}
    assert gateway.post("/v1/memories", content=body, headers=shouted).json()["name"] == "b.txt"
    for answer, code in (
        (send(b"\xff\xfe broken"), "not_utf8"),
        (send(b"  "), "invalid_value"),
        (send(b"a\0b"), "invalid_value"),
        (send(b"fine", ttl_seconds="soon"), "invalid_value"),
        (send(b"fine", color="red"), "unknown_parameter"),
        (gateway.post("/v1/memories", files={"document": ("a.txt", b"fine")}), "unknown_parameter"),
        (gateway.post("/v1/memories", files={"file": ("a", b"1"), "other": ("b", b"2")}), None),
        (gateway.post("/v1/memories", {}), "missing_required_parameter"),
        (gateway.post("/v1/memories", {"text": " "}), "invalid_value"),
        (gateway.post("/v1/memories", {"text": "a", "ttl_seconds": 0}), "invalid_value"),
        (gateway.post("/v1/memories", {"text": "a", "nome": "b"}), "unknown_parameter"),
        (gateway.post("/v1/memories", {"text": "word " * 9000}), "context_length_exceeded"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text


def test_sessions_begin_with_the_same_ids_and_find_them_computed(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker, codec: TextCodec
) -> None:
    memory = _create(gateway)
    ids = MemoryTemplate(codec).prefix_ids([HANDBOOK])
    _wait(lambda: bool(worker.seen.prefills))
    session = gateway.post("/v1/sessions", {"memory_ids": [memory["id"]]}).json()
    assert session["memory_ids"] == [memory["id"]]
    owners = {worker.seen.prefills[0]["kv_transfer_params"]["kv_owner"]}
    for extra in ({"session_id": session["id"]}, {"memory_ids": [memory["id"]]}):
        answer = _ask(client, **extra)
        prompt = worker.seen.bodies[-1]["prompt"]
        assert prompt[: len(ids)] == ids
        assert prompt == ids + MemoryTemplate(codec).first_turn(1, [{"role": "user", "content": "When?"}])
        assert answer.usage.prompt_tokens_details.cached_tokens >= len(ids)
        assert answer.usage.kvloop["memory_computed_tokens"] == 0
        owners.add(worker.seen.bodies[-1]["kv_transfer_params"]["kv_owner"])
    assert len(owners) == 3
    assert len(worker.seen.prefills) == 1
    # The next turn continues behind the memory, also when the history is sent again.
    second = _ask(client, "And?", session_id=session["id"])
    assert worker.seen.bodies[-1]["prompt"][: len(ids)] == ids
    assert second.usage.kvloop["history"] == "session"
    history: Any = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "Again?"},
    ]
    for extra, found in (({"memory_ids": [memory["id"]]}, "resend"), ({}, "new")):
        resent = client.chat.completions.create(model="kvloop", messages=history, extra_body=extra)  # type: ignore[arg-type]
        assert resent.usage.kvloop["history"] == found  # type: ignore[union-attr]
        assert (worker.seen.bodies[-1]["prompt"][: len(ids)] == ids) is (found == "resend")
    shown = gateway.get(f"/v1/sessions/{session['id']}").json()
    assert shown["tokens"] == second.usage.total_tokens
    assert [message["content"] for message in shown["messages"] if message["role"] == "user"] == ["When?", "And?"]


def test_the_responses_api_attaches_them_too(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    memory = _create(gateway)
    first = client.responses.create(model="kvloop", input="When?", extra_body={"memory_ids": [memory["id"]]})
    prompt = worker.seen.bodies[-1]["prompt"]
    client.responses.create(model="kvloop", input="And?", previous_response_id=first.id)
    assert worker.seen.bodies[-1]["prompt"][: len(prompt)] == prompt
    fork = gateway.post(f"/v1/sessions/{first.session_id}/fork").json()  # type: ignore[attr-defined]
    assert fork["memory_ids"] == [memory["id"]]


def test_what_is_not_computed_yet_is_computed_for_the_memory_first(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    worker.script.prefill_gate = threading.Event()  # the background never gets its turn
    memory = _create(gateway)
    _wait(lambda: bool(worker.seen.prefills))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(_ask(client, memory_ids=[memory["id"]])))
    thread.start()
    _wait(lambda: len(worker.seen.prefills) == 2)
    assert worker.seen.prefills[1].get("priority", 0) == 0, "somebody waits for it now"
    worker.script.prefill_gate.set()
    thread.join()
    assert answers[0].usage.kvloop["memory_computed_tokens"] == memory["tokens"]
    assert _ask(client, memory_ids=[memory["id"]]).usage.kvloop["memory_computed_tokens"] == 0
    assert len(worker.seen.prefills) == 2


def test_a_server_that_must_generate_is_asked_for_one_token(gateway: RunningGateway, worker: FakeWorker) -> None:
    worker.script.at_least_one = True
    before = gateway.metric('kvloop_memory_prefetches_total{outcome="done"}')
    memory = _create(gateway)
    _wait(lambda: gateway.metric('kvloop_memory_prefetches_total{outcome="done"}') == before + 1)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in worker.seen.bodies] == [(memory["tokens"], 1)]


def test_a_turn_is_answered_where_the_memory_could_not_be_computed_ahead(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    worker.script.prefill_status = 500
    memory = _create(gateway)
    assert _ask(client, memory_ids=[memory["id"]]).choices[0].message.content == "Hello there, friend."


def test_memories_are_attached_at_the_beginning(client: openai.OpenAI, gateway: RunningGateway) -> None:
    one, two = _create(gateway, "One."), _create(gateway, "Two.")
    empty = gateway.post("/v1/sessions").json()["id"]
    assert _ask(client, session_id=empty, memory_ids=[one["id"]]).session_id == empty
    assert gateway.get(f"/v1/sessions/{empty}").json()["memory_ids"] == [one["id"]]
    assert _ask(client, session_id=empty, memory_ids=[one["id"]]).session_id == empty  # the same again is no change
    for given in ([two["id"]], [one["id"], two["id"]], []):
        with pytest.raises(openai.BadRequestError, match="other memories"):
            _ask(client, session_id=empty, memory_ids=given)
    with pytest.raises(openai.BadRequestError, match="each once"):
        _ask(client, memory_ids=[one["id"], one["id"]])
    for call in (
        lambda: _ask(client, memory_ids=["mem_nothing"]),
        lambda: client.responses.create(model="kvloop", input="Hi", extra_body={"memory_ids": ["mem_nothing"]}),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.param == "memory_ids"
    assert gateway.post("/v1/sessions", {"memory_ids": ["mem_nothing"]}).status_code == 404


def test_the_order_counts(client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker) -> None:
    one, two = _create(gateway, "One."), _create(gateway, "Two.")
    prompts = []
    for order in ([one, two], [two, one]):
        _ask(client, memory_ids=[memory["id"] for memory in order])
        prompts.append(worker.seen.bodies[-1]["prompt"])
    assert prompts[0] != prompts[1]
    assert len(prompts[0]) == len(prompts[1])


def test_a_deleted_memory_is_never_sent_again(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    secret = "tourmaline quartz lanterns"
    memory, other = _create(gateway, f"Our secret: {secret}."), _create(gateway, "Harmless.")
    alone = {memory["tokens"], other["tokens"]}
    _wait(lambda: {len(body["prompt"]) for body in worker.seen.prefills} == alone)
    session = _ask(client, memory_ids=[memory["id"], other["id"]]).session_id
    untouched = _ask(client, memory_ids=[other["id"]]).session_id
    owners = {body["kv_transfer_params"]["kv_owner"] for body in (*worker.seen.prefills, *worker.seen.bodies)}
    kept = {worker.seen.bodies[-1]["kv_transfer_params"]["kv_owner"]}
    kept |= {
        body["kv_transfer_params"]["kv_owner"]
        for body in worker.seen.prefills
        if len(body["prompt"]) == other["tokens"]
    }
    receipt = gateway.delete(f"/v1/memories/{memory['id']}").json()["receipt"]
    assert receipt["sessions"] == [session]
    assert receipt["kv"][0]["status"] == "forgotten"
    # Everything that was computed over it goes: its own KV, that of the combination, that of the session.
    assert set(worker.seen.forgotten[-1]["owners"]) == owners - kept
    asked = len(worker.seen.bodies)
    for call in (
        lambda: _ask(client, session_id=session),
        lambda: _ask(client, memory_ids=[memory["id"]]),
        lambda: _ask(client, memory_ids=[other["id"], memory["id"]]),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            call()
        assert (refused.value.status_code, refused.value.code) == (410, "memory_gone")
        assert memory["id"] in refused.value.message
        assert "deleted" in refused.value.message
    assert gateway.post(f"/v1/sessions/{session}/fork").status_code == 410
    assert gateway.post("/v1/sessions", {"memory_ids": [memory["id"]]}).status_code == 410
    assert len(worker.seen.bodies) == asked
    # What was said in the session can be read and deleted; the memory's text is nowhere.
    assert gateway.get(f"/v1/sessions/{session}").json()["memory_ids"] == [memory["id"], other["id"]]
    folder = Path(gateway.settings.journal.url.removeprefix("sqlite:///")).parent
    stored = b"".join(file.read_bytes() for file in folder.glob("journal.db*"))
    assert b"Harmless." in stored
    assert secret.encode() not in stored
    assert gateway.delete(f"/v1/sessions/{session}").status_code == 200
    assert _ask(client, session_id=untouched).session_id == untouched


def test_deleting_waits_for_the_turns_that_use_it(
    start_gateway: Callable[..., RunningGateway], worker: FakeWorker
) -> None:
    gateway = start_gateway(memory_delete_seconds=0.1)
    memory = _create(gateway)
    worker.script.gate = threading.Event()
    with gateway.client() as client:
        running = iter(
            client.chat.completions.create(
                model="kvloop", messages=[{"role": "user", "content": "Hi"}], stream=True,
                extra_body={"memory_ids": [memory["id"]]},
            )
        )  # fmt: skip
        next(running)
        refused = gateway.delete(f"/v1/memories/{memory['id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "memory_busy")
        assert worker.seen.forgotten == []
        worker.script.gate.set()  # and while a deletion waits, no turn begins with it
        list(running)
        assert _ask(client, memory_ids=[memory["id"]]).session_id, "it was not deleted, so it can be used"
        _gone(gateway, memory["id"])


def test_deleting_ends_its_prefetch(gateway: RunningGateway, worker: FakeWorker) -> None:
    worker.script.prefill_gate = threading.Event()
    memory = _create(gateway)
    _wait(lambda: bool(worker.seen.prefills))
    _gone(gateway, memory["id"])
    _wait(lambda: worker.seen.aborted == 1)
    worker.script.prefill_gate.set()
    assert len(worker.seen.prefills) == 1


def test_nothing_is_deleted_while_bytes_remain(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker
) -> None:
    memory = _create(gateway)
    worker.script.forget_status = 500
    assert gateway.delete(f"/v1/memories/{memory['id']}").status_code == 503
    assert _ask(client, memory_ids=[memory["id"]]).session_id
    worker.script.forget_status = 200
    _gone(gateway, memory["id"])


def test_tenants_do_not_see_each_other(keyed: RunningGateway) -> None:
    ann, bob = ({"Authorization": f"Bearer key-{name}"} for name in ("ann", "bob"))
    memory = keyed.post("/v1/memories", {"text": HANDBOOK, "name": "a"}, headers=ann).json()
    assert keyed.post("/v1/memories", {"text": "Other.", "name": "a"}, headers=bob).status_code == 201
    for answer in (
        keyed.get(f"/v1/memories/{memory['id']}", headers=bob),
        keyed.delete(f"/v1/memories/{memory['id']}", headers=bob),
        keyed.post("/v1/sessions", {"memory_ids": [memory["id"]]}, headers=bob),
    ):
        assert answer.status_code == 404
    assert keyed.get("/v1/memories").status_code == 401
    assert keyed.get(f"/v1/memories/{memory['id']}", headers=ann).status_code == 200


def test_no_turn_begins_with_a_memory_that_is_being_deleted(gateway: RunningGateway, worker: FakeWorker) -> None:
    memory = _create(gateway)
    worker.script.gate = threading.Event()
    with gateway.client() as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        extra = {"memory_ids": [memory["id"]]}
        running = iter(client.chat.completions.create(model="kvloop", messages=messages, stream=True, extra_body=extra))
        next(running)
        deleted: list[Any] = []
        thread = threading.Thread(target=lambda: deleted.append(gateway.delete(f"/v1/memories/{memory['id']}")))
        thread.start()
        codes: list[str] = []

        def refused() -> bool:
            try:
                client.chat.completions.create(model="kvloop", messages=messages, stream=True, extra_body=extra).close()
            except openai.ConflictError as error:
                codes.append(str(error.code))
            return bool(codes)

        _wait(refused)
        worker.script.gate.set()
        list(running)
        thread.join()
    assert codes == ["memory_busy"]
    assert deleted[0].status_code == 200
