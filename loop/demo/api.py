"""The demo's client: the official `openai` package, unchanged, plus the two extra calls kvloop offers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

PARALLEL_CLIENTS = 6
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Answer:
    """One reply as the client saw it. `ttft` is seconds from sending to the first streamed text."""

    text: str
    response_id: str
    session_id: str
    models: frozenset[str]
    """Every version name that any chunk of this reply carried: more than one would be a mixed response."""
    fingerprints: frozenset[str]
    ttft: float
    first_token_at: float
    """Wall clock (seconds since the epoch) at the first streamed text."""
    prompt_tokens: int
    cached_tokens: int
    extras: dict[str, Any]
    """`usage.kvloop`: restored, computed and generated tokens, fidelity, weights id, spans."""


class Api:
    """Talks to one gateway. Thread-safe."""

    def __init__(self, base_url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="not-needed", max_retries=0, timeout=120)

    def close(self) -> None:
        self._client.close()

    def ask(self, question: str, *, session_id: str | None = None, max_tokens: int = 32) -> Answer:
        """Asks as one user message, greedily and streaming; in a session only the new message is sent."""
        started = time.perf_counter()
        stream = self._client.chat.completions.create(
            model="kvloop",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"session_id": session_id} if session_id else None,
        )
        pieces: list[str] = []
        models: set[str] = set()
        fingerprints: set[str] = set()
        response_id = session = ""
        ttft = first_token_at = 0.0
        usage: Any = None
        for chunk in stream:
            models.add(chunk.model)
            fingerprints.add(chunk.system_fingerprint or "")
            extra = chunk.model_extra or {}
            session = extra.get("session_id", session)
            response_id = extra.get("response_id", response_id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    if not pieces:
                        ttft, first_token_at = time.perf_counter() - started, time.time()
                    pieces.append(choice.delta.content)
        details = usage.prompt_tokens_details
        return Answer(
            text="".join(pieces),
            response_id=response_id,
            session_id=session,
            models=frozenset(models),
            fingerprints=frozenset(fingerprints),
            ttft=ttft,
            first_token_at=first_token_at,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else 0,
            extras=(usage.model_extra or {}).get("kvloop", {}),
        )

    def ask_all(self, questions: Sequence[str], max_tokens: int = 32) -> list[Answer]:
        """Asks independent questions, a few at a time, and returns the answers in order."""
        return in_parallel(lambda question: self.ask(question, max_tokens=max_tokens), questions)

    def correct(self, response_id: str, answer: str, source: str) -> None:
        """Leaves the right answer as a demonstration on a response."""
        self._client.post(
            "/feedback",
            cast_to=object,
            body={"kind": "demonstration", "value": answer, "response_id": response_id, "source": source},
        )


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What a few clients at the same time get done, in the order of `items`."""
    with ThreadPoolExecutor(PARALLEL_CLIENTS) as pool:
        return list(pool.map(work, items))
