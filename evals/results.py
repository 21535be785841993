"""What an evaluation found, example by example, and the pairs the gate compares. JSON-able both ways."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from evals.errors import EvalDataError
from evals.settings import EvalSettings
from evals.stats import PairedScores, Unit
from evals.suites.base import Role


class Record(BaseModel):
    """Frozen, and strict about its fields, also when it is read back from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Example(Record):
    """One example's score; `cluster` is its session, or itself where examples are independent."""

    id: str
    cluster: str
    score: float = Field(allow_inf_nan=False)
    secondary: float | None = None
    details: dict[str, Any] = {}


class SuiteScores(Record):
    """One model's scores on one suite. `unit` is "score" ([0, 1]) or "logprob" (nats per token); higher is better."""

    suite: str
    role: Role
    kind: str
    unit: Unit
    secondary_name: str
    digest: str
    examples: list[Example]

    @property
    def mean(self) -> float | None:
        """Mean score over examples; None without examples."""
        return _mean([example.score for example in self.examples])

    @property
    def secondary_mean(self) -> float | None:
        """Mean secondary score over the examples that have one."""
        return _mean([example.secondary for example in self.examples if example.secondary is not None])


class ModelScores(Record):
    """One model's scores. `weights_id` is None when the worker tells none; `reused` names suites scored before."""

    name: str
    adapter: str | None
    weights_id: str | None
    suites: list[SuiteScores]
    reused: list[str]
    prompt_tokens: int
    generated_tokens: int
    seconds: float

    def suite(self, name: str) -> SuiteScores:
        """Raises KeyError when this suite was not scored."""
        for scores in self.suites:
            if scores.suite == name:
                return scores
        raise KeyError(name)


class StaleGroup(Record):
    """One kind of probes: the candidate over the other version's KV against its own, on the tokens that follow.

    `kl` and `kl_p95` are in nats per token, mean and 95th percentile; `top1` is the share of tokens with the same
    likeliest next token, `answer_agreement` the share of greedy answers that is equal before the first difference, None
    where nobody answers.
    """

    kind: str
    probes: int
    tokens: int
    kl: float = Field(allow_inf_nan=False)
    kl_p95: float
    top1: float
    answer_agreement: float | None
    noise_kl: float


class StaleKV(Record):
    """What serving `candidate` on KV of `under` costs. `kl` is the worst group's; `allowed` when below `threshold`."""

    candidate: str
    under: str
    groups: list[StaleGroup]
    kl: float
    threshold: float
    allowed: bool


class EvalResult(Record):
    """All models' scores. `champion` equals `base` when the base model serves. Times are UTC epoch seconds."""

    base: str
    champion: str
    candidate: str
    models: list[ModelScores]
    settings: EvalSettings
    versions: dict[str, str]
    left_out: dict[str, int]
    started_at: float
    seconds: float
    stale_kv: StaleKV | None = None
    """None where it was not measured."""

    def model(self, name: str) -> ModelScores:
        """Raises KeyError for a model that was not scored."""
        for scores in self.models:
            if scores.name == name:
                return scores
        raise KeyError(name)

    def target(self) -> PairedScores:
        """The held-out suite, candidate against champion."""
        (name,) = (scores.suite for scores in self.model(self.candidate).suites if scores.role == "target")
        return self.pair(name, self.champion)

    def guards(self) -> list[PairedScores]:
        """Every guard, candidate against base."""
        suites = self.model(self.candidate).suites
        return [self.pair(scores.suite, self.base) for scores in suites if scores.role == "guard"]

    def pair(self, suite: str, reference: str) -> PairedScores:
        """Candidate against `reference` on one suite. Raises `EvalDataError` when they saw different examples."""
        candidate, baseline = self.model(self.candidate).suite(suite), self.model(reference).suite(suite)
        ids = tuple(example.id for example in candidate.examples)
        if candidate.digest != baseline.digest or ids != tuple(example.id for example in baseline.examples):
            raise EvalDataError(f"{suite}: {self.candidate} and {reference} were scored on different examples")
        return PairedScores(
            metric=suite,
            kind=candidate.kind,
            unit=candidate.unit,
            ids=ids,
            clusters=tuple(example.cluster for example in candidate.examples),
            baseline=np.array([example.score for example in baseline.examples], dtype=np.float64),
            candidate=np.array([example.score for example in candidate.examples], dtype=np.float64),
            baseline_name=reference,
            candidate_name=self.candidate,
        )

    def perplexity_ratio(self, name: str) -> float:
        """Perplexity of model `name` over the base model's on the general texts, as a geometric mean over texts."""
        scored, base = self.model(name).suite("perplexity").mean, self.model(self.base).suite("perplexity").mean
        if scored is None or base is None:
            raise EvalDataError("perplexity: no texts were scored")
        return math.exp(base - scored)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
