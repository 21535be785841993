"""What Prometheus reads at `/metrics`. One registry for each gateway; no tenant, session or word is ever a label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.backends.base import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The gateway's counters; every name begins with `kvloop_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvloop_requests",
            "Requests answered, by route and HTTP status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "kvloop_ttft_seconds", "Time from request to first token.", buckets=_SECONDS, registry=self.registry
        )
        self.turn = Histogram(
            "kvloop_turn_seconds", "Time from request to journalled answer.", buckets=_SECONDS, registry=self.registry
        )
        self.tokens = Counter(
            "kvloop_tokens",
            "Tokens by kind: prompt, cached (KV reused), restored (of these, read from disk), lifted (computed from a "
            "shared layer up), computed, generated.",
            ["kind"],
            registry=self.registry,
        )
        self.turns = Counter(
            "kvloop_turns",
            "Turns by how their history was found: session, previous, resend, new.",
            ["history"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvloop_in_flight", "Requests in flight, by version.", ["version"], registry=self.registry
        )
        self.swaps = Counter(
            "kvloop_swaps",
            "Changes of the serving version, by outcome: done, refused, failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.swap_seconds = Histogram(
            "kvloop_swap_seconds", "Time to load, prove and flip a version.", buckets=_SECONDS, registry=self.registry
        )
        self.errors = Counter("kvloop_errors", "Errors told to clients, by code.", ["code"], registry=self.registry)
        self.worker_retries = Counter(
            "kvloop_worker_retries",
            "Requests tried again, by reason: unavailable, reloaded.",
            ["reason"],
            registry=self.registry,
        )
        self.feedback = Counter("kvloop_feedback", "Feedback journalled, by kind.", ["kind"], registry=self.registry)
        self.disconnects = Counter(
            "kvloop_disconnects", "Requests whose client left before the end.", registry=self.registry
        )
        self.prefetches = Counter(
            "kvloop_memory_prefetches",
            "Beginnings of memories computed ahead, by outcome: done, failed, gone, stopped.",
            ["outcome"],
            registry=self.registry,
        )
        self.refreshes = Counter(
            "kvloop_refreshes",
            "Sessions refreshed, by reason (promote, climb) and outcome: done, moved, skipped, failed, stopped.",
            ["reason", "outcome"],
            registry=self.registry,
        )
        self.refresh_tokens = Counter(
            "kvloop_refresh_tokens", "Prompt tokens computed by refreshes.", registry=self.registry
        )
        self.refresh_waiting = Gauge(
            "kvloop_refresh_waiting", "Sessions that wait to be refreshed.", registry=self.registry
        )
        self.flips = Counter(
            "kvloop_flips",
            "Sessions that went to another version, by what moved them: refresh, turn.",
            ["by"],
            registry=self.registry,
        )
        self.expired = Counter(
            "kvloop_expired",
            "Sessions and memories deleted when their time was up.",
            ["kind"],
            registry=self.registry,
        )
        self.serving = Gauge(
            "kvloop_serving", "1 for the version being served.", ["version", "weights_id"], registry=self.registry
        )

    def count_tokens(self, usage: Usage, generated: int) -> None:
        """Adds one request's tokens."""
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("cached").inc(usage.cached_tokens)
        self.tokens.labels("restored").inc(int(usage.extras.get("restored_tokens") or 0))
        self.tokens.labels("lifted").inc(int(usage.extras.get("lifted_tokens") or 0))
        self.tokens.labels("computed").inc(usage.prompt_tokens - usage.cached_tokens)
        self.tokens.labels("generated").inc(generated)

    def now_serving(self, version: str, weights_id: str) -> None:
        """Marks the version being served."""
        self.serving.clear()
        self.serving.labels(version, weights_id).set(1)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
