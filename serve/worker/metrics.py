"""What a worker tells Prometheus: `kvloop_worker_*` of its engine, `kvloop_kv_*` of its memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.engine.engine import Engine
from serve.engine.kv_memory import MemoryStats
from serve.engine.request import Usage

TTFT_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """The metrics of one worker, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvloop_worker_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        self._prompt_tokens = Counter(
            "kvloop_worker_prompt_tokens",
            "Prompt tokens by where their KV came from.",
            ["source"],
            registry=self.registry,
        )
        self._generated = Counter("kvloop_worker_generated_tokens", "Tokens generated.", registry=self.registry)
        self._ttft = Histogram(
            "kvloop_worker_ttft_seconds",
            "Time from a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(engine))

    def finished(self, usage: Usage) -> None:
        """Counts a request that ended well."""
        self.ended("finished")
        self._prompt_tokens.labels("ram").inc(usage.ram_tokens)
        self._prompt_tokens.labels("disk").inc(usage.disk_tokens)
        self._prompt_tokens.labels("remote").inc(usage.remote_tokens)
        self._prompt_tokens.labels("lifted").inc(usage.lifted_tokens)
        self._prompt_tokens.labels("computed").inc(usage.computed_tokens)
        self._generated.inc(usage.generated_tokens)
        if usage.ttft_ms is not None:
            self._ttft.observe(usage.ttft_ms / 1e3)

    def ended(self, outcome: str) -> None:
        """Counts a request by its end: finished, refused, aborted or failed."""
        self._requests.labels(outcome).inc()

    def text(self) -> bytes:
        """Returns all of them in Prometheus' text format."""
        return generate_latest(self.registry)


RATES = (("ram", "bytes"), ("disk", "bytes"), ("remote", "bytes"), ("prefill", "tokens"), ("lift", "tokens"))


class _EngineCollector(Collector):
    """Reads the engine's and the memory's own figures when asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load_now
        yield _gauge(
            "kvloop_worker_waiting_requests", "Requests not admitted yet, without background ones.", load.waiting
        )
        yield _gauge("kvloop_worker_running_sequences", "Sequences in the batch.", load.running)
        yield _gauge("kvloop_worker_buffer_bytes", "KV buffers reserved, in bytes.", load.kv_reserved_bytes)
        yield _gauge("kvloop_worker_buffer_budget_bytes", "Budget of KV buffers, in bytes.", load.kv_budget_bytes)
        computed = "Prompt tokens pushed through the model, counted where that happens."
        yield _counter("kvloop_worker_computed_tokens", computed, load.computed_tokens)
        lifted = "Prompt tokens of which only the layers that are not shared were computed."
        yield _counter("kvloop_worker_lifted_tokens", lifted, load.lifted_tokens)
        background = "Of the computed and lifted prompt tokens, those of background requests: refreshes and prefetches."
        yield _counter("kvloop_worker_background_tokens", background, load.background_tokens)
        waiting = "Background requests not admitted yet."
        yield _gauge("kvloop_worker_background_requests", waiting, load.background)
        versions = len(self._engine.versions.list())
        yield _gauge("kvloop_worker_resident_versions", "Versions that take requests, the base included.", versions)
        if self._engine.memory is not None:
            yield from _memory(self._engine.memory.stats())


def _memory(stats: MemoryStats) -> Iterator[Metric]:
    store = stats.store
    held = GaugeMetricFamily("kvloop_kv_bytes", "Bytes that a tier holds.", labels=["tier"])
    budget = GaugeMetricFamily("kvloop_kv_budget_bytes", "Bytes that a tier may hold.", labels=["tier"])
    chunks = GaugeMetricFamily("kvloop_kv_chunks", "Chunks that a tier holds.", labels=["tier"])
    tokens = GaugeMetricFamily("kvloop_kv_tokens", "Tokens whose KV a tier holds.", labels=["tier"])
    for name, tier in (("ram", store.ram), ("disk", store.disk), ("remote", store.remote)):
        held.add_metric([name], tier.bytes)
        budget.add_metric([name], tier.budget)
        chunks.add_metric([name], tier.chunks)
        tokens.add_metric([name], tier.tokens)
    yield from (held, budget, chunks, tokens)
    rung_bytes = GaugeMetricFamily("kvloop_kv_rung_bytes", "Bytes stored on disk and remotely.", labels=["fidelity"])
    rung_tokens = GaugeMetricFamily("kvloop_kv_rung_tokens", "Tokens of each band there.", labels=["fidelity"])
    for rung in stats.rungs:
        rung_bytes.add_metric([rung.fidelity], rung.bytes)
        rung_tokens.add_metric([rung.fidelity], rung.tokens)
    yield from (rung_bytes, rung_tokens)
    yield _counter("kvloop_kv_hits", "Matches that found at least one chunk.", store.hits)
    yield _counter("kvloop_kv_misses", "Matches that found none.", store.misses)
    yield _counter("kvloop_kv_saved_tokens", "Tokens taken in.", store.saved_tokens)
    yield _counter("kvloop_kv_shared_tokens", "Tokens that another owner had stored already.", store.shared_tokens)
    restored = CounterMetricFamily("kvloop_kv_restored_tokens", "Tokens handed out, by tier.", labels=["tier"])
    restored.add_metric(["ram"], store.ram_tokens)
    restored.add_metric(["disk"], store.disk_tokens)
    restored.add_metric(["remote"], store.remote_tokens)
    yield restored
    yield _counter("kvloop_kv_quarantined", "Files refused: damaged, short or foreign.", store.quarantined)
    yield _counter("kvloop_kv_lost", "Chunks that were gone when they were to be read.", store.lost)
    yield _counter("kvloop_kv_locked", "Chunks that no key was found for.", store.locked)
    yield _counter("kvloop_kv_expired", "Chunks deleted because their time had passed.", store.expired)
    yield _counter("kvloop_kv_read_errors", "Reads that failed.", store.read_errors)
    yield _counter("kvloop_kv_write_errors", "Writes that failed.", store.write_errors)
    yield _counter("kvloop_kv_index_errors", "Questions that the index could not answer.", store.index_errors)
    yield _counter("kvloop_kv_index_rebuilds", "Times the index was rebuilt from the files.", store.index_rebuilds)
    yield _counter("kvloop_kv_dropped", "Chunks not written, queue or budget being full.", store.dropped)
    yield _counter("kvloop_kv_dropped_saves", "Sequences not remembered, too many waiting.", stats.dropped_saves)
    yield _counter("kvloop_kv_evictions", "Chunks that left a tier for others.", store.evictions)
    yield _gauge("kvloop_kv_waiting_bytes", "Raw KV that waits to be written.", store.waiting_bytes)
    yield _gauge("kvloop_kv_disk_trouble", "1 while nothing can be written to disk.", float(bool(store.disk_trouble)))
    for name, unit in RATES:
        value = stats.rates.get(name)
        if value is not None:
            yield _gauge(f"kvloop_kv_{name}_{unit}_per_second", f"Measured rate of {name}.", value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
