"""Conversations of any shape: what the model sees grows from what it saw, and nothing is tokenised twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory.journal.journal import Journal
from serve.gateway.errors import ApiError
from serve.gateway.output import ChoiceOutput
from serve.gateway.text import TextCodec
from serve.gateway.turns import Asked, Plan, Reply, Turns, new_response_id, stored_ids

pytestmark = pytest.mark.model
END = 2
PARTS = st.sampled_from([*"ab 12\n.,é漢👩", "<|im_end|>", "<|im_start|>", "\ufdd0"])
TEXTS = st.lists(PARTS, max_size=12).map("".join)
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journal]:
    with Journal.open(f"sqlite:///{tmp_path_factory.mktemp('turns')}/journal.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def turns(journal: Journal, codec: TextCodec) -> Turns:
    return Turns(journal, codec)


def _sampled(codec: TextCodec, text: str, shape: random.Random) -> list[int]:
    """Ids as a model might sample them: a text cut at odd places, with or without the end of turn."""
    ids: list[int] = []
    while text:
        length = shape.randint(1, len(text))
        ids += codec.encode_plain(text[:length])
        text = text[length:]
    return [*ids, END] if shape.random() < 0.7 else ids or [END]


def _finish(turns: Turns, codec: TextCodec, plan: Plan, ids: list[int]) -> str:
    output = ChoiceOutput(0, codec, ())
    output.push(ids, ())
    output.finish("stop")
    reply = Reply(
        response_id=new_response_id(), text=output.text, output_ids=output.output_ids(), finish_reason="stop",
        model="m", weights_id="w", cached_tokens=0, restored_tokens=0, computed_tokens=0, generated_tokens=len(ids),
        fidelity="exact", spans=[], ttft_ms=None, duration_ms=1.0, created_at=1.0,
    )  # fmt: skip
    try:
        turns.commit(plan, [reply])
    finally:
        turns.release(plan)
    return output.text


@SLOW
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), seed=st.integers(), data=st.data())
def test_each_turn_begins_with_the_ids_of_the_one_before(
    turns: Turns, codec: TextCodec, journal: Journal, texts: list[tuple[str, str]], seed: int, data: st.DataObject
) -> None:
    shape = random.Random(seed)
    user = f"user-{shape.random()}"  # keeps the examples' conversations apart
    history: list[dict[str, Any]] = []
    seen: list[int] = []
    session: str | None = None
    for question, answer in texts:
        new = [{"role": "user", "content": question}]
        resend = session is None or data.draw(st.booleans())
        asked = Asked(
            tenant="t", user=user, store=True, messages=[*history, *new] if resend else new,
            session_id=None if resend else session,
        )  # fmt: skip
        with mock.patch.object(codec, "encode", wraps=codec.encode) as encode:
            plan = turns.plan(asked)
        assert plan.known_ids == seen
        # Only what is new was encoded, once.
        assert encode.call_count == 1
        assert plan.new_ids == codec.encode(encode.call_args.args[0])
        if session is not None:
            assert plan.found == ("resend" if resend else "session")
            assert plan.session_id == session
        sampled = _sampled(codec, answer, shape)
        said = _finish(turns, codec, plan, sampled)
        seen = plan.prompt + sampled
        session = plan.session_id
        assert session is not None
        head = journal.get_session("t", session).head_response
        assert head is not None
        assert stored_ids(journal.chain(head)) == journal.session_token_ids(head) == seen
        history += [*new, {"role": "assistant", "content": said}]


def _ask(turns: Turns, codec: TextCodec, messages: list[dict[str, Any]], answer: str, **more: Any) -> Plan:
    plan = turns.plan(Asked(tenant=more.pop("tenant", "x"), messages=messages, store=True, **more))
    _finish(turns, codec, plan, [*codec.encode_plain(answer), END])
    return plan


def test_an_edited_history_starts_anew_from_what_still_matches(turns: Turns, codec: TextCodec) -> None:
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
    two = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]
    first = _ask(turns, codec, one[:1], "1")
    second = _ask(turns, codec, [*one, two[0]], "2")
    assert second.session_id == first.session_id
    edited = [*one, two[0], {"role": "assistant", "content": "edited"}, {"role": "user", "content": "?"}]
    plan = turns.plan(Asked(tenant="x", messages=edited, store=True))
    turns.release(plan)
    assert (plan.found, plan.create, plan.parent) == ("resend", True, second.parent)
    assert plan.session_id != first.session_id
    assert [message["content"] for message in plan.new] == ["two", "edited", "?"]


def test_another_tokenizer_reads_the_stored_words_again(
    turns: Turns, codec: TextCodec, journal: Journal, model_dir: Path, tmp_path: Path
) -> None:
    first = _ask(turns, codec, [{"role": "user", "content": "hi"}], "ho", tenant="y")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).symlink_to(model_dir / name)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    other = TextCodec(tmp_path)
    renewed = Turns(journal, other)
    plan = renewed.plan(
        Asked(tenant="y", messages=[{"role": "user", "content": "go"}], store=True, session_id=first.session_id)
    )
    assert plan.known_ids == []
    assert other.vocabulary.decode(plan.new_ids) == "[user]hi\n[assistant]ho\n[user]go\n[a]"
    _finish(renewed, other, plan, [*other.encode_plain("ok"), END])
    plan = renewed.plan(
        Asked(tenant="y", messages=[{"role": "user", "content": "on"}], store=True, session_id=first.session_id)
    )
    renewed.release(plan)
    assert other.vocabulary.decode(plan.prompt) == "[user]hi\n[assistant]ho\n[user]go\n[a]ok\n[user]on\n[a]"


def test_a_lost_race_leaves_no_trace(turns: Turns, codec: TextCodec, journal: Journal) -> None:
    first = _ask(turns, codec, [{"role": "user", "content": "hi"}], "ho", tenant="z")
    go = [{"role": "user", "content": "go"}]
    plan = turns.plan(Asked(tenant="z", messages=go, store=True, session_id=first.session_id))
    # Another process (its own `Turns`) takes the turn meanwhile.
    _ask(Turns(journal, codec), codec, go, "first", tenant="z", session_id=first.session_id)
    with pytest.raises(ApiError) as refused:
        _finish(turns, codec, plan, [END])
    assert (refused.value.status, refused.value.code) == (409, "session_conflict")
    assert _ask(turns, codec, go, "next", tenant="z", session_id=first.session_id).session_id == first.session_id


def test_a_failed_plan_holds_nothing(turns: Turns, codec: TextCodec) -> None:
    first = _ask(turns, codec, [{"role": "user", "content": "hi"}], "ho", tenant="q")
    asked = Asked(tenant="q", messages=[], store=True, session_id=first.session_id)
    for _ in range(2):
        with pytest.raises(ApiError, match="no new message"):
            turns.plan(asked)
    with pytest.raises(ApiError, match="not found"):
        turns.plan(Asked(tenant="other", messages=[], store=True, session_id=first.session_id))


@SLOW
@given(
    text=st.text(st.sampled_from("abc é漢👩"), max_size=40),
    stops=st.lists(st.text(st.sampled_from("abc é漢"), min_size=1, max_size=3), max_size=3),
    seed=st.integers(),
)
def test_stop_strings_cut_at_the_same_place_however_the_text_arrives(
    codec: TextCodec, text: str, stops: list[str], seed: int
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    ids = _sampled(codec, text, random.Random(seed))
    output = ChoiceOutput(0, codec, stops)
    given_out = ""
    for token_id in ids:
        given_out += output.push([token_id], ()).text
        assert expected.startswith(given_out)
    given_out += output.finish("length").text
    assert given_out == output.text == expected
    assert codec.vocabulary.decode(output.output_ids()) == expected
    assert output.finish_reason == ("stop" if ends else "length")
