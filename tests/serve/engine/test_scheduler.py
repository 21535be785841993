"""What a step holds: admission in order, one version a step, decodes first, prompts in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from serve.engine.model import Decoder
from serve.engine.pages import PAGE_TOKENS, PageBudget
from serve.engine.request import Request, Sampling
from serve.engine.scheduler import Scheduler, Step
from serve.engine.sequence import Job, Restoration, Restored, Sequence, Ticket
from serve.engine.settings import EngineSettings
from serve.engine.versions import Version

TOKEN_BYTES = 8
SHARED = 2


class FakeDecoder:
    """What scheduling needs of a decoder."""

    buffer_bytes_per_token = TOKEN_BYTES
    shared_layers = SHARED

    def lay_out(self, memory: torch.Tensor, tokens: int) -> tuple[torch.Tensor, None]:
        return memory, None


DECODER = cast(Decoder, FakeDecoder())


def version(name: str) -> Version:
    return Version(name, Path(), name, "fp32", DECODER)


BASE, OTHER = version("base"), version("other")


def scheduler(budget_tokens: int = 10_000, max_batch: int = 8) -> Scheduler:
    settings = EngineSettings(
        max_batch=max_batch, prefill_chunk=100, prefill_chunk_busy=10, prefill_chunk_background=40
    )
    return Scheduler(PageBudget(DECODER, budget_tokens * TOKEN_BYTES), settings)


def job(tokens: int, max_tokens: int = 10, n: int = 1, of: Version = BASE, priority: int = 0) -> Job:
    request = Request(of.name, tuple(range(tokens)), Sampling(n=n), priority=priority)
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


def test_lifted_tokens_are_computed_apart_and_from_their_layer() -> None:
    under_test = scheduler()
    lifted, plain = job(300), job(30)
    for each in (lifted, plain):
        under_test.add(each)
    under_test.admit()
    lifted.begin(Restoration((Restored(50, "disk", "base"),), lifted=120))
    for each in (lifted, plain):
        under_test.start(each.leader)
    seen = []
    while not lifted.leader.generated:
        step = under_test.next_step()
        assert step is not None
        seen.append((step.first_layer, [(work.sequence is lifted.leader, work.count) for work in step.works]))
        finish(step)
    assert seen[:4] == [
        (SHARED, [(True, 100)]),
        (0, [(False, 30)]),
        (SHARED, [(True, 10)]),  # beside a running reply
        (0, [(False, 1)]),
    ]
    assert sum(count for layer, works in seen for its, count in works if its and layer) == 120
    assert sum(count for layer, works in seen for its, count in works if its and not layer) == 300 - 50 - 120


def test_background_jobs_wait_for_all_others_and_stop_for_them() -> None:
    under_test = scheduler()
    back, front = job(200, priority=1), job(30)
    start(under_test, back)
    step = under_test.next_step()
    assert counts(step) == [40]
    assert step is not None
    finish(step)
    under_test.add(front)
    assert under_test.next_step() is None, "nothing in the background while another job waits"
    assert under_test.displaced() == [], "there is room for both"
    assert under_test.admit() == [front]
    assert under_test.next_step() is None, "nor while its KV is being restored"
    under_test.start(front.leader)
    for _ in range(3):
        step = under_test.next_step()
        assert step is not None
        assert [work.sequence for work in step.works] == [front.leader]
        finish(step)
    second = job(20, priority=1)
    under_test.add(second)
    assert under_test.admit() == []
    under_test.remove(front)
    assert under_test.admit() == [second]
    step = under_test.next_step()
    assert step is not None
    assert step.works[0].sequence is back.leader
    assert back.leader.computed == 40, "it goes on where it stopped"


def test_background_jobs_give_their_memory_away() -> None:
    under_test = scheduler(budget_tokens=4 * PAGE_TOKENS)
    back, small, front = job(PAGE_TOKENS, 0, priority=1), job(3, 1, priority=1), job(3 * PAGE_TOKENS, 1)
    start(under_test, back, small)
    step = under_test.next_step()
    assert step is not None
    finish(step)
    under_test.add(front)
    assert under_test.can_work
    assert under_test.displaced() == [small, back], "the last that came goes first, and no more than have to"
    for each in under_test.displaced():
        under_test.give_way(each)
    assert (back.leader.buffer, back.leader.computed) == (None, 0)
    assert under_test.admit() == [front]
    assert (under_test.waiting, under_test.background) == (0, 2)
    under_test.remove(front)
    assert under_test.admit() == [back, small], "in their order"


def test_nobody_gives_way_in_vain() -> None:
    under_test = scheduler(budget_tokens=4 * PAGE_TOKENS)
    running, back, front = job(2 * PAGE_TOKENS, 0), job(PAGE_TOKENS, 0, priority=1), job(3 * PAGE_TOKENS, 0)
    start(under_test, back)
    under_test.add(running)
    under_test.admit()
    under_test.add(front)
    assert under_test.displaced() == [], "it would not fit either way"
