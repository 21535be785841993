"""Measures the basis of the compact codec: from KV of real text, and from how much the model's output reacts to it.

The metric of a layer's keys or values is the Fisher information of the next tokens about them, E[g g^T] with g the
gradient of a log-probability: an error d moves the distribution by d^T F d / 2 nats. In coordinates where the metric
is the identity, the principal components with one common step are the best that a linear transform and a scalar
quantiser can do (reverse water-filling). Errors are not small here, and those of a token's neighbours are alike, so
the metric is mixed with the identity, spread further between layers, and leans to values: the three constants below
were chosen by measuring the divergence itself.

Rounding is to the nearest: a dead zone saves fewer bits than it costs, for it shrinks keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memory.kv.codec.base import KVArray
from memory.kv.codec.basis import Basis, Group
from memory.kv.codec.compact import LARGEST_SUM, SYNTHESIS_LIMIT, to_float32
from memory.kv.codec.compact_rans import RADIUS_LIMIT, frequencies_of
from memory.kv.codec.compact_rotation import cos_sin, rotate

DEFAULT_BITS = 1.1
"""Coded bits a number, of tokens that are not kept better."""
IDENTITY_SHARE = 1.0
LAYER_EXPONENT = 1.2
VALUES_OVER_KEYS = 4.0
SINK_TOKENS = 4
"""The first tokens of a sequence are unlike all others, and are not coded by the transform."""
SEARCH_TOKENS = 1024
LEAST_MEAN = 0.0007
"""Coefficients that are rounded to zero more often than this are left out."""
CLASSES, CLASSES_PER_OCTAVE, LOWEST_OCTAVE = 48, 2, -11
MOST_LOW_BITS = 7
INPUT_BITS = 15
INT16_LIMIT = 32767

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """KV [layers, 2, kv_heads, tokens, head_dim] of consecutive tokens at positions start, start + 1, ..."""

    kv: KVArray
    start: int = 0


@dataclass(frozen=True)
class _Transform:
    mean: NDArray[np.float32]
    analysis: Matrix
    synthesis: Matrix


def calibrate(
    samples: Sequence[Sample], metrics: Matrix | None, turns: NDArray[np.uint64], bits: float = DEFAULT_BITS
) -> Basis:
    """The basis that codes text like `samples` with `bits` bits a number.

    `metrics` [layers, 2, width, width], width = kv_heads head_dim, of keys without rotation; None weighs all alike.
    `turns`: see `compact_rotation.turns_of`; empty where nothing is rotated. Some thousand tokens are enough.
    """
    layers, _, kv_heads, _, head_dim = samples[0].kv.shape
    weights = _weights(metrics, layers, kv_heads * head_dim)
    transforms = [
        _transform(_numbers(samples, place, turns), weights[place // 2, place % 2]) for place in range(2 * layers)
    ]
    step = _step(samples, transforms, turns, bits)
    counts = np.zeros((CLASSES, 2 * RADIUS_LIMIT + 1))
    groups = [
        _group(_numbers(samples, place, turns), transform, step, counts) for place, transform in enumerate(transforms)
    ]
    used = sorted({int(each) for group in groups for each in group.classes})
    renamed = np.zeros(CLASSES, np.uint8)
    renamed[used] = np.arange(len(used))
    return Basis(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        turns=turns,
        groups=tuple(_with_classes(group, renamed[group.classes]) for group in groups),
        frequencies=tuple(frequencies_of(counts[place]) for place in used),
        low_bits=tuple(_low_bits(place) for place in used),
    )


def _numbers(samples: Sequence[Sample], place: int, turns: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Keys without rotation, or values, of one layer [tokens, width]; tokens that hold no number are left out."""
    parts = []
    for sample in samples:
        first = max(0, SINK_TOKENS - sample.start)
        numbers = to_float32(sample.kv[place // 2, place % 2][:, first:])
        if len(turns) and place % 2 == 0:
            cos, sin = cos_sin(turns, sample.start + first, numbers.shape[1])
            numbers = rotate(numbers, cos, -sin)
        parts.append(numbers.transpose(1, 0, 2).reshape(numbers.shape[1], -1))
    together = np.concatenate(parts)
    return together[np.isfinite(together).all(axis=1)]


def _weights(metrics: Matrix | None, layers: int, width: int) -> Matrix:
    """The metrics made positive definite, with the layers' strengths spread around those of keys and of values."""
    if metrics is None:
        return np.broadcast_to(np.eye(width), (layers, 2, width, width))
    strength = np.maximum(np.trace(metrics, axis1=-2, axis2=-1) / width, 1e-30)
    middle = np.exp(np.log(strength).mean(axis=0))
    lean = np.array([VALUES_OVER_KEYS**-0.5, VALUES_OVER_KEYS**0.5])
    wanted = (strength / middle) ** LAYER_EXPONENT * middle * lean
    weights: Matrix = metrics / strength[..., None, None] + IDENTITY_SHARE * np.eye(width)
    weights *= wanted[..., None, None]
    return weights


def _transform(numbers: NDArray[np.float32], weight: Matrix) -> _Transform:
    """Principal components where `weight` is the metric; both matrices for a step of one."""
    mean = numbers.mean(axis=0, dtype=np.float64)
    centred = (numbers - mean).astype(np.float64)
    values, vectors = np.linalg.eigh(weight)
    roots = np.sqrt(np.maximum(values, values.max() * 1e-9))
    straighten, bend = (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
    covariance = straighten @ (centred.T @ centred / max(1, len(centred))) @ straighten
    components = np.linalg.eigh(covariance)[1][:, ::-1]
    return _Transform(mean.astype(np.float32), straighten @ components, components.T @ bend)


def _step(samples: Sequence[Sample], transforms: Sequence[_Transform], turns: NDArray[np.uint64], bits: float) -> float:
    """The common step at which the coefficients have `bits` bits of entropy."""
    parts = []
    for place, transform in enumerate(transforms):
        numbers = _numbers(samples, place, turns)
        some = numbers[:: -(-len(numbers) // SEARCH_TOKENS)]
        parts.append(((some - transform.mean) @ transform.analysis).astype(np.float32))
    coefficients = np.concatenate(parts, axis=1)
    largest = float(np.abs(coefficients).max()) or 1.0
    low, high = np.log(largest / LARGEST_SUM), np.log(2.0 * largest)
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy(coefficients / np.float32(np.exp(middle))) > bits else (low, middle)
    return float(np.exp(high))


def _entropy(scaled: NDArray[np.float32]) -> float:
    """Bits a number of the rounded coefficients, each coded with the frequencies of its class."""
    rounded = np.rint(scaled).astype(np.int32)
    classes = _classes(np.abs(rounded).mean(axis=0))
    total = 0.0
    for place in np.unique(classes):
        values = rounded[:, classes == place]
        shares = np.bincount((values - values.min()).ravel()) / values.size
        shares = shares[shares > 0]
        total -= float((shares * np.log2(shares)).sum()) * values.size
    return total / rounded.size


def _classes(means: NDArray[np.float64]) -> NDArray[np.int64]:
    """The class of coefficients whose absolute value is `means` on average."""
    octaves = np.log2(np.maximum(means, 2.0**LOWEST_OCTAVE)) - LOWEST_OCTAVE
    return np.minimum((octaves * CLASSES_PER_OCTAVE).astype(np.int64), CLASSES - 1)


def _low_bits(place: int) -> int:
    """Bits of a class's numbers that are as good as random, and coded apart."""
    return min(MOST_LOW_BITS, max(0, place // CLASSES_PER_OCTAVE + LOWEST_OCTAVE - 1))


def _group(numbers: NDArray[np.float32], transform: _Transform, step: float, counts: Matrix) -> Group:
    """The integer transform at this step, of the coefficients that are worth coding; adds to the classes' counts."""
    rounded = np.rint((numbers - transform.mean) @ (transform.analysis / step))
    means = np.abs(rounded).mean(axis=0)
    chosen = means > LEAST_MEAN
    chosen[means.argmax()] = True
    classes = _classes(means[chosen])
    for place, values in zip(classes.tolist(), rounded[:, chosen].T.astype(np.int64), strict=True):
        bits = _low_bits(place)
        high = (values + (1 << bits >> 1)) >> bits
        inside = high[np.abs(high) <= RADIUS_LIMIT]
        counts[place] += np.bincount(inside + RADIUS_LIMIT, minlength=2 * RADIUS_LIMIT + 1)
    analysis, synthesis = transform.analysis[:, chosen] / step, transform.synthesis[chosen] * step
    largest = float(np.abs(numbers - transform.mean).max())
    analysis_scale, synthesis_scale = _scale(analysis, INT16_LIMIT), _scale(synthesis, SYNTHESIS_LIMIT)
    return Group(
        input_scale=INPUT_BITS - int(np.ceil(np.log2(max(largest, 1e-30)))),
        analysis_scale=analysis_scale,
        synthesis_scale=synthesis_scale,
        mean=transform.mean,
        analysis=np.rint(np.ldexp(analysis, analysis_scale)).astype(np.int16),
        synthesis=np.rint(np.ldexp(synthesis, synthesis_scale)).astype(np.int16),
        classes=classes.astype(np.uint8),
    )


def _scale(matrix: Matrix, limit: int) -> int:
    """The power of two that brings the largest entry up to `limit`."""
    return int(np.floor(np.log2(limit / max(float(np.abs(matrix).max()), 1e-30))))


def _with_classes(group: Group, classes: NDArray[np.uint8]) -> Group:
    return Group(
        group.input_scale,
        group.analysis_scale,
        group.synthesis_scale,
        group.mean,
        group.analysis,
        group.synthesis,
        classes,
    )
