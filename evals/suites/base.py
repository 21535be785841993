"""What a suite is: it turns examples into one number per example, through a model that generates and scores tokens.

A suite is made once per evaluation and asked to score every model in turn. It chooses its examples from its data and
settings alone, never from a model's answers, so that all models are compared on the same examples. It may not change
anything but what it returns. What it raises: `EvalDataError` when its data is unusable (at construction, before any
model is asked); errors of the worker pass through.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from evals.errors import EvalDataError
from evals.stats import Unit

Advance = Callable[[int], None]
Role = Literal["target", "guard"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Reply:
    """One greedy reply and the token ids it was made of."""

    token_ids: tuple[int, ...]
    text: str


class Model(Protocol):
    """One model as suites see it. `advance` is called with the number of prompts just done."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int], advance: Advance
    ) -> list[Reply]:
        """Greedy replies to prompts of token ids, each of at most its `most_tokens` tokens, in the prompts' order."""
        ...

    async def log_probs(self, prompts: Sequence[Sequence[int]], advance: Advance) -> list[list[float]]:
        """Natural log-probabilities of each prompt's tokens after its first: `len(prompt) - 1` numbers each."""
        ...


class Text(Protocol):
    """Tokenizer and chat template of the model folder."""

    def first_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        ...


@dataclass(frozen=True)
class ExampleScore:
    """One example's result. `cluster` names what it shares its luck with (a session); `details` are for reading."""

    id: str
    cluster: str
    score: float
    secondary: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Suite(Protocol):
    """One metric. `kind` chooses the gate's margin; higher scores are better."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def kind(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def secondary(self) -> str:
        """What `ExampleScore.secondary` is, in a few words; empty when there is none."""
        ...

    @property
    def prompts(self) -> int:
        """How many prompts one model is asked: the size of a progress bar."""
        ...

    @property
    def digest(self) -> str:
        """64 hex digits over everything that decides the scores, apart from the model and its tokenizer."""
        ...

    async def score(self, model: Model, advance: Advance) -> list[ExampleScore]:
        """Scores one model on every example, in a fixed order."""
        ...


def content_digest(*parts: object) -> str:
    """SHA-256 of the canonical JSON of `parts`, as 64 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped. Raises `EvalDataError` naming the file and line."""
    rows = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalDataError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvalDataError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise EvalDataError(f"{file}, line {number}: each line must be one JSON object")
        rows.append(row)
    return rows


def sample(items: Sequence[Item], most: int, seed: int) -> list[Item]:
    """At most `most` items, chosen by `seed` alone and kept in their order."""
    if len(items) <= most:
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), most))
    return [items[index] for index in chosen]
