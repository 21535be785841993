"""Background requests: prefill and storing that gives way to everybody else and loses nothing by it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.kv.cost import CostModel
from memory.kv.match import Match
from memory.kv.settings import KVSettings
from serve.engine.engine import Engine
from serve.engine.errors import InvalidRequest, QueueFull
from serve.engine.request import DoneEvent, Event, FailedEvent, Request, Sampling, Usage
from serve.engine.stepper import Stepper
from tests.serve.tiny import prompt

StartEngine = Callable[..., Engine]
SETTINGS = KVSettings(chunk_tokens=32, min_tokens=4, disk_reserve_bytes=0, upkeep_seconds=0)
STORE_ONLY = Sampling(max_tokens=0)
GREEDY = Sampling(max_tokens=5, temperature=0, ignore_eos=True)
LONG, SHORT = prompt(480), prompt(60, 7)


def everything(self: CostModel, match: Match, total: int, beside: Match | None = None) -> int:
    return match.tokens


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    monkeypatch.setattr(CostModel, "tokens_to_load", everything)

    def start_with_memory(**settings: Any) -> Engine:
        options = {"kv": SETTINGS, "prefill_chunk": 64, "prefill_chunk_background": 32} | settings
        return start_engine(kv_folder=tmp_path / "kv", **options)

    return start_with_memory


class Gate:
    """Holds the engine's thread before each step until it is let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[int]] = []
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._let_on = threading.Semaphore(0)
        self._open = False
        execute = Stepper.execute
        gate = self

        def held(self: Stepper, step: Any) -> None:
            gate.steps.append([work.sequence.job.request.priority for work in step.works])
            if not gate._open:
                gate._arrived.put(None)
                assert gate._let_on.acquire(timeout=30)
            execute(self, step)

        monkeypatch.setattr(Stepper, "execute", held)

    def wait(self) -> None:
        """Until the engine is about to compute a step."""
        self._arrived.get(timeout=30)

    def step(self) -> None:
        """Lets it compute that one."""
        self._let_on.release()

    def open(self) -> None:
        """Lets it compute everything from now on."""
        self._open = True
        self._let_on.release()


