"""The session that survives: a long conversation, the worker killed with -9, and the next turn timed.

Cold is the first turn, which computes the whole history; warm is the next turn in the same process; restored is the
turn after the worker was killed and started again. Whether `cached_tokens` is honest is checked against the worker's
own count of the tokens it pushed through the model, which knows nothing of what the API reports.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loop.demo.api import Answer, Api

RESTART_SECONDS = 120.0
QUESTIONS = (
    "Read these notes. I will ask about them later. Just say that you are ready.",
    "Thanks. In one sentence: what are the notes about?",
    "Welcome back. Which part of the notes would you read first?",
)


@dataclass(frozen=True)
class Resumed:
    """Seconds to the first token of each kind of turn, and what the API and the worker said about reuse."""

    history_tokens: int
    cold: float
    warm: float
    restored: float
    restored_tokens: int
    cached_tokens_honest: bool


class Worker:
    """The worker of a running install, as seen from outside: its counters and its process."""

    def __init__(self, home: Path, url: str) -> None:
        self._home = home
        self._url = url

    def computed_tokens(self) -> int:
        """Prompt tokens this worker process pushed through the model so far."""
        return int(self._metric("kvloop_worker_computed_tokens_total"))

    def kv_bytes_per_token(self) -> float:
        """Bytes of disk for each token that KV memory holds there."""
        return self._metric("kvloop_kv_bytes", "disk") / self._metric("kvloop_kv_tokens", "disk")

    def kill(self) -> None:
        """kill -9; returns once the supervisor has a new process that answers."""
        pid = self._pid()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + RESTART_SECONDS
        while time.monotonic() < deadline:
            if self._pid() != pid and self._answers():
                return
            time.sleep(0.05)
        raise TimeoutError(
            f"the worker did not come back within {RESTART_SECONDS:.0f} s; see {self._home}/run/worker.log"
        )

    def wait_until_written(self, seconds: float = 30.0) -> None:
        """Waits until nothing waits for the disk. Without it a kill would lose the newest chunks, and only time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._metric("kvloop_kv_waiting_bytes"):
            time.sleep(0.05)

    def _metric(self, name: str, tier: str | None = None) -> float:
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels.get("tier") == tier:
                    return float(sample.value)
        raise LookupError(f"the worker at {self._url} has no metric {name}")

    def _pid(self) -> int:
        state = json.loads((self._home / "run" / "state.json").read_text())
        return int(state["processes"]["worker"]["pid"] or 0)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def measure(api: Api, worker: Worker, notes: Sequence[str]) -> Resumed:
    """Runs the three turns; `notes` are the paragraphs of the long first message."""
    long_message = "\n\n".join([*notes, QUESTIONS[0]])
    computed: list[int] = []
    answers: list[Answer] = []
    for number, question in enumerate((long_message, *QUESTIONS[1:])):
        if number == 2:
            worker.wait_until_written()
            worker.kill()
            api.ask("Hello!", max_tokens=1)  # the process's very first request is not what is measured
        before = worker.computed_tokens()
        session = answers[0].session_id if answers else None
        answers.append(api.ask(question, session_id=session, max_tokens=16))
        computed.append(worker.computed_tokens() - before)
    cold, warm, restored = answers
    honest = all(
        answer.prompt_tokens - answer.cached_tokens == tokens for answer, tokens in zip(answers, computed, strict=True)
    )
    reused = warm.cached_tokens >= 0.9 * cold.prompt_tokens and restored.cached_tokens >= 0.9 * warm.prompt_tokens
    return Resumed(
        history_tokens=warm.prompt_tokens,
        cold=cold.ttft,
        warm=warm.ttft,
        restored=restored.ttft,
        restored_tokens=int(restored.extras["restored_tokens"]),
        cached_tokens_honest=honest and reused and cold.cached_tokens <= 64,
    )
