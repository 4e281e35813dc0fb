"""What requests met in the last minute and in the last hour: percentiles and sums, in bounded memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any

SLOT_S, MINUTE_S, HOUR_S = 15, 60, 3600
GROWTH = 1.1
"""From one bucket of times to the next: a percentile is within 5 % of the true one."""
_LEAST_S, _LAST_BUCKET = 1e-4, 180
_MAX_KEYS = 500
"""Kinds of sums in a slot; what is beyond counts together."""
_Slot = tuple[int, Counter[tuple[str, int]], Counter[tuple[str, ...]]]
"""Its number, times by name and bucket, sums."""


class Lately:
    """Times and sums of each quarter of a minute, an hour back. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals: Counter[str] = Counter()
        self._slots: deque[_Slot] = deque(maxlen=HOUR_S // SLOT_S + 1)

    def time(self, name: str, seconds: float) -> None:
        """Count a time."""
        bucket = round(math.log(max(seconds, _LEAST_S) / _LEAST_S, GROWTH))
        self._slot()[1][name, min(bucket, _LAST_BUCKET)] += 1

    def count(self, *key: str, amount: int = 1) -> None:
        """Add to a sum; the first word of `key` says what is counted."""
        self._totals[key[0]] += amount
        sums = self._slot()[2]
        sums[key if key in sums or len(sums) < _MAX_KEYS else (key[0], *("others" for _ in key[1:]))] += (
            amount
        )

    def told(self) -> dict[str, Any]:
        """Return what pages show: sums as rows of words and a number, times as percentiles in seconds.

        ``totals`` are the sums since the start, by their first word.
        """
        minute, hour = self._window(MINUTE_S), self._window(HOUR_S)
        return {"minute": minute, "hour": hour, "totals": dict(self._totals)}

    def _slot(self) -> _Slot:
        number = int(self._clock() // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, Counter(), Counter()))
        return self._slots[-1]

    def _window(self, seconds: int) -> dict[str, Any]:
        first = int(self._clock() // SLOT_S) - seconds // SLOT_S
        times: dict[str, Counter[int]] = {}
        sums: Counter[tuple[str, ...]] = Counter()
        for _, timed, summed in (slot for slot in self._slots if slot[0] >= first):
            sums.update(summed)
            for (name, bucket), count in timed.items():
                times.setdefault(name, Counter())[bucket] += count
        return {
            "times": {name: _percentiles(counts) for name, counts in times.items()},
            "sums": [[*key, count] for key, count in sums.most_common()],
        }


def _percentiles(counts: Counter[int]) -> dict[str, float]:
    """Return how many times there are, and their percentiles by nearest rank; `counts`: by bucket."""
    buckets, total = sorted(counts), counts.total()
    reached = list(accumulate(counts[one] for one in buckets))
    at = {name: buckets[bisect_left(reached, share * total)] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"count": total, **{name: _LEAST_S * GROWTH**bucket for name, bucket in at.items()}}
