"""Retrain: curate, train, evaluate, register, promote. A run is a row with steps in the journal.

Invariants: a step that finished is never done again, and each step can be repeated after a kill at any moment without
a second side effect (datasets are named by digest, adapters by their dataset, MLflow runs and ledger entries by the
run); two runs never overlap; every run ends as done with its outcome or as failed with its reason; only the gate's
`pass` moves the champion, and only while the champion is the one the candidate was compared with.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memory.journal import Conflict, Journal, Json, LeaseLost, Run
from memory.journal.records import RunStatus
from pipelines.lease import HeldLease
from pipelines.promotion import BASE, Promotions
from pipelines.registry import CHAMPION, COMPARED_WITH, STALE_KL
from pipelines.settings import RetrainSettings
from pipelines.stages import Adapter, EvaluateStage, Event, Outcome, Result, StepName, TrainStage, VersionRegistry
from train.curate import curate
from train.dataset import HELDOUT, ROWS

KIND = "retrain"
_NOT_FAILED: tuple[RunStatus, ...] = ("running", "done")
_log = logging.getLogger(__name__)


class _Ended(Exception):
    """The run is over before its last step."""

    def __init__(self, result: Result, reason: str) -> None:
        super().__init__(reason)
        self.result: Result = result
        self.reason = reason


def interrupted_run(journal: Journal) -> Run | None:
    """The newest run that is not over although no process works on it: the next `Retrain.run` resumes it."""
    if journal.get_lease(KIND) is not None:
        return None
    running = journal.list_runs(KIND, status="running", limit=1)
    return running[0] if running else None


def last_mark(journal: Journal) -> int:
    """The feedback number up to which the newest run that did not fail looked; 0 before the first."""
    looked = [run for status in _NOT_FAILED for run in journal.list_runs(KIND, status=status, limit=1)]
    return max((int(run.params["last_feedback"]) for run in looked), default=0)


class Retrain:
    """Runs the pipeline. One object may be used for one run after the other."""

    def __init__(
        self,
        journal: Journal,
        registry: VersionRegistry,
        settings: RetrainSettings,
        train: TrainStage,
        evaluate: EvaluateStage,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.journal = journal
        self.registry = registry
        self.settings = settings
        self.train = train
        self.evaluate = evaluate
        self.on_event = on_event

    def run(self, trigger: str = "by hand", force: bool = False) -> Outcome:
        """Resumes the run that was interrupted, or starts a new one, and works on it to its end.

        `force` lets a new run train although too few of its examples are new.
        A stage that fails ends the run as failed; the outcome says why. Raises `Busy` when another process is at it,
        `LeaseLost` when another process took over; an interrupt leaves the run to be resumed.
        """
        with HeldLease(self.journal, KIND, self.settings.lease_seconds) as lease:
            run = self._next_run(trigger, force, lease.owner)
            attempt = self.journal.begin_attempt(run.id, lease.owner)
            if attempt > self.settings.max_attempts:
                done = ", ".join(step.name for step in self.journal.list_steps(run.id)) or "none"
                return self._failed(run, lease, f"its process died {attempt - 1} times; finished steps: {done}")
            return self._work(run, lease)

    def _next_run(self, trigger: str, force: bool, owner: str) -> Run:
        running = self.journal.list_runs(KIND, status="running")
        for abandoned in running[1:]:
            self.journal.fail_run(abandoned.id, "abandoned: a newer run took its place", owner)
        if running:
            return running[0]
        # Marks are taken before the time, so that feedback in between counts as new twice rather than never.
        params: Json = {"trigger": trigger, "force": force}
        params |= {"last_feedback": self.journal.last_feedback_number(), "after_feedback": self._trained_up_to()}
        return self.journal.create_run(KIND, params | {"until": self.journal.now()})

    def _trained_up_to(self) -> int:
        for run in self.journal.list_runs(KIND, status="done"):
            if run.outcome is not None and run.outcome.get("trained"):
                return int(run.params["last_feedback"])
        return 0

    def _work(self, run: Run, lease: HeldLease) -> Outcome:
        work = _Work(self, run, lease)
        try:
            outcome = work.to_the_end()
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the job: whatever a stage raises is the run's reason
            _log.exception("run %s failed", run.id)
            return self._failed(run, lease, f"{type(error).__name__}: {error}")
        self.journal.finish_run(run.id, outcome.as_json(), lease.owner)
        return outcome

    def _failed(self, run: Run, lease: HeldLease, reason: str) -> Outcome:
        try:
            self.journal.fail_run(run.id, reason, lease.owner)
        except Conflict:
            _log.warning("run %s had ended already", run.id)
        return Outcome(run_id=run.id, result="failed", reasons=(reason,))


class _Work:
    """One process's work on one run."""

    def __init__(self, retrain: Retrain, run: Run, lease: HeldLease) -> None:
        self._of = retrain
        self._run = run
        self._lease = lease
        self._folder = retrain.settings.folder.absolute() / run.id

    def to_the_end(self) -> Outcome:
        """Does the steps that are not finished. Raises what the stages raise."""
        try:
            dataset = self._curated()
            trained = self._step("train", lambda: self._do_train(dataset))
            judged = self._step("evaluate", lambda: self._do_evaluate(dataset, trained))
            registered = self._step("register", lambda: self._do_register(dataset, trained, judged))
            self._step("promote", lambda: self._do_promote(judged, registered))
        except _Ended as ended:
            return self._outcome(ended.result, (ended.reason,))
        return self._verdict()

    def _step(self, name: StepName, work: Callable[[], Json]) -> Json:
        """The step's result: as recorded, or by doing it now."""
        self._lease.check()
        known = self._of.journal.step(self._run.id, name)
        if known is not None:
            self._say(name, "resumed", detail=known)
            return known
        self._say(name, "started")
        began = time.monotonic()
        result = work()
        result |= {"seconds": time.monotonic() - began}
        recorded = self._of.journal.finish_step(self._run.id, name, result, self._lease.owner)
        self._say(name, "finished", detail=recorded)
        return recorded

    def _curated(self) -> Json:
        dataset = self._step("curate", self._do_curate)
        if self._of.journal.step(self._run.id, "train") is None and self._of.journal.deleted_in_dataset(
            dataset["digest"]
        ):
            # A session was deleted since: its words must not be trained on, so the dataset is built again without it.
            self._of.journal.forget_step(self._run.id, "curate", self._lease.owner)
            dataset = self._step("curate", self._do_curate)
        least = self._of.settings.min_examples
        enough = dataset["examples"] if self._run.params["force"] else dataset["new_examples"] >= least
        if not enough:
            reason = f"{dataset['new_examples']} new examples since the last training, {least} are needed"
            raise _Ended("too few examples", f"{reason}; left out: {dataset['dropped'] or 'none'}")
        if not dataset["heldout_examples"]:
            raise _Ended("no held-out examples", "no correction is in a session of the eval split: collect more")
        return dataset

    def _do_curate(self) -> Json:
        params, settings = self._run.params, self._of.settings
        folder = self._folder / "dataset"
        card = curate(self._of.journal, folder, settings.curate, params["until"], params["after_feedback"])
        self._of.journal.record_dataset(card.digest, str(folder), card.sessions)
        return {
            "folder": str(folder),
            "digest": card.digest,
            "examples": card.examples,
            "new_examples": card.new_examples,
            "heldout_examples": card.heldout_examples,
            "dropped": card.dropped,
            "scrubbed": card.scrubbed,
            "champion": self._of.registry.get_alias(CHAMPION),
        }

    def _do_train(self, dataset: Json) -> Json:
        champion = dataset["champion"]  # as it was then: a resumed run asks for the same training
        trained = self._of.train(
            dataset=Path(dataset["folder"]) / ROWS,
            out_dir=self._folder / f"adapter-{dataset['digest'][:12]}",
            name=self._run.id,
            parents=(champion,) if champion else (),
            advance=self._advance("train"),
        )
        return {"adapter": str(trained.adapter_dir), "metrics": trained.metrics}

    def _do_evaluate(self, dataset: Json, trained: Json) -> Json:
        champion = self._of.registry.get_alias(CHAMPION)
        serving = Adapter(name=f"v{champion}", path=self._of.registry.version_path(champion)) if champion else None
        judged = self._of.evaluate(
            heldout=Path(dataset["folder"]) / HELDOUT,
            candidate=Adapter(name=self._run.id, path=Path(trained["adapter"])),
            champion=serving,
            out_dir=self._folder / "report",
            advance=self._advance("evaluate"),
        )
        return {
            "champion": champion,
            "verdict": judged.verdict,
            "reasons": list(judged.reasons),
            "metrics": judged.metrics,
            "report": str(judged.report_dir),
            "stale_kl": judged.stale_kl,
        }

    def _do_register(self, dataset: Json, trained: Json, judged: Json) -> Json:
        adapter = Path(trained["adapter"])
        manifest = json.loads((adapter / "manifest.json").read_text(encoding="utf-8"))
        tags = {
            "verdict": judged["verdict"],
            "dataset": dataset["digest"],
            COMPARED_WITH: judged["champion"] or BASE,
        }
        if judged.get("stale_kl") is not None:
            tags[STALE_KL] = repr(judged["stale_kl"])
        version = self._of.registry.register(
            adapter,
            manifest,
            _numbers("train", trained["metrics"]) | _numbers("eval", judged["metrics"]),
            Path(judged["report"]),
            self._run.id,
            tags,
        )
        self._of.journal.record_version(dataset["digest"], version)
        return {"version": version}

    def _do_promote(self, judged: Json, registered: Json) -> Json:
        version = registered["version"]
        if judged["verdict"] != "pass":
            return {"result": "refused" if judged["verdict"] == "fail" else "inconclusive"}
        champion = self._of.registry.get_alias(CHAMPION)
        if champion not in (judged["champion"], version):
            return {"result": "champion moved", "champion": champion}
        Promotions(self._of.journal, self._of.registry).promote(
            version, "gate", "; ".join(judged["reasons"]), judged["report"], key=f"{self._run.id}:promote"
        )
        return {"result": "promoted"}

    def _verdict(self) -> Outcome:
        promoted = self._results()["promote"]
        reasons: tuple[str, ...] = tuple(self._results()["evaluate"]["reasons"])
        if promoted["result"] == "champion moved":
            moved = f"champion became {promoted['champion'] or 'base'} while this run compared with another: run again"
            reasons = (moved, *reasons)
        return self._outcome(promoted["result"], reasons)

    def _outcome(self, result: Result, reasons: tuple[str, ...]) -> Outcome:
        steps = self._results()
        dataset, judged = steps.get("curate", {}), steps.get("evaluate", {})
        return Outcome(
            run_id=self._run.id,
            result=result,
            reasons=reasons,
            version=steps.get("register", {}).get("version"),
            verdict=judged.get("verdict"),
            examples=dataset.get("examples", 0),
            heldout_examples=dataset.get("heldout_examples", 0),
            report=judged.get("report"),
            seconds={name: step["seconds"] for name, step in steps.items()},
        )

    def _results(self) -> dict[str, Json]:
        return {step.name: step.result for step in self._of.journal.list_steps(self._run.id)}

    def _advance(self, step: StepName) -> Callable[[float, float, Mapping[str, Any]], None]:
        def advance(done: float, total: float, detail: Mapping[str, Any]) -> None:
            self._lease.check()
            self._of.on_event(
                Event(run_id=self._run.id, step=step, kind="progress", done=done, total=total, detail=detail)
            )

        return advance

    def _say(self, step: StepName, kind: Any, detail: Mapping[str, Any] | None = None) -> None:
        self._of.on_event(Event(run_id=self._run.id, step=step, kind=kind, detail=detail or {}))


def _numbers(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, named `prefix.name`."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    return {f"{prefix}.{key}": float(value) for key, value in numbers.items()}
