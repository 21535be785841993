from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from evals.errors import EvalError
from evals.gate import judge
from evals.results import EvalResult
from evals.run import EvalJob, EvalModel, Progress, evaluate
from evals.settings import EvalSettings, GateSettings
from serve.backends.base import WorkerRejected
from tests.evals.fake_worker import State
from tests.evals.fakes import write_heldout

pytestmark = pytest.mark.model

SMALL = EvalSettings(heldout_examples=12, knowledge_questions=10, batch=8)


@pytest.fixture
def job(model_dir: Path, tmp_path: Path, url: str) -> EvalJob:
    for name in ("better", "same"):
        (tmp_path / name).mkdir()
    return EvalJob(
        model_dir=model_dir,
        heldout=write_heldout(tmp_path / "heldout.jsonl", 12),
        candidate=EvalModel(name="v2", adapter=tmp_path / "better"),
        worker_url=url,
        settings=SMALL,
    )


def with_champion(job: EvalJob, tmp_path: Path) -> EvalJob:
    return job.model_copy(update={"champion": EvalModel(name="v1", adapter=tmp_path / "same")})


def test_every_model_is_scored_on_the_same_examples(job: EvalJob, tmp_path: Path, state: State) -> None:
    result = evaluate(with_champion(job, tmp_path))
    assert [model.name for model in result.models] == ["base", "v1", "v2"]
    assert result.target().baseline_name == "v1"
    assert {pair.baseline_name for pair in result.guards()} == {"base"}
    for suite in ("heldout", "perplexity", "knowledge", "format"):
        ids = {tuple(example.id for example in model.suite(suite).examples) for model in result.models}
        assert len(ids) == 1
    assert result.perplexity_ratio("v2") == pytest.approx(0.99005, abs=1e-5)
    assert result.perplexity_ratio("v1") == 1.0
    assert judge(result, GateSettings()).verdict != "pass"
    assert EvalResult.model_validate_json(result.model_dump_json()) == result


def test_without_champion_base_is_scored_once_and_is_the_champion(job: EvalJob) -> None:
    result = evaluate(job)
    assert [model.name for model in result.models] == ["base", "v2"]
    assert result.champion == result.base == result.target().baseline_name


def test_adapters_get_names_of_their_own_and_are_unloaded(job: EvalJob, tmp_path: Path, state: State) -> None:
    evaluate(with_champion(job, tmp_path))
    evaluate(job)
    assert len(set(state.loaded)) == len(state.loaded) == 6  # each is loaded to be scored, and for its KV
    assert state.adapters == {}


def test_adapters_are_unloaded_when_scoring_fails(job: EvalJob, state: State) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.model == "v2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(job, interrupt)
    assert state.loaded
    assert state.adapters == {}
    state.broken = True
    with pytest.raises(WorkerRejected, match="broken on purpose"):
        evaluate(job)


def test_nothing_asked_is_kept_in_memory_and_replies_are_greedy(job: EvalJob, state: State) -> None:
    evaluate(job)
    assert {json.dumps(request["kv_transfer_params"]) for request in state.requests} == {'{"kv_save": false}'}
    assert {request["temperature"] for request in state.requests} == {0.0}


def test_a_full_queue_is_waited_for(job: EvalJob, state: State) -> None:
    state.refusals = 5
    assert evaluate(job).models[0].prompt_tokens > 0
    assert state.refusals == 0


def test_progress_reaches_the_end_without_going_back(job: EvalJob) -> None:
    seen: list[Progress] = []
    evaluate(job, seen.append)
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert seen[-1].done == seen[-1].total
    assert {progress.suite for progress in seen} == {"heldout", "perplexity", "knowledge", "format", "stale KV"}


def test_kept_scores_are_not_asked_again(job: EvalJob, tmp_path: Path, state: State) -> None:
    keeping = job.model_copy(update={"kept_folder": tmp_path / "kept"})
    first = evaluate(keeping)
    state.requests.clear()
    again = evaluate(keeping)
    assert state.requests == []
    assert [model.reused for model in again.models] == [["heldout", "perplexity", "knowledge", "format"]] * 2
    assert [model.suites for model in again.models] == [model.suites for model in first.models]


def test_kept_scores_of_other_examples_or_weights_are_not_used(job: EvalJob, tmp_path: Path) -> None:
    keeping = job.model_copy(update={"kept_folder": tmp_path / "kept"})
    evaluate(keeping)
    write_heldout(job.heldout, 11)
    other = keeping.model_copy(update={"candidate": EvalModel(name="v3", adapter=tmp_path / "same")})
    base, candidate = evaluate(other).models
    assert base.reused == ["perplexity", "knowledge", "format"]
    assert candidate.reused == []


def test_damaged_kept_scores_are_scored_again(job: EvalJob, tmp_path: Path) -> None:
    keeping = job.model_copy(update={"kept_folder": tmp_path / "kept"})
    first = evaluate(keeping)
    for file in (tmp_path / "kept").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    again = evaluate(keeping)
    assert [model.reused for model in again.models] == [[], []]
    assert [model.suites for model in again.models] == [model.suites for model in first.models]


def test_a_refused_adapter_is_an_error(job: EvalJob, tmp_path: Path) -> None:
    wrong = job.model_copy(update={"candidate": EvalModel(name="v2", adapter=tmp_path / "missing")})
    with pytest.raises(WorkerRejected, match="no adapter there"):
        evaluate(wrong)


def test_a_base_name_the_worker_does_not_know_is_an_error(job: EvalJob) -> None:
    with pytest.raises(EvalError, match="serves base, but not other"):
        evaluate(job.model_copy(update={"base_name": "other"}))


def test_names_must_differ(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="different names"):
        EvalJob(model_dir=model_dir, heldout=tmp_path / "h", candidate=EvalModel(name="base", adapter=tmp_path / "a"))
