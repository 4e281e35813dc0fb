"""Counts of hints that requests gave and this server doesn't act on, by field, for `/metrics`.

Field names are those of the request models alone (`RequestModel.hints`), so there are few.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_hint(field: str) -> None:
    """Count a request that gave `field`."""
    with _lock:
        _counts[field] += 1


class IgnoredHints(Collector):
    """Shows the counts of this process."""

    def collect(self) -> Iterable[Metric]:
        """Yield the one family."""
        family = CounterMetricFamily(
            "stemma_ignored_hints", "Requests with a hint that has no effect here, by field", labels=["field"]
        )
        with _lock:
            counts = dict(_counts)
        for field, count in sorted(counts.items()):
            family.add_metric([field], count)
        yield family
