"""Chat completions through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serve.gateway.text import TextCodec
from tests.serve.gateway.conftest import RunningGateway
from tests.serve.gateway.fake_worker import BASE_NAME, BASE_WEIGHTS, END, FakeWorker

pytestmark = pytest.mark.model
HI = [{"role": "user", "content": "Hi"}]


def test_an_answer(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    answer = client.chat.completions.create(
        model="kvloop", messages=HI, max_tokens=50, temperature=0, seed=3, top_p=0.5
    )
    assert answer.choices[0].message.content == "Hello there, friend."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == BASE_NAME
    assert answer.system_fingerprint == "fp_" + "b" * 12
    body = worker.seen.bodies[-1]
    assert body["prompt"] == codec.first_turn(HI)
    assert (body["temperature"], body["seed"], body["top_p"], body["max_tokens"]) == (0, 3, 0.5, 50)
    owner = body["kv_transfer_params"].pop("kv_owner")
    assert len(owner) == 64
    assert body["kv_transfer_params"] == {"kv_save": True}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(body["prompt"])
    assert answer.usage.completion_tokens == len(codec.encode_plain("Hello there, friend.")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.session_id.startswith("sess_")
    assert answer.choices[0].response_id.startswith("resp_")


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="kvloop", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello there, friend."
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens > 0
    assert chunks[-1].usage.kvloop["fidelity"] == "exact"
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1


def test_a_session_needs_only_the_new_message(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker, codec: TextCodec, say: Any
) -> None:
    first = client.chat.completions.create(model="kvloop", messages=HI)
    session = first.session_id
    one = worker.seen.bodies[-1]["prompt"] + codec.encode_plain("Hello there, friend.") + [END]
    worker.script.answer = say("Fine.")
    second = client.chat.completions.create(
        model="kvloop", messages=[{"role": "user", "content": "How are you?"}], extra_body={"session_id": session}
    )
    assert second.session_id == session
    prompt = worker.seen.bodies[-1]["prompt"]
    assert prompt[: len(one)] == one
    assert (
        codec.vocabulary.decode(prompt[len(one) :], skip_special=False)
        == "\n<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == len(one)
    third = client.chat.completions.create(
        model="kvloop", messages=[{"role": "user", "content": "Bye"}], extra_headers={"X-Session-Id": session}
    )
    two = prompt + codec.encode_plain("Fine.") + [END]
    assert worker.seen.bodies[-1]["prompt"][: len(two)] == two
    assert third.session_id == session
    shown = gateway.get(f"/v1/sessions/{session}").json()
    assert [message["content"] for message in shown["messages"]] == [
        "Hi", "Hello there, friend.", "How are you?", "Fine.", "Bye", "Fine.",
    ]  # fmt: skip
    assert shown["messages"][3]["response_id"] == second.response_id


def test_a_resent_history_is_found_again(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    # Ids that a re-tokenisation would never give: one token for each character.
    odd = [token for letter in "Hello" for token in codec.encode_plain(letter)]
    worker.script.answer = lambda body: [*odd, END]
    first = client.chat.completions.create(model="kvloop", messages=HI)
    known = worker.seen.bodies[-1]["prompt"] + odd + [END]
    history: list[Any] = [*HI, first.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(model="kvloop", messages=history)
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    assert second.session_id == first.session_id
    # The same beginning once more is another conversation: a fork.
    third = client.chat.completions.create(model="kvloop", messages=[*history[:2], {"role": "user", "content": "Or?"}])
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    assert third.session_id != first.session_id


def test_several_choices(client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker, codec: TextCodec) -> None:
    worker.script.answer = lambda body: [*codec.encode_plain(f"choice {body['index']}"), END]
    answer = client.chat.completions.create(model="kvloop", messages=HI, n=3)
    assert [choice.message.content for choice in answer.choices] == ["choice 0", "choice 1", "choice 2"]
    assert len({choice.response_id for choice in answer.choices}) == 3
    history: list[Any] = [*HI, {"role": "assistant", "content": "choice 2"}, {"role": "user", "content": "go on"}]
    known = worker.seen.bodies[-1]["prompt"] + codec.encode_plain("choice 2") + [END]
    client.chat.completions.create(model="kvloop", messages=history)
    assert worker.seen.bodies[-1]["prompt"][: len(known)] == known
    stream = client.chat.completions.create(model="kvloop", messages=HI, n=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["choice 0", "choice 1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["there"], "Hello "), (", friend", "Hello there"), (["o th", "zzz"], "Hell"),
        (["riend.", "nd"], "Hello there, frie"), (["nope"], "Hello there, friend."),
    ],
)  # fmt: skip
def test_stop_strings(
    client: openai.OpenAI,
    gateway: RunningGateway,
    worker: FakeWorker,
    codec: TextCodec,
    stop: Any,
    expected: str,
    stream: bool,
) -> None:
    if stream:
        chunks = list(client.chat.completions.create(model="kvloop", messages=HI, stop=stop, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        session = chunks[0].session_id
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = client.chat.completions.create(model="kvloop", messages=HI, stop=stop)
        text, session = answer.choices[0].message.content or "", answer.session_id
    assert text == expected
    with gateway.journal() as journal:
        head = journal.get_session("default", session).head_response
        assert head is not None
        kept = journal.get_response("default", head)
    assert kept.output_message["content"] == expected
    assert codec.vocabulary.decode(kept.output_ids) == expected
    # The next turn closes what the stop string left open.
    client.chat.completions.create(
        model="kvloop", messages=[{"role": "user", "content": "x"}], extra_body={"session_id": session}
    )
    assert f"assistant\n{expected}<|im_end|>\n<|im_start|>user\nx" in codec.vocabulary.decode(
        worker.seen.bodies[-1]["prompt"], skip_special=False
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_a_stop_string_ends_keeps_the_workers_account(
    client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker, codec: TextCodec, stream: bool
) -> None:
    first = client.chat.completions.create(model="kvloop", messages=HI)
    held: Any = {"model": "kvloop", "messages": HI, "stop": " friend", "extra_body": {"session_id": first.session_id}}
    heard = codec.encode_plain("Hello there, friend")
    worker.script.answer = lambda body: [*heard, *codec.encode_plain(" and so on" * 50), END]
    if stream:
        *_, last = client.chat.completions.create(**held, stream=True, stream_options={"include_usage": True})
        usage = last.usage
    else:
        usage = client.chat.completions.create(**held).usage
    assert usage.prompt_tokens_details.cached_tokens > 10
    assert usage.completion_tokens == len(heard)
    account = usage.kvloop
    assert account["weights_id"] == BASE_WEIGHTS
    assert account["ram_tokens"] == usage.prompt_tokens_details.cached_tokens
    assert account["ram_tokens"] + account["computed_tokens"] == usage.prompt_tokens
    assert account["generated_tokens"] == len(heard)
    assert account["spans"][-1] == {
        "start": usage.prompt_tokens, "end": usage.prompt_tokens + len(heard), "source": "generated",
        "weights_id": BASE_WEIGHTS,
    }  # fmt: skip
    with gateway.journal() as journal:
        head = journal.get_session("default", first.session_id).head_response
        assert head is not None
        kept = journal.get_response("default", head)
    assert (kept.cached_tokens, kept.generated_tokens) == (account["ram_tokens"], len(heard))
    assert kept.spans == account["spans"]


def test_other_weights_are_noticed_also_where_a_stop_string_ends_the_turn(
    client: openai.OpenAI, worker: FakeWorker
) -> None:
    worker.script.weights_told = "c" * 64
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="kvloop", messages=HI, stop="there")
    assert refused.value.code == "weights_mismatch"


def test_an_answer_cut_by_its_length_goes_on_well(client: openai.OpenAI, worker: FakeWorker, codec: TextCodec) -> None:
    answer = client.chat.completions.create(model="kvloop", messages=HI, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    client.chat.completions.create(model="kvloop", messages=HI, extra_body={"session_id": answer.session_id})
    shown = codec.vocabulary.decode(worker.seen.bodies[-1]["prompt"], skip_special=False)
    assert f"assistant\n{answer.choices[0].message.content}<|im_end|>\n<|im_start|>user\nHi" in shown


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        chunks = client.chat.completions.create(model="kvloop", messages=HI, logprobs=True, top_logprobs=2, stream=True)
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        answer = client.chat.completions.create(model="kvloop", messages=HI, logprobs=True, top_logprobs=2)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in entries) == "Hello there, friend."
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    assert bytes(entries[0].bytes) == entries[0].token.encode()


def test_nothing_is_kept_when_not_asked_to(client: openai.OpenAI, gateway: RunningGateway, worker: FakeWorker) -> None:
    before = gateway.get("/v1/sessions").json()["data"]
    answer = client.chat.completions.create(model="kvloop", messages=HI, store=False)
    assert answer.choices[0].message.content == "Hello there, friend."
    assert answer.response_id is None
    assert worker.seen.bodies[-1]["kv_transfer_params"] == {"kv_save": False}
    assert gateway.get("/v1/sessions").json()["data"] == before


def test_the_answer_is_kept_before_it_ends(client: openai.OpenAI, gateway: RunningGateway) -> None:
    stream = client.chat.completions.create(model="kvloop", messages=HI, stream=True)
    for chunk in stream:
        if chunk.choices[0].finish_reason is not None:
            with gateway.journal() as journal:
                kept = journal.get_response("default", chunk.choices[0].response_id)
            assert kept.output_message["content"] == "Hello there, friend."
            break
    else:
        pytest.fail("no final event")
    stream.close()
