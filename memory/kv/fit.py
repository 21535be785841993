"""Costs learned from measurements: how many seconds each unit of each kind of work takes.

Several kinds add up in one measurement (opening files, reading bytes, decoding tokens), so they are fitted together:
least squares of the relative error over costs above zero, by multiplicative updates (Lee and Seung's). These begin at
what was expected and keep its proportions wherever the measurements leave them open. Old measurements fade as new ones
of the same kinds come, by half every `HALF_LIFE` of them. One wild measurement moves an estimate by no more than a few
times: machines stall.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

HALF_LIFE = 8
PULL = 1e-12
"""Weight of the expectation against one measurement: no more than keeps what was never measured as expected."""
TRUSTED_AFTER = 3
WILD = 8.0
"""Once measured `TRUSTED_AFTER` times, a cost is not believed to have changed by more than this factor at once."""
ROUNDS = 100


class Fit:
    """Seconds for each unit of each kind. Not thread-safe."""

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._places = {kind: place for place, kind in enumerate(expected)}
        self._expected = np.array(list(expected.values()))
        self._factors = np.ones(len(expected))  # of the expected costs
        self._counts = np.zeros(len(expected), int)
        # Sums over measurements, where a share is what a kind was expected to take of it.
        self._shares = np.zeros(len(expected))
        self._products = np.zeros((len(expected), len(expected)))
        self._stale = False

    def expect(self, expected: Mapping[str, float]) -> None:
        """Replaces what is expected, before the first measurement; later this changes nothing."""
        if not self._counts.any():
            for kind, cost in expected.items():
                self._expected[self._places[kind]] = cost

    def observe(self, units: Mapping[str, float], seconds: float) -> None:
        """Takes one measurement in; one of no work or no time is ignored."""
        work = self._vector(units)
        at = work > 0
        if not at.any() or not seconds > 0:
            return
        if self._counts[at].min() >= TRUSTED_AFTER:
            before = self.seconds(units)
            seconds = min(max(seconds, before / WILD), before * WILD)
        shares = work * self._expected / seconds
        kept = np.where(at, 0.5 ** (0.5 / HALF_LIFE), 1.0)
        self._products = self._products * np.outer(kept, kept) + np.outer(shares, shares)
        self._shares = self._shares * kept**2 + shares
        self._counts += at
        self._stale = True

    def seconds(self, units: Mapping[str, float]) -> float:
        """What that work is estimated to take."""
        if self._stale:
            self._solve()
        return sum(count * self.cost(kind) for kind, count in units.items())

    def cost(self, kind: str) -> float:
        """Seconds for a unit of `kind`, as expected where it was never measured."""
        if self._stale:
            self._solve()
        place = self._places[kind]
        return float(self._factors[place] * self._expected[place])

    def measured(self, kind: str) -> bool:
        """Whether `kind` was measured at all."""
        return bool(self._counts[self._places[kind]])

    def _vector(self, units: Mapping[str, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        work = np.zeros(len(self._places))
        for kind, count in units.items():
            work[self._places[kind]] = count
        return work

    def _solve(self) -> None:
        self._stale = False
        for _ in range(ROUNDS):
            self._factors *= (self._shares + PULL) / (self._products @ self._factors + PULL * self._factors)
