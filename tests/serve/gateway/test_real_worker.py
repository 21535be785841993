"""The gateway with the embedded worker and the bundled model: what the fake cannot show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.gateway.text import TextCodec
from tests.ports import free_port
from tests.serve.gateway.conftest import RunningGateway, gateway_settings

pytestmark = pytest.mark.model


class RealWorker:
    """The worker as its own process; `kill` is kill -9."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.port = free_port()
        self.kv_folder = folder / "kv"
        self._settings = folder / "worker.json"
        given = {
            "model": str(model_dir),
            "served_name": "base-model",
            "port": self.port,
            "kv_folder": str(self.kv_folder),
        }
        self._settings.write_text(json.dumps(given))
        self._log = folder / "worker.log"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve.worker", "--settings", str(self._settings)], stdout=log, stderr=log
            )

    def wait(self) -> None:
        for _ in range(1200):
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        pytest.fail(f"the worker did not start: {self._log.read_text()}")

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def real(tmp_path: Path, model_dir: Path) -> Iterator[tuple[RealWorker, RunningGateway]]:
    worker = RealWorker(tmp_path, model_dir)
    url = f"http://127.0.0.1:{worker.port}"
    gateway = RunningGateway(gateway_settings(tmp_path, model_dir, url, worker_wait_seconds=60))
    worker.start()
    gateway.start()
    try:
        worker.wait()
        yield worker, gateway
    finally:
        gateway.stop()
        worker.stop()


def _until(true: Callable[[], bool]) -> None:
    for _ in range(400):
        if true():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen")


def test_a_session_outlives_its_worker(real: tuple[RealWorker, RunningGateway], codec: TextCodec) -> None:
    worker, gateway = real
    with gateway.client() as client:
        story = "Remember these numbers. " + " ".join(f"{number} follows {number - 1}." for number in range(1, 70))
        messages = [{"role": "user", "content": story}]
        first = client.chat.completions.create(model="kvloop", messages=messages, temperature=0, max_tokens=8)
        assert first.usage is not None
        assert first.usage.kvloop["computed_tokens"] == first.usage.prompt_tokens
        session = first.session_id
        with gateway.journal() as journal:
            head = journal.get_session("default", session).head_response
            assert head is not None
            known = journal.session_token_ids(head)
        # Full chunks and the tail are on disk a moment after the answer.
        chunks = -(-len(known) // 256)
        _until(lambda: len(list(worker.kv_folder.rglob("*.kv"))) >= chunks)
        worker.kill()
        worker.start()
        again = [{"role": "user", "content": "And then?"}]
        second = client.chat.completions.create(
            model="kvloop",
            messages=again,
            temperature=0,
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
            extra_body={"session_id": session},
        )
        usage = second.usage
        assert len(known) - 8 <= usage.kvloop["restored_tokens"] <= len(known)
        assert usage.prompt_tokens_details.cached_tokens == usage.kvloop["restored_tokens"]
        assert usage.prompt_tokens == usage.kvloop["computed_tokens"] + usage.prompt_tokens_details.cached_tokens
        assert "".join(entry.token for entry in second.choices[0].logprobs.content) == second.choices[0].message.content
        # The whole history, resent as text, finds the same ids.
        history = [*messages, first.choices[0].message.model_dump(), *again, second.choices[0].message.model_dump()]
        third = client.chat.completions.create(
            model="kvloop", messages=[*history, {"role": "user", "content": "Go on"}], temperature=0, max_tokens=4
        )
        assert third.session_id == session
        assert third.usage.prompt_tokens_details.cached_tokens >= len(known)
        stopped = client.chat.completions.create(
            model="kvloop",
            messages=[{"role": "user", "content": "Say: a, b, c"}],
            temperature=0,
            max_tokens=30,
            stop=[" "],
        )
        assert " " not in stopped.choices[0].message.content
        account = stopped.usage.kvloop
        assert account["weights_id"] == first.usage.kvloop["weights_id"]
        assert account["generated_tokens"] == stopped.usage.completion_tokens
        assert account["spans"][-1]["end"] == stopped.usage.total_tokens
        # The worker has given back every slot.
        _until(lambda: gateway.get("/v1/kvloop/status").json()["workers"][0]["in_flight"] == 0)
        # What is deleted leaves KV memory as well, the turn that was left at its stop string included.
        for name in (session, stopped.session_id):
            (told,) = gateway.delete(f"/v1/sessions/{name}").json()["receipt"]["kv"]
            assert told["status"] == "forgotten"
            assert told["chunks"]["ram"] + told["chunks"]["waiting"] + told["chunks"]["disk"] > 0
        assert list(worker.kv_folder.rglob("*.kv")) == []


def test_a_memory_is_shared_and_gone_for_good(real: tuple[RealWorker, RunningGateway]) -> None:
    worker, gateway = real
    worker.wait()
    notes = " ".join(f"Lamp {number} costs {number * 7} coins." for number in range(60))
    memory = gateway.post("/v1/memories", {"text": notes, "name": "prices"}).json()
    _until(lambda: gateway.metric('kvloop_memory_prefetches_total{outcome="done"}') == 1)
    with gateway.client() as client:

        def ask(text: str, **extra: object) -> openai.types.chat.ChatCompletion:
            messages: list[Any] = [{"role": "user", "content": text}]
            return client.chat.completions.create(
                model="kvloop", messages=messages, temperature=0, max_tokens=4, extra_body=extra
            )

        sessions = []
        for question in ("What does lamp 3 cost?", "And lamp 9?"):
            answer = ask(question, memory_ids=[memory["id"]])
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            # The first turn of a session reads the whole memory from KV that was there.
            assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= memory["tokens"] - 1
            assert answer.usage.model_extra is not None
            assert answer.usage.model_extra["kvloop"]["memory_computed_tokens"] == 0
            sessions.append((answer.model_extra or {})["session_id"])
        receipt = gateway.delete(f"/v1/sessions/{sessions[0]}").json()["receipt"]
        assert receipt["kv"][0]["keys"] == 1
        again = ask("And lamp 5?", memory_ids=[memory["id"]])
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= memory["tokens"] - 1, "it is the memory's"
    sessions.append((again.model_extra or {})["session_id"])
    receipt = gateway.delete(f"/v1/memories/{memory['id']}").json()["receipt"]
    assert receipt["sessions"] == sessions[1:]
    (told,) = receipt["kv"]
    assert (told["status"], told["keys"], told["remote_waiting"]) == ("forgotten", 3, 0)
    assert list(worker.kv_folder.rglob("*.kv")) == [], "everything that was computed over it is gone"
