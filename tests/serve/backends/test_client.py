"""The worker client: what it sends, what it makes of answers, and which error a failure becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from serve.backends.base import (
    CompletionRequest,
    Delta,
    ModelNotFound,
    NotSupported,
    Overloaded,
    Usage,
    WorkerLoad,
    WorkerRejected,
    WorkerUnavailable,
)
from serve.backends.client import CompletionsClient
from serve.backends.router import Router
from tests.serve.gateway.fake_worker import BASE_NAME, BASE_WEIGHTS, FakeWorker, logprob, make_adapter

REQUEST = CompletionRequest(model=BASE_NAME, prompt=[1, 2, 3], max_tokens=8, logprobs=1)


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    fake = FakeWorker(lambda body: [10, 11, 12, 2])
    fake.start()
    yield fake
    fake.stop()


async def test_a_stream_is_tokens_then_usage(worker: FakeWorker) -> None:
    async with CompletionsClient(worker.url) as client:
        events = [event async for event in client.stream(REQUEST)]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [delta.token_ids for delta in deltas] == [(10,), (11,), (12,), (2,)]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert deltas[0].logprobs[0].logprob == logprob(BASE_WEIGHTS, 10)
    assert deltas[0].logprobs[0].top == ((10, logprob(BASE_WEIGHTS, 10)),)
    usage = events[-1]
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 0)
    assert usage.extras["weights_id"] == BASE_WEIGHTS


async def test_leaving_a_stream_aborts_it(worker: FakeWorker) -> None:
    worker.script.token_seconds = 0.02
    async with CompletionsClient(worker.url) as client:
        async with aclosing(client.stream(REQUEST)) as events:
            await anext(events)
        for _ in range(100):
            if worker.seen.aborted:
                break
            await client.health()
    assert worker.seen.aborted == 1


async def test_scores_of_prompts(worker: FakeWorker, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "v1", "one")
    async with CompletionsClient(worker.url) as client:
        await client.load_adapter("v1", adapter["path"])
        prompts = [list(probe["token_ids"]) for probe in adapter["fingerprint"]["probes"]]
        scores = await client.prompt_logprobs("v1", prompts)
        assert scores == [probe["adapter_logprobs"] for probe in adapter["fingerprint"]["probes"]]
        models = await client.models()
        assert [(model.id, model.parent, model.weights_id) for model in models] == [
            (BASE_NAME, None, BASE_WEIGHTS), ("v1", BASE_NAME, adapter["weights_id"]),
        ]  # fmt: skip
        await client.unload_adapter("v1")
        with pytest.raises(ModelNotFound):
            await client.prompt_logprobs("v1", prompts)
        with pytest.raises(ModelNotFound):
            await client.unload_adapter("v1")
        with pytest.raises(WorkerRejected, match="does not match"):
            await client.load_adapter("v2", str(tmp_path))
        health = await client.health()
        assert (health.boot_id, health.context_length) == ("1", 8192)


async def test_failures_are_typed(worker: FakeWorker) -> None:
    async with CompletionsClient(worker.url) as client:
        worker.script.reject = (429, "full", {"Retry-After": "3"})
        with pytest.raises(Overloaded) as full:
            await anext(client.stream(REQUEST))
        assert full.value.retry_after == 3
        worker.script.reject = (400, "bad field 'x'", {})
        with pytest.raises(WorkerRejected, match="bad field") as bad:
            await anext(client.stream(REQUEST))
        assert bad.value.status == 400
        worker.script.reject = (503, "closing", {})
        with pytest.raises(WorkerUnavailable, match="closing"):
            await anext(client.stream(REQUEST))
        worker.script.reject = None
        worker.script.die_after = 2
        with pytest.raises(WorkerUnavailable):
            _ = [event async for event in client.stream(REQUEST)]
        with pytest.raises(ModelNotFound):
            await anext(client.stream(CompletionRequest(model="other", prompt=[1])))
        worker.stop()
        for call in (client.health(), client.models(), client.load_adapter("a", "b"), anext(client.stream(REQUEST))):
            with pytest.raises(WorkerUnavailable):
                await call


async def test_the_router_waits_then_gives_up(worker: FakeWorker) -> None:
    router = Router([CompletionsClient(worker.url)], wait_seconds=0.1, poll_seconds=0.02)
    chosen = await router.choose("s")
    assert chosen.up
    worker.stop()
    await router.probe()
    with pytest.raises(WorkerUnavailable):
        await router.choose("s")
    worker.start()
    assert await router.choose("s") is chosen
    await router.close()


def test_defaults_are_left_out_of_the_body() -> None:
    body = CompletionRequest(model="m", prompt=(1, 2)).body(stream=False)
    assert body == {
        "model": "m", "prompt": [1, 2], "temperature": 1.0, "top_p": 1.0, "stream": False, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "kv_transfer_params": {"kv_save": True},
    }  # fmt: skip


def test_what_kv_memory_may_do_is_in_the_body() -> None:
    request = CompletionRequest(
        model="m", prompt=[1], max_tokens=0, priority=1, kv_owner="o", kv_expires_at=9.5, kv_least_fidelity="exact",
        kv_reuse_model="v1",
    )  # fmt: skip
    body = request.body(stream=False)
    assert (body["max_tokens"], body["priority"]) == (0, 1)
    assert body["kv_transfer_params"] == {
        "kv_save": True, "kv_owner": "o", "kv_expires_at": 9.5, "kv_least_fidelity": "exact", "kv_reuse_model": "v1",
    }  # fmt: skip


async def test_a_prompt_for_its_kv_alone(worker: FakeWorker) -> None:
    async with CompletionsClient(worker.url) as client:
        done = await client.complete(CompletionRequest(model=BASE_NAME, prompt=[1, 2, 3], max_tokens=0))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.choices[0].token_ids) == (3, 0, ())


async def test_owners_are_forgotten(worker: FakeWorker) -> None:
    async with CompletionsClient(worker.url) as client:
        request = CompletionRequest(model=BASE_NAME, prompt=[1, 2], max_tokens=0, kv_owner="o", cache_salt="s")
        await client.complete(request)
        assert (await client.forget(["o", "p"], "s"))["ram"] == 1
        assert (await client.complete(request)).usage.cached_tokens == 0
        worker.script.forget_status = 404
        with pytest.raises(NotSupported):
            await client.forget(["o"], "s")


async def test_load_is_read_from_metrics_of_both_kinds(worker: FakeWorker) -> None:
    worker.script.running = 2
    async with CompletionsClient(worker.url) as client:
        assert await client.load() == WorkerLoad(0, 2)
        worker.script.metrics = 'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:num_requests_running{engine="0"} 3.0\n'
        assert await client.load() == WorkerLoad(1, 3)
        worker.script.metrics = "something_else 1.0\n"
        with pytest.raises(NotSupported):
            await client.load()
        worker.stop()
        with pytest.raises(WorkerUnavailable):
            await client.load()


async def test_the_router_tells_when_there_is_time(worker: FakeWorker) -> None:
    other = FakeWorker(lambda body: [2])
    other.start()
    router = Router([CompletionsClient(fake.url) for fake in (worker, other)], wait_seconds=0.1, poll_seconds=0.02)
    assert await router.idle(0)
    other.script.running = 2
    assert not await router.idle(0)
    assert not await router.idle(1)
    assert await router.idle(2)
    other.script.metrics = "kvloop_worker_waiting_requests 1\nkvloop_worker_running_sequences 0\n"
    assert not await router.idle(2), "somebody waits"
    other.script.metrics = "nothing\n"
    assert await router.idle(0), "one that tells nothing holds nobody up"
    other.stop()
    assert await router.idle(0)
    await router.close()
