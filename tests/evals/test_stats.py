from __future__ import annotations

import math
from statistics import stdev

import numpy as np
import pytest

from evals.errors import EvalDataError
from evals.stats import clusters_needed, holm, paired_difference
from tests.evals.fakes import paired


def test_independent_log_probs_give_the_textbook_standard_error() -> None:
    differences = [0.3, -0.1, 0.25, 0.4, 0.05, -0.2]
    estimate = paired_difference(paired([0.0] * 6, differences, unit="logprob"))
    assert estimate.difference == estimate.centre == pytest.approx(np.mean(differences))
    assert estimate.standard_error == pytest.approx(stdev(differences) / math.sqrt(6))
    assert estimate.degrees == pytest.approx(5)


def test_copies_of_a_session_buy_no_certainty() -> None:
    differences = [0.3, -0.1, 0.25, 0.4]
    once = paired_difference(paired([0.0] * 4, differences, unit="logprob"))
    copied = paired_difference(
        paired([0.0] * 40, np.repeat(differences, 10).tolist(), unit="logprob", clusters=np.repeat(range(4), 10))
    )
    assert copied.standard_error == pytest.approx(once.standard_error)
    assert copied.degrees == pytest.approx(once.degrees)
    assert (copied.examples, copied.clusters) == (40, 4)


def test_a_session_that_dominates_lowers_the_degrees_of_freedom() -> None:
    even = paired_difference(paired([0.0] * 8, [0.1] * 8, clusters=[0, 0, 1, 1, 2, 2, 3, 3]))
    uneven = paired_difference(paired([0.0] * 8, [0.1] * 8, clusters=[0, 0, 0, 0, 0, 1, 2, 3]))
    assert even.degrees == pytest.approx(3)
    assert uneven.degrees < 2


def test_unanimous_scores_are_not_certain() -> None:
    few = paired_difference(paired([0.0] * 4, [1.0] * 4))
    many = paired_difference(paired([0.0] * 40, [1.0] * 40))
    assert few.difference == many.difference == 1.0
    assert few.p_above(0.0) > 0.025 > many.p_above(0.0)
    tied = paired_difference(paired([0.5] * 10, [0.5] * 10))
    assert tied.lower(0.025) < -0.1


@pytest.mark.parametrize("size", [0, 1, 5])
def test_one_session_knows_nothing(size: int) -> None:
    estimate = paired_difference(paired([0.0] * size, [1.0] * size, clusters=["only"] * size))
    assert estimate.p_above(0.0) == 1.0
    assert (estimate.lower(0.025), estimate.upper(0.025)) == (-math.inf, math.inf)


def test_holm_gives_levels_and_adjusted_values_in_the_order_given() -> None:
    steps = holm([0.01, 0.04, 0.03, 0.005], 0.05)
    assert [step.level for step in steps] == pytest.approx([0.05 / 3, 0.05, 0.05 / 2, 0.05 / 4])
    assert [step.adjusted for step in steps] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([], 0.05) == []


def test_needed_sessions_grow_as_effects_shrink() -> None:
    random = np.random.default_rng(2)
    estimate = paired_difference(paired([0.0] * 40, random.beta(0.3, 2.7, 40).tolist()))
    small, large = (clusters_needed(estimate, 0.0, effect, 0.025, 0.8) for effect in (0.05, 0.2))
    assert small is not None
    assert large is not None
    assert small > 4 * large
    spread = estimate.standard_error * math.sqrt(40)
    assert small == pytest.approx(((1.96 + 0.84) * spread / 0.05) ** 2, rel=0.05)
    assert clusters_needed(estimate, 0.0, -0.01, 0.025, 0.8) is None


def test_unusable_scores_are_refused() -> None:
    with pytest.raises(EvalDataError, match="not a finite number"):
        paired([0.0, 0.0], [math.nan, 0.0])
    with pytest.raises(EvalDataError, match=r"outside \[0, 1\]"):
        paired([0.0, 0.0], [1.5, 0.0])
    with pytest.raises(EvalDataError, match="differ in number"):
        paired([0.0, 0.0], [0.5])
