"""The gate: may this version become champion? It says `pass`, `fail` or `inconclusive`, and why in plain words.

The mathematics. Write d for the true mean difference candidate - reference of a metric, higher being better.

- Target (held-out demonstrations, against the champion): superiority. H0: d <= 0.
- Every guard (against the base model, so that losses do not add up over many promotions): non-inferiority.
  H0: d <= -margin. For perplexity d is the difference of mean log-prob per token, and a perplexity ratio of at most
  r means a margin of ln(r) nats.

Each H0 is tested one-sided with a clustered t statistic (`evals.stats`). A version passes only when **every** H0 is
rejected. Were one of them true, passing would mean rejecting a true hypothesis, so its chance is at most `alpha`
already (an intersection-union test). On top of that the levels follow Holm's correction, so that the single claims
of the report ("not worse in knowledge") hold together: the chance of even one false claim is at most `alpha`. The
lower bounds shown are one-sided bounds at each test's Holm level; all H0 are rejected exactly when every lower
bound lies above its null value.

Three verdicts:

- `fail`: there is proof against the version. A guard's upper bound lies below -margin, or the target's lies below
  `smallest_gain`: even in the best case the gain is not worth a swap. These upper bounds use `alpha` undivided: a
  wrong refusal costs a retry, a wrong promotion costs users.
- `pass`: no such proof, enough data everywhere, every H0 rejected, no required guard missing.
- `inconclusive`: everything else, with the number of sessions or examples that would probably decide.

Strength, by simulation with the defaults, on right-or-wrong held-out scores of sessions with 1 to 3 examples, beside
guards of the bundled sizes with spreads as measured on a small model:

- Without any effect, 2.5% of candidates pass with 60 sessions, 1.4% with 20, 0.4% with 9.
- With 60 sessions, a true gain of 0.10 passes in 30%, of 0.20 in 83%, of 0.30 in 98% of cases; with 20 sessions, one
  of 0.30 in 61% and one from 0.40 to 0.95 in 98%.
- Exactly one margin worse on one guard, at most 2.2% pass, however great the gain. Truly 2% more perplexity and 5
  points less in format, beside a great gain, pass in 80%: a recipe needs some distance to the margins.

tests/evals/test_gate_strength.py repeats the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from evals.results import EvalResult
from evals.settings import GateSettings
from evals.stats import Estimate, HolmStep, PairedScores, clusters_needed, holm, paired_difference

Verdict = Literal["pass", "fail", "inconclusive"]
Role = Literal["target", "guard"]


class MetricDecision(BaseModel):
    """One metric's evidence. Differences are candidate minus reference, in shares of the full score or in nats."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    role: Role
    verdict: Verdict
    reason: str
    unit: str
    reference: str
    candidate: str
    reference_mean: float | None
    candidate_mean: float | None
    difference: float
    lower: float | None
    upper: float | None
    null: float
    level: float
    p_value: float
    p_adjusted: float
    standard_error: float | None
    degrees: float
    examples: int
    clusters: int
    clusters_needed: int | None