class Submitted:
    """One request and what became of it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tokens: list[int] = []
        self.ticket = engine.submit([request], self._events.put)

    def usage(self) -> Usage:
        while True:
            event = self._events.get(timeout=30)
            if isinstance(event, FailedEvent):
                raise event.error
            if isinstance(event, DoneEvent):
                return event.usage
            self.tokens.append(event.token_id)


def flushed(engine: Engine) -> Engine:
    assert engine.memory is not None
    assert engine.memory.flush(20)
    return engine


def test_nothing_is_generated_and_everything_is_stored(start: StartEngine) -> None:
    engine = start()
    done = engine.generate([Request("base", LONG, STORE_ONLY, priority=1)])[0]
    assert done.choices[0].token_ids == ()
    assert (done.usage.prompt_tokens, done.usage.computed_tokens, done.usage.generated_tokens) == (480, 480, 0)
    assert done.usage.ttft_ms is None
    turn = LONG + prompt(5, 1)
    assert flushed(engine).generate([Request("base", turn, GREEDY)])[0].usage.cached_tokens == len(LONG)


def test_a_background_prompt_stops_for_others_and_goes_on(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    gate = Gate(monkeypatch)
    back = Submitted(engine, Request("base", LONG, STORE_ONLY, priority=1))
    gate.wait()
    front = Submitted(engine, Request("base", SHORT, GREEDY))
    gate.open()
    front.usage()
    usage = back.usage()
    mine = [step[0] for step in gate.steps]
    first_front = mine.index(0)
    assert mine[first_front : first_front + 5] == [0] * 5, "nothing in between"
    assert first_front <= 1
    assert (usage.computed_tokens, usage.cached_tokens) == (len(LONG), 0)
    assert sum(mine) == len(LONG) // 32, "what it had computed was kept"


def test_a_background_prompt_gives_its_memory_away_and_finds_it_again(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = start().versions.base.decoder.kv_bytes_per_token
    engine = start(kv_buffer_bytes=max(2**20, 512 * per_token + 2**18))
    room = engine.load_now.kv_budget_bytes // per_token
    gate = Gate(monkeypatch)
    long = prompt(480, 3)
    fillers = [Submitted(engine, Request("base", long, STORE_ONLY, priority=1))]
    gate.wait()
    gate.step()
    for _ in range(3):
        gate.wait()
        gate.step()
    gate.wait()
    count = room // 512
    fronts = [Submitted(engine, Request("base", prompt(500, 10 + at), GREEDY)) for at in range(count)]
    gate.open()
    for front in fronts:
        front.usage()
    usage = fillers[0].usage()
    assert (usage.computed_tokens, usage.cached_tokens) == (len(long), 0), "its own work is not told as cached"
    background = sum(step[0] for step in gate.steps)
    assert background <= len(long) // 32 + 1, "what it had computed was restored, not computed again"
    turn = long + prompt(5, 1)
    assert flushed(engine).generate([Request("base", turn, GREEDY)])[0].usage.cached_tokens == len(long)


def test_a_background_reply_survives_giving_way(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    expected = engine.generate([Request("base", LONG[:100], sampling)])[0].choices[0].token_ids
    small = start(max_batch=1)
    gate = Gate(monkeypatch)
    back = Submitted(small, Request("base", LONG[:100], sampling, priority=1))
    for _ in range(6):
        gate.wait()
        gate.step()
    gate.wait()
    front = Submitted(small, Request("base", SHORT, GREEDY))
    gate.open()
    front.usage()
    usage = back.usage()
    mine = [step[0] for step in gate.steps]
    assert 1 in mine[mine.index(0) :], "it was interrupted"
    assert tuple(back.tokens) == expected
    assert usage.generated_tokens == 12


def test_aborting_one_that_gave_way_ends_it(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(max_batch=1)
    gate = Gate(monkeypatch)
    back = Submitted(engine, Request("base", LONG, STORE_ONLY, priority=1))
    gate.wait()
    gate.step()
    gate.wait()
    front = Submitted(engine, Request("base", SHORT, GREEDY))
    engine.abort(back.ticket)
    gate.open()
    front.usage()
    load = engine.load_now
    assert (load.background, load.waiting) == (0, 0)
    assert engine.generate([Request("base", SHORT, GREEDY)])[0].usage.cached_tokens > 0


def test_background_requests_have_a_queue_of_their_own(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(max_batch=1, queue_limit=2)
    gate = Gate(monkeypatch)
    back = [Submitted(engine, Request("base", LONG, STORE_ONLY, priority=1))]
    gate.wait()
    back += [Submitted(engine, Request("base", LONG, STORE_ONLY, priority=1)) for _ in range(2)]
    with pytest.raises(QueueFull):
        engine.submit([Request("base", LONG, STORE_ONLY, priority=1)], lambda event: None)
    front = Submitted(engine, Request("base", SHORT, GREEDY))
    assert engine.load_now.background == 2
    gate.open()
    for each in (front, *back):
        each.usage()


def test_a_background_request_has_one_reply(start: StartEngine) -> None:
    with pytest.raises(InvalidRequest, match="n is 2"):
        start().submit([Request("base", SHORT, Sampling(n=2), priority=1)], lambda event: None)


def test_scoring_in_the_background_starts_over(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_tokens=0, prompt_logprobs=0)
    engine = start(max_batch=1)
    expected = engine.generate([Request("base", LONG, sampling)])[0].prompt_logprobs
    gate = Gate(monkeypatch)
    done: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit([Request("base", LONG, sampling, priority=1)], done.put)
    gate.wait()
    gate.step()
    gate.wait()
    front = Submitted(engine, Request("base", SHORT, GREEDY))
    gate.open()
    front.usage()
    event = done.get(timeout=30)
    assert isinstance(event, DoneEvent)
    assert event.prompt_logprobs is not None
    assert expected is not None
    assert [each.token_id for each in event.prompt_logprobs] == [each.token_id for each in expected]
