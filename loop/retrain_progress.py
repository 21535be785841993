"""Runs a retrain in this process and shows its steps as progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loop.config import Config
from loop.jobs import opened_journal
from pipelines.build import build_retrain
from pipelines.registry import Registry
from pipelines.stages import STEPS, Event, Outcome
from serve.pull import pull


class Bars:
    """One bar for each step of the pipeline."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<9}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {
            step: self._progress.add_task(step, start=False, total=None, note="") for step in STEPS
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Moves the bar of the event's step."""
        task = self._tasks[event.step]
        if event.kind == "started":
            self._progress.start_task(task)
        elif event.kind == "progress":
            self._progress.update(task, completed=event.done, total=event.total or None, note=_note(event.detail))
        else:
            self._progress.start_task(task)
            self._progress.update(task, completed=1, total=1, note=event.kind if event.kind == "resumed" else "")


def _note(detail: Any) -> str:
    parts = [f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in detail.items()]
    return " ".join(parts)[:48]


def retrain_with_progress(
    config: Config,
    console: Console,
    trigger: str = "by hand",
    force: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Resumes the interrupted run or starts a new one. Raises `Busy` when another process is at it."""
    model_dir = pull(config.model, config.home / "models")
    with opened_journal(config) as journal, Bars(console) as bars:

        def both(event: Event) -> None:
            bars.show(event)
            on_event(event)

        retrain = build_retrain(
            journal,
            Registry(config.registry),
            config.retrain,
            model_dir,
            config.train,
            config.evals,
            config.gate,
            both,
            reuse_max_kl=config.gateway.reuse_max_kl,
        )
        return retrain.run(trigger, force=force)
