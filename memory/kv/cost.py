"""Decides how much of a match is worth loading: restoring must never be slower than computing.

The estimates are measured rates that forget: each new measurement weighs as much as the work it took, older ones
fade by half every `HALF_LIFE` observations. Until both sides are measured, everything is loaded.
"""

from __future__ import annotations

import threading

from memory.kv.match import Match
from memory.kv.tiers.base import TierName

HALF_LIFE = 8
EXPLORE_EVERY = 32
CHUNK_SECONDS = 0.0003
"""Opening a file and looking after a chunk, besides moving its bytes."""


class Rate:
    """Units per second, measured. Not thread-safe."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """Takes one measurement in."""
        if units <= 0 or seconds <= 0:
            return
        fade = 0.5 ** (1 / HALF_LIFE)
        self._units = self._units * fade + units
        self._seconds = self._seconds * fade + seconds

    @property
    def per_second(self) -> float | None:
        """The rate, or None before the first measurement."""
        return self._units / self._seconds if self._seconds else None


class CostModel:
    """Thread-safe. The store reports its loads itself; whoever prefills reports that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load: dict[TierName, Rate] = {"ram": Rate(), "disk": Rate()}
        self._prefill = Rate()
        self._declined = 0

    def observe_load(self, size: int, seconds: float, tier: TierName = "disk") -> None:
        """Reports that loading `size` bytes (of files, or of raw KV in RAM) took `seconds`."""
        with self._lock:
            self._load[tier].observe(size, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Reports that computing the KV of `tokens` tokens took `seconds`."""
        with self._lock:
            self._prefill.observe(tokens, seconds)

    def tokens_to_load(self, match: Match, total: int) -> int:
        """How many of the first tokens of a prompt of `total` tokens to load; the rest is to be computed.

        The answer ends a chunk of the match (see `Match.limited`): 0, all of it, or the part in front that pays,
        such as chunks in RAM before chunks on a slow disk. A side not measured yet counts as worth trying, and every
        `EXPLORE_EVERY`-th match that would be declined is loaded all the same, for the disk may have become faster.
        """
        if not match.chunks:
            return 0
        with self._lock:
            prefill = self._prefill.per_second
            rates = {tier: rate.per_second for tier, rate in self._load.items()}
            if prefill is None:
                return match.tokens
            best, best_seconds = 0, total / prefill
            loading, tokens = 0.0, 0
            for chunk in match.chunks:
                rate = rates[chunk.tier]
                loading += CHUNK_SECONDS + (chunk.size / rate if rate else 0.0)
                tokens += chunk.tokens
                seconds = loading + (total - tokens) / prefill
                if seconds <= best_seconds:
                    best, best_seconds = tokens, seconds
            if best < match.tokens:
                self._declined += 1
                if self._declined % EXPLORE_EVERY == 0:
                    return match.tokens
            return best

    def rates(self) -> dict[str, float | None]:
        """Bytes per second from "ram" and "disk", tokens per second of "prefill"; None where not measured yet."""
        with self._lock:
            return {
                "ram": self._load["ram"].per_second,
                "disk": self._load["disk"].per_second,
                "prefill": self._prefill.per_second,
            }