class Decision(BaseModel):
    """The verdict, the reasons in plain words (most important first) and each metric's evidence. JSON-able."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Verdict
    reasons: list[str]
    metrics: list[MetricDecision]
    settings: GateSettings

    @property
    def passed(self) -> bool:
        """True only for `pass`."""
        return self.verdict == "pass"


def decide(target: PairedScores, guards: Sequence[PairedScores], settings: GateSettings) -> Decision:
    """Decides from the candidate's scores against the champion (target) and against the base (guards).

    Raises KeyError for a guard whose kind has no margin. See the module's docstring for the rule.
    """
    scores = [target, *guards]
    nulls = [0.0, *(-settings.margin(guard.kind) for guard in guards)]
    estimates = [paired_difference(each) for each in scores]
    p_values = [estimate.p_above(null) for estimate, null in zip(estimates, nulls, strict=True)]
    steps = holm(p_values, settings.alpha)
    metrics = [
        _judge(each, "target" if index == 0 else "guard", estimates[index], nulls[index], steps[index], settings)
        for index, each in enumerate(scores)
    ]
    present = {guard.metric for guard in guards}
    missing = [name for name in settings.required_guards if name not in present]
    return Decision(
        verdict=_verdict(metrics, missing), reasons=_reasons(metrics, missing), metrics=metrics, settings=settings
    )


def judge(result: EvalResult, settings: GateSettings) -> Decision:
    """Decides on an evaluation: held-out scores against its champion, every guard against its base model."""
    return decide(result.target(), result.guards(), settings)


def _verdict(metrics: Sequence[MetricDecision], missing: Sequence[str]) -> Verdict:
    if any(metric.verdict == "fail" for metric in metrics):
        return "fail"
    if missing or any(metric.verdict == "inconclusive" for metric in metrics):
        return "inconclusive"
    return "pass"


def _reasons(metrics: Sequence[MetricDecision], missing: Sequence[str]) -> list[str]:
    order: dict[Verdict, int] = {"fail": 0, "inconclusive": 1, "pass": 2}
    worst_first = sorted(metrics, key=lambda metric: order[metric.verdict])
    reasons = [f"{metric.metric}: {metric.reason}" for metric in worst_first]
    absent = [f"{name}: this required guard was not measured" for name in missing]
    failures = sum(metric.verdict == "fail" for metric in metrics)
    return reasons[:failures] + absent + reasons[failures:]


def _judge(
    scores: PairedScores, role: Role, estimate: Estimate, null: float, step: HolmStep, settings: GateSettings
) -> MetricDecision:
    lower, upper = estimate.lower(step.level), estimate.upper(settings.alpha)
    refused_below = settings.smallest_gain if role == "target" else null
    enough = estimate.clusters >= settings.min_clusters and estimate.examples >= settings.min_examples
    verdict: Verdict
    if enough and upper < refused_below:
        verdict = "fail"
    elif enough and lower > null:
        verdict = "pass"
    else:
        verdict = "inconclusive"
    needed = _needed(role, estimate, null, step.level, settings) if verdict == "inconclusive" else None
    metric = MetricDecision(
        metric=scores.metric,
        role=role,
        verdict=verdict,
        reason="",
        unit=scores.unit,
        reference=scores.baseline_name,
        candidate=scores.candidate_name,
        reference_mean=float(scores.baseline.mean()) if estimate.examples else None,
        candidate_mean=float(scores.candidate.mean()) if estimate.examples else None,
        difference=estimate.difference,
        lower=_finite(lower),
        upper=_finite(upper),
        null=null,
        level=step.level,
        p_value=estimate.p_above(null),
        p_adjusted=step.adjusted,
        standard_error=_finite(estimate.standard_error),
        degrees=estimate.degrees,
        examples=estimate.examples,
        clusters=estimate.clusters,
        clusters_needed=needed,
    )
    return metric.model_copy(update={"reason": _explain(metric, scores.kind, settings)})


def _needed(role: Role, estimate: Estimate, null: float, level: float, settings: GateSettings) -> int | None:
    """Sessions that would probably decide; None when no number would, by what was seen."""
    # A guard is planned for a version that loses nothing, the target for one that gains what was seen.
    effect = max(0.0, estimate.centre) if role == "guard" else estimate.centre
    needed = clusters_needed(estimate, null, effect, level, settings.power)
    if estimate.clusters < settings.min_clusters:
        return max(needed or 0, settings.min_clusters)
    return needed


def _explain(metric: MetricDecision, kind: str, settings: GateSettings) -> str:
    """One sentence on why this metric was judged so."""
    show = _as_ratio if kind == "perplexity" else _as_points
    things = "sessions" if metric.role == "target" else "examples"
    allowed = f"the {show(metric.null)} that is accepted"
    worst = "" if metric.lower is None else f", at worst {show(metric.lower)}"
    seen = f"{metric.candidate} against {metric.reference}: {show(metric.difference)}{worst}"
    if metric.verdict == "pass":
        return f"{seen}; " + (
            "the gain is proven" if metric.role == "target" else f"proven to lose less than {allowed}"
        )
    if metric.verdict == "fail":
        best = "even at best" if metric.upper is None else f"even at best {show(metric.upper)}"
        gain = f"less than the smallest gain worth a swap ({show(settings.smallest_gain)})"
        return f"{seen}; {best}, " + (gain if metric.role == "target" else f"worse than {allowed}")
    goal = "a gain" if metric.role == "target" else f"that it loses less than {allowed}"
    if metric.clusters < settings.min_clusters or metric.examples < settings.min_examples:
        return (
            f"{seen}; too little data to prove {goal}: {metric.examples} examples in {metric.clusters} sessions,"
            f" and at least {settings.min_examples} in {settings.min_clusters} are needed"
        )
    missing = (metric.clusters_needed or 0) - metric.clusters
    more = f"; about {missing} more {things} would probably decide" if missing > 0 else ""
    return f"{seen}; not enough to prove {goal}{more}"


def _as_points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def _as_ratio(log_prob_difference: float) -> str:
    return (
        f"perplexity x {math.exp(-log_prob_difference):.3f}" if abs(log_prob_difference) < 700 else "perplexity x inf"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
