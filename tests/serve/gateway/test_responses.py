"""Responses through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serve.gateway.text import TextCodec
from tests.serve.gateway.conftest import RunningGateway
from tests.serve.gateway.fake_worker import BASE_NAME, END, FakeWorker

pytestmark = pytest.mark.model


def test_an_answer_is_stored_and_read_again(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    made = client.responses.create(
        model="kvloop", input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, max_output_tokens=90
    )
    assert made.output_text == "Hello there, friend."
    assert (made.status, made.model, made.instructions, made.metadata) == (
        "completed", BASE_NAME, "Be brief.", {"a": "b"},
    )  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert worker.seen.bodies[-1]["prompt"] == codec.first_turn(messages)
    assert made.usage is not None
    assert made.usage.input_tokens == len(worker.seen.bodies[-1]["prompt"])
    again = client.responses.retrieve(made.id)
    assert again.model_dump(exclude={"usage"}) == made.model_dump(exclude={"usage"})
    assert again.usage is not None
    assert again.usage.output_tokens == made.usage.output_tokens


def test_a_response_goes_on_from_another(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    first = client.responses.create(model="kvloop", input="Hi")
    known = worker.seen.bodies[-1]["prompt"] + codec.encode_plain("Hello there, friend.") + [END]
    second = client.responses.create(model="kvloop", input="More", previous_response_id=first.id)
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    assert second.previous_response_id == first.id
    assert second.session_id == first.session_id
    branch = client.responses.create(model="kvloop", input="Other", previous_response_id=first.id)
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    assert branch.session_id != first.session_id
    items: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Parts"}]}]
    third = client.responses.create(model="kvloop", input=items, previous_response_id=second.id)
    assert third.session_id == first.session_id
    unknown = pytest.raises(openai.NotFoundError, match="was not found")
    with unknown:
        client.responses.create(model="kvloop", input="x", previous_response_id="resp_nothing")


def test_a_history_of_items_is_matched(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    first = client.responses.create(model="kvloop", input="Hi")
    known = worker.seen.bodies[-1]["prompt"] + codec.encode_plain("Hello there, friend.") + [END]
    reply: list[Any] = [item.model_dump() for item in first.output]
    items: list[Any] = [{"role": "user", "content": "Hi"}, *reply, {"role": "user", "content": "On"}]
    second = client.responses.create(model="kvloop", input=items)
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    assert second.session_id == first.session_id


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="kvloop", input="Hi", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello there, friend."
    )
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hello there, friend."
    assert client.responses.retrieve(last.response.id).output_text == "Hello there, friend."
    with client.responses.stream(model="kvloop", input="Hi") as stream:
        for _ in stream:
            continue
        assert stream.get_final_response().output_text == "Hello there, friend."


def test_a_short_budget_is_incomplete(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="kvloop", input="Hi", max_output_tokens=2, stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(last.response.id).status == "incomplete"


def test_log_probabilities(client: openai.OpenAI) -> None:
    made = client.responses.create(model="kvloop", input="Hi", include=["message.output_text.logprobs"], top_logprobs=1)
    content: Any = made.output[0].content[0]
    assert "".join(entry.token for entry in content.logprobs) == "Hello there, friend."
    assert len(content.logprobs[0].top_logprobs) == 1


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(model="kvloop", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_deleting(client: openai.OpenAI, gateway: RunningGateway) -> None:
    alone = client.responses.create(model="kvloop", input="Hi")
    client.responses.delete(alone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(alone.id)
    first = client.responses.create(model="kvloop", input="Hi")
    second = client.responses.create(model="kvloop", input="On", previous_response_id=first.id)
    with pytest.raises(openai.ConflictError, match="delete the session"):
        client.responses.delete(first.id)
    assert gateway.post(f"/v1/sessions/{second.session_id}/fork").status_code == 200


def test_a_worker_that_dies_ends_the_stream_with_an_error(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script.die_after = 2
    events = iter(client.responses.create(model="kvloop", input="Hi", stream=True))
    kinds: list[str] = []

    def listen() -> None:
        kinds.extend(event.type for event in events)

    with pytest.raises(openai.APIError, match="stopped in the middle"):
        listen()
    assert kinds[-1] == "response.failed"
