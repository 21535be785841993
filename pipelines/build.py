"""A retrain made of the real trainer and the real evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from evals.gate import decide
from evals.report import summary, write
from evals.results import EvalResult
from evals.run import EvalJob, EvalModel, evaluate
from evals.run import Progress as EvalProgress
from evals.settings import EvalSettings, GateSettings
from memory.journal import Journal
from pipelines.retrain import Retrain
from pipelines.settings import RetrainSettings
from pipelines.stages import Adapter, Advance, Event, Judged, Trained, VersionRegistry
from train.events import Progress as TrainProgress
from train.launch import LOG, TrainFailed, train
from train.settings import RecipeName, TrainJob, TrainSettings


def build_retrain(
    journal: Journal,
    registry: VersionRegistry,
    settings: RetrainSettings,
    model_dir: Path,
    train_settings: TrainSettings,
    eval_settings: EvalSettings,
    gate_settings: GateSettings,
    on_event: Callable[[Event], None] = lambda event: None,
    worker_url: str | None = None,
    reuse_max_kl: float = 0.0,
) -> Retrain:
    """The pipeline on the base model in `model_dir`.

    What runs share (replay rows, scores kept from before) lies in `shared` in the runs' folder. The evaluation starts
    a worker of its own unless `worker_url` names one. `reuse_max_kl` is the bar for stale KV that reports name.
    """
    shared = settings.folder.absolute() / "shared"
    trainer = Trainer(model_dir, settings.recipe, train_settings, shared / "replay")
    judge = Judge(model_dir, eval_settings, gate_settings, shared / "scores", worker_url, reuse_max_kl)
    return Retrain(journal, registry, settings, trainer, judge, on_event)


class Trainer:
    """The train stage: a subprocess that trains a LoRA."""

    def __init__(self, model_dir: Path, recipe: RecipeName, settings: TrainSettings, replay_dir: Path) -> None:
        self._model_dir = model_dir
        self._recipe = recipe
        self._settings = settings
        self._replay_dir = replay_dir

    def __call__(
        self, *, dataset: Path, out_dir: Path, name: str, parents: tuple[str, ...], advance: Advance
    ) -> Trained:
        """Trains, or returns what the same job left. Raises `TrainFailed` with the reason and where the log is."""
        job = TrainJob(
            name=name,
            model_dir=self._model_dir.absolute(),
            dataset=dataset,
            replay_dir=self._replay_dir,
            recipe=self._recipe,
            parents=parents,
            settings=self._settings,
        )
        # A resumed run with other settings is another job: it must not find the adapter of the first.
        folder = out_dir.with_name(f"{out_dir.name}-{blake3(job.model_dump_json().encode()).hexdigest()[:8]}")

        def on_progress(progress: TrainProgress) -> None:
            advance(progress.step, progress.steps, {"loss": progress.loss, "kl": progress.kl})

        try:
            result = train(job, folder, on_progress)
        except TrainFailed as failed:
            log = folder.with_name(f"{folder.name}.partial") / LOG
            raise TrainFailed(f"{failed.reason}; the trainer's log is {log}", failed.log_tail) from failed
        return Trained(adapter_dir=result.adapter_dir, metrics=result.metrics)


class Judge:
    """The evaluate stage: base, champion and candidate through a worker, the gate, the report."""

    def __init__(
        self,
        model_dir: Path,
        settings: EvalSettings,
        gate: GateSettings,
        kept_folder: Path,
        worker_url: str | None = None,
        reuse_max_kl: float = 0.0,
    ) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._gate = gate
        self._kept_folder = kept_folder
        self._worker_url = worker_url
        self._reuse_max_kl = reuse_max_kl

    def __call__(
        self, *, heldout: Path, candidate: Adapter, champion: Adapter | None, out_dir: Path, advance: Advance
    ) -> Judged:
        """Scores and decides. Raises `EvalError` and the worker client's errors."""
        job = EvalJob(
            model_dir=self._model_dir.absolute(),
            heldout=heldout,
            candidate=EvalModel(name=candidate.name, adapter=candidate.path),
            champion=EvalModel(name=champion.name, adapter=champion.path) if champion else None,
            worker_url=self._worker_url,
            kept_folder=self._kept_folder,
            reuse_max_kl=self._reuse_max_kl,
            settings=self._settings,
        )

        def on_progress(progress: EvalProgress) -> None:
            advance(progress.done, progress.total, {"model": progress.model, "suite": progress.suite})

        result = evaluate(job, on_progress)
        decision = decide(result.target(), result.guards(), self._gate)
        write(result, decision, out_dir)
        return Judged(
            verdict=decision.verdict,
            reasons=tuple(decision.reasons),
            metrics=_metrics(result),
            report_dir=out_dir,
            stale_kl=result.stale_kv.kl if result.stale_kv else None,
        )


def _metrics(result: EvalResult) -> dict[str, float]:
    """Each model's means as `role.metric`, where roles are base, champion and candidate; and what stale KV costs."""
    stale = result.stale_kv
    of_memory = {f"stale_kv.{group.kind}.kl": group.kl for group in stale.groups} if stale else {}
    roles = {result.champion: "champion", result.candidate: "candidate", result.base: "base"}
    return of_memory | {
        f"{roles[model]}.{metric.replace(' ', '_')}": value
        for model, values in summary(result).items()
        for metric, value in values.items()
    }
