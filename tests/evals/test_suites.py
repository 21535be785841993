from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from evals.errors import EvalDataError
from evals.settings import EvalSettings
from evals.suites.base import read_json_lines
from evals.suites.catalog import build_suites
from evals.suites.format import ITEMS, Format
from evals.suites.heldout import HeldOut
from evals.suites.knowledge import QUESTIONS, Knowledge
from evals.suites.perplexity import TEXTS, Perplexity
from tests.evals.fakes import CharacterText, ScriptedModel, write_heldout

TEXT = CharacterText()


def ignore(_: int) -> None:
    """Nobody watches the progress."""


async def test_heldout_scores_what_a_reply_holds(tmp_path: Path) -> None:
    suite = HeldOut(TEXT, write_heldout(tmp_path / "heldout.jsonl", sessions=3))
    model = ScriptedModel(reply=lambda prompt: "In room 701." if "team 1 " in prompt else "In 700.")
    scores = {score.cluster: score for score in await suite.score(model, ignore)}
    assert {name: score.score for name, score in scores.items()} == {"sess_0": 1.0, "sess_1": 1.0, "sess_2": 0.0}
    assert scores["sess_2"].details["wanted"] == ["702"]
    assert scores["sess_2"].secondary == -1.0


async def test_heldout_replies_may_be_only_somewhat_longer_than_the_demonstration(tmp_path: Path) -> None:
    suite = HeldOut(TEXT, write_heldout(tmp_path / "heldout.jsonl", sessions=2), most_tokens=500)
    model = ScriptedModel()
    await suite.score(model, ignore)
    answer = len("Team 0 meets in room 700.")
    assert model.most_tokens == [answer + answer // 2 + 8] * 2


async def test_heldout_scores_answers_without_information_by_overlap(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "Is it open?"}],
        "completion": {"role": "assistant", "content": "Yes, it is."},
        "lineage": {"session": "s"},
    }
    file = tmp_path / "heldout.jsonl"
    file.write_text(json.dumps(row))
    (score,) = await HeldOut(TEXT, file).score(ScriptedModel(reply=lambda _: "Yes it is"), ignore)
    assert score.score == 1.0


async def test_heldout_caps_sessions_and_choice_is_stable(tmp_path: Path) -> None:
    small = HeldOut(TEXT, write_heldout(tmp_path / "a.jsonl", 5, of_each=9), most_examples=30, most_per_session=3)
    scores = await small.score(ScriptedModel(), ignore)
    assert Counter(score.cluster for score in scores) == {f"sess_{number}": 3 for number in range(5)}
    again = HeldOut(TEXT, tmp_path / "a.jsonl", most_examples=30, most_per_session=3)
    assert again.digest == small.digest
    few = await HeldOut(TEXT, tmp_path / "a.jsonl", most_examples=4, most_per_session=3).score(ScriptedModel(), ignore)
    assert {score.id for score in few} < {score.id for score in scores}


def test_heldout_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    suite = HeldOut(TEXT, write_heldout(tmp_path / "a.jsonl", 4), context_length=40)
    assert (suite.too_long, suite.prompts) == (4, 0)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("[]", "one JSON object"),
        ("{", "line 1: not JSON"),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": [{"role": "user", "content": "q"}]}', '"completion" must be'),
        (
            '{"messages": [{"role": "user", "content": "q"}], "completion": {"role": "assistant", "content": "a"}}',
            '"lineage" must name the "session"',
        ),
    ],
)
def test_unusable_heldout_files_are_refused(tmp_path: Path, row: str, problem: str) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text(row)
    with pytest.raises(EvalDataError, match="heldout.jsonl.*" + problem.replace("[", r"\[")):
        HeldOut(TEXT, file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalDataError, match=r"missing\.jsonl cannot be read"):
        HeldOut(TEXT, tmp_path / "missing.jsonl")


