"""Counters of the connector, in vLLM's log and at vLLM's /metrics, beside vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from stemma_connect.vllm.worker import total_of

_SERIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "loaded_blocks": ("Blocks loaded for a request", ("tier",)),
    "loaded_bytes": ("Bytes loaded for requests", ("tier",)),
    "load_seconds": ("Seconds from the start of a load to its end, summed over loads", ()),
    "lost_blocks": ("Blocks that a tier had and couldn't deliver; computed instead", ("tier", "result")),
    "late_loads": ("Loads that reached their time limit", ()),
    "writes": ("Blocks written to a tier, by result", ("tier", "result")),
    "dropped_writes": ("Blocks not copied down because the transfer buffer was full", ()),
    "evicted_blocks": ("Blocks evicted from a tier", ("tier",)),
    "failures": ("Failed reads and writes of a tier, by reason", ("tier", "reason")),
}


class StemmaStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval by name, as `WorkerSide.take_counts` returns them."""

    data: dict[str, float]

    def reset(self) -> None:
        """Begin the next interval, with no counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of another worker or interval."""
        return StemmaStats(data=total_of([self.data, other.data]))

    def reduce(self) -> dict[str, int | float]:
        """Return them for the log."""
        return {name: round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not self.data


class StemmaPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters ``stemma_connector_*`` with the labels of vLLM's own metrics."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(f"stemma_connector_{name}", text, labelnames=[*labelnames, *labels])
            for name, (text, labels) in _SERIES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            series, *details = name.split("/")
            self._counters[series].labels(*labels, *details).inc(value)
