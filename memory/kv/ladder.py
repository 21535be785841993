"""The ladder: stored chunks get cheaper with age, and before anything is evicted for want of room.

    exact -> int8 -> int4 -> compact

Invariants:
- A rung is used only where it is trusted: its error was measured for the model whose KV it is, and is small enough.
- Fidelity only falls here: a chunk that was coded twice is as good as the worse of the two codings. It climbs when
  its KV is computed again from its tokens and saved.
- A chunk moves at most once in a step, for want of room by one rung, and never while it is in use: what came back up
  a moment ago stays.
- What is of use only while it is exact (`needs_exact`) stays so. Where others move for want of room, it is deleted,
  unless it can move to a remote tier.
- Moving changes neither the key nor the last use, nor what a file's expiry or owner is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memory.kv.codec.base import CodecError
from memory.kv.fidelity import RUNGS, Fidelity, FidelityRecords
from memory.kv.identity import needs_exact
from memory.kv.settings import KVSettings
from memory.kv.tiers.base import kept_of
from memory.kv.tiers.disk import DiskTier
from memory.kv.tiers.index import Row, Victim

logger = logging.getLogger(__name__)
SETTLE_SECONDS = 300.0
"""What was used so recently is left where it is."""
PAGE = 128
LOOKED_AT = 4096
"""Chunks that a step by budget looks at, those that cannot move included."""
STUCK = 1 << 16
STUCK_SECONDS = 3600.0
"""How many chunks are remembered as not worth another try, and for how long: those without a key here, or that would
not become smaller."""


@dataclass(slots=True)
class Moved:
    """What a ladder of this process has done."""

    by_age: int = 0
    by_budget: int = 0
    saved_bytes: int = 0


class Ladder:
    """For one thread. `stopped` is asked between chunks. Methods raise `OSError` and `sqlite3.Error`."""

    def __init__(
        self,
        disk: DiskTier,
        settings: KVSettings,
        records: FidelityRecords,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._records = records
        self._stopped = stopped
        self._clock = clock
        self._trust: dict[tuple[bytes, str], bool] = {}
        self._stuck: dict[tuple[bytes, str], None] = {}
        self._stuck_since = clock()
        self.done = Moved()

    def trusted(self, model: bytes, rung: Fidelity) -> bool:
        """Whether chunks of a model (`KVIdentity.model_digest`) may move to a rung."""
        if (model, rung) not in self._trust:
            record = self._records.for_model(model, rung)
            self._trust[model, rung] = record is not None and record.kl_mean <= self._settings.max_kl[rung]
        return self._trust[model, rung]

    def _begin(self) -> None:
        """A step may not rest on what was measured or tried too long ago."""
        self._trust.clear()
        if self._clock() - self._stuck_since > STUCK_SECONDS:
            self._stuck.clear()
            self._stuck_since = self._clock()

    # by age

    def by_age(self, limit: int) -> int:
        """Moves up to `limit` chunks to the rung of their age; returns how many moved."""
        self._begin()
        moved: set[bytes] = set()
        for model in self._disk.index.models():
            if needs_exact(self._disk.index.band_of(model)):
                continue
            for rung in reversed(RUNGS[1:]):  # the lowest first: what is that old skips those between
                after = self._settings.after_seconds[rung]
                if after is None or not self.trusted(model, rung):
                    continue
                before = min(self._clock() - after, self._clock() - SETTLE_SECONDS)
                for codec in RUNGS[: RUNGS.index(rung)]:
                    for key in self._older(model, codec, before, rung):
                        if len(moved) >= limit or self._stopped():
                            return len(moved)
                        if key not in moved and self._move(key, rung):
                            moved.add(key)
                            self.done.by_age += 1
        return len(moved)

    def _older(self, model: bytes, codec: str, before: float, rung: Fidelity) -> Iterator[bytes]:
        """Chunks in a codec that were last used before a time, besides those that are stuck above the rung."""
        skip = 0
        while True:
            page = self._disk.index.colder_than(model, codec, before, PAGE, skip)
            for key in page:
                if (key, rung) in self._stuck:
                    skip += 1  # it stays in the list; those that move leave it
                else:
                    yield key
                    skip += (key, rung) in self._stuck
            if len(page) < PAGE:
                return

    # by budget

    def pressed(self) -> bool:
        """Whether the disk tier holds more than it should in the long run."""
        return self.excess() > 0

    def excess(self) -> int:
        """Bytes above the mark, or how far below it they are."""
        return self._disk.index.used_bytes() - int(self._settings.high_water * self._settings.disk_bytes)

    def by_budget(self, limit: int) -> int:
        """Moves up to `limit` chunks one rung down, those worth least first, while there are too many bytes."""
        self._begin()
        excess = self.excess()
        moved = 0
        for victim in self._leaving(self._clock() - SETTLE_SECONDS) if excess > 0 else ():
            if excess <= 0 or moved >= limit or self._stopped():
                break
            saved = self._lower(victim)
            if saved:
                excess -= saved
                moved += 1
                self.done.by_budget += 1
        return moved

    def _leaving(self, unused_since: float) -> Iterator[Victim]:
        """What would be evicted next, the first of it; listed before anything moves, so each chunk comes once."""
        victims = self._disk.index.least_worth(LOOKED_AT)
        return (victim for victim in victims if victim.last_used < unused_since)

    def _lower(self, victim: Victim) -> int:
        """Moves a chunk to the next rung that is trusted, or deletes it; returns the bytes saved."""
        row = self._disk.index.rows([victim.key]).get(victim.key)
        if row is None or victim.codec not in RUNGS:
            return 0
        if needs_exact(row.band):
            stays = self._disk.remote is not None or not any(self.trusted(row.model, rung) for rung in RUNGS[1:])
            return 0 if stays else row.size * self._disk.drop([row.key], "evictions")
        for rung in RUNGS[RUNGS.index(victim.codec) + 1 :]:
            if self.trusted(row.model, rung) and (victim.key, rung) not in self._stuck:
                saved = self._move(victim.key, rung)
                if saved:
                    return saved
        return 0

    def _move(self, key: bytes, rung: Fidelity) -> int:
        """Rewrites a chunk; returns the bytes saved, 0 where it stays as it is."""
        row = self._disk.index.rows([key]).get(key)
        if row is None or row.tier != "disk" or row.state != "stored":
            return 0
        saved = self._rewrite(row, rung)
        if not saved:
            while len(self._stuck) >= STUCK:
                del self._stuck[next(iter(self._stuck))]
            self._stuck[key, rung] = None
            return 0
        self.done.saved_bytes += saved
        return saved

    def _rewrite(self, row: Row, rung: Fidelity) -> int | None:
        try:
            return self._disk.rewrite(row.key, rung, kept_of(row.start, self._disk.children_tokens(row.key)))
        except CodecError as error:
            logger.warning("a chunk of KV memory cannot be written as %s: %s", rung, error)
            return None