async def test_knowledge_ranks_choices_by_mean_log_prob(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "Q?", "choices": ["bad", "a long right choice", "worse", "best"], "answer": 1}')
    values = {"bad": -2.0, "choice": -1.0, "worse": -3.0, "best": -0.5}
    model = ScriptedModel(log_prob=lambda prompt: values[prompt.split()[-1]])
    (score,) = await Knowledge(TEXT, file).score(model, ignore)
    assert score.score == pytest.approx(2 / 3)
    assert score.secondary == 0.0
    assert score.details["chosen"] == "best"


async def test_knowledge_ties_count_half() -> None:
    scores = await Knowledge(TEXT, most_questions=7).score(ScriptedModel(), ignore)
    assert [score.score for score in scores] == [0.5] * 7


def test_knowledge_sample_depends_on_the_seed_alone() -> None:
    digests = [Knowledge(TEXT, most_questions=20, seed=seed).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "row",
    [
        '{"question": "", "choices": ["a", "b"], "answer": 0}',
        '{"question": "q", "choices": ["a"], "answer": 0}',
        '{"question": "q", "choices": ["a", "b"], "answer": 2}',
        '{"question": "q", "choices": ["a", " "], "answer": 0}',
        '{"question": "q", "choices": ["a", "b"], "answer": true}',
    ],
)
def test_unusable_questions_are_refused(tmp_path: Path, row: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}\n\n' + row)
    with pytest.raises(EvalDataError, match="question 2"):
        Knowledge(TEXT, file)


async def test_perplexity_is_the_mean_log_prob_of_each_text() -> None:
    scores = await Perplexity(TEXT).score(ScriptedModel(log_prob=lambda _: -2.0), ignore)
    assert {score.score for score in scores} == {-2.0}
    assert scores[0].secondary == pytest.approx(math.exp(2.0))


async def test_format_runs_the_checks_of_each_item() -> None:
    scores = {score.id: score for score in await Format(TEXT).score(ScriptedModel(reply=lambda _: "Paris"), ignore)}
    assert scores["one-word-capital"].score == 1.0
    assert scores["list-three-fruits"].score < 0.5


def test_bundled_questions_are_many_balanced_and_distinct() -> None:
    rows = read_json_lines(QUESTIONS)
    assert len(rows) == 200
    assert len({row["question"] for row in rows}) == 200
    assert all(len(set(row["choices"])) == 4 for row in rows)
    assert set(Counter(row["answer"] for row in rows).values()) == {50}


def test_bundled_texts_and_items_are_of_many_kinds() -> None:
    texts, items = read_json_lines(TEXTS), read_json_lines(ITEMS)
    assert 10 <= len({row["id"] for row in texts}) == len(texts)
    assert all(600 <= len(row["text"]) <= 1500 for row in texts)
    assert len({row["id"] for row in items}) == len(items) >= 30
    assert {check for row in items for check in row["checks"]} >= {"list_of", "words_exactly", "ends_with", "one_of"}


def test_guard_files_of_the_user_join_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "guards"
    folder.mkdir()
    heldout = write_heldout(tmp_path / "heldout.jsonl", 2)
    settings = EvalSettings(guard_dir=folder)
    with pytest.raises(EvalDataError, match="guard_dir"):
        build_suites(TEXT, heldout, settings, 4096)
    (folder / "ours.jsonl").write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}')
    target, guards = build_suites(TEXT, heldout, settings, 4096)
    assert [suite.name for suite in (target, *guards)] == ["heldout", "perplexity", "knowledge", "format", "file:ours"]
    assert guards[-1].kind == "file"


def test_public_question_sets_load_as_guard_files(tmp_path: Path) -> None:
    given = os.environ.get("KVLOOP_TEST_GUARD_DIR")
    if not given or not Path(given).is_dir():
        pytest.skip("KVLOOP_TEST_GUARD_DIR names no folder of guard files")
    heldout = write_heldout(tmp_path / "heldout.jsonl", 2)
    _, guards = build_suites(TEXT, heldout, EvalSettings(guard_dir=Path(given), guard_questions=50), 4096)
    of_user = [suite for suite in guards if suite.kind == "file"]
    assert len(of_user) == len(list(Path(given).glob("*.jsonl")))
    assert all(suite.prompts >= 100 for suite in of_user)
