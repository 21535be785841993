"""Requests through the engine: what comes back, what is refused, what an abort frees."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.engine.engine import Engine
from serve.engine.errors import EngineClosed, EngineError, InvalidRequest, QueueFull, VersionNotFound, WeightsError
from serve.engine.request import Completion, DoneEvent, Event, FailedEvent, Request, Sampling, TokenEvent
from serve.engine.scheduler import Scheduler
from serve.engine.settings import EngineSettings
from tests.serve.tiny import EOS, load_reference, prompt, reference_logits

StartEngine = Callable[..., Engine]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def one(engine: Engine, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
    return engine.generate([Request("base", token_ids, sampling)])[0]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_greedy_replies_are_the_references_argmax(start_engine: StartEngine, tiny_model: Path) -> None:
    reply = one(start_engine(), prompt(50), replace(GREEDY, logprobs=3))
    choice = reply.choices[0]
    logits = reference_logits(load_reference(tiny_model), prompt(50) + choice.token_ids)[49:-1]
    assert choice.token_ids == tuple(logits.argmax(-1).tolist())
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    expected = torch.log_softmax(logits, -1)
    for row, score in zip(expected, choice.logprobs, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        assert score.rank == 1
        assert [token for token, _ in score.top] == row.topk(3).indices.tolist()


def test_usage_says_what_was_done(start_engine: StartEngine) -> None:
    engine = start_engine()
    usage = one(engine, prompt(20), GREEDY).usage
    assert (usage.prompt_tokens, usage.computed_tokens, usage.cached_tokens, usage.generated_tokens) == (20, 20, 0, 12)
    assert [(span.start, span.end, span.source) for span in usage.spans] == [
        (0, 20, "computed"),
        (20, 32, "generated"),
    ]
    assert {span.weights_id for span in usage.spans} == {engine.versions.base.weights_id}
    assert usage.ttft_ms is not None
    assert usage.ttft_ms > 0


def test_many_requests_at_once_get_what_each_gets_alone(start_engine: StartEngine) -> None:
    engine = start_engine(max_batch=5, prefill_chunk=32, prefill_chunk_busy=8)
    requests = [
        Request("base", prompt(length, length), replace(GREEDY, max_tokens=length % 7 + 1, seed=length))
        for length in (3, 90, 17, 41, 1, 60, 8, 33)
    ]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    assert [each.choices[0].token_ids for each in together] == [each.choices[0].token_ids for each in alone]


def test_prompt_logprobs_are_the_references(start_engine: StartEngine, tiny_model: Path) -> None:
    engine = start_engine(prefill_chunk=48)
    reference = load_reference(tiny_model)
    prompts = [prompt(length, length) for length in (1, 2, 30, 130, 47, 5)]
    sampling = Sampling(max_tokens=0, prompt_logprobs=2)
    completions = engine.generate([Request("base", each, sampling) for each in prompts])
    for token_ids, completion in zip(prompts, completions, strict=True):
        expected = torch.log_softmax(reference_logits(reference, token_ids), -1)
        scores = completion.prompt_logprobs
        assert scores is not None
        assert [score.token_id for score in scores] == list(token_ids[1:])
        for row, score in zip(expected, scores, strict=False):
            assert score.logprob == pytest.approx(float(row[score.token_id]), abs=2e-4)
            assert score.rank == int((row > row[score.token_id]).sum()) + 1
            assert [token for token, _ in score.top] == row.topk(2).indices.tolist()
        assert completion.choices[0].token_ids == ()
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage.ttft_ms is None


def test_seeds_reproduce_whatever_runs_beside(start_engine: StartEngine) -> None:
    engine = start_engine()
    sampling = Sampling(max_tokens=16, temperature=1.2, top_p=0.95, seed=11, n=3, ignore_eos=True)
    alone = one(engine, prompt(30), sampling)
    crowd = [Request("base", prompt(9, seed), replace(sampling, seed=seed, n=1)) for seed in range(4)]
    crowded = engine.generate([*crowd, Request("base", prompt(30), sampling)])[-1]
    replies = [choice.token_ids for choice in alone.choices]
    assert replies == [choice.token_ids for choice in crowded.choices]
    assert len(set(replies)) == 3
    assert one(engine, prompt(30), replace(sampling, seed=13, n=1)).choices[0].token_ids == replies[2]
    assert alone.usage.generated_tokens == 48
    assert alone.usage.computed_tokens == 30, "the prompt of n choices is computed once"


def test_choices_of_a_greedy_request_agree(start_engine: StartEngine) -> None:
    engine = start_engine()
    reply = one(engine, prompt(25), replace(GREEDY, n=4))
    assert {choice.token_ids for choice in reply.choices} == {one(engine, prompt(25), GREEDY).choices[0].token_ids}


def test_what_ends_a_reply(start_engine: StartEngine) -> None:
    engine = start_engine()
    free = one(engine, prompt(50), GREEDY).choices[0].token_ids
    stop = next(token for token in free[2:] if token not in free[:2])
    at = free.index(stop)
    stopped = one(engine, prompt(50), replace(GREEDY, stop_token_ids=(stop,))).choices[0]
    assert stopped.token_ids == free[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    longer = one(engine, prompt(50), replace(GREEDY, stop_token_ids=(stop,), min_tokens=at + 2)).choices[0]
    assert longer.token_ids[:at] == free[:at]
    assert stop not in longer.token_ids[: at + 1]


def test_the_models_own_end_ids(start_engine: StartEngine) -> None:
    engine = start_engine()
    wild = Sampling(max_tokens=400, temperature=2.0, seed=3)
    ended = one(engine, prompt(5), wild).choices[0]
    assert ended.token_ids[-1] == EOS
    assert EOS not in ended.token_ids[:-1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    length = len(ended.token_ids)
    ignoring = one(engine, prompt(5), replace(wild, ignore_eos=True, max_tokens=length + 3)).choices[0]
    assert ignoring.token_ids[:length] == ended.token_ids
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (length + 3, "length")


def test_max_tokens_left_out_fills_the_context(start_engine: StartEngine) -> None:
    engine = start_engine(context_length=40)
    choice = one(engine, prompt(30), Sampling(temperature=0, ignore_eos=True)).choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (10, "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("base", ()), "empty"),
        (Request("base", (3, 97)), "outside 0 .. 96"),
        (Request("base", (-1,)), "outside"),
        (Request("base", (3,) * 60, Sampling(max_tokens=5)), "context holds 64"),
        (Request("base", (3,) * 64), "context holds 64"),
        (Request("base", (3,), Sampling(stop_token_ids=(500,))), "stop_token_ids"),
        (Request("base", (3,), Sampling(n=33, max_tokens=1)), "n is 33"),
        (Request("base", (3,), Sampling(top_p=2.0)), "top_p"),
    ],
)
def test_requests_that_can_never_be_served(start_engine: StartEngine, request_: Request, message: str) -> None:
    engine = start_engine(context_length=64)
    with pytest.raises(InvalidRequest, match=message):
        engine.generate([Request("base", (3, 4), GREEDY), request_])
    assert engine.load_now.waiting == engine.load_now.running == 0


def test_more_memory_than_there_is_can_never_be_served(start_engine: StartEngine) -> None:
    engine = start_engine(kv_buffer_bytes=2**20)
    with pytest.raises(InvalidRequest, match="more KV"):
        one(engine, prompt(20), Sampling(n=20, max_tokens=400))


def test_unknown_versions_are_refused_and_nothing_stays_counted(start_engine: StartEngine, tiny_adapter: Path) -> None:
    engine = start_engine()
    engine.load_adapter("a", tiny_adapter)
    with pytest.raises(VersionNotFound, match="'b'"):
        engine.generate([Request("a", prompt(5)), Request("b", prompt(5))])
    assert engine.unload_adapter("a") == 0


def test_a_full_queue_refuses(start_engine: StartEngine) -> None:
    engine = start_engine(max_batch=1, queue_limit=2)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    long = Request("base", prompt(5), replace(GREEDY, max_tokens=400))
    tickets = [engine.submit([long], events.put)]
    wait_for(lambda: engine.load_now.running == 1)
    tickets += [engine.submit([long], events.put) for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        engine.submit([long], events.put)
    assert caught.value.retry_after >= 1
    for ticket in tickets:
        engine.abort(ticket)
    wait_for(lambda: engine.load_now.waiting == engine.load_now.running == 0)
    assert one(engine, prompt(5), GREEDY).choices[0].finish_reason == "length"


def test_an_abort_frees_place_and_memory(start_engine: StartEngine) -> None:
    engine = start_engine(max_batch=1)
    seen: list[Event] = []
    started = threading.Event()

    def listen(event: Event) -> None:
        seen.append(event)
        started.set()

    ticket = engine.submit([Request("base", prompt(5), replace(GREEDY, max_tokens=500))], listen)
    assert started.wait(20)
    assert engine.load_now.kv_reserved_bytes > 0
    engine.abort(ticket)
    engine.abort(ticket)
    wait_for(lambda: engine.load_now.running == 0)
    assert engine.load_now.kv_reserved_bytes == 0
    heard = len(seen)
    assert heard < 500
    assert not any(isinstance(event, DoneEvent | FailedEvent) for event in seen)
    assert one(engine, prompt(6), GREEDY).usage.generated_tokens == 12
    assert len(seen) == heard


def test_a_long_prompt_does_not_stall_running_replies(start_engine: StartEngine) -> None:
    engine = start_engine(prefill_chunk_busy=16)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ticket = engine.submit([Request("base", prompt(5), replace(GREEDY, max_tokens=400))], events.put)
    assert isinstance(events.get(timeout=20), TokenEvent)
    second = engine.submit([Request("base", prompt(400, 1), replace(GREEDY, max_tokens=1))], events.put)
    order = []
    while not order or order[-1] != "long":
        event = events.get(timeout=20)
        order.append("long" if isinstance(event, TokenEvent) and event.finish_reason else "short")
    assert len(order) > 400 / 16 - 5, "a token of the short reply comes with each piece of the long prompt"
    engine.abort(ticket)
    engine.abort(second)


def test_a_step_that_fails_fails_its_requests_only(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine()
    decoder = type(engine.versions.base.decoder)
    forward = decoder.forward

    def broken(self: object, runs: object, first_layer: int) -> torch.Tensor:
        raise ValueError("no luck")

    monkeypatch.setattr(decoder, "forward", broken)
    with pytest.raises(EngineError, match="no luck"):
        one(engine, prompt(5), GREEDY)
    monkeypatch.setattr(decoder, "forward", forward)
    assert one(engine, prompt(5), GREEDY).usage.generated_tokens == 12
    assert engine.load_now.running == 0


def test_a_listener_that_fails_is_given_up(start_engine: StartEngine) -> None:
    engine = start_engine()

    def broken(event: Event) -> None:
        raise ValueError("no ears")

    engine.submit([Request("base", prompt(5), replace(GREEDY, max_tokens=500))], broken)
    wait_for(lambda: engine.load_now.generated_tokens > 0 and engine.load_now.running == 0)
    assert engine.load_now.kv_reserved_bytes == 0
    assert one(engine, prompt(5), GREEDY).usage.generated_tokens == 12


def test_an_engine_whose_thread_fails_says_so(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine()
    assert engine.alive

    def broken(self: Scheduler) -> None:
        raise ValueError("no plan")

    monkeypatch.setattr(Scheduler, "next_step", broken)
    with pytest.raises(EngineClosed):
        one(engine, prompt(5), GREEDY)
    assert not engine.alive
    with pytest.raises(EngineClosed):
        one(engine, prompt(5), GREEDY)


def test_closing_fails_what_is_in_flight(start_engine: StartEngine) -> None:
    engine = start_engine(max_batch=1)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for _ in range(2):
        engine.submit([Request("base", prompt(5), replace(GREEDY, max_tokens=500))], events.put)
    engine.close()
    failed = []
    while not events.empty():
        event = events.get()
        failed += [event] if isinstance(event, FailedEvent) else []
    assert [type(event.error) for event in failed] == [EngineClosed, EngineClosed]
    with pytest.raises(EngineClosed):
        one(engine, prompt(5), GREEDY)


def test_an_engine_needs_a_model() -> None:
    with pytest.raises(WeightsError, match="model"):
        Engine.load(EngineSettings())


def test_nothing_waits_once_everything_is_answered(start_engine: StartEngine) -> None:
    engine = start_engine()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    sampling = Sampling(max_tokens=0, prompt_logprobs=0)  # it begins and ends within one step
    engine.submit([Request("base", prompt(8, seed), sampling) for seed in range(3)], events.put)
    for _ in range(3):
        assert isinstance(events.get(timeout=20), DoneEvent)
    wait_for(lambda: engine.load_now.waiting == 0)
