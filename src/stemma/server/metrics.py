"""`/metrics`: the engine's counters, and histograms of requests measured in the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.engine.api import EngineStats, RequestOutput
from stemma.server.tier_metrics import tier_metrics
from stemma.types import Tier

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 3.2)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
TOKENS_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class _EngineCollector(Collector):
    """Turns the latest `EngineStats` into metric families at scrape time."""

    def __init__(self) -> None:
        self.latest: EngineStats | None = None

    def collect(self) -> Iterable[Metric]:
        stats = self.latest
        if stats is None:
            return
        for name, text, gauge in (
            ("stemma_requests_running", "Requests in the running batch", stats.num_running),
            ("stemma_requests_waiting", "Requests in the queue", stats.num_waiting),
            ("stemma_device_blocks", "Blocks of the device tier", stats.num_blocks),
            ("stemma_device_blocks_free", "Blocks that hold nothing", stats.num_free_blocks),
            ("stemma_device_blocks_cached", "Blocks in the prefix index", stats.num_cached_blocks),
        ):
            yield GaugeMetricFamily(name, text, value=gauge)
        for name, text, count in (
            ("stemma_prompt_tokens", "Prompt tokens of requests that started", stats.num_prompt_tokens),
            ("stemma_generated_tokens", "Tokens generated", stats.num_generated_tokens),
            ("stemma_preemptions", "Running requests whose blocks were taken back", stats.num_preemptions),
            ("stemma_evicted_blocks", "Blocks evicted to make room", stats.num_evicted_blocks),
            (
                "stemma_policy_failures",
                "Times that the eviction policy raised and LRU ranked instead",
                stats.num_policy_failures,
            ),
            ("stemma_draft_tokens", "Draft tokens verified", stats.num_draft_tokens),
            ("stemma_draft_tokens_accepted", "Draft tokens accepted", stats.num_accepted_draft_tokens),
        ):
            yield CounterMetricFamily(name, text, value=count)
        cached = CounterMetricFamily(
            "stemma_cached_tokens", "Prompt tokens served from cache, by tier", labels=["tier"]
        )
        for tier in Tier:
            cached.add_metric([tier.value], stats.cached_tokens_by_tier.get(tier, 0))
        yield cached
        misses = CounterMetricFamily(
            "stemma_misses", "Requests not wholly served from cache, by reason", labels=["reason"]
        )
        for reason, number in sorted(stats.misses_by_reason.items()):
            misses.add_metric([reason], number)
        yield misses
        if stats.transfer is not None:
            yield from tier_metrics(stats.transfer)


class ServerMetrics:
    """Has its own registry, so that two servers in one process stay separate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self.requests = Counter(
            "stemma_requests", "Requests by how they ended", ["api", "outcome"], registry=self._registry
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS_S)
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean gap between tokens of a request", TPOT_BUCKETS_S
        )
        self.e2e = self._histogram("request_seconds", "Arrival to last token", E2E_BUCKETS_S)
        self.queue_wait = self._histogram("queue_wait_seconds", "Arrival to first step", TTFT_BUCKETS_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", TOKENS_BUCKETS)
        self.generated_tokens = self._histogram("request_generated_tokens", "Output length", TOKENS_BUCKETS)

    def mean_ms(self, name: str) -> float:
        """Return the mean of a histogram of seconds since the start, in ms; 0 without any value."""
        total = self._registry.get_sample_value(f"stemma_{name}_sum") or 0.0
        count = self._registry.get_sample_value(f"stemma_{name}_count") or 0.0
        return round(1000 * total / count, 3) if count else 0.0

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stemma_{name}", text, buckets=buckets, registry=self._registry)

    def register(self, collector: Collector) -> None:
        """Show what `collector` knows as well."""
        self._registry.register(collector)

    def watch(self, api: str) -> RequestWatch:
        """Start the clock for a request that came in over `api` (``chat``, ``completions``, ``tgi``...)."""
        return RequestWatch(self, api)

    def families(self) -> Iterable[Metric]:
        """Return what the registry holds."""
        return self._registry.collect()

    def render(self, stats: EngineStats) -> bytes:
        """Return everything in Prometheus' text format."""
        self._engine.latest = stats
        return generate_latest(self._registry)


class RequestWatch:
    """Times one request. `seen` per output; `done` exactly once."""

    def __init__(self, metrics: ServerMetrics, api: str) -> None:
        self._metrics = metrics
        self._api = api
        self._arrived = metrics.clock()
        self._first: float | None = None
        self._last: RequestOutput | None = None

    def seen(self, output: RequestOutput) -> None:
        """Note an output."""
        self._last = output
        if self._first is None and output.num_generated_tokens:
            self._first = self._metrics.clock()
            self._metrics.ttft.observe(self._first - self._arrived)
            self._metrics.queue_wait.observe(output.queue_wait_s)

    def done(self, outcome: str) -> None:
        """Record how it ended: ``ok``, ``error``, ``refused`` or ``aborted``."""
        metrics = self._metrics
        metrics.requests.labels(self._api, outcome).inc()
        if outcome != "ok" or self._last is None:
            return
        now = metrics.clock()
        num_generated = self._last.num_generated_tokens
        metrics.e2e.observe(now - self._arrived)
        metrics.prompt_tokens.observe(self._last.cache.num_prompt_tokens)
        metrics.generated_tokens.observe(num_generated)
        if self._first is not None and num_generated > 1:
            metrics.tpot.observe((now - self._first) / (num_generated - 1))
