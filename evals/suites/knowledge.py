"""Guard: general knowledge, as multiple choice by likelihood. Nothing is generated.

Each choice is scored as the continuation of "Question: ...\\nAnswer:", by its mean log-prob per token, so that long
choices are not punished for their length. The score is the share of wrong choices that the right one beats (a tie
counts half): 1 when it is first of four, 2/3 when it is second, 0 when it is last. Half-lost questions thus count as
half-lost, so that fewer questions settle a margin than with right-or-wrong, which is kept as the secondary score
(accuracy). And unlike the probability of the right choice, ranks do not rise when a model merely grows surer of
itself, as fine-tuned models do: that would hide what they forgot.

Asking with lettered choices in one prompt and comparing the letters would cost a quarter, but models of a few
hundred million parameters answer letters at chance: such a guard would see nothing. So each choice is its own prompt,
without chat template and system prompt, which keeps prompts near 15 tokens: 120 questions of 4 choices are about
6,900 tokens of prefill for each model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.errors import EvalDataError
from evals.stats import Unit
from evals.suites.base import Advance, ExampleScore, Model, Role, Text, content_digest, read_json_lines, sample

QUESTIONS = Path(__file__).parent / "data" / "knowledge.jsonl"


@dataclass(frozen=True)
class _Prompt:
    token_ids: list[int]
    scored: int


class Knowledge:
    """Reads JSONL rows {"question", "choices", "answer"}, `answer` being the index of the right choice."""

    role: Role = "guard"
    unit: Unit = "score"
    secondary = "accuracy"

    def __init__(
        self, text: Text, file: Path = QUESTIONS, *, name: str = "knowledge", kind: str = "knowledge",
        most_questions: int = 120, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.kind = kind
        rows = read_json_lines(file)
        for number, row in enumerate(rows, start=1):
            _check(row, f"{file}, question {number}")
        chosen = sample(list(enumerate(rows, start=1)), most_questions, seed)
        self._numbers = [number for number, _ in chosen]
        self._rows = [row for _, row in chosen]
        self._asked = [_prompts(text, row) for row in self._rows]
        self.prompts = sum(len(asked) for asked in self._asked)
        self.digest = content_digest(name, "share of wrong choices beaten", self._rows)

    async def score(self, model: Model, advance: Advance) -> list[ExampleScore]:
        """One score per question. The id is the question's number within its file."""
        flat = [prompt for asked in self._asked for prompt in asked]
        log_probs = await model.log_probs([prompt.token_ids for prompt in flat], advance)
        means = iter(
            math.fsum(values[-prompt.scored :]) / prompt.scored for prompt, values in zip(flat, log_probs, strict=True)
        )
        scores = []
        for number, row in zip(self._numbers, self._rows, strict=True):
            of_choices = [next(means) for _ in row["choices"]]
            best = max(range(len(of_choices)), key=of_choices.__getitem__)
            answer = int(row["answer"])
            details = {"question": row["question"], "chosen": row["choices"][best], "right": row["choices"][answer]}
            beaten = _beaten(of_choices, answer)
            scores.append(ExampleScore(str(number), f"question {number}", beaten, float(best == answer), details))
        return scores


def guard_files(folder: Path) -> list[Path]:
    """The guard files (`*.jsonl`) of a user's folder, by name. Raises `EvalDataError` when the folder has none."""
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise EvalDataError(f"guard_dir {folder} is not a folder with *.jsonl files; correct it or leave it empty")
    return files


def _prompts(text: Text, row: dict[str, Any]) -> list[_Prompt]:
    stem = text.encode_plain(f"Question: {str(row['question']).strip()}\nAnswer:")
    prompts = []
    for choice in row["choices"]:
        # Encoded apart, so that no merge across the border changes what is scored.
        continuation = text.encode_plain(" " + choice.strip())
        prompts.append(_Prompt(stem + continuation, len(continuation)))
    return prompts


def _beaten(values: Sequence[float], index: int) -> float:
    """The share of the other `values` that lie below the one at `index`; ties count half."""
    others = [value for position, value in enumerate(values) if position != index]
    return sum(1.0 if value < values[index] else 0.5 * (value == values[index]) for value in others) / len(others)


def _check(row: dict[str, Any], where: str) -> None:
    question, choices, answer = row.get("question"), row.get("choices"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise EvalDataError(f'{where}: "question" must be a text')
    if not isinstance(choices, list) or len(choices) < 2:
        raise EvalDataError(f'{where}: "choices" must be a list of at least two texts')
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise EvalDataError(f"{where}: every choice must be a text that is not empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise EvalDataError(f'{where}: "answer" must be the index of the right choice, 0 to {len(choices) - 1}')
