"""Rotary position embedding of stored keys, undone and done again, with the same bits on every CPU.

Angles are counted in turns of 2^-64, so a position's angle is one wrapping multiplication. Sines come from a table
that integers alone make; what follows are single float32 operations, which IEEE 754 defines to the bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

ANGLE_BITS = 16
FRACTION_BITS = 60
PI = 3_622_009_729_038_561_421  # pi * 2^60


@cache
def _table() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of every angle of 2^-16 turns."""
    size = 1 << ANGLE_BITS
    eighth = [_cos_sin(2 * PI * place >> ANGLE_BITS) for place in range(size // 8 + 1)]
    quarter = eighth + [(sin, cos) for cos, sin in eighth[-2:0:-1]]  # a quarter's second half mirrors its first
    cos, sin = np.array(quarter, np.int64).T
    cos, sin = np.concatenate((cos, -sin, -cos, sin)), np.concatenate((sin, cos, -sin, -cos))
    return tuple(np.ldexp(each.astype(np.float32), -FRACTION_BITS) for each in (cos, sin))  # type: ignore[return-value]


def _cos_sin(angle: int) -> tuple[int, int]:
    """Taylor's series of an angle up to pi / 4, all numbers times 2^60."""
    cos, sin, power = 0, 0, 1 << FRACTION_BITS
    for order in range(24):
        if order % 2:
            sin += -power if order % 4 == 3 else power
        else:
            cos += -power if order % 4 == 2 else power
        power = (power * angle >> FRACTION_BITS) // (order + 1)
    return cos, sin


def turns_of(radians_per_token: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Frequencies, in 2^-64 turns a position. They are part of a basis, not computed where it is used."""
    scale = (1 << (FRACTION_BITS + 64)) // (2 * PI)
    return np.array([int(each * 2.0**52) * scale >> 52 & (1 << 64) - 1 for each in radians_per_token], np.uint64)


def cos_sin(turns: NDArray[np.uint64], start: int, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine [tokens, pairs] at positions start, start + 1, ..."""
    positions = np.arange(start, start + tokens, dtype=np.uint64)[:, None]
    half = np.uint64(1 << (63 - ANGLE_BITS))
    angles = ((positions * turns + half) >> np.uint64(64 - ANGLE_BITS)).astype(np.int64)
    cos, sin = _table()
    return cos[angles], sin[angles]


def rotate(numbers: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotates `numbers` [heads, tokens, dim], pairing the first half of the dimensions with the second."""
    half = numbers.shape[-1] // 2
    first, second = numbers[..., :half], numbers[..., half:]
    rotated = np.empty_like(numbers)
    np.subtract(first * cos, second * sin, out=rotated[..., :half])
    np.add(second * cos, first * sin, out=rotated[..., half:])
    return rotated
