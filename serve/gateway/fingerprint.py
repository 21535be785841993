"""Proof that a worker runs the weights it was told to: log-probabilities of fixed probes, compared with the trainer's.

An adapter that was not applied gives the base's numbers; another adapter gives others again. Both are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# An adapter must be at least this many times nearer to the trainer's numbers than to the base's.
_NEARER = 2.0


@dataclass(frozen=True)
class Probe:
    """Token ids with the log-probabilities of each after the first, under the adapter and under the base."""

    token_ids: tuple[int, ...]
    adapter_logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Fingerprint:
    """The probes of one adapter; `tolerance` is a mean absolute difference in nats."""

    probes: tuple[Probe, ...]
    tolerance: float

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Fingerprint:
        """From a manifest's `fingerprint`. Raises `ValueError` when it cannot prove anything."""
        try:
            probes = tuple(
                Probe(
                    tuple(int(token_id) for token_id in probe["token_ids"]),
                    _numbers(probe["adapter_logprobs"], len(probe["token_ids"]) - 1),
                    _numbers(probe["base_logprobs"], len(probe["token_ids"]) - 1),
                )
                for probe in given["probes"]
            )
            tolerance = float(given["tolerance"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the fingerprint cannot be read: {error!r}") from error
        if not probes:
            raise ValueError("the fingerprint has no probes")
        return cls(probes, tolerance)


@dataclass(frozen=True)
class Proof:
    """The outcome of a comparison: mean absolute differences in nats to the trainer's and to the base's numbers."""

    holds: bool
    to_adapter: float
    to_base: float
    reason: str


def compare(fingerprint: Fingerprint, measured: Sequence[Sequence[float]]) -> Proof:
    """Compares a worker's numbers (one list for each probe) with the fingerprint's."""
    to_adapter = _distance(measured, [probe.adapter_logprobs for probe in fingerprint.probes])
    to_base = _distance(measured, [probe.base_logprobs for probe in fingerprint.probes])
    if not to_adapter <= fingerprint.tolerance:
        reason = f"log-probs differ from the trainer's by {to_adapter:.4f} on average, over {fingerprint.tolerance}"
    elif not to_adapter * _NEARER <= to_base:
        reason = f"log-probs are no nearer to the adapter's ({to_adapter:.4f}) than to the base's ({to_base:.4f})"
    else:
        return Proof(True, to_adapter, to_base, "")
    return Proof(False, to_adapter, to_base, reason)


def _distance(measured: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    differences = [
        abs(one - other)
        for ours, theirs in zip(measured, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return math.fsum(differences) / len(differences) if differences else math.inf


def _numbers(given: Sequence[float | None], count: int) -> tuple[float, ...]:
    # The first token has no log-probability; some writers keep its place with null.
    values = [value for value in given[-count:] if value is not None]
    if len(values) != count or not all(math.isfinite(value) for value in values):
        raise ValueError(f"expected {count} finite log-probabilities, got {len(given)}")
    return tuple(float(value) for value in values)
