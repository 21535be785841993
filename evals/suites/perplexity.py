"""Guard: how well the model still predicts general text. Score: mean log-prob per token of each text, in nats.

The bundled texts are of many kinds (news, story, how-to, dialogue, science, code, letter, ...), so that a model that
turned into a lookup table for one catalogue shows it. Perplexity is exp(-score); each text counts once, so that the
ratio of two models' perplexities is the geometric mean of the per-text ratios.
"""

from __future__ import annotations

import math
from pathlib import Path

from evals.errors import EvalDataError
from evals.stats import Unit
from evals.suites.base import Advance, ExampleScore, Model, Role, Text, content_digest, read_json_lines

TEXTS = Path(__file__).parent / "data" / "texts.jsonl"


class Perplexity:
    """Reads JSONL rows {"id", "text"}. Texts are cut to `most_tokens` tokens, which bounds what a model is asked."""

    name = "perplexity"
    role: Role = "guard"
    kind = "perplexity"
    unit: Unit = "logprob"
    secondary = "perplexity"

    def __init__(self, text: Text, file: Path = TEXTS, *, most_tokens: int = 160) -> None:
        rows = read_json_lines(file)
        for row in rows:
            if not isinstance(row.get("text"), str) or not row.get("id"):
                raise EvalDataError(f'{file}: each line needs an "id" and a "text"')
        self._ids = [str(row["id"]) for row in rows]
        self._prompts = [text.encode_plain(row["text"])[:most_tokens] for row in rows]
        if any(len(prompt) < 2 for prompt in self._prompts):
            raise EvalDataError(f"{file}: each text needs at least two tokens")
        self.token_ids: tuple[list[int], ...] = tuple(self._prompts)
        """The texts as they are scored."""
        self.prompts = len(self._prompts)
        self.digest = content_digest(self.name, rows, most_tokens)

    async def score(self, model: Model, advance: Advance) -> list[ExampleScore]:
        """One score per text."""
        scores = []
        for name, log_probs in zip(self._ids, await model.log_probs(self._prompts, advance), strict=True):
            mean = math.fsum(log_probs) / len(log_probs)
            details = {"tokens": len(log_probs)}
            scores.append(ExampleScore(name, name, mean, math.exp(min(-mean, 700.0)), details))
        return scores
