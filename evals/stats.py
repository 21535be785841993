"""Paired differences with errors clustered by session, Holm's correction, and how much data is still missing.

Two models answer the same examples, so that only the difference d_i = candidate_i - baseline_i of each example
matters: what makes an example easy or hard cancels. Examples of one session are not independent; a session is
therefore one cluster, and only the number of sessions buys certainty (Miller, "Adding error bars to evals",
arXiv 2411.00640).

With G clusters of n_g examples, S_g the sum of a cluster's differences, n = sum n_g and c = sum S_g / n:

    standard error^2 = G / (G - 1) * sum_g (S_g - n_g c)^2 / n^2        degrees of freedom = G* - 1

G* = n^2 / sum n_g^2 is the effective number of clusters (Kish): equal to G when clusters are of one size, and
smaller when one session dominates, where t with G - 1 degrees would claim too much.

Scores bounded to [0, 1] need one more care. When 10 of 10 examples agree, the formula gives a standard error of 0
and certainty out of nothing. So two clusters of average size are added before the formula is applied: half of one
with difference +1, half with -1, and one with 0 (Agresti and Min, "Simple improved confidence intervals for comparing
matched proportions", Statistics in Medicine 24, 2005). The reported difference stays the plain mean; tests and
intervals use the smoothed centre. Log-probs are unbounded, and never tie in all examples: nothing is added there.

Invariants: fewer than two clusters give an infinite standard error, never a small one; nothing here returns NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from evals.errors import EvalDataError
from evals.student import upper_quantile, upper_tail

Unit = Literal["score", "logprob"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairedScores:
    """Two models' scores on the same examples; higher is better in every metric.

    `ids` and `clusters` name each example and its session; `baseline` and `candidate` are float64 [examples], in
    [0, 1] where `unit` is "score", in nats where it is "logprob". `kind` chooses the gate's margin. Raises
    `EvalDataError` when lengths differ, an id repeats, or a value is not finite or out of its range.
    """

    metric: str
    kind: str
    unit: Unit
    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    baseline: Floats
    candidate: Floats
    baseline_name: str
    candidate_name: str

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.clusters), len(self.baseline), len(self.candidate)}
        if len(sizes) != 1:
            raise EvalDataError(f"{self.metric}: ids, clusters and both models' scores differ in number: {sizes}")
        if len(set(self.ids)) != len(self.ids):
            raise EvalDataError(f"{self.metric}: an example id occurs twice; ids must be unique within a metric")
        for name, values in ((self.baseline_name, self.baseline), (self.candidate_name, self.candidate)):
            if not np.isfinite(values).all():
                raise EvalDataError(f"{self.metric}: {name} has a score that is not a finite number")
            if self.unit == "score" and values.size and (values.min() < 0 or values.max() > 1):
                raise EvalDataError(f"{self.metric}: {name} has a score outside [0, 1]")


@dataclass(frozen=True)
class Estimate:
    """A mean paired difference and how sure it is. `centre` and `standard_error` are what tests use (see above)."""

    difference: float
    centre: float
    standard_error: float
    degrees: float
    examples: int
    clusters: int

    def lower(self, tail: float) -> float:
        """The one-sided lower confidence bound that is wrong with probability `tail`; -inf when nothing is known."""
        return self.centre - self._reach(tail)

    def upper(self, tail: float) -> float:
        """The one-sided upper confidence bound that is wrong with probability `tail`; +inf when nothing is known."""
        return self.centre + self._reach(tail)

    def p_above(self, null: float) -> float:
        """One-sided p-value of the hypothesis "the true difference is at most `null`"; 1.0 when nothing is known."""
        if math.isinf(self.standard_error):
            return 1.0
        if self.standard_error == 0:
            return 0.0 if self.centre > null else 1.0
        return upper_tail((self.centre - null) / self.standard_error, self.degrees)

    def _reach(self, tail: float) -> float:
        if math.isinf(self.standard_error):
            return math.inf
        return upper_quantile(tail, self.degrees) * self.standard_error


def paired_difference(scores: PairedScores) -> Estimate:
    """The clustered estimate of candidate minus baseline."""
    differences = scores.candidate - scores.baseline
    examples = len(differences)
    if examples == 0:
        return Estimate(0.0, 0.0, math.inf, 0.0, 0, 0)
    _, member_of = np.unique(np.asarray(scores.clusters), return_inverse=True)
    sizes = np.bincount(member_of).astype(np.float64)
    sums = np.bincount(member_of, weights=differences)
    clusters = len(sizes)
    effective = examples**2 / float((sizes**2).sum())
    extra_clusters, extra_size = (2.0, examples / clusters) if scores.unit == "score" else (0.0, 0.0)
    total = examples + extra_clusters * extra_size
    centre = float(sums.sum()) / total
    squares = float(((sums - sizes * centre) ** 2).sum()) + extra_size**2 * _pseudo_squares(centre)
    count = clusters + extra_clusters
    known = clusters >= 2 and effective > 1
    error = math.sqrt(count / (count - 1) * squares) / total if known else math.inf
    return Estimate(float(differences.mean()), centre, error, effective - 1, examples, clusters)


def _pseudo_squares(centre: float) -> float:
    """Squared deviations of the added clusters: half of one at +1, half at -1, one at 0."""
    return 0.5 * (1 - centre) ** 2 + 0.5 * (1 + centre) ** 2 + centre**2


@dataclass(frozen=True)
class HolmStep:
    """One test within its family: the level it must meet, and its p-value adjusted for the family."""

    level: float
    adjusted: float


def holm(p_values: Sequence[float], alpha: float) -> list[HolmStep]:
    """Holm's step-down correction (1979), in the order given.

    The k-th smallest of m p-values must be at most alpha / (m - k + 1), and so must all smaller ones. The chance of
    even one false claim in the family is at most `alpha`, whatever the dependence between the tests. All m claims
    stand together exactly when each meets its own `level`.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    steps = [HolmStep(alpha, 1.0)] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        remaining = len(p_values) - rank
        running = max(running, min(1.0, p_values[index] * remaining))
        steps[index] = HolmStep(alpha / remaining, running)
    return steps


def clusters_needed(estimate: Estimate, null: float, effect: float, tail: float, power: float) -> int | None:
    """How many clusters in all prove, with probability `power`, a true difference `effect` to lie above `null`.

    Uses the spread between clusters seen so far. None when `effect` is not above `null`, or when too little was
    seen to know the spread.
    """
    if effect <= null or math.isinf(estimate.standard_error):
        return None
    spread = estimate.standard_error * math.sqrt(estimate.clusters)
    distance, chance = (effect - null) / spread, NormalDist().inv_cdf(power)
    needed = math.ceil(((NormalDist().inv_cdf(1 - tail) + chance) / distance) ** 2)
    # The t quantile asks for a few more than the normal one, and depends on the answer: three rounds settle it.
    for _ in range(3):
        needed = math.ceil(((upper_quantile(tail, max(2, needed - 1)) + chance) / distance) ** 2)
    return max(3, needed)
