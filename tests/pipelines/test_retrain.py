"""Retrain: every step once, whatever kills it; the gate decides; two never overlap; deleted words never come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from memory.journal import Journal, JournalSettings, LeaseLost
from pipelines.lease import Busy, HeldLease
from pipelines.promotion import Promotions
from pipelines.registry import CHAMPION, PREVIOUS
from pipelines.retrain import KIND, Retrain, interrupted_run, last_mark
from pipelines.settings import RetrainSettings
from pipelines.stages import Event, Outcome
from tests.pipelines.fakes import FakeRegistry, Killed, Stages, teach

MOMENTS = [
    "before train",
    "after train",
    "before evaluate",
    "after evaluate",
    "before register",
    "after register",
    "before previous",
    "after previous",
    "before champion",
    "after champion",
]


@dataclass
class Bench:
    folder: Path
    journal: Journal
    stages: Stages
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = FakeRegistry(self.folder, self.stages)
        self.settings = RetrainSettings(folder=self.folder / "runs", min_examples=3)

    def retrain(self) -> Outcome:
        return self.job().run()

    def job(self) -> Retrain:
        stages = self.stages
        return Retrain(
            self.journal, self.registry, self.settings, stages.train, stages.evaluate, on_event=self.events.append
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    journal = Journal.open(f"sqlite:///{tmp_path}/journal.db", JournalSettings(eval_share=0.5))
    with journal:
        yield Bench(tmp_path, journal, Stages(tmp_path / "stages"))


def test_a_pass_moves_the_champion_and_says_why(bench: Bench) -> None:
    taught = teach(bench.journal, 4)
    teach(bench.journal, 3, "eval")
    outcome = bench.retrain()
    assert (outcome.result, outcome.version, outcome.verdict, outcome.exit_code) == ("promoted", "1", "pass", 0)
    assert (outcome.examples, outcome.heldout_examples) == (4, 3)
    assert set(outcome.seconds) == {"curate", "train", "evaluate", "register", "promote"}
    assert bench.registry.get_alias(CHAMPION) == "1"
    (entry,) = bench.journal.list_promotions()
    assert (entry.who, entry.action, entry.from_version, entry.to_version) == ("gate", "promote", "base", "1")
    assert (entry.reason, entry.report) == ("heldout: better", outcome.report)
    (version,) = bench.registry.versions
    assert version["tags"]["verdict"] == "pass"
    assert (version["tags"]["compared_with"], version["tags"]["stale_kl"]) == ("base", "0.0042")
    assert version["metrics"] == {"train.loss": 0.5, "train.seconds": 1.0, "eval.heldout": 0.9}
    assert bench.journal.trained_on("acme", taught[0])[1] == ("1",)
    run = bench.journal.get_run(outcome.run_id)
    assert run.status == "done"
    assert run.outcome == json.loads(json.dumps(outcome.as_json()))
    assert bench.journal.get_lease(KIND) is None
    assert [(event.step, event.kind) for event in bench.events if event.step == "train"] == [
        ("train", "started"),
        ("train", "progress"),
        ("train", "finished"),
    ]
    assert "version 1: promoted" in outcome.summary()


def test_the_next_champion_leaves_a_previous_one(bench: Bench) -> None:
    teach(bench.journal, 3, "eval")
    for round_ in ("first", "second"):
        teach(bench.journal, 4, label=round_)
        assert bench.retrain().result == "promoted"
    assert (bench.registry.get_alias(CHAMPION), bench.registry.get_alias(PREVIOUS)) == ("2", "1")
    assert bench.registry.versions[1]["manifest"]["parents"] == ["1"]
    assert bench.registry.versions[1]["manifest"]["rows"] == 8
    assert [entry.from_version for entry in bench.journal.list_promotions()] == ["1", "base"]


@pytest.mark.parametrize(("verdict", "result"), [("fail", "refused"), ("inconclusive", "inconclusive")])
def test_without_proof_it_is_registered_but_not_promoted(bench: Bench, verdict: str, result: str) -> None:
    teach(bench.journal, 4)
    teach(bench.journal, 3, "eval")
    bench.stages.verdict = verdict
    bench.stages.stale_kl = None
    outcome = bench.retrain()
    assert (outcome.result, outcome.version, outcome.exit_code) == (result, "1", 0)
    assert bench.registry.versions[0]["tags"]["verdict"] == verdict
    assert bench.registry.get_alias(CHAMPION) is None
    assert bench.journal.list_promotions() == []
    assert "stale_kl" not in bench.registry.versions[0]["tags"]


def test_too_little_that_is_new_ends_the_run_at_once(bench: Bench) -> None:
    teach(bench.journal, 3, "eval")
    teach(bench.journal, 2)
    outcome = bench.retrain()
    assert (outcome.result, outcome.version, outcome.examples) == ("too few examples", None, 2)
    assert "2 new examples" in outcome.reasons[0]
    teach(bench.journal, 1, label="one more")
    assert bench.retrain().result == "promoted"
    assert bench.retrain().result == "too few examples"
    assert bench.stages.calls().count("trained") == 1
    assert bench.job().run(force=True).result == "promoted"


def test_force_does_not_train_on_nothing(bench: Bench) -> None:
    teach(bench.journal, 3, "eval")
    assert bench.job().run(force=True).result == "too few examples"


def test_without_held_out_examples_nothing_is_trained(bench: Bench) -> None:
    teach(bench.journal, 5)
    assert bench.retrain().result == "no held-out examples"
    assert bench.stages.calls() == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_and_repeats_no_effect(bench: Bench, moment: str) -> None:
    teach(bench.journal, 3, "eval")
    teach(bench.journal, 4, label="first")
    bench.retrain()
    teach(bench.journal, 4, label="second")
    (bench.folder / "stages" / "calls").unlink()
    bench.stages.die_at = moment
    with pytest.raises(Killed):
        bench.retrain()
    interrupted = interrupted_run(bench.journal)
    assert interrupted is not None
    teach(bench.journal, 4, label="too late for this run")
    outcome = bench.retrain()
    assert (outcome.run_id, outcome.result, outcome.version, outcome.examples) == (
        interrupted.id,
        "promoted",
        "2",
        8,
    )
    calls = bench.stages.calls()
    if moment == "after evaluate":
        calls.remove("evaluated")  # it has no effect but its own report
    assert calls == ["trained", "evaluated", "registered", "previous=1", "champion=2"]
    assert len(bench.registry.versions) == 2
    assert [(entry.from_version, entry.to_version) for entry in bench.journal.list_promotions()] == [
        ("1", "2"),
        ("base", "1"),
    ]
    assert interrupted_run(bench.journal) is None
    assert bench.journal.get_run(outcome.run_id).attempts == 2


def test_a_stage_that_fails_ends_the_run_with_its_reason(bench: Bench) -> None:
    teach(bench.journal, 4)
    teach(bench.journal, 3, "eval")
    bench.stages.error = RuntimeError("out of memory")
    outcome = bench.retrain()
    assert (outcome.result, outcome.reasons, outcome.exit_code) == ("failed", ("RuntimeError: out of memory",), 1)
    run = bench.journal.get_run(outcome.run_id)
    assert (run.status, run.reason) == ("failed", "RuntimeError: out of memory")
    bench.stages.error = None
    assert bench.retrain().result == "promoted"


def test_a_run_that_keeps_dying_fails(bench: Bench) -> None:
    teach(bench.journal, 4)
    teach(bench.journal, 3, "eval")
    for _ in range(bench.settings.max_attempts):
        bench.stages.die_at = "before evaluate"
        with pytest.raises(Killed):
            bench.retrain()
    outcome = bench.retrain()
    assert outcome.result == "failed"
    assert outcome.reasons == ("its process died 3 times; finished steps: curate, train",)
    assert bench.retrain().result == "promoted"


def test_two_runs_never_overlap(bench: Bench) -> None:
    with HeldLease(bench.journal, KIND, 30) as lease:
        assert interrupted_run(bench.journal) is None
        with pytest.raises(Busy, match=lease.owner):
            bench.retrain()
    assert bench.journal.list_runs() == []


def test_who_lost_the_lease_stops_and_writes_nothing_more(bench: Bench) -> None:
    teach(bench.journal, 4)
    teach(bench.journal, 3, "eval")
    job = bench.job()
    honest = job.evaluate

    def robbed(**arguments: object) -> object:
        with bench.journal._writing() as connection:
            connection.exec_driver_sql("UPDATE leases SET owner = 'somebody else'")
        return honest(**arguments)  # type: ignore[arg-type]

    job.evaluate = robbed  # type: ignore[assignment]
    with pytest.raises(LeaseLost):
        job.run()
    (run,) = bench.journal.list_runs()
    assert run.status == "running"
    assert [step.name for step in bench.journal.list_steps(run.id)] == ["curate", "train"]
    assert bench.registry.versions == []


def test_a_session_deleted_before_training_is_not_trained_on(bench: Bench) -> None:
    taught = teach(bench.journal, 5)
    teach(bench.journal, 3, "eval")
    bench.stages.die_at = "before train"
    with pytest.raises(Killed):
        bench.retrain()
    receipt = bench.journal.delete_session("acme", taught[0])
    assert len(receipt.datasets) == 1
    outcome = bench.retrain()
    assert (outcome.result, outcome.examples) == ("promoted", 4)
    assert bench.registry.versions[0]["manifest"]["rows"] == 4
    assert bench.journal.trained_on("acme", taught[0]) == (receipt.datasets, ())
    assert bench.journal.trained_on("acme", taught[1])[1] == ("1",)


def test_a_champion_moved_meanwhile_is_left_alone(bench: Bench) -> None:
    teach(bench.journal, 3, "eval")
    for label in ("first", "second"):
        teach(bench.journal, 4, label=label)
        bench.retrain()
    teach(bench.journal, 4, label="third")
    bench.stages.die_at = "before register"
    with pytest.raises(Killed):
        bench.retrain()
    Promotions(bench.journal, bench.registry).rollback("ann", "complaints")
    outcome = bench.retrain()
    assert (outcome.result, outcome.version, outcome.verdict) == ("champion moved", "3", "pass")
    assert "champion became 1" in outcome.reasons[0]
    assert bench.registry.get_alias(CHAMPION) == "1"


def test_the_mark_is_that_of_the_newest_run(bench: Bench) -> None:
    assert last_mark(bench.journal) == 0
    teach(bench.journal, 2)
    bench.retrain()
    assert last_mark(bench.journal) == 2
    assert bench.journal.count_feedback(after=2) == 0
    teach(bench.journal, 3)
    teach(bench.journal, 1, "eval")
    bench.stages.error = RuntimeError("out of memory")
    assert bench.retrain().result == "failed"
    assert last_mark(bench.journal) == 2
