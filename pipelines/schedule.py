"""When the loop retrains by itself: at times, after so much feedback, and to finish what was interrupted.

Invariants: what was set survives restarts (a SQLite job store); what is stored is times and numbers only, never a
command; a time missed while nothing ran is made up for once, at the next start; a change made by another process is
seen within `check_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_STOPPED, BaseScheduler
from apscheduler.triggers.interval import IntervalTrigger

from memory.journal import Journal
from pipelines.cron import cron_trigger
from pipelines.retrain import interrupted_run, last_mark
from pipelines.runner import CommandRunner
from pipelines.settings import ScheduleSettings

_CRON, _FEEDBACK, _WATCH = "cron", "feedback", "watch"
_active: dict[str, _Active] = {}


class FixedBySettings(ValueError):
    """The trigger is set in the settings, and can only be changed there."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One trigger. `next_run` is in UTC seconds since 1970; for feedback, of the next count."""

    id: str
    description: str
    next_run: float | None

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class _Editor(BaseScheduler):  # type: ignore[misc]
    """Reads and changes the store, and never acts on it: a missed time waits for the scheduler that does."""

    def wakeup(self) -> None:
        """There is no thread to wake."""

    def shutdown(self, wait: bool = True) -> None:
        """Closes the store."""
        super().shutdown(wait)


class _Acting(BackgroundScheduler):  # type: ignore[misc]
    """Acts on the store until it is stopped. APScheduler would take what is due once more while it shuts down."""

    def _process_jobs(self) -> Any:
        return None if self.state == STATE_STOPPED else super()._process_jobs()


@dataclass(frozen=True)
class _Active:
    journal: Journal
    runner: CommandRunner


class Schedule:
    """The stored triggers and, between `start` and `stop`, the threads that act on them."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._folder = settings.folder.absolute()
        self._scheduler: Any = None

    def set_cron(self, expression: str | None) -> None:
        """Stores the times at which to retrain; None removes them. Raises `BadCron`, `FixedBySettings`."""
        if self._settings.cron is not None and expression != self._settings.cron:
            raise FixedBySettings(f"schedule.cron is set to {self._settings.cron!r} in the settings: change it there")
        with self._editing() as scheduler:
            self._put_cron(scheduler, expression)

    def set_feedback(self, every: int | None) -> None:
        """Stores after how much new feedback to retrain; None removes it. Raises `FixedBySettings`, ValueError."""
        if every is not None and every < 1:
            raise ValueError(f"feedback must be counted in ones or more, not {every}")
        if self._settings.feedback_every is not None and every != self._settings.feedback_every:
            fixed = self._settings.feedback_every
            raise FixedBySettings(f"schedule.feedback_every is set to {fixed} in the settings: change it there")
        with self._editing() as scheduler:
            self._put_feedback(scheduler, every)

    def planned(self) -> list[Planned]:
        """The triggers that are set."""
        with self._editing() as scheduler:
            jobs = list(scheduler.get_jobs(jobstore="default"))
        return [
            Planned(
                id=job.id, description=job.name, next_run=job.next_run_time.timestamp() if job.next_run_time else None
            )
            for job in sorted(jobs, key=lambda job: str(job.id))
        ]

    def start(self, journal: Journal, command: Sequence[str]) -> None:
        """Acts on the triggers from now on by running `command`, whose output goes to retrain.log in the folder.

        The journal stays the caller's; it must stay open until `stop`.
        """
        runner = CommandRunner(command, log_file(self._settings), self._settings.check_seconds)
        _active[str(self._folder)] = _Active(journal, runner)
        self._scheduler = self._made(_Acting)
        self._scheduler.start(paused=True)
        self._apply_settings(self._scheduler)
        # Also wakes the scheduler's thread, which looks at the store then.
        self._scheduler.add_job(
            check_interrupted,
            "interval",
            seconds=self._settings.check_seconds,
            args=[str(self._folder)],
            id=_WATCH,
            jobstore="memory",
        )
        self._scheduler.resume()

    def stop(self) -> None:
        """Stops acting; a running command is interrupted and its run resumes later."""
        if self._scheduler is None:
            return
        self._scheduler.pause()
        _active[str(self._folder)].runner.stop()
        self._scheduler.shutdown(wait=True)
        self._scheduler = None
        del _active[str(self._folder)]

    @contextmanager
    def _editing(self) -> Iterator[Any]:
        """The running scheduler, or one that is opened on the store for a moment and does nothing."""
        if self._scheduler is not None:
            yield self._scheduler
            return
        scheduler = self._made(_Editor)
        scheduler.start(paused=True)
        try:
            self._apply_settings(scheduler)
            yield scheduler
        finally:
            scheduler.shutdown(wait=True)

    def _made(self, kind: type[BaseScheduler]) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        options = {"connect_args": {"timeout": 30}}
        store = SQLAlchemyJobStore(url=f"sqlite:///{self._folder / 'schedule.db'}", engine_options=options)
        return kind(
            jobstores={"default": store, "memory": MemoryJobStore()},
            executors={"default": ThreadPoolExecutor(4)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone="UTC",
        )

    def _apply_settings(self, scheduler: Any) -> None:
        if self._settings.cron is not None:
            self._put_cron(scheduler, self._settings.cron)
        if self._settings.feedback_every is not None:
            self._put_feedback(scheduler, self._settings.feedback_every)

    def _put_cron(self, scheduler: Any, expression: str | None) -> None:
        if expression is None:
            _remove(scheduler, _CRON)
            return
        trigger = cron_trigger(expression, self._settings.timezone)
        name = f"retrain at {' '.join(expression.split())} ({self._settings.timezone})"
        _put(scheduler, run_at_time, trigger, _CRON, name, [str(self._folder)])

    def _put_feedback(self, scheduler: Any, every: int | None) -> None:
        if every is None:
            _remove(scheduler, _FEEDBACK)
            return
        trigger = IntervalTrigger(seconds=self._settings.check_seconds, timezone="UTC")
        name = f"retrain after {every} new pieces of feedback, counted every {self._settings.check_seconds:g} s"
        _put(scheduler, check_feedback, trigger, _FEEDBACK, name, [str(self._folder), every])


def run_at_time(folder: str) -> None:
    """Called by the scheduler at the times of the cron expression."""
    _active[folder].runner.run("scheduled time", after_failure=True)


def check_feedback(folder: str, every: int) -> None:
    """Called by the scheduler: counts the feedback since the newest run began, and retrains when it is enough."""
    active = _active[folder]
    count = active.journal.count_feedback(after=last_mark(active.journal))
    if count >= every:
        active.runner.run(f"{count} new pieces of feedback")


def check_interrupted(folder: str) -> None:
    """Called by the scheduler: resumes a run whose process died."""
    active = _active[folder]
    run = interrupted_run(active.journal)
    if run is not None:
        active.runner.run(f"{run.id} was interrupted")


def log_file(settings: ScheduleSettings) -> Path:
    """Where the output of the scheduled commands goes."""
    return settings.folder.absolute() / "retrain.log"


def _put(scheduler: Any, call: Any, trigger: Any, identifier: str, name: str, arguments: list[Any]) -> None:
    """Stores a job; one that says the same is left alone, so that a missed time is still made up for."""
    known = scheduler.get_job(identifier, jobstore="default")
    if known is not None and known.name == name and list(known.args) == arguments:
        return
    scheduler.add_job(call, trigger, args=arguments, id=identifier, name=name, replace_existing=True)


def _remove(scheduler: Any, identifier: str) -> None:
    if scheduler.get_job(identifier, jobstore="default") is not None:
        scheduler.remove_job(identifier, jobstore="default")
