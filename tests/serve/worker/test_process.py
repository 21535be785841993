"""`python -m serve.worker`: starts, answers, remembers across a kill, ends on SIGTERM, explains what is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from memory.kv.settings import KVSettings
from serve.engine import load_engine
from serve.engine.sequence import Job
from serve.worker.__main__ import serve
from serve.worker.settings import WorkerSettings
from tests.ports import free_port
from tests.serve.tiny import prompt


@contextmanager
def running(settings: WorkerSettings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    path = folder / "worker.json"
    path.write_text(settings.model_dump_json())
    command = [sys.executable, "-m", "serve.worker", "--settings", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.05)
    raise AssertionError("the worker did not become ready")


def test_a_killed_worker_remembers(tmp_path: Path, tiny_model: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    kv = KVSettings(chunk_tokens=64, disk_reserve_bytes=0, restore="always")
    settings = WorkerSettings(model=tiny_model, dtype="float32", port=port, kv_folder=tmp_path / "kv", kv=kv)
    body = {"model": "base", "prompt": prompt(300), "max_tokens": 4, "temperature": 0}
    with running(settings, tmp_path) as process:
        wait_until_ready(process, url)
        cold = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        boot_id = httpx.get(f"{url}/health", timeout=60).json()["boot_id"]
        stored = tmp_path / "kv" / "chunks"
        deadline = time.monotonic() + 20
        while "kvloop_kv_waiting_bytes 0.0" not in httpx.get(f"{url}/metrics", timeout=60).text or not any(
            stored.rglob("*.kv")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
    with running(settings, tmp_path) as process:
        wait_until_ready(process, url)
        warm = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert httpx.get(f"{url}/health", timeout=60).json()["boot_id"] != boot_id
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert warm["usage"]["kvloop"]["restored_tokens"] >= 256
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert out == b"", "nothing goes to stdout"
        assert process.returncode in (0, -signal.SIGTERM)


def test_a_worker_ends_with_its_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(model=tiny_model, dtype="float32", port=free_port())
    engine = load_engine(settings)

    def fail() -> list[Job]:
        raise MemoryError("as if")

    monkeypatch.setattr(engine._loop.scheduler, "admit", fail)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(serve(engine, settings)))
    thread.start()
    url = f"http://127.0.0.1:{settings.port}"
    deadline = time.monotonic() + 60
    answer = None
    while answer is None and time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{url}/v1/completions", json={"model": "base", "prompt": [1, 2]}, timeout=60)
        except httpx.ConnectError:
            time.sleep(0.05)
    assert answer is not None
    assert answer.status_code == 503
    thread.join(timeout=30)
    assert codes == [1]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for settings, message in (
        (WorkerSettings(model=tmp_path), b"config.json"),
        (WorkerSettings(), b"no model is set"),
    ):
        with running(settings, tmp_path) as process:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 1
            assert message in errors
            assert b"Traceback" not in errors
