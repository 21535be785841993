"""Decides what each step computes: continuous batching with chunked prefill.

Invariants: jobs are admitted in the order they came; an admitted job has all the memory it can need; a step mixes
tokens of one version only; every running reply of that version gets its next token in every step of that version,
and prompts get what is left of the step's token budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serve.engine.pages import PageBudget
from serve.engine.sequence import Job, Sequence
from serve.engine.versions import Version


@dataclass(frozen=True)
class Work:
    """The next `count` tokens of one sequence."""

    sequence: Sequence
    count: int


@dataclass(frozen=True)
class Step:
    """What one forward computes."""

    version: Version
    works: tuple[Work, ...]


class Scheduler:
    """Queue, admission and batching. Used from the engine's thread only."""

    def __init__(self, budget: PageBudget, max_batch: int, prefill_chunk: int, prefill_chunk_busy: int) -> None:
        self._budget = budget
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._prefill_chunk_busy = prefill_chunk_busy
        self._waiting: deque[Job] = deque()
        self._admitted: list[Job] = []
        self._running: list[Sequence] = []
        self._held = 0
        self._last_version = ""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold a place in the batch."""
        return self._held

    @property
    def can_work(self) -> bool:
        """Whether `admit` or `next_step` would find something to do."""
        return bool(self._running) or self._next_fits()

    @property
    def jobs(self) -> list[Job]:
        """Every job there is, admitted or waiting."""
        return [*self._admitted, *self._waiting]

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def admit(self) -> list[Job]:
        """Reserves memory and places for waiting jobs, in order, and returns those that got them."""
        admitted = []
        while self._next_fits():
            job = self._waiting.popleft()
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
        if job in self._admitted:
            self._admitted.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def next_step(self) -> Step | None:
        """Returns the next step, the versions taking turns, or None when nothing can be computed."""
        version = self._next_version()
        if version is None:
            return None
        decoding = any(sequence.remaining == 1 for sequence in self._running)
        budget = self._prefill_chunk_busy if decoding else self._prefill_chunk
        works = []
        for sequence in self._running:
            if sequence.job.version is not version:
                continue
            if sequence.remaining == 1:
                works.append(Work(sequence, 1))
            elif budget:
                count = min(budget, sequence.remaining)
                budget -= count
                works.append(Work(sequence, count))
        return Step(version, tuple(works))

    def _next_fits(self) -> bool:
        if not self._waiting:
            return False
        job = self._waiting[0]
        count = len(job.sequences)
        reserved = count * self._budget.size(job.capacity)
        return self._held + count <= self._max_batch and self._budget.fits(reserved)

    def _next_version(self) -> Version | None:
        versions = {sequence.job.version.name: sequence.job.version for sequence in self._running}
        if not versions:
            return None
        names = list(versions)
        after = names.index(self._last_version) + 1 if self._last_version in versions else 0
        self._last_version = names[after % len(names)]
        return versions[self._last_version]
