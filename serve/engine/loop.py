"""The engine's thread: takes in jobs, lets the scheduler admit them, computes steps, ends jobs.

Only this thread touches scheduler, sequences and buffers. Other threads leave jobs, aborts and restored KV in an
inbox under one lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from serve.engine.errors import EngineClosed, EngineError, QueueFull
from serve.engine.kv_memory import KVMemory
from serve.engine.pages import Buffer, PageBudget
from serve.engine.request import FailedEvent
from serve.engine.scheduler import Scheduler, Step
from serve.engine.sequence import NOTHING, Job, Restoration, Ticket
from serve.engine.settings import EngineSettings
from serve.engine.stepper import Stepper
from serve.engine.versions import Versions

log = logging.getLogger(__name__)


@dataclass
class _Inbox:
    jobs: list[Job] = field(default_factory=list)
    restored: list[tuple[Job, Buffer, Restoration]] = field(default_factory=list)
    aborted: bool = False
    closing: bool = False

    def has_news(self) -> bool:
        return bool(self.jobs or self.restored or self.aborted or self.closing)


def use_threads(settings: EngineSettings) -> None:
    """Sets the calling thread's number of compute threads."""
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)


class EngineLoop:
    """Runs jobs to their end. `put`, `abort` and `close` are thread-safe."""

    def __init__(
        self, settings: EngineSettings, budget: PageBudget, versions: Versions, memory: KVMemory | None
    ) -> None:
        self._settings = settings
        self._versions = versions
        self._memory = memory
        self.scheduler = Scheduler(budget, settings)
        self.stepper = Stepper(self.scheduler, memory, self._end)
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._waiting = 0
        self._background = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet, those in the background left out."""
        return self._waiting

    @property
    def background(self) -> int:
        """Background requests that are not admitted yet."""
        return self._background

    @property
    def alive(self) -> bool:
        """Whether requests are still taken."""
        return self._thread.is_alive() and not self._inbox.closing

    def put(self, jobs: Many[Job]) -> None:
        """Queues `jobs` together. Raises `QueueFull` or `EngineClosed`; then none was queued."""
        with self._changed:
            if self._inbox.closing:
                raise EngineClosed("the engine is closed")
            for count in {self._background if job.background else self._waiting for job in jobs}:
                if count >= self._settings.queue_limit:
                    raise QueueFull(count, retry_after=max(1.0, count / self._settings.max_batch))
            background = sum(job.background for job in jobs)
            self._background += background
            self._waiting += len(jobs) - background
            self._inbox.jobs += jobs
            self._changed.notify()

    def abort(self, ticket: Ticket) -> None:
        """Ends what is left of a submission before the next step."""
        with self._changed:
            ticket.aborted = True
            self._inbox.aborted = True
            self._changed.notify()

    def close(self) -> None:
        """Fails what is still in flight, ends the thread and waits for it."""
        with self._changed:
            self._inbox.closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        use_threads(self._settings)
        try:
            with torch.inference_mode():
                self._work()
        except Exception:  # nobody else would notice: from here on every request is refused
            log.exception("the engine's thread failed")
        with self._changed:
            self._inbox.closing = True
            left = [*self.scheduler.jobs, *self._inbox.jobs]
            self._inbox.jobs = []
        for job in left:
            self._fail(job, EngineClosed("the engine was closed before this request ended"))

    def _work(self) -> None:
        while self._take_in():
            for job in self.scheduler.displaced():
                self._give_way(job)
            for job in self._admit():
                self._restore(job)
            step = self.scheduler.next_step()
            if step is not None:
                self._execute(step)

    def _take_in(self) -> bool:
        """Waits until there is something to do and takes in what other threads left. False: close."""
        with self._changed:
            while not (self._inbox.has_news() or self.scheduler.can_work):
                self._count()  # what began and ended within one step is not waiting any more
                self._changed.wait()
            news = self._inbox
            self._inbox = _Inbox(closing=news.closing)
            for job in news.jobs:
                self.scheduler.add(job)
        for job, buffer, restored in news.restored:
            if job.leader.buffer is buffer:  # else it had to give way meanwhile, and asks again later
                self._start(job, restored)
        if news.aborted or any(job.ticket.failed for job in self.scheduler.jobs):
            for job in self.scheduler.jobs:
                if job.ticket.aborted:
                    self._give_up(job)
        return not news.closing

    def _admit(self) -> list[Job]:
        """Admits what fits; whoever sees it running finds the queue shorter by it."""
        with self._changed:
            admitted = self.scheduler.admit()
            self._count()
        return admitted

    def _count(self) -> None:
        background = sum(job.background for job in self._inbox.jobs)
        self._background = self.scheduler.background + background
        self._waiting = self.scheduler.waiting + len(self._inbox.jobs) - background

    def _restore(self, job: Job) -> None:
        """Lets memory fill the job's buffer first, where there is a memory and the job may use it."""
        if self._memory is None or not self._memory.restore(job, self._leave_restored):
            self._start(job, NOTHING)

    def _leave_restored(self, job: Job, buffer: Buffer, restored: Restoration) -> None:
        with self._changed:
            self._inbox.restored.append((job, buffer, restored))
            self._changed.notify()

    def _start(self, job: Job, restored: Restoration) -> None:
        if job.ended:
            return
        job.begin(restored)
        self.scheduler.start(job.leader)

    def _give_way(self, job: Job) -> None:
        """Takes a background job's buffers for others; what it computed is remembered, and restored when it goes on."""
        if self._memory is not None:
            for sequence in job.sequences:
                self._memory.save(sequence)
        self.scheduler.give_way(job)

    def _execute(self, step: Step) -> None:
        try:
            self.stepper.execute(step)
        except Exception as error:  # this step's requests fail; the others go on
            log.exception("a step failed")
            for job in {work.sequence.job for work in step.works}:
                if not job.ended:
                    self._fail(job, EngineError(f"computing the reply failed: {error}"))

    def _end(self, job: Job) -> None:
        job.ended = True
        self.scheduler.remove(job)
        self._versions.release(job.version)

    def _give_up(self, job: Job) -> None:
        """Ends an aborted job; what it computed is remembered, so that a retry does not pay again."""
        if self._memory is not None:
            for sequence in job.sequences:
                self._memory.save(sequence)
        self._end(job)

    def _fail(self, job: Job, error: EngineError) -> None:
        self._end(job)
        job.emit(FailedEvent(job.place, error))
