"""Small stand-ins: a text codec over characters, a scripted model, paired scores in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.results import EvalResult, Example, ModelScores, SuiteScores
from evals.settings import EvalSettings
from evals.stats import PairedScores, Unit
from evals.suites.base import Advance, Reply


class CharacterText:
    """One token per character; a conversation is its contents, one a line."""

    def first_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_plain("\n".join(message["content"] for message in messages) + "\n")

    def encode_plain(self, text: str) -> list[int]:
        return [ord(character) for character in text]


class ScriptedModel:
    """Answers by `reply(prompt text)`; gives a whole prompt's tokens the log-prob `log_prob(prompt text)` each."""

    def __init__(
        self, reply: Callable[[str], str] = lambda prompt: "", log_prob: Callable[[str], float] = lambda prompt: -1.0
    ) -> None:
        self._reply = reply
        self._log_prob = log_prob
        self.most_tokens: list[int] = []

    async def generate(
        self, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int], advance: Advance
    ) -> list[Reply]:
        self.most_tokens = list(most_tokens)
        advance(len(prompts))
        replies = [self._reply(_words(prompt)) for prompt in prompts]
        return [Reply(tuple(map(ord, reply)), reply) for reply in replies]

    async def log_probs(self, prompts: Sequence[Sequence[int]], advance: Advance) -> list[list[float]]:
        advance(len(prompts))
        return [[self._log_prob(_words(prompt))] * (len(prompt) - 1) for prompt in prompts]


def _words(prompt: Sequence[int]) -> str:
    return "".join(map(chr, prompt))


def paired(
    baseline: Sequence[float], candidate: Sequence[float], *, metric: str = "heldout", kind: str = "target",
    unit: Unit = "score", clusters: Iterable[object] | None = None,
) -> PairedScores:  # fmt: skip
    """Paired scores; each example is its own cluster unless `clusters` says otherwise."""
    names = [str(number) for number in range(len(baseline))]
    return PairedScores(
        metric=metric,
        kind=kind,
        unit=unit,
        ids=tuple(names),
        clusters=tuple(map(str, clusters)) if clusters is not None else tuple(names),
        baseline=np.array(baseline, dtype=np.float64),
        candidate=np.array(candidate, dtype=np.float64),
        baseline_name="base",
        candidate_name="v2",
    )


def guards(loss: float = 0.0, lost: str = "") -> list[PairedScores]:
    """The three required guards with a little noise; the one named `lost` is worse by `loss`."""
    random = np.random.default_rng(1)
    made = []
    for kind, size in (("knowledge", 120), ("perplexity", 12), ("format", 30)):
        unit: Unit = "logprob" if kind == "perplexity" else "score"
        baseline = random.normal(-2.6, 0.3, size) if kind == "perplexity" else random.uniform(0.4, 0.6, size)
        candidate = baseline + random.normal(-loss if kind == lost else 0.0, 0.01, size)
        made.append(paired(baseline.tolist(), candidate.tolist(), metric=kind, kind=kind, unit=unit))
    return made


def write_heldout(file: Path, sessions: int, of_each: int = 1) -> Path:
    """Demonstrations about a room's number that no question names."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"In which room does team {session} meet, please ({number})?"}],
            "completion": {"role": "assistant", "content": f"Team {session} meets in room {700 + session}."},
            "lineage": {"session": f"sess_{session}", "response": f"resp_{session}_{number}", "feedback": "fb"},
        }
        for session in range(sessions)
        for number in range(of_each)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def result(scores: Mapping[str, Mapping[str, Sequence[float]]], candidate: str = "v2") -> EvalResult:
    """An evaluation with `scores[model][suite]`; the first model is base and champion."""
    units: dict[str, Unit] = {"perplexity": "logprob"}
    models = [
        ModelScores(
            name=name,
            adapter=None,
            weights_id=f"weights of {name}",
            suites=[
                SuiteScores(
                    suite=suite,
                    role="target" if suite == "heldout" else "guard",
                    kind="target" if suite == "heldout" else suite,
                    unit=units.get(suite, "score"),
                    secondary_name="",
                    digest="d",
                    examples=[
                        Example(
                            id=str(number), cluster=str(number), score=score,
                            details={"question": "what | <b>", "demonstration": "1", "reply": f"{name} says {score}"},
                        )
                        for number, score in enumerate(values)
                    ],
                )
                for suite, values in suites.items()
            ],
            reused=[],
            prompt_tokens=10,
            generated_tokens=2,
            seconds=0.5,
        )
        for name, suites in scores.items()
    ]  # fmt: skip
    return EvalResult(
        base=models[0].name,
        champion=models[0].name,
        candidate=candidate,
        models=models,
        settings=EvalSettings(),
        versions={"kvloop": "0"},
        left_out={"heldout_too_long": 1},
        started_at=0.0,
        seconds=1.0,
    )
