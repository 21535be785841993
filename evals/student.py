"""Student's t distribution, as the gate asks for it. Degrees of freedom may be any real number above 0."""

from __future__ import annotations

from scipy.special import stdtr, stdtrit


def upper_tail(t: float, degrees: float) -> float:
    """P(T > t) for Student's t with `degrees` > 0 degrees of freedom. Raises ValueError for other degrees."""
    if not degrees > 0:
        raise ValueError(f"degrees of freedom must be above 0, not {degrees}")
    return float(stdtr(degrees, -t))  # by symmetry: no cancellation in a small tail


def upper_quantile(tail: float, degrees: float) -> float:
    """The t with P(T > t) = `tail`, for 0 < tail < 1. Raises ValueError for another tail."""
    if not 0 < tail < 1:
        raise ValueError(f"a tail probability lies between 0 and 1, not at {tail}")
    return -float(stdtrit(degrees, tail))
