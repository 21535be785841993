"""The chance of return: what was seen, smoothed by a prior, and never out of bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.returns import Returns

SILENCES = st.lists(st.floats(min_value=0, max_value=1e9), max_size=30)


@given(ended=SILENCES, going_on=SILENCES, idle=st.floats(min_value=0, max_value=1e10))
def test_it_is_a_chance(ended: list[float], going_on: list[float], idle: float) -> None:
    assert 0.0 <= Returns(ended, going_on).chance(idle) <= 1.0


def test_without_a_past_a_session_fades_with_its_silence() -> None:
    returns = Returns()
    assert returns.chance(0) == pytest.approx(0.5)
    assert returns.chance(86_400) == pytest.approx(0.25)
    assert returns.chance(0) > returns.chance(3600) > returns.chance(30 * 86_400)


def test_a_past_outweighs_the_prior() -> None:
    # Everybody returns within a minute or not at all.
    returns = Returns([30.0] * 500, [10_000.0] * 500)
    assert returns.chance(10) == pytest.approx(0.5, abs=0.01)
    assert returns.chance(60) < 0.01
    # Everybody returns the next day.
    assert Returns([86_400.0] * 500).chance(3600) > 0.99


def test_silences_that_only_began_say_nothing_of_longer_ones() -> None:
    few = Returns([100.0] * 10, [5.0] * 1000)
    assert few.chance(50) == Returns([100.0] * 10).chance(50)
