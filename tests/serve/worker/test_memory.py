"""What the worker tells of its KV memory, and what requests may ask of it, over HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from memory.kv.fidelity import RUNGS
from serve.backends.base import CompletionRequest
from serve.backends.client import CompletionsClient
from serve.engine import measure
from tests.serve.tiny import prompt
from tests.serve.worker.conftest import Worker

LONG = list(prompt(300))
PROMPTS = [list(prompt(230, seed)) for seed in (1, 2)]


def flush(worker: Worker) -> None:
    assert worker.engine.memory is not None
    assert worker.engine.memory.flush(20)


async def test_a_prompt_is_stored_in_the_background_and_found_by_its_next_turn(worker: Worker) -> None:
    async with CompletionsClient(str(worker.client.base_url)) as client:
        ahead = CompletionRequest(
            model="base", prompt=LONG, max_tokens=0, priority=1, kv_owner="memory", kv_expires_at=time.time() + 600
        )
        done = await client.complete(ahead)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (300, 0, 0)
        assert [choice.token_ids for choice in done.choices] == [()]
        flush(worker)
        turn = CompletionRequest(model="base", prompt=[*LONG, 5, 6], max_tokens=2, kv_least_fidelity="exact")
        usage = (await client.complete(turn)).usage
    assert usage.cached_tokens == 300
    extras = usage.extras
    assert (extras["fidelity"], extras["lifted_tokens"], extras["remote_tokens"]) == ("exact", 0, 0)
    assert [(span["source"], span["fidelity"]) for span in extras["spans"]] == [
        ("ram", "exact"),
        ("computed", "exact"),
        ("generated", "exact"),
    ]


async def test_kv_of_another_version_is_told_as_stale(worker: Worker, tiny_adapter: Path) -> None:
    async with CompletionsClient(str(worker.client.base_url)) as client:
        await client.load_adapter("new", str(tiny_adapter))
        await client.complete(CompletionRequest(model="base", prompt=LONG, max_tokens=1))
        asked = CompletionRequest(model="new", prompt=LONG, max_tokens=1, kv_reuse_model="base")
        extras = (await client.complete(asked)).usage.extras
    assert extras["fidelity"] == "stale"
    assert extras["spans"][0]["weights_id"] == worker.engine.versions.base.weights_id
    assert extras["weights_id"] != worker.engine.versions.base.weights_id


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_params": {"kv_least_fidelity": "best"}}, "kv_transfer_params.kv_least_fidelity"),
    ({"kv_transfer_params": {"kv_owner": "x" * 300}}, "kv_transfer_params.kv_owner"),
    ({"kv_transfer_params": {"kv_expires_at": -1}}, "kv_transfer_params.kv_expires_at"),
    ({"kv_transfer_params": {"kv_expires_at": "soon"}}, "kv_transfer_params.kv_expires_at"),
    ({"kv_transfer_params": {"kv_reuse_model": ""}}, "kv_transfer_params.kv_reuse_model"),
    ({"kv_transfer_params": {"kv_owners": []}}, "kv_transfer_params.kv_owners"),
    ({"priority": "low"}, "priority"),
    ({"priority": 1, "n": 2}, "priority"),
]


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(worker: Worker, options: dict[str, Any], says: str) -> None:
    answer = worker.client.post("/v1/completions", json={"model": "base", "prompt": LONG} | options)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


async def test_divergence_of_codecs_and_versions(worker: Worker, tiny_adapter: Path) -> None:
    async with CompletionsClient(str(worker.client.base_url)) as client:
        await client.load_adapter("new", str(tiny_adapter))
        told = await client.divergence(
            "new", PROMPTS, [210, 200], versions=["base", "new"], codecs=["exact", "int4"], answer_tokens=8
        )
    assert (told["object"], told["model"]) == ("kv.divergence", "new")
    assert told["noise"]["kl_mean"] >= 0
    for found in (*told["codecs"].values(), *told["versions"].values()):
        assert found["tokens"] == 20 + 30
        assert 0 <= found["answer_agreement"] <= 1
    assert told["codecs"]["exact"]["kl_mean"] == told["versions"]["new"]["kl_mean"] == 0
    assert told["versions"]["base"]["kl_mean"] > told["codecs"]["int4"]["kl_mean"] > 0


DIVERGENCE = {"model": "base", "prompts": PROMPTS, "prefixes": [210, 200]}
BAD_DIVERGENCES: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "none"}, 404, "none"),
    ({"versions": ["none"]}, 404, "none"),
    ({"prefixes": [40]}, 400, "prefixes"),
    ({"prefixes": [40, 230]}, 400, "prefix"),
    ({"prompts": [[]], "prefixes": [1]}, 400, "prompts.0"),
    ({"prompts": [[1, 2], [1, 99999]], "prefixes": [1, 1]}, 400, "prompts.1"),
    ({"prompts": [], "prefixes": []}, 400, "prompts"),
    ({"codecs": ["best"]}, 400, "codecs.0"),
    ({"codecs": ["compact"]}, 400, "codecs"),
    ({"answer_tokens": -1}, 400, "answer_tokens"),
]


@pytest.mark.parametrize(("change", "status", "says"), BAD_DIVERGENCES)
def test_bad_divergences_are_refused_by_name(worker: Worker, change: dict[str, Any], status: int, says: str) -> None:
    answer = worker.client.post("/v1/kv/divergence", json=DIVERGENCE | change)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def test_the_report_tells_what_is_stored_and_what_it_costs(worker: Worker) -> None:
    worker.client.post("/v1/completions", json={"model": "base", "prompt": LONG, "max_tokens": 1})
    flush(worker)
    told = worker.client.get("/v1/kv/report").json()
    assert told["object"] == "kv.report"
    assert [(entry["band"], entry["codec"], entry["tokens"]) for entry in told["holdings"]] == [("all", "exact", 300)]
    assert told["records"] == []
    assert told["stats"]["store"]["disk"]["chunks"] == 2
    assert told["costs"]["prefill token"] > 0


async def test_metrics_tell_of_rungs_and_of_work_in_the_background(worker: Worker, tmp_path: Path) -> None:
    async with CompletionsClient(str(worker.client.base_url)) as client:
        await client.complete(CompletionRequest(model="base", prompt=LONG, max_tokens=0, priority=1))
        flush(worker)
        load = await client.load()
    assert (load.waiting, load.running) == (0, 0)
    text = worker.client.get("/metrics").text
    figures = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert figures["kvloop_worker_background_tokens_total"] == figures["kvloop_worker_computed_tokens_total"] == 300
    assert figures["kvloop_worker_lifted_tokens_total"] == figures["kvloop_worker_background_requests"] == 0
    assert figures['kvloop_kv_rung_tokens{fidelity="exact"}'] == 300
    assert figures['kvloop_kv_rung_bytes{fidelity="exact"}'] == figures['kvloop_kv_bytes{tier="disk"}']
    assert figures["kvloop_kv_prefill_tokens_per_second"] > 0


def test_every_rung_is_measured_and_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = worker.client.post("/v1/kv/measure", json={})
    assert refused.status_code == 500
    assert "tokenizer.json" in refused.json()["error"]["message"]
    assert worker.client.post("/v1/kv/measure", json={"model": "base"}).status_code == 400

    def tokenizer(folder: Path) -> Any:
        return lambda text: [3 + ord(letter) % 90 for letter in text[:300]]

    monkeypatch.setattr(measure, "tokenizer_of", tokenizer)
    told = worker.client.post("/v1/kv/measure", json={}).json()
    assert told["object"] == "kv.measured"
    assert [record["codec"] for record in told["records"]] == list(RUNGS)
    assert told["records"][0]["kl_mean"] == 0
    report = worker.client.get("/v1/kv/report").json()["records"]
    assert sorted(record["codec"] for record in report) == sorted(RUNGS)
    answer = worker.client.post("/v1/kv/divergence", json=DIVERGENCE | {"codecs": ["compact"]})
    assert answer.json()["codecs"]["compact"]["tokens"] == 50, "the compact rung is calibrated now"
