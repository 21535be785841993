from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.student import upper_quantile, upper_tail


@pytest.mark.parametrize(
    ("tail", "degrees", "quantile"),
    [
        # From printed tables of Student's t distribution.
        (0.025, 1, 12.7062),
        (0.05, 2, 2.9200),
        (0.025, 5, 2.5706),
        (0.005, 10, 3.1693),
        (0.05, 30, 1.6973),
        (0.025, 120, 1.9799),
    ],
)
def test_quantiles_match_printed_tables(tail: float, degrees: float, quantile: float) -> None:
    assert upper_quantile(tail, degrees) == pytest.approx(quantile, abs=5e-5)


def test_one_degree_is_cauchy() -> None:
    for t in (-3.0, -0.2, 0.0, 1.0, 50.0):
        assert upper_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.3, 1e5))
def test_quantile_inverts_tail(tail: float, degrees: float) -> None:
    assert upper_tail(upper_quantile(tail, degrees), degrees) == pytest.approx(tail, rel=1e-6)


@given(st.floats(-50, 50), st.floats(0.3, 1e5))
def test_tails_are_symmetric(t: float, degrees: float) -> None:
    assert upper_tail(t, degrees) + upper_tail(-t, degrees) == pytest.approx(1.0)


@pytest.mark.parametrize("degrees", [0.0, -1.0, math.nan])
def test_degrees_must_be_positive(degrees: float) -> None:
    with pytest.raises(ValueError, match="degrees of freedom"):
        upper_tail(1.0, degrees)
