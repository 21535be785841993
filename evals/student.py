"""Student's t distribution in plain Python, so that the gate needs no scientific package.

The tail is the regularised incomplete beta function, evaluated by its continued fraction with the modified Lentz
method (Numerical Recipes, 3rd ed., section 6.4). Degrees of freedom may be any real number above 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_MOST_TERMS = 500
_TINY = 1e-300
_CLOSE = 1e-15


def upper_tail(t: float, degrees: float) -> float:
    """P(T > t) for Student's t with `degrees` > 0 degrees of freedom. Raises ValueError for other degrees."""
    if not degrees > 0:
        raise ValueError(f"degrees of freedom must be above 0, not {degrees}")
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return half if t >= 0 else 1.0 - half


@lru_cache(maxsize=4096)
def upper_quantile(tail: float, degrees: float) -> float:
    """The t with P(T > t) = `tail`, for 0 < tail < 1; Newton's method kept inside a bracket, to 1e-12 relative."""
    if not 0 < tail < 1:
        raise ValueError(f"a tail probability lies between 0 and 1, not at {tail}")
    if tail > 0.5:
        return -upper_quantile(1 - tail, degrees)
    low, high = 0.0, max(1.0, NormalDist().inv_cdf(1 - tail))
    while (above := upper_tail(high, degrees)) > tail:
        low, high = high, 2 * high
    t = high
    while high - low > 1e-12 * max(1.0, high):
        step = (above - tail) / _density(t, degrees)
        t = t + step if low < t + step < high else (low + high) / 2
        if abs(step) <= 1e-12 * max(1.0, t):
            break
        above = upper_tail(t, degrees)
        low, high = (t, high) if above > tail else (low, t)
    return t


def _density(t: float, degrees: float) -> float:
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(scale - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) for 0 <= x <= 1."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return scale * _continued_fraction(a, b, x) / a
    return 1.0 - scale * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function; converges for x below its mean."""
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / _away_from_zero(1 + even * d)
        c = _away_from_zero(1 + even / c)
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / _away_from_zero(1 + odd * d)
        c = _away_from_zero(1 + odd / c)
        step = d * c
        value *= step
        if abs(step - 1) < _CLOSE:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
