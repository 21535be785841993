"""Guard: does the model still follow simple instructions on the form of its answer?

Each item asks for something a program can check: one word, a list of three, a given last word, capital letters, and so
on. The score is the mean of the item's checks (`evals.suites.checks`), each in [0, 1] and graded where a near miss is
possible (two list items of three), because graded scores differ less by chance between two models that are equally
good, so that a small guard can prove more. Replies are greedy and short.
"""

from __future__ import annotations

from pathlib import Path

from evals.errors import EvalDataError
from evals.stats import Unit
from evals.suites.base import Advance, ExampleScore, Model, Role, Text, content_digest, read_json_lines
from evals.suites.checks import CHECKS, run_checks

ITEMS = Path(__file__).parent / "data" / "format.jsonl"


class Format:
    """Reads JSONL rows {"id", "prompt", "checks": {check: argument}, "most_tokens"}."""

    name = "format"
    role: Role = "guard"
    kind = "format"
    unit: Unit = "score"
    secondary = "all checks hold"

    def __init__(self, text: Text, file: Path = ITEMS) -> None:
        self._rows = read_json_lines(file)
        for number, row in enumerate(self._rows, start=1):
            where = f"{file}, item {number}"
            if (
                not isinstance(row.get("prompt"), str)
                or not row.get("id")
                or not isinstance(row.get("most_tokens"), int)
            ):
                raise EvalDataError(f'{where}: needs "id", "prompt" and "most_tokens"')
            checks = row.get("checks")
            if not isinstance(checks, dict) or not checks or not set(checks) <= set(CHECKS):
                raise EvalDataError(f'{where}: "checks" must name one or more of {", ".join(sorted(CHECKS))}')
        self._prompts = [text.first_turn([{"role": "user", "content": row["prompt"]}]) for row in self._rows]
        self._most_tokens = [row["most_tokens"] for row in self._rows]
        self.prompts = len(self._rows)
        self.digest = content_digest(self.name, self._rows)

    async def score(self, model: Model, advance: Advance) -> list[ExampleScore]:
        """One score per item."""
        scores = []
        for row, reply in zip(self._rows, await model.generate(self._prompts, self._most_tokens, advance), strict=True):
            value = run_checks(row["checks"], reply.text)
            details = {"prompt": row["prompt"], "reply": reply.text}
            scores.append(ExampleScore(str(row["id"]), str(row["id"]), value, float(value == 1.0), details))
        return scores
