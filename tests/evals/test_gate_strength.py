"""The gate's error rate and power, by simulation. Seeds are fixed; the rates are those the gate's docstring states."""

from __future__ import annotations

import numpy as np

from evals.gate import decide
from evals.settings import GateSettings
from evals.stats import PairedScores

SETTINGS = GateSettings()
GUARD_SIZES = {"knowledge": 120, "format": 60, "perplexity": 20}
# Spread of the paired differences, as measured between a small model and its fine-tuned versions.
SPREADS = {"knowledge": 0.11, "format": 0.25, "perplexity": 0.04}


def _paired(metric: str, kind: str, clusters: np.ndarray, baseline: np.ndarray, candidate: np.ndarray) -> PairedScores:
    return PairedScores(
        metric=metric,
        kind=kind,
        unit="logprob" if kind == "perplexity" else "score",
        ids=tuple(map(str, range(len(clusters)))),
        clusters=tuple(map(str, clusters)),
        baseline=baseline,
        candidate=candidate,
        baseline_name="reference",
        candidate_name="candidate",
    )


def _target(random: np.random.Generator, sessions: int, gain: float) -> PairedScores:
    """Right or wrong answers; half of a model's luck is the session's, half the example's own."""
    clusters = np.repeat(np.arange(sessions), random.integers(1, 4, sessions))
    easiness = 0.8 * random.random(sessions)[clusters]
    together = [random.random(sessions)[clusters] for _ in range(2)]
    alone = [random.random(len(clusters)) for _ in range(2)]
    luck = [np.where(random.random(len(clusters)) < 0.5, t, a) for t, a in zip(together, alone, strict=True)]
    return _paired(
        "heldout",
        "target",
        clusters,
        (luck[0] < easiness).astype(float),
        (luck[1] < easiness + gain).astype(float),
    )


def _guards(random: np.random.Generator, losses: dict[str, float]) -> list[PairedScores]:
    guards = []
    for kind, size in GUARD_SIZES.items():
        # Two-point noise keeps scores inside [0, 1], so that the mean loss is exactly the one asked for.
        noise = SPREADS[kind] * random.choice([-1.0, 1.0], size)
        baseline = random.normal(-2.6, 0.4, size) if kind == "perplexity" else random.uniform(0.45, 0.55, size)
        candidate = baseline - losses.get(kind, 0.0) + noise
        guards.append(_paired(kind, kind, np.arange(size), baseline, candidate))
    return guards


def _promoted(count: int, sessions: int, gain: float, losses: dict[str, float] | None = None) -> float:
    random = np.random.default_rng(20)
    verdicts = [
        decide(_target(random, sessions, gain), _guards(random, losses or {}), SETTINGS).verdict for _ in range(count)
    ]
    return verdicts.count("pass") / count


def test_candidates_without_effect_are_promoted_in_at_most_five_percent() -> None:
    assert _promoted(1000, sessions=60, gain=0.0) <= 0.05


def test_few_sessions_do_not_raise_the_error_rate() -> None:
    assert _promoted(500, sessions=9, gain=0.0) <= 0.05


def test_a_clear_gain_is_promoted() -> None:
    assert _promoted(200, sessions=60, gain=0.2) >= 0.8


def test_a_loss_of_one_margin_is_not_promoted_however_great_the_gain() -> None:
    for kind in GUARD_SIZES:
        assert _promoted(200, sessions=60, gain=0.2, losses={kind: SETTINGS.margin(kind)}) <= 0.05
