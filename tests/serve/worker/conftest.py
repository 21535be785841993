"""A worker on a port of its own, in this process: real HTTP, a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn

from serve.engine import load_engine
from serve.engine.engine import Engine
from serve.worker.app import create_app
from serve.worker.settings import WorkerSettings


@dataclass(frozen=True)
class Worker:
    engine: Engine
    client: httpx.Client


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path) -> Iterator[Worker]:
    settings = WorkerSettings(
        model=tiny_model,
        dtype="float32",
        kv_folder=tmp_path / "kv",
        max_batch=4,
        queue_limit=4,
        max_prompts=64,
    )
    engine = load_engine(settings)
    config = uvicorn.Config(create_app(engine, settings.max_prompts), port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield Worker(engine, client)
    server.should_exit = True
    thread.join()
    engine.close()
