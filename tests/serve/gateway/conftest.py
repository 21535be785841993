"""A gateway on a real port, its fake worker, and the official client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from memory.journal.journal import Journal
from serve.gateway.app import create_app
from serve.gateway.settings import GatewaySettings
from serve.gateway.text import TextCodec
from tests.ports import free_port
from tests.serve.gateway.fake_worker import END, FakeWorker

ADMIN = "admin-token-of-the-tests"


class RunningGateway:
    """A gateway in a thread; `restart` keeps its journal."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self) -> None:
        config = uvicorn.Config(
            create_app(self.settings), host="127.0.0.1", port=self.settings.port, log_config=None,
            timeout_graceful_shutdown=self.settings.shutdown_seconds,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._server = self._thread = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def delete(self, path: str, **options: Any) -> httpx.Response:
        return httpx.delete(self.url + path, timeout=30, **options)

    def admin(self, path: str, body: Any) -> httpx.Response:
        return self.post(path, body, headers={"Authorization": f"Bearer {ADMIN}"})

    def journal(self) -> Journal:
        return Journal.open(self.settings.journal.url, self.settings.journal)

    def metric(self, line: str) -> float:
        """The value of the metric line that begins with `line`; 0 when there is none."""
        for entry in self.get("/metrics").text.splitlines():
            if entry.startswith(line + " "):
                return float(entry.rsplit(" ", 1)[1])
        return 0.0


@pytest.fixture(scope="session")
def codec(model_dir: Path) -> TextCodec:
    return TextCodec(model_dir)


Say = Callable[[str], Callable[[dict[str, Any]], list[int]]]


@pytest.fixture(scope="session")
def say(codec: TextCodec) -> Say:
    """A script that answers with a text and the end of turn."""
    return lambda text: lambda body: [*codec.encode_plain(text), END]


@pytest.fixture(scope="module")
def shared_worker(say: Say) -> Iterator[FakeWorker]:
    """One for all tests of a module; they take it through `worker`, which resets it."""
    fake = FakeWorker(say("Hello there, friend."))
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def worker(shared_worker: FakeWorker) -> FakeWorker:
    shared_worker.reset()
    return shared_worker


def gateway_settings(folder: Path, model_dir: Path, *workers: str, **changes: Any) -> GatewaySettings:
    """Settings of a gateway whose files lie in `folder`."""
    (folder / "secret").write_text("a secret of many bytes")
    (folder / "admin").write_text(ADMIN)
    given: dict[str, Any] = {
        "journal": {"url": f"sqlite:///{folder}/journal.db"}, "model_dir": model_dir, "workers": workers,
        "secret_file": folder / "secret", "admin_token_file": folder / "admin", "port": free_port(),
        "refresh_pause_seconds": 0.01, "worker_wait_seconds": 5, "worker_poll_seconds": 0.05, "shutdown_seconds": 5,
    }  # fmt: skip
    return GatewaySettings(**(given | changes))


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, shared_worker: FakeWorker
) -> Iterator[RunningGateway]:
    """One for all tests of a module: its journal holds what earlier tests left."""
    running = RunningGateway(gateway_settings(tmp_path_factory.mktemp("gateway"), model_dir, shared_worker.url))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def client(gateway: RunningGateway, worker: FakeWorker) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made


@pytest.fixture
def start_gateway(tmp_path: Path, model_dir: Path, worker: FakeWorker) -> Iterator[Callable[..., RunningGateway]]:
    """Starts gateways of this test alone, with changed settings; stops them at the end."""
    running: list[RunningGateway] = []

    def start(*workers: str, **changes: Any) -> RunningGateway:
        running.append(RunningGateway(gateway_settings(tmp_path, model_dir, *(workers or (worker.url,)), **changes)))
        running[-1].start()
        return running[-1]

    yield start
    for gateway in running:
        gateway.stop()


@pytest.fixture
def keyed(start_gateway: Callable[..., RunningGateway], tmp_path: Path) -> RunningGateway:
    """A gateway with two tenants, `ann` and `bob`, whose keys are `key-ann` and `key-bob`."""
    (tmp_path / "keys.json").write_text(json.dumps({"key-ann": "ann", "key-bob": "bob"}))
    return start_gateway(keys_file=tmp_path / "keys.json")
