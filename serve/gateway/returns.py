"""How likely a session is to return, by how long it has been quiet: the survival of the gaps between turns.

Method: of all silences that lasted as long as this one, the share that ended with a turn (the empirical survival
function of gaps, Kaplan and Meier 1958, with silences that go on counted as not ended), smoothed by a prior for
installs that have seen little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp2

# What is believed before anything was seen: half of the sessions return, and half as many after each day of silence.
_PRIOR = 0.5
_PRIOR_SECONDS = 86_400.0
_PRIOR_WEIGHT = 5.0


class Returns:
    """Chances of return, from the silences of the journal."""

    def __init__(self, ended: Sequence[float] = (), going_on: Sequence[float] = ()) -> None:
        """Seconds of silences that ended with a turn, and of those that go on."""
        self._ended = sorted(ended)
        self._going_on = sorted(going_on)

    def chance(self, idle: float) -> float:
        """The chance, 0 to 1, that a session returns which has been quiet for `idle` seconds."""
        returned = len(self._ended) - bisect_right(self._ended, idle)
        silent = len(self._going_on) - bisect_right(self._going_on, idle)
        prior = _PRIOR * exp2(-max(0.0, idle) / _PRIOR_SECONDS)
        return (returned + _PRIOR_WEIGHT * prior) / (returned + silent + _PRIOR_WEIGHT)
