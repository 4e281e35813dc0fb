"""`/metrics`: the engine's counters, and histograms of requests measured in the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.budgets import BudgetState
from stemma.engine.api import DRAFT_SOURCES, CacheReport, DraftCount, EngineStats
from stemma.prefix.explain import MissReason
from stemma.server.observe.ignored_hints import IgnoredHints
from stemma.server.observe.tier_metrics import tier_metrics
from stemma.smoothed import Smoothed
from stemma.types import FinishReason, Tier

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 3.2)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
NO_TENANT = "-"
CACHED_SHARES = ("0-9", "10-49", "50-89", "90-100")
"""Classes of prompts by the percentage that was cached."""
TOKENS_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

OUTCOMES = ("ok", "aborted", "refused", "error")
"""How requests end."""


_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("stemma_requests_running", "Requests in the running batch", "num_running"),
    ("stemma_requests_waiting", "Requests in the queue", "num_waiting"),
    ("stemma_device_blocks", "Blocks of the device tier", "num_blocks"),
    ("stemma_device_blocks_free", "Blocks that hold nothing", "num_free_blocks"),
    ("stemma_device_blocks_cached", "Blocks in the prefix index", "num_cached_blocks"),
    ("stemma_image_cache_bytes", "Memory of vectors of images that are kept", "image_cache_bytes"),
    (
        "stemma_device_checkpoints",
        "States of recurrent layers and windows of KV that are kept for later prompts",
        "num_checkpoints",
    ),
    ("stemma_prefill_seconds_per_token", "Measured cost of a prompt token", "prefill_s_per_token"),
)
"""Name, help and field of `EngineStats`."""
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("stemma_prompt_tokens", "Prompt tokens of requests that started", "num_prompt_tokens"),
    ("stemma_generated_tokens", "Tokens generated", "num_generated_tokens"),
    ("stemma_preemptions", "Running requests whose blocks were taken back", "num_preemptions"),
    ("stemma_evicted_blocks", "Blocks evicted to make room", "num_evicted_blocks"),
    ("stemma_regretted_blocks", "Evicted blocks that came back within a minute", "num_regretted_blocks"),
    ("stemma_blocks_ahead", "Blocks loaded to the device before their turn", "num_blocks_ahead"),
    ("stemma_blocks_ahead_used", "Of these, blocks that a request used", "num_used_ahead"),
    ("stemma_blocks_ahead_wasted", "Of these, blocks evicted unused", "num_wasted_ahead"),
    (
        "stemma_evicted_checkpoints",
        "Kept states and windows that were dropped to make room",
        "num_evicted_checkpoints",
    ),
    ("stemma_images_encoded", "Images that the vision encoder computed", "num_encoded_images"),
    (
        "stemma_images_reused",
        "Images whose vectors were kept from before, where their KV wasn't",
        "num_reused_images",
    ),
    (
        "stemma_policy_failures",
        "Times that the eviction policy raised and LRU ranked instead",
        "num_policy_failures",
    ),
)
"""As `_GAUGES`."""


class _EngineCollector(Collector):
    """Turns the latest `EngineStats` into metric families at scrape time."""

    def __init__(self) -> None:
        self.latest: EngineStats | None = None
        self.budgets: Sequence[BudgetState] = ()

    def collect(self) -> Iterable[Metric]:
        stats = self.latest
        if stats is None:
            return
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        yield from _by_label(stats)
        if stats.transfer is not None:
            yield from tier_metrics(stats.transfer)
        yield from budget_metrics(self.budgets)


def _by_label(stats: EngineStats) -> Iterable[Metric]:
    """Yield the engine's counters that have labels; each label from the start."""
    cached = CounterMetricFamily(
        "stemma_cached_tokens", "Prompt tokens served from cache, by tier", labels=["tier"]
    )
    for tier in Tier:
        cached.add_metric([tier.value], stats.cached_tokens_by_tier.get(tier, 0))
    yield cached
    drafted = CounterMetricFamily(
        "stemma_draft_tokens", "Draft tokens verified, by source", labels=["source"]
    )
    accepted = CounterMetricFamily(
        "stemma_draft_tokens_accepted", "Draft tokens accepted, by source", labels=["source"]
    )
    for source in DRAFT_SOURCES:
        drafts = stats.drafts_by_source.get(source, DraftCount())
        drafted.add_metric([source], drafts.num_proposed)
        accepted.add_metric([source], drafts.num_accepted)
    yield drafted
    yield accepted
    misses = CounterMetricFamily(
        "stemma_misses", "Requests not wholly served from cache, by reason", labels=["reason"]
    )
    for reason in MissReason:
        misses.add_metric([reason.value], stats.misses_by_reason.get(reason.value, 0))
    yield misses


def budget_metrics(budgets: Sequence[BudgetState]) -> Iterable[Metric]:
    """Yield what is held of each budget, its limit, and the requests that it refused."""
    held = GaugeMetricFamily("stemma_budget_held", "Units in use of each budget", labels=["budget"])
    limit = GaugeMetricFamily("stemma_budget_limit", "Units that may be in use", labels=["budget"])
    refused = CounterMetricFamily(
        "stemma_budget_refused", "Requests refused, by whose part was used up", labels=["budget", "part"]
    )
    for one in budgets:
        held.add_metric([one.name], one.held)
        limit.add_metric([one.name], one.limit)
        refused.add_metric([one.name, "all"], one.num_refused)
        refused.add_metric([one.name, "tenant"], one.num_refused_shares)
    yield from (held, limit, refused)


