"""kill -9 of any process, at random moments under load: what was acknowledged is there, and sessions go on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from memory.journal import Journal
from tests.running import Running
from tests.tiny import make_tiny_model

KILLS = 20
CLIENTS = 3
VICTIMS = ("worker", "gateway", "worker", "gateway", "supervisor", "follower", "scheduler")


@dataclass
class Client:
    """One user in one session, who writes down everything that was acknowledged."""

    running: Running
    name: str
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    """(response id, text) of each reply whose final event arrived, in order."""
    feedback: list[str] = field(default_factory=list)
    """Ids of feedback that got a 2xx."""
    session_id: str | None = None
    failures: int = 0
    surprises: list[str] = field(default_factory=list)

    def talk(self, stop: threading.Event) -> None:
        with self.running.client(timeout=30) as client:
            while not stop.is_set():
                try:
                    self._turn(client)
                except (openai.APIError, httpx2.TransportError) as error:
                    self.failures += 1
                    if isinstance(error, openai.APIStatusError) and error.status_code not in (409, 429, 502, 503):
                        self.surprises.append(f"{error.status_code}: {error.message}")
                    time.sleep(0.05)

    def _turn(self, client: openai.OpenAI) -> None:
        text: list[str] = []
        final: Any = None
        extra = {"session_id": self.session_id} if self.session_id else None
        stream = client.chat.completions.create(
            model="kvloop",
            messages=[{"role": "user", "content": f"{self.name} says {random.random()}"}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in stream:
            final = chunk
            text += [choice.delta.content or "" for choice in chunk.choices]
        if final is None or final.usage is None:
            raise httpx2.RemoteProtocolError("the stream ended before its final event")
        response_id = final.model_extra["response_id"]
        self.session_id = final.model_extra["session_id"]
        self.acknowledged.append((response_id, "".join(text)))
        body = {"kind": "float", "value": 0.5, "response_id": response_id, "source": self.name}
        given: Any = client.post("/feedback", cast_to=dict[str, Any], body=body)
        self.feedback.append(given["id"])


@pytest.fixture
def running(tmp_path: Path, model_dir: Path) -> Iterator[Running]:
    # on a busy machine the kills take long and the sessions grow: they must not meet the end of the context
    model = make_tiny_model(tmp_path / "model", model_dir, context_length=65536)
    running = Running(tmp_path / "home", model, "worker.kv.chunk_tokens=32")
    running.start()
    yield running
    running.stop()


def test_nothing_acknowledged_is_lost(running: Running) -> None:
    randomness = random.Random(7)
    clients = [Client(running, f"client-{number}") for number in range(CLIENTS)]
    stop = threading.Event()
    threads = [threading.Thread(target=client.talk, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        for number in range(KILLS):
            time.sleep(randomness.uniform(0.2, 1.0))
            victim = VICTIMS[number % len(VICTIMS)]
            running.kill(victim)
            if victim == "supervisor":
                running.start()
            elif number % 3 == 0:
                running.wait_ready()
        running.wait_ready()
        reached = [len(client.acknowledged) for client in clients]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(
            len(client.acknowledged) < before + 2 for client, before in zip(clients, reached, strict=True)
        ):
            time.sleep(0.1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    for client, before in zip(clients, reached, strict=True):
        assert client.surprises == []
        assert len(client.acknowledged) >= before + 2, "the session does not go on after the kills"
        _check_journal(running, client)


def _check_journal(running: Running, client: Client) -> None:
    journal = Journal.open(f"sqlite:///{running.home / 'journal.db'}")
    try:
        assert client.session_id is not None
        stored = {response.id: response for response in journal.list_responses("default", client.session_id)}
        for response_id, text in client.acknowledged:
            assert stored[response_id].output_message["content"] == text
        head = journal.get_session("default", client.session_id).head_response
        assert head is not None
        chain = [response.id for response in journal.chain(head)]
        acknowledged = [response_id for response_id, _ in client.acknowledged]
        assert [response_id for response_id in chain if response_id in set(acknowledged)] == acknowledged
        known = {item.id for item in journal.list_feedback(tenant="default", limit=100_000)}
        assert set(client.feedback) <= known
    finally:
        journal.close()
