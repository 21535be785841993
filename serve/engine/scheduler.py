"""Decides what each step computes: continuous batching with chunked prefill.

Invariants: jobs are admitted in the order they came; an admitted job has all the memory it can need; a step mixes
tokens of one version only, all of which begin at the same layer; every running reply of that version gets its next
token in every step of that version, and prompts get what is left of the step's token budget.

A background job is admitted and computed only while no other job waits or runs. Where another job needs its memory or
its place in the batch, it gives way: it loses both, and waits at the head of its queue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serve.engine.pages import PageBudget
from serve.engine.sequence import Job, Sequence
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version


@dataclass(frozen=True)
class Work:
    """The next `count` tokens of one sequence."""

    sequence: Sequence
    count: int


@dataclass(frozen=True)
class Step:
    """What one forward computes, from `first_layer` on."""

    version: Version
    works: tuple[Work, ...]
    first_layer: int = 0


Turn = tuple[str, bool]
"""Whose turn it is: a version's name, and whether its lifted tokens are computed or the others."""


class Scheduler:
    """Queues, admission and batching. Used from the engine's thread only."""

    def __init__(self, budget: PageBudget, settings: EngineSettings) -> None:
        self._budget = budget
        self._settings = settings
        self._waiting: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._admitted: list[Job] = []
        self._running: list[Sequence] = []
        self._held = 0
        self._last_turn: Turn = ("", False)

    @property
    def waiting(self) -> int:
        """Jobs that are not admitted, those in the background left out."""
        return len(self._waiting)

    @property
    def background(self) -> int:
        """Background jobs that are not admitted."""
        return len(self._background)

    @property
    def running(self) -> int:
        """Sequences that hold a place in the batch."""
        return self._held

    @property
    def can_work(self) -> bool:
        """Whether `displaced`, `admit` or `next_step` would find something to do."""
        return bool(self._runnable()) or self._next_fits() or bool(self.displaced())

    @property
    def jobs(self) -> list[Job]:
        """Every job there is, admitted or waiting."""
        return [*self._admitted, *self._waiting, *self._background]

    def add(self, job: Job) -> None:
        (self._background if job.background else self._waiting).append(job)

    def displaced(self) -> list[Job]:
        """The background jobs that have to give way for the next job to be admitted; none where that would not do."""
        if not self._waiting or self._fits(self._waiting[0]):
            return []
        need, places = self._needs(self._waiting[0])
        going: list[Job] = []
        for job in reversed(self._admitted):
            if not job.background:
                continue
            going.append(job)
            freed = sum(s.buffer.reserved for each in going for s in each.sequences if s.buffer is not None)
            held = sum(s.buffer is not None for each in going for s in each.sequences)
            if self._budget.fits(need - freed) and self._held - held + places <= self._settings.max_batch:
                return going
        return []

    def give_way(self, job: Job) -> None:
        """Takes memory and places from an admitted job; it starts over, from what memory has by then."""
        self.remove(job)
        job.rewind()
        self._background.appendleft(job)

    def admit(self) -> list[Job]:
        """Reserves memory and places for waiting jobs, in order, and returns those that got them."""
        admitted = []
        while self._next_fits():
            job = (self._waiting or self._background).popleft()
            for sequence in job.sequences:
                sequence.buffer = self._budget.take(job.capacity)
            self._held += len(job.sequences)
            self._admitted.append(job)
            admitted.append(job)
        return admitted

    def start(self, sequence: Sequence) -> None:
        """Lets an admitted sequence compute from here on."""
        self._running.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Frees the place and the reservation of one sequence."""
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.buffer is not None:
            self._budget.give_back(sequence.buffer)
            sequence.buffer = None
            self._held -= 1

    def remove(self, job: Job) -> None:
        """Forgets a job and frees whatever its sequences still hold."""
        for sequence in job.sequences:
            self.finish(sequence)
        for queue in (self._admitted, self._waiting, self._background):
            if job in queue:
                queue.remove(job)

    def next_step(self) -> Step | None:
        """Returns the next step, versions taking turns, or None when nothing can be computed."""
        runnable = self._runnable()
        if not runnable:
            return None
        turn = self._next_turn(runnable)
        chosen = [sequence for sequence in runnable if _turn_of(sequence) == turn]
        budget = self._prefill_tokens(runnable)
        works = []
        for sequence in chosen:
            if sequence.remaining == 1:
                works.append(Work(sequence, 1))
            elif budget:
                left = sequence.lift_until - sequence.computed if sequence.lifts else sequence.remaining
                count = min(budget, left)
                budget -= count
                works.append(Work(sequence, count))
        version = chosen[0].job.version
        return Step(version, tuple(works), version.decoder.shared_layers if turn[1] else 0)

    def _prefill_tokens(self, runnable: list[Sequence]) -> int:
        if any(sequence.remaining == 1 for sequence in runnable):
            return self._settings.prefill_chunk_busy
        if runnable[0].job.background:
            return min(self._settings.prefill_chunk, self._settings.prefill_chunk_background)
        return self._settings.prefill_chunk

    def _runnable(self) -> list[Sequence]:
        """The sequences that may compute: background ones only while there is no other job."""
        if self._waiting or any(not job.background for job in self._admitted):
            return [sequence for sequence in self._running if not sequence.job.background]
        return self._running

    def _needs(self, job: Job) -> tuple[int, int]:
        count = len(job.sequences)
        return count * self._budget.size(job.capacity), count

    def _fits(self, job: Job) -> bool:
        reserved, count = self._needs(job)
        return self._held + count <= self._settings.max_batch and self._budget.fits(reserved)

    def _next_fits(self) -> bool:
        if self._waiting:
            return self._fits(self._waiting[0])
        if not self._background or any(not job.background for job in self._admitted):
            return False
        return self._fits(self._background[0])

    def _next_turn(self, runnable: list[Sequence]) -> Turn:
        turns = list(dict.fromkeys(_turn_of(sequence) for sequence in runnable))
        after = turns.index(self._last_turn) + 1 if self._last_turn in turns else 0
        self._last_turn = turns[after % len(turns)]
        return self._last_turn


def _turn_of(sequence: Sequence) -> Turn:
    return sequence.job.version.name, sequence.lifts
