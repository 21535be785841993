"""Decides how much of a match is worth loading: restoring must never be slower than computing.

Invariants:
- Of all cuts of a match (load this many tokens, compute the rest) the one is chosen that is estimated to take least;
  to load everything and to compute everything are two of them.
- Estimates are fitted to what was measured (`fit.Fit`): for loads the opening of chunks and the reading of bytes of
  each tier, and the decoding of each codec; for prefill a cost for each step, for each token, and for each token that
  it attends to. Before the first measurement they are what is usual.
- To notice that a tier has become faster, what looks slower is tried now and then: as often as that costs no more
  than `EXPLORE_SHARE` of all estimated time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from memory.kv.fidelity import RUNGS
from memory.kv.fit import Fit
from memory.kv.match import ChunkRef, Match
from memory.kv.tiers.base import TierName

EXPLORE_SHARE = 0.02
MOST_CREDIT = 1.0
"""Seconds that exploring may save up; a quiet week must not buy a load of minutes."""
STEP_TOKENS = 512
"""Prompt tokens of one step, where the engine does not say."""

EXPECTED_LOAD = {
    "open ram": 30e-6,
    "open disk": 300e-6,
    "open remote": 30e-3,
    "read ram": 1 / 5e9,
    "read disk": 1 / 1.5e9,
    "read remote": 1 / 50e6,
    "decode exact": 1 / 0.5e9,
    "decode int8": 1 / 0.6e9,
    "decode int4": 1 / 0.3e9,
    "decode compact": 1 / 0.05e9,
}
"""Seconds: for each chunk, for each byte moved, and for each byte decoded (of files, which hold less the worse)."""
EXPECTED_PREFILL = {"step": 20e-3, "token": 0.7e-3, "attended": 3e-7}
"""Seconds: for each step, for each token, and for each pair of a token and one before it."""


class CostModel:
    """Thread-safe. The store reports its loads; whoever computes prompts reports that."""

    def __init__(self, *, always: bool = False) -> None:
        """`always`: whatever is found is to be loaded."""
        self._always = always
        self._lock = threading.Lock()
        self._load = Fit(EXPECTED_LOAD)
        self._prefill = Fit(EXPECTED_PREFILL)
        self._lift = Fit(EXPECTED_PREFILL)
        self._step_tokens = STEP_TOKENS
        self._credit = 0.0

    # what was measured

    def expect_prefill(self, step: float, token: float, attended: float, step_tokens: int, lifted: float = 1.0) -> None:
        """Says what computing should cost before it is measured, in seconds, and how many tokens a step has.

        `lifted` is the share of that which lifted tokens take.
        """
        costs = {"step": step, "token": token, "attended": attended}
        with self._lock:
            self._step_tokens = step_tokens
            self._prefill.expect(costs)
            self._lift.expect({kind: cost * lifted for kind, cost in costs.items()})

    def observe_load(self, chunks: Iterable[tuple[TierName, str, int]], seconds: float) -> None:
        """Reports that loading chunks took `seconds`: for each the tier it came from, its codec, and the bytes moved
        (of its file, or of raw KV in RAM)."""
        units: dict[str, float] = {}
        for tier, codec, size in chunks:
            _add_chunk(units, tier, codec, size)
        with self._lock:
            self._load.observe(units, seconds)

    def observe_prefill(self, tokens: int, seconds: float, start: int = 0) -> None:
        """Reports that one step computed `tokens` tokens from position `start` on in `seconds`."""
        with self._lock:
            self._prefill.observe(_step(start, tokens), seconds)

    def observe_lift(self, tokens: int, seconds: float, start: int = 0) -> None:
        """The same for tokens that were computed from the first layer on that is not shared."""
        with self._lock:
            self._lift.observe(_step(start, tokens), seconds)

    # what that says of work to come

    def load_seconds(self, chunks: Iterable[ChunkRef]) -> float:
        """Estimated time to load these chunks."""
        with self._lock:
            return sum(self._chunk_seconds(chunk) for chunk in chunks)

    def prefill_seconds(self, start: int, end: int) -> float:
        """Estimated time to compute the tokens [start, end)."""
        with self._lock:
            return self._computing(self._prefill, start, end)

    # decisions

    def tokens_to_load(self, match: Match, total: int, beside: Match | None = None) -> int:
        """How many of the first tokens of a prompt of `total` tokens to load; the rest is to be computed.

        The answer ends a chunk of the match (see `Match.limited`): 0, all of it, or the part in front that pays, such
        as chunks in RAM before chunks on a slow disk. `beside` is what has to be loaded for the same tokens as well.
        """
        if not match.chunks:
            return 0
        if self._always:
            return match.chunks[-1].start + match.chunks[-1].tokens
        with self._lock:
            companions = list(beside.chunks) if beside is not None else []
            best, best_seconds = 0, self._computing(self._prefill, 0, total)
            most = loading = seconds = 0.0
            end = 0
            for chunk in match.chunks:
                loading += self._chunk_seconds(chunk)
                end = chunk.start + chunk.tokens
                while companions and companions[0].start < end:
                    loading += self._chunk_seconds(companions.pop(0))
                seconds = loading + self._computing(self._prefill, end, total)
                if seconds <= best_seconds:
                    best, best_seconds = end, seconds
                most = seconds
            return end if self._tries(most, best_seconds, declined=best < end) else best

    def pays(self, chunks: Iterable[ChunkRef], start: int, end: int, total: int, *, lift: bool) -> bool:
        """Whether loading `chunks` (and, with `lift`, computing the layers above) is faster than computing the tokens
        [start, end) of a prompt of `total` tokens."""
        with self._lock:
            instead = self._computing(self._prefill, start, total)
            seconds = sum(self._chunk_seconds(chunk) for chunk in chunks) + self._computing(self._prefill, end, total)
            if lift:
                seconds += self._computing(self._lift, start, end)
            best = min(seconds, instead)
            return self._always or seconds <= instead or self._tries(seconds, best, declined=True)

    def rates(self) -> dict[str, float | None]:
        """What was measured, None where nothing was: bytes per second from "ram", "disk" and "remote", tokens per
        second of "prefill" and "lift" at the beginning of a prompt."""
        with self._lock:
            tiers: tuple[TierName, ...] = ("ram", "disk", "remote")
            rates: dict[str, float | None] = {
                # A cost of nothing is a measurement that another kind explains: it tells no rate.
                tier: 1 / seconds if self._load.measured(f"read {tier}") and seconds > 0 else None
                for tier in tiers
                for seconds in [self._load.cost(f"read {tier}")]
            }
            for name, fit in (("prefill", self._prefill), ("lift", self._lift)):
                seconds = self._computing(fit, 0, self._step_tokens)
                rates[name] = self._step_tokens / seconds if fit.measured("token") and seconds > 0 else None
            return rates

    def costs(self) -> dict[str, float]:
        """Every estimate that the model has, in seconds for a unit, measured or not."""
        with self._lock:
            costs = {kind: self._load.cost(kind) for kind in EXPECTED_LOAD}
            costs |= {f"prefill {kind}": self._prefill.cost(kind) for kind in EXPECTED_PREFILL}
            return costs | {f"lift {kind}": self._lift.cost(kind) for kind in EXPECTED_PREFILL}

    def _chunk_seconds(self, chunk: ChunkRef) -> float:
        units: dict[str, float] = {}
        _add_chunk(units, chunk.tier, chunk.codec, chunk.size)
        return self._load.seconds(units)

    def _computing(self, fit: Fit, start: int, end: int) -> float:
        if end <= start:
            return 0.0
        units = _step(start, end - start)
        units["step"] = -(-(end - start) // self._step_tokens)
        return fit.seconds(units)

    def _tries(self, most: float, best: float, *, declined: bool) -> bool:
        """Whether what looks slower is tried all the same."""
        self._credit = min(self._credit + best * EXPLORE_SHARE, MOST_CREDIT)
        if not declined or most - best > self._credit:
            return False
        self._credit -= most - best
        return True


def _add_chunk(units: dict[str, float], tier: TierName, codec: str, size: int) -> None:
    kinds = [(f"open {tier}", 1), (f"read {tier}", size)]
    if tier != "ram":
        kinds.append((f"decode {codec if codec in RUNGS else 'exact'}", size))
    for kind, count in kinds:
        units[kind] = units.get(kind, 0.0) + count


def _step(start: int, tokens: int) -> dict[str, float]:
    return {"step": 1.0, "token": float(tokens), "attended": tokens * (start + tokens / 2)}