class Throughput:
    """Tokens a second between two looks at the engine's counters, at least `MIN_SPAN_S` apart."""

    MIN_SPAN_S = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = self._last = (clock(), 0, 0)

    def rates(self, stats: EngineStats) -> tuple[float, float]:
        """Return prompt tokens and generated tokens a second since the last look.

        Looks that come sooner share the one before them, so that two scrapers don't spoil each other's.
        """
        now = self._clock()
        if now - self._last[0] >= self.MIN_SPAN_S:
            self._before, self._last = self._last, (now, stats.num_prompt_tokens, stats.num_generated_tokens)
        since, num_prompt, num_generated = self._before
        span_s = now - since
        if span_s <= 0:
            return 0.0, 0.0
        return (
            (stats.num_prompt_tokens - num_prompt) / span_s,
            (stats.num_generated_tokens - num_generated) / span_s,
        )


class ServerMetrics:
    """Has its own registry, so that two servers in one process stay separate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.throughput = Throughput(clock)
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._registry.register(IgnoredHints())
        self._apis: set[str] = set()
        self.requests = Counter(
            "stemma_requests", "Requests by how they ended", ["api", "outcome"], registry=self._registry
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS_S)
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean gap between tokens of a request", TPOT_BUCKETS_S
        )
        self.gap = Smoothed()
        """The same of the latest requests, for routers (`/health`)."""
        self.seat = Smoothed()
        """How long the latest requests had a seat."""
        self.answer_tokens = Smoothed()
        """Tokens of the latest answers."""
        self.e2e = self._histogram("request_seconds", "Arrival to last token", E2E_BUCKETS_S)
        self.prefill = self._histogram("prefill_seconds", "First step to first token", TTFT_BUCKETS_S)
        self.decode = self._histogram("decode_seconds", "First to last token", E2E_BUCKETS_S)
        self.ttft_by_share = Histogram(
            "stemma_time_to_first_token_by_cached_share_seconds",
            "Arrival to first token, by the percentage of the prompt that was cached",
            ["cached"],
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.finished = Counter(
            "stemma_sequences_finished", "Sequences by finish reason", ["reason"], registry=self._registry
        )
        for reason in FinishReason:  # an alert on an increase misses what a series begins with
            self.finished.labels(reason.value)
        self.tenant_requests = Counter(
            "stemma_tenant_requests", "Requests that started, by tenant", ["tenant"], registry=self._registry
        )
        self.tenant_prompt_tokens = Counter(
            "stemma_tenant_prompt_tokens", "Prompt tokens by tenant", ["tenant"], registry=self._registry
        )
        self.tenant_cached_tokens = Counter(
            "stemma_tenant_cached_tokens",
            "Prompt tokens served from cache, by tenant and tier",
            ["tenant", "tier"],
            registry=self._registry,
        )
        self.queue_wait = self._histogram("queue_wait_seconds", "Arrival to first step", TTFT_BUCKETS_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", TOKENS_BUCKETS)
        self.generated_tokens = self._histogram("request_generated_tokens", "Output length", TOKENS_BUCKETS)

    def mean_ms(self, name: str) -> float:
        """Return the mean of a histogram of seconds since the start, in ms; 0 without any value."""
        total = self._registry.get_sample_value(f"stemma_{name}_sum") or 0.0
        count = self._registry.get_sample_value(f"stemma_{name}_count") or 0.0
        return round(1000 * total / count, 3) if count else 0.0

    def arrived(self, api: str) -> None:
        """Let what may become of a request have its count."""
        if api not in self._apis:
            self._apis.add(api)
            for outcome in OUTCOMES:
                self.requests.labels(api, outcome)

    def started(self, tenant: str, cache: CacheReport) -> None:
        """Count a request whose first output is there."""
        name = tenant or NO_TENANT
        self.tenant_requests.labels(name).inc()
        self.tenant_prompt_tokens.labels(name).inc(cache.num_prompt_tokens)
        for tier, count in cache.cached_by_tier.items():
            self.tenant_cached_tokens.labels(name, tier.value).inc(count)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"stemma_{name}", text, buckets=buckets, registry=self._registry)

    def register(self, collector: Collector) -> None:
        """Show what `collector` knows as well."""
        self._registry.register(collector)

    def families(self) -> Iterable[Metric]:
        """Return what the registry holds."""
        return self._registry.collect()

    def render(self, stats: EngineStats, budgets: Sequence[BudgetState] = ()) -> bytes:
        """Return everything in Prometheus' text format."""
        self._engine.latest, self._engine.budgets = stats, budgets
        return generate_latest(self._registry)


def cached_share(cache: CacheReport) -> str:
    """Return the class of `CACHED_SHARES` that a request belongs to."""
    percent = 100 * cache.num_cached_tokens / max(1, cache.num_prompt_tokens)
    return CACHED_SHARES[sum(percent >= edge for edge in (10, 50, 90))]
