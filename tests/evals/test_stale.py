"""What serving the champion's KV under the candidate costs: what is asked, what the report says, what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evals.gate import judge
from evals.report import render, write
from evals.run import EvalJob, EvalModel, evaluate
from evals.settings import EvalSettings, GateSettings
from evals.stale import Conversation, build_probes
from serve.gateway.text import TextCodec
from tests.evals.fake_worker import State
from tests.evals.fakes import CharacterText, write_heldout

SMALL = EvalSettings(heldout_examples=6, knowledge_questions=5, batch=8, stale_probes=4)


class SessionText(CharacterText):
    """Goes on with a conversation by the new contents, one a line."""

    def next_turn(
        self, history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], last_id: int
    ) -> list[int]:
        assert chr(last_id) == history[-1]["content"][-1]
        return self.encode_plain("\n") + self.first_turn(new)


def words(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


SAID = [
    Conversation([{"role": "system", "content": "s"}, user("q1")], "a1"),
    Conversation([{"role": "system", "content": "s"}, user("q2")], "a2"),
    Conversation([user("q3")], "a3"),
]


def test_a_conversation_follows_another_one_that_is_the_old_history() -> None:
    probes = build_probes(SessionText(), SAID, [], most=3, room=100)
    asked = [
        (words(probe.token_ids[: probe.prefix]), words(probe.token_ids[probe.prefix :]))
        for probe in probes.conversations
    ]
    assert asked == [("q3\na3", "\nq1\na1"), ("s\nq1\na1", "\nq2\na2"), ("s\nq2\na2", "\nq3\na3")]


def test_half_of_a_text_is_old() -> None:
    (probe,) = build_probes(SessionText(), [], [[1, 2, 3, 4, 5], [1, 2]], most=5, room=100).texts
    assert (probe.token_ids, probe.prefix, probe.answer_start) == ([1, 2, 3, 4, 5], 2, None)


def test_no_more_probes_than_asked_and_none_that_does_not_fit() -> None:
    texts = [[1] * 10, [1] * 6, [1] * 6]
    probes = build_probes(SessionText(), SAID, texts, most=2, room=12)
    assert (len(probes.conversations), [len(probe.token_ids) for probe in probes.texts]) == (1, [10, 6])
    assert not build_probes(SessionText(), SAID, texts, most=0, room=100)


@pytest.fixture
def job(model_dir: Path, tmp_path: Path, url: str) -> EvalJob:
    for name in ("better", "same"):
        (tmp_path / name).mkdir()
    return EvalJob(
        model_dir=model_dir,
        heldout=write_heldout(tmp_path / "heldout.jsonl", 6),
        candidate=EvalModel(name="v2", adapter=tmp_path / "better"),
        champion=EvalModel(name="v1", adapter=tmp_path / "same"),
        worker_url=url,
        reuse_max_kl=0.005,
        settings=SMALL,
    )


@pytest.mark.model
def test_the_candidate_is_measured_over_the_champions_kv(job: EvalJob, state: State, tmp_path: Path) -> None:
    result = evaluate(job)
    assert result.stale_kv is not None
    conversations, answers, texts = state.divergence
    loaded = state.loaded[-2:]
    assert [(asked["versions"], asked["model"]) for asked in state.divergence] == [(loaded[:1], loaded[1])] * 3
    # The same histories and questions, with people's answer and with the candidate's own.
    assert [asked["answer_tokens"] > 0 for asked in state.divergence] == [False, True, False]
    assert answers["prefixes"] == conversations["prefixes"]
    for question, whole in zip(answers["prompts"], conversations["prompts"], strict=True):
        assert whole[: len(question)] == question != whole
    assert len(conversations["prompts"]) == len(texts["prompts"]) == SMALL.stale_probes
    assert all(0 < prefix < len(ids) for ids, prefix in zip(texts["prompts"], texts["prefixes"], strict=True))
    assert state.adapters == {}
    # The worse of the two kinds decides.
    groups = result.stale_kv.groups
    assert [(group.kind, group.kl) for group in groups] == [("conversations", 0.004), ("texts", 0.004 / 3)]
    assert [group.answer_agreement for group in groups] == [0.9, None]
    assert (result.stale_kv.kl, result.stale_kv.allowed) == (0.004, True)
    assert (result.stale_kv.candidate, result.stale_kv.under) == ("v2", "v1")

    decision = judge(result, GateSettings())
    machine = json.loads(write(result, decision, tmp_path / "report")[1].read_text())
    assert machine["stale_kv"] == result.stale_kv.model_dump(mode="json")
    assert (machine["stale_kv"]["threshold"], machine["stale_kv"]["allowed"]) == (0.005, True)
    text = render(result, decision)
    assert "v2 on KV that v1 computed" in text
    assert "0.00400, is below the threshold of 0.005: policy `reuse` may serve it" in text
    assert "0.00160" in text


@pytest.mark.model
def test_a_probe_begins_as_a_session_would(job: EvalJob, state: State, model_dir: Path) -> None:
    evaluate(job)
    codec = TextCodec(model_dir)
    asked = state.divergence[0]
    ids, prefix = asked["prompts"][1], asked["prefixes"][1]
    rows = [json.loads(line) for line in job.heldout.read_text().splitlines()]
    starts = [codec.first_turn(row["messages"]) + codec.encode_plain(row["completion"]["content"]) for row in rows]
    assert ids[:prefix] in starts
    ends = [codec.encode_plain(row["completion"]["content"]) for row in rows]
    assert any(ids[-len(end) :] == end for end in ends)


@pytest.mark.model
@pytest.mark.parametrize("bar", [0.0, 0.004])
def test_what_is_not_below_the_bar_is_not_allowed(job: EvalJob, bar: float) -> None:
    result = evaluate(job.model_copy(update={"reuse_max_kl": bar}))
    assert result.stale_kv is not None
    assert result.stale_kv.allowed is False
    assert "may not serve it" in render(result, judge(result, GateSettings()))


@pytest.mark.model
@pytest.mark.parametrize("how", ["switched off", "another kind of worker"])
def test_without_a_measurement_nothing_is_allowed(job: EvalJob, state: State, how: str) -> None:
    if how == "switched off":
        job = job.model_copy(update={"settings": SMALL.model_copy(update={"stale_probes": 0})})
    else:
        state.stale_kl = None
    result = evaluate(job)
    assert (result.stale_kv, state.divergence) == (None, [])
    assert "never served under this version" in render(result, judge(result, GateSettings()))
    assert state.adapters == {}
