"""Continuous traffic during the swap: every request is kept, so that "none failed, none mixed" is counted."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

from loop.demo.api import Answer, Api


@dataclass
class TrafficReport:
    """What the clients saw. `answers` hold the version names of every chunk."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.answers) + len(self.failures)

    @property
    def mixed(self) -> int:
        """Responses of more than one version: by the chunks' names, or by the weights of any generated span."""
        return sum(1 for answer in self.answers if len(answer.models) != 1 or len(_weights(answer)) > 1)

    def first_token_of(self, version: str) -> float | None:
        """Wall clock of the first token that `version` sent, or None if it never answered."""
        times = [answer.first_token_at for answer in self.answers if version in answer.models and answer.text]
        return min(times, default=None)


def _weights(answer: Answer) -> set[str]:
    return {span["weights_id"] for span in answer.extras.get("spans", [])}


class Traffic:
    """Clients that ask one short question after another from `start` until `stop`."""

    def __init__(self, api: Api, questions: Sequence[str], clients: int = 4, max_tokens: int = 8) -> None:
        self._api = api
        self._questions = itertools.cycle(questions)
        self._max_tokens = max_tokens
        self._report = TrafficReport()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._client, name=f"traffic-{n}") for n in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for(self, version: str, requests: int, seconds: float) -> None:
        """Returns when `version` has answered and `requests` were sent in all, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                done = self._report.requests >= requests and self._report.first_token_of(version) is not None
            if done:
                return
            time.sleep(0.1)

    def stop(self) -> TrafficReport:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        return self._report

    def _client(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                question = next(self._questions)
            try:
                answer = self._api.ask(question, max_tokens=self._max_tokens)
            except openai.OpenAIError as error:
                with self._lock:
                    self._report.failures.append(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._report.answers.append(answer)
