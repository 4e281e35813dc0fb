"""The values of `/metrics` under the names that MindIE's dashboards query, in addition to our own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.engine.api import EngineStats
from stemma.server.metrics import ServerMetrics
from stemma.types import Tier

_HISTOGRAMS = {
    "stemma_time_to_first_token_seconds": "time_to_first_token_seconds",
    "stemma_time_per_output_token_seconds": "time_per_output_token_seconds",
    "stemma_request_seconds": "e2e_request_latency_seconds",
    "stemma_request_prompt_tokens": "request_prompt_tokens",
    "stemma_request_generated_tokens": "request_generation_tokens",
}
_Values = tuple[tuple[str, str, float], ...]


def render_for_mindie(metrics: ServerMetrics, stats: EngineStats, model_name: str) -> bytes:
    """Return MindIE's metrics in Prometheus' text format, each with the label ``model_name``."""
    registry = CollectorRegistry()
    registry.register(_Renamed(metrics, stats, model_name))
    return generate_latest(registry)


class _Renamed(Collector):
    def __init__(self, metrics: ServerMetrics, stats: EngineStats, model_name: str) -> None:
        self._metrics = metrics
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        own = {family.name: family for family in self._metrics.families()}
        ended: dict[str, float] = {}
        for sample in own["stemma_requests"].samples:
            if sample.name == "stemma_requests_total":
                outcome = sample.labels["outcome"]
                ended[outcome] = ended.get(outcome, 0.0) + sample.value
        for name, text, value in _counters(self._stats, ended):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        for name, text, value in _gauges(self._stats, ended):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for ours, theirs in _HISTOGRAMS.items():
            family = Metric(theirs, own[ours].documentation, "histogram")
            for sample in own[ours].samples:
                suffix = sample.name.removeprefix(ours)
                if suffix != "_created":
                    labels = {**sample.labels, "model_name": self._model_name}
                    family.add_sample(theirs + suffix, labels, sample.value)
            yield family


def _counters(stats: EngineStats, ended: dict[str, float]) -> _Values:
    failed = sum(count for outcome, count in ended.items() if outcome != "ok")
    received = sum(ended.values()) + stats.num_running + stats.num_waiting
    return (
        ("request_received", "Requests that came", received),
        ("request_success", "Requests that ended well", ended.get("ok", 0.0)),
        ("request_failed", "Requests that were refused, aborted or failed", failed),
        ("num_preemptions", "Running requests whose blocks were taken back", stats.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that started", stats.num_prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.num_generated_tokens),
    )


def _gauges(stats: EngineStats, ended: dict[str, float]) -> _Values:
    failed = sum(count for outcome, count in ended.items() if outcome != "ok")
    on_device = stats.cached_tokens_by_tier.get(Tier.DEVICE, 0)
    host = None if stats.transfer is None else stats.transfer.tiers.get(Tier.HOST)
    host_share = 0.0
    if host is not None and host.capacity_blocks:
        host_share = (host.num_blocks or 0) / host.capacity_blocks
    return (
        ("num_requests_running", "Requests in the running batch", stats.num_running),
        ("num_requests_waiting", "Requests in the queue", stats.num_waiting),
        ("num_requests_swapped", "Always 0: blocks stay in the prefix cache", 0),
        ("failed_request_perc", "Failed requests as a share of all", _share(failed, sum(ended.values()))),
        (
            "npu_cache_usage_perc",
            "Device blocks that hold something, cached ones too",
            1.0 - _share(stats.num_free_blocks, stats.num_blocks),
        ),
        ("cpu_cache_usage_perc", "Host blocks that hold something", host_share),
        (
            "npu_prefix_cache_hit_rate",
            "Prompt tokens served from the device tier, as a share of all",
            _share(on_device, stats.num_prompt_tokens),
        ),
        ("all_radix_match_num", "Prompt tokens looked up", stats.num_prompt_tokens),
        ("npu_radix_match_hit_num", "Prompt tokens served from the device tier", on_device),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
