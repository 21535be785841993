"""Which sessions are refreshed, and in what order: those in use first, then by chance of return times length.

Everything here is asked of the journal, in threads.
"""

from __future__ import annotations

from memory.journal.journal import Journal
from memory.journal.records import MemoryPrefix, Refresh, RefreshCounts, RefreshReason, Sleeper
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics
from serve.gateway.returns import Returns
from serve.gateway.settings import GatewaySettings
from serve.gateway.threads import Threads
from serve.gateway.versions import Version, Versions

# So many of the newest replies tell how sessions return.
_GAPS_FROM = 20_000
_PREFIXES = 100
_AT_ONCE = 200
_DAY = 86_400.0


class RefreshQueue:
    """The queue in the journal, seen from the version that serves."""

    def __init__(
        self, settings: GatewaySettings, journal: Journal, threads: Threads, versions: Versions, metrics: Metrics,
        tokenizer: str,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._journal = journal
        self._threads = threads
        self._versions = versions
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._returns = Returns()

    async def fill(self, version: Version) -> int:
        """Queues the sessions that are not at this version, and drops what waits for others; how many it queued."""
        return await self._threads.run(self._fill, version) if self._settings.refresh else 0

    async def add(self, tenant: str, session_id: str, tokens: int, version: Version, reason: RefreshReason) -> None:
        """Queues a session that has just had a turn: to `climb`, where it was answered from KV that was not exact or
        not of this version; to be taken along by a `promote` that began while its first turn ran."""
        sleeper = Sleeper(
            tenant=tenant, session_id=session_id, version=None, updated_at=self._journal.now(), tokens=tokens
        )
        if self._settings.refresh:
            await self._threads.run(self._journal.queue_refreshes, [self._wanted(sleeper, version, reason)])
            self._versions.news.set()

    async def best(self, version: Version) -> Refresh | None:
        """The most valuable session that waits for this version."""
        return await self._threads.run(self._journal.next_refresh, version.weights_id)

    async def end(self, refresh: Refresh) -> None:
        """Notes what became of a refresh: its state and its attempts. Says so when nothing waits any more."""
        await self._threads.run(self._journal.end_refresh, refresh, refresh.state, refresh.attempts)
        counts, _ = await self.counts()
        if not counts.waiting:
            event("all queued sessions are refreshed", version=refresh.version, done=counts.done, failed=counts.failed,
                  skipped=counts.skipped, tokens=counts.tokens_done)  # fmt: skip

    async def counts(self) -> tuple[RefreshCounts, Version | None]:
        """How far the refreshes for the version that serves are."""
        version = self._versions.known()
        weights_id = "" if version is None else version.weights_id
        counts = await self._threads.run(self._journal.count_refreshes, weights_id)
        self._metrics.refresh_waiting.set(counts.waiting)
        return counts, version

    async def prefixes(self) -> list[MemoryPrefix]:
        """The newest beginnings that memories make: sessions share them, so they are computed at a change as well."""
        return await self._threads.run(self._journal.latest_prefixes, self._tokenizer, _PREFIXES)

    def _fill(self, version: Version) -> int:
        settings, now = self._settings, self._journal.now()
        self._journal.drop_refreshes(version.weights_id)
        since = now - settings.refresh_days * _DAY
        key = self._versions.key(version)
        sleepers = self._journal.sleepers(key, settings.refresh_sessions, since)
        if sleepers:
            self._returns = Returns(*self._journal.return_gaps(_GAPS_FROM))
            wanted = [self._wanted(sleeper, version, "promote") for sleeper in sleepers]
            for at in range(0, len(wanted), _AT_ONCE):  # turns are journalled between two of these
                self._journal.queue_refreshes(wanted[at : at + _AT_ONCE])
        counts = self._journal.count_refreshes(version.weights_id)
        self._metrics.refresh_waiting.set(counts.waiting)
        return len(sleepers)

    def _wanted(self, sleeper: Sleeper, version: Version, reason: RefreshReason) -> Refresh:
        now = self._journal.now()
        return Refresh(
            tenant=sleeper.tenant, session_id=sleeper.session_id, version=self._versions.key(version),
            weights_id=version.weights_id, reason=reason,
            live=sleeper.updated_at >= self._versions.flipped_at - self._settings.pin_seconds,
            score=self._returns.chance(now - sleeper.updated_at) * sleeper.tokens, tokens=sleeper.tokens,
            state="waiting", attempts=0, updated_at=now,
        )  # fmt: skip
