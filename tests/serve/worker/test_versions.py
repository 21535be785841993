"""Adapters, models, health and metrics over HTTP."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from tests.serve.tiny import build_adapter, prompt
from tests.serve.worker.conftest import Worker
from tests.serve.worker.test_completions import chunks, complete

LONG = list(prompt(200))


def load(worker: Worker, name: str, path: Path) -> int:
    body = {"lora_name": name, "lora_path": str(path)}
    return worker.client.post("/v1/load_lora_adapter", json=body).status_code


def unload(worker: Worker, name: str) -> int:
    return worker.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def test_an_adapter_comes_and_goes(worker: Worker, tiny_adapter: Path) -> None:
    base = complete(worker)["choices"][0]["token_ids"]
    assert load(worker, "v1", tiny_adapter) == 200
    assert load(worker, "v1", tiny_adapter) == 200
    adapted = complete(worker, model="v1")
    assert adapted["model"] == "v1"
    assert adapted["choices"][0]["token_ids"] != base
    assert "+" in adapted["usage"]["kvloop"]["weights_id"]
    cards = worker.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("v1", "base")]
    assert cards[1]["root"] == str(tiny_adapter)
    assert cards[1]["weights_id"] == adapted["usage"]["kvloop"]["weights_id"]
    assert cards[0]["weights_id"] == cards[1]["weights_id"].split("+")[0]
    assert unload(worker, "v1") == 200
    assert unload(worker, "v1") == 404
    assert worker.client.post("/v1/completions", json={"model": "v1", "prompt": [1]}).status_code == 404


def test_adapters_that_cannot_be_served(worker: Worker, tmp_path: Path, tiny_model: Path, tiny_adapter: Path) -> None:
    assert load(worker, "v1", tmp_path / "nowhere") == 400
    broken = tmp_path / "broken"
    shutil.copytree(tiny_adapter, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"\x80\x04K*.")
    assert load(worker, "v1", broken) == 400
    assert load(worker, "v1", tiny_adapter) == 200
    assert load(worker, "v1", build_adapter(tmp_path / "other", tiny_model, seed=9)) == 400
    assert worker.client.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code == 400


def test_loading_does_not_stop_serving(worker: Worker, tiny_adapter: Path) -> None:
    tokens: list[int] = []
    statuses: list[int] = []

    def load_and_unload() -> None:
        for index in range(5):
            statuses.append(load(worker, f"v{index}", tiny_adapter))
            statuses.append(unload(worker, f"v{index}"))

    thread = threading.Thread(target=load_and_unload)
    thread.start()
    for chunk in chunks(worker, max_tokens=200):
        tokens += chunk["choices"][0]["token_ids"]
    thread.join()
    assert statuses == [200] * 10
    assert tokens == complete(worker, max_tokens=200)["choices"][0]["token_ids"]


def test_health_tells_when_the_engine_has_ended(worker: Worker) -> None:
    worker.engine.close()
    assert worker.client.get("/health").status_code == 503
    assert worker.client.post("/v1/completions", json={"model": "base", "prompt": [1]}).status_code == 503


def test_health_and_metrics(worker: Worker) -> None:
    health = worker.client.get("/health")
    assert health.status_code == 200
    body = health.json()
    assert body["status"] == "ok"
    assert (body["model"], body["context_length"]) == ("base", 512)
    assert worker.client.get("/health").json()["boot_id"] == body["boot_id"]
    complete(worker, prompt=LONG)
    complete(worker, prompt=LONG)
    lines = dict(
        line.rsplit(" ", 1) for line in worker.client.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    assert all(name.startswith(("kvloop_worker_", "kvloop_kv_")) for name in lines)
    assert lines['kvloop_worker_requests_total{outcome="finished"}'] == "2.0"
    assert lines["kvloop_worker_generated_tokens_total"] == "12.0"
    assert float(lines["kvloop_kv_hits_total"]) == 1
    assert float(lines['kvloop_kv_chunks{tier="ram"}']) >= 1
