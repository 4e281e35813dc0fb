"""Counts of what requests gave and this server left out, for `/metrics`; each is logged once.

Names are those of the request models' tables alone (`RequestModel.hints`, `Kinds`), so there are few.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_hint(field: str) -> None:
    """Count a request that gave `field`."""
    with _lock:
        _counts[field] += 1
        is_first = _counts[field] == 1
    if is_first:
        logger.warning("%s of a request has no effect here (logged once, counted in /metrics)", field)


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
