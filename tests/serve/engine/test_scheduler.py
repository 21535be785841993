"""What a step holds: admission in order, one version a step, decodes first, prompts in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from serve.engine.model import Decoder
from serve.engine.pages import PAGE_TOKENS, PageBudget
from serve.engine.request import Request, Sampling
from serve.engine.scheduler import Scheduler, Step
from serve.engine.sequence import Job, Sequence, Ticket
from serve.engine.versions import Version

TOKEN_BYTES = 8


def version(name: str) -> Version:
    return Version(name, Path(), name, "fp32", cast(Decoder, None))


BASE, OTHER = version("base"), version("other")


def scheduler(budget_tokens: int = 10_000, max_batch: int = 8) -> Scheduler:
    budget = PageBudget(lambda tokens: torch.empty(tokens), TOKEN_BYTES, budget_tokens * TOKEN_BYTES)
    return Scheduler(budget, max_batch, prefill_chunk=100, prefill_chunk_busy=10)


def job(tokens: int, max_tokens: int = 10, n: int = 1, of: Version = BASE) -> Job:
    request = Request(of.name, tuple(range(tokens)), Sampling(n=n))
    made = Job(request, of, max_tokens, 0, lambda event: None, Ticket())
    made.sequences += [Sequence(made, choice, list(request.prompt), torch.Generator()) for choice in range(n)]
    return made


def start(under_test: Scheduler, *jobs: Job) -> None:
    for each in jobs:
        under_test.add(each)
    for each in under_test.admit():
        under_test.start(each.leader)


def finish(step: Step) -> None:
    """What computing a step does to its sequences."""
    for work in step.works:
        work.sequence.computed += work.count
        if not work.sequence.remaining:
            work.sequence.tokens.append(0)


def counts(step: Step | None) -> list[int]:
    assert step is not None
    return [work.count for work in step.works]


def test_prompts_are_cut_and_packed_into_the_step() -> None:
    under_test = scheduler()
    start(under_test, job(30), job(50), job(90))
    step = under_test.next_step()
    assert counts(step) == [30, 50, 20]


def test_beside_running_replies_prompts_go_in_small_pieces() -> None:
    under_test = scheduler()
    start(under_test, job(30))
    step = under_test.next_step()
    assert step is not None
    finish(step)
    start(under_test, job(95), job(40))
    for _ in range(3):
        step = under_test.next_step()
        assert counts(step) == [1, 10]
        assert step is not None
        finish(step)


def test_versions_take_turns_and_never_mix() -> None:
    under_test = scheduler()
    start(under_test, job(5), job(5, of=OTHER), job(5), job(5, of=OTHER))
    names = []
    for _ in range(6):
        step = under_test.next_step()
        assert step is not None
        assert {work.sequence.job.version for work in step.works} == {step.version}
        names.append(step.version.name)
        finish(step)
    assert names == ["base", "other"] * 3


def test_admission_is_in_order_and_within_the_budget() -> None:
    under_test = scheduler(budget_tokens=4 * PAGE_TOKENS)
    big, bigger, small = job(2 * PAGE_TOKENS, 1), job(3 * PAGE_TOKENS, 1), job(3, 1)
    for each in (big, bigger, small):
        under_test.add(each)
    assert under_test.admit() == [big], "a small job does not overtake the one that waits for memory"
    assert (under_test.running, under_test.waiting) == (1, 2)
    assert not under_test.can_work
    under_test.remove(big)
    assert under_test.can_work
    assert under_test.admit() == [bigger]
    under_test.remove(bigger)
    assert under_test.admit() == [small]


def test_all_choices_need_a_place() -> None:
    under_test = scheduler(max_batch=4)
    many, single = job(5, n=3), job(5, n=2)
    under_test.add(many)
    under_test.add(single)
    assert under_test.admit() == [many]
    assert under_test.running == 3
    under_test.finish(many.sequences[1])
    assert under_test.admit() == [single]
    under_test.remove(many)
    under_test.remove(single)
    assert under_test.running == 0


def test_nothing_to_do() -> None:
    under_test: Any = scheduler()
    assert under_test.next_step() is None
    assert under_test.admit() == []
    assert not under_test.can_work
