"""Target: does the model now answer as people corrected it to, on sessions it was never trained on?

The examples are the demonstrations of eval-split sessions. Real corrections name no key value to look for, so the
primary score asks how much of the demonstration's information the greedy reply holds: the share of its informative
units (numbers, codes, and words that neither the question nor everyday English has; see `evals.suites.words`), 1.0
when all are found. A reference without any such unit is scored by word overlap (F1) instead. A reply may be only
somewhat longer than its demonstration, so that talking at length wins nothing.

Secondary score: mean log-prob per token of the demonstration, in nats. It moves before greedy replies do.

At most `most_per_session` examples of one session are asked, so that no single user outweighs the others; then at
most `most_examples` in all, by whole sessions while they last. The choice depends on the data and the seed alone.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.errors import EvalDataError
from evals.stats import Unit
from evals.suites.base import Advance, ExampleScore, Model, Role, Text, content_digest, read_json_lines
from evals.suites.words import informative, overlap, recall


@dataclass(frozen=True)
class _Example:
    id: str
    session: str
    messages: list[dict[str, Any]]
    answer: str
    wanted: list[str]


class HeldOut:
    """Reads JSONL rows {"messages": [...], "completion": {"role", "content"}, "lineage": {"session", ...}}."""

    name = "heldout"
    role: Role = "target"
    kind = "target"
    unit: Unit = "score"
    secondary = "log-prob per token of the demonstration"

    def __init__(
        self, text: Text, file: Path, *, most_examples: int = 60, most_per_session: int = 4, most_tokens: int = 64,
        context_length: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        rows = read_json_lines(file)
        examples = [_example(row, f"{file}, example {number}") for number, row in enumerate(rows, start=1)]
        chosen = _choose(_unique(examples), most_examples, most_per_session, seed)
        room = context_length if context_length is not None else 2**31
        self._examples: list[_Example] = []
        self._questions: list[list[int]] = []
        self._answers: list[list[int]] = []
        self.too_long = 0
        for example in chosen:
            question, answer = text.first_turn(example.messages), text.encode_plain(example.answer)
            if len(question) + max(len(answer), most_tokens) + 1 > room or not answer:
                self.too_long += 1
                continue
            self._examples.append(example)
            self._questions.append(question)
            self._answers.append(answer)
        self.conversations = [(example.messages, example.answer) for example in self._examples]
        """(messages, demonstration) of every example asked, in their order."""
        self._most_tokens = [min(most_tokens, len(answer) + len(answer) // 2 + 8) for answer in self._answers]
        self.prompts = 2 * len(self._examples)
        self.digest = content_digest(
            self.name, [[example.id, example.messages, example.answer] for example in self._examples], self._most_tokens
        )

    async def score(self, model: Model, advance: Advance) -> list[ExampleScore]:
        """One score per example."""
        replies = await model.generate(self._questions, self._most_tokens, advance)
        whole = [question + answer for question, answer in zip(self._questions, self._answers, strict=True)]
        log_probs = await model.log_probs(whole, advance)
        scores = []
        for example, answer, reply, values in zip(self._examples, self._answers, replies, log_probs, strict=True):
            mean = math.fsum(values[-len(answer) :]) / len(answer)
            details = {
                "question": example.messages[-1]["content"],
                "demonstration": example.answer,
                "reply": reply.text,
                "wanted": example.wanted,
            }
            scores.append(ExampleScore(example.id, example.session, _match(example, reply.text), mean, details))
        return scores


def _match(example: _Example, reply: str) -> float:
    return recall(example.wanted, reply) if example.wanted else overlap(example.answer, reply)


def _example(row: Mapping[str, Any], where: str) -> _Example:
    messages, completion, lineage = row.get("messages"), row.get("completion"), row.get("lineage")
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise EvalDataError(f'{where}: "messages" must be a list of {{"role", "content"}} with text contents')
    if not _is_message(completion) or not completion["content"].strip():  # type: ignore[index]
        raise EvalDataError(f'{where}: "completion" must be an assistant message with text')
    if not isinstance(lineage, dict) or not isinstance(lineage.get("session"), str):
        raise EvalDataError(f'{where}: "lineage" must name the "session", which clusters the errors')
    answer = str(completion["content"]).strip()  # type: ignore[index]
    said = "\n".join(str(message["content"]) for message in messages)
    name = content_digest(lineage.get("feedback"), lineage.get("response"), lineage["session"], messages, answer)[:16]
    return _Example(name, lineage["session"], messages, answer, informative(answer, said))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _unique(examples: Sequence[_Example]) -> list[_Example]:
    return list({example.id: example for example in examples}.values())


def _choose(examples: Sequence[_Example], most: int, per_session: int, seed: int) -> list[_Example]:
    """Sessions in an order drawn by `seed`, at most `per_session` examples of each, until `most` are found.

    The draw goes by each session's name, so that new sessions do not reshuffle which old ones are asked.
    """
    sessions: dict[str, list[_Example]] = {}
    for example in examples:
        sessions.setdefault(example.session, []).append(example)
    chosen: list[_Example] = []
    for session in sorted(sessions, key=lambda name: content_digest(seed, name)):
        of_session = sessions[session]
        if len(of_session) > per_session:
            of_session = random.Random(json.dumps([seed, session])).sample(of_session, per_session)
        chosen += of_session[: most - len(chosen)]
    return chosen
