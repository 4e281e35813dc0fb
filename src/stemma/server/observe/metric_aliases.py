"""The values of `/metrics` under other servers' names, in addition to our own: their dashboards work here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.engine.api import EngineStats
from stemma.server.observe.metrics import ServerMetrics

Values = tuple[tuple[str, str, float], ...]
"""Name, description, value."""


@dataclass(frozen=True, slots=True)
class Source:
    """The metric that the values come from."""

    stats: EngineStats
    ended: Mapping[str, float]
    """Requests by outcome."""
    finished: Mapping[str, float]
    """Sequences by finish reason."""
    rates: tuple[float, float]
    """Prompt tokens and generated tokens a second."""


@dataclass(frozen=True, slots=True)
class AliasNames:
    """The names of one other server."""

    histograms: Mapping[str, str]
    """Our name -> theirs."""
    counters: Callable[[Source], Values]
    gauges: Callable[[Source], Values]
    families: Callable[[Source, dict[str, str]], Iterable[Metric]] = lambda source, labels: ()
    """Samples that have more labels than those given."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Constant labels beside ``model_name``."""


def render_aliases(names: AliasNames, metrics: ServerMetrics, stats: EngineStats, model_name: str) -> bytes:
    """Return the metrics in Prometheus' text format, each with the label ``model_name``."""
    registry = CollectorRegistry()
    registry.register(_Renamed(names, metrics, stats, {"model_name": model_name, **names.labels}))
    return generate_latest(registry)


class _Renamed(Collector):
    def __init__(
        self, names: AliasNames, metrics: ServerMetrics, stats: EngineStats, labels: dict[str, str]
    ) -> None:
        self._names = names
        self._metrics = metrics
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        own = {family.name: family for family in self._metrics.families()}
        source = Source(
            self._stats,
            _sums(own["stemma_requests"], "outcome"),
            _sums(own["stemma_sequences_finished"], "reason"),
            self._metrics.throughput.rates(self._stats),
        )
        labels, values = list(self._labels), list(self._labels.values())
        for name, text, value in self._names.counters(source):
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, value)
            yield counter
        for name, text, value in self._names.gauges(source):
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        yield from self._names.families(source, self._labels)
        for ours, theirs in self._names.histograms.items():
            family = Metric(theirs, own[ours].documentation, "histogram")
            for sample in own[ours].samples:
                suffix = sample.name.removeprefix(ours)
                if suffix != "_created":
                    family.add_sample(theirs + suffix, {**sample.labels, **self._labels}, sample.value)
            yield family


def share(part: float, whole: float) -> float:
    """Return a ratio; 0 of nothing."""
    return part / whole if whole else 0.0


def _sums(family: Metric, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for sample in family.samples:
        if sample.name.endswith("_total"):
            sums[sample.labels[label]] = sums.get(sample.labels[label], 0.0) + sample.value
    return sums
