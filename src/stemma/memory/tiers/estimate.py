"""Estimates whether loading is faster than computing, from measurements in the running server.

A read from a tier takes a fixed latency and seconds per block, a step of prefill a fixed part and seconds
per token: both fitted to what was measured last, as long as sizes differed. What is loaded, KV and states
alike, costs what its blocks cost and saves the tokens that needn't be computed then. The fixed part of a step
is never saved: the last token is computed in any case. It must not count as the tokens' either, or computing
looks dear where only the short rests behind hits were measured.
Measurements lose weight with age, so a tier that was slow once is tried again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from stemma.types import Tier

_WEIGHT = 0.2
"""Weight of a new observation in the moving average."""
_FORGIVE_S = 60.0
"""Time without an observation after which a tier's estimated cost counts half."""
_LEAST_SPREAD = 0.1
"""Relative deviation of sizes from which on the fixed part is told from the rest."""
LEAST_PREFILL_TOKENS = 64
"""Steps of fewer tokens say little of what a token costs."""


class _Fit:
    """Seconds as a fixed part and a part for each block or token, fitted to moving averages."""

    def __init__(self) -> None:
        self._means: list[float] | None = None
        self.fixed_s = 0.0
        self.each_s = 0.0
        self.seen_at = 0.0

    def observe(self, count: int, seconds: float, now: float) -> None:
        """Fit ``seconds / count = each_s + fixed_s / count``, so that small ones weigh as much as large."""
        x, y = 1.0 / count, seconds / count
        new = [x, y, x * x, x * y]
        before = self._means or new
        self._means = [old + _WEIGHT * (one - old) for old, one in zip(before, new, strict=True)]
        mean_x, mean_y, mean_xx, mean_xy = self._means
        spread = mean_xx - mean_x * mean_x
        if spread > (_LEAST_SPREAD * mean_x) ** 2:
            self.fixed_s = max(0.0, (mean_xy - mean_x * mean_y) / spread)
        self.fixed_s = min(self.fixed_s, mean_y / mean_x)
        self.each_s = max(0.0, mean_y - self.fixed_s * mean_x)
        self.seen_at = now


class LoadEstimator:
    """Costs of loading and of computing. Thread-safe."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self.block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: dict[Tier, _Fit] = {}
        self._prefill: _Fit | None = None
        self._largest, self._largest_at = 0, clock()
        """Tokens of the largest step measured in the last minute, and when."""

    def observe_load(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Learn from a read of `num_blocks` blocks. Failed reads count too: they take time."""
        if num_blocks < 1:
            return
        with self._lock:
            self._reads.setdefault(tier, _Fit()).observe(num_blocks, seconds, self._clock())

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that did (almost) nothing but prefill `num_tokens` tokens; ignores short ones."""
        if num_tokens < LEAST_PREFILL_TOKENS:
            return
        now = self._clock()
        with self._lock:
            self._prefill = self._prefill or _Fit()
            self._prefill.observe(num_tokens, seconds, now)
            if num_tokens >= self._largest or now >= self._largest_at + _FORGIVE_S:
                self._largest, self._largest_at = num_tokens, now

    def has_computed(self, num_blocks: int) -> bool:
        """Return whether a step like that of so many blocks, or larger, was measured in the last minute.

        Else `compute_s` may be too much, if it says what a few tokens cost behind hits.
        """
        num_tokens = num_blocks * self.block_size
        if num_tokens < LEAST_PREFILL_TOKENS:  # nothing more will be known
            return True
        with self._lock:
            is_fresh = self._clock() < self._largest_at + _FORGIVE_S
            return is_fresh and 2 * self._largest >= num_tokens

    def load_s(self, tier: Tier, num_blocks: int = 1) -> float | None:
        """Return the estimated seconds to load blocks at once, or None if nothing was measured."""
        with self._lock:
            if tier not in self._reads:
                return None
            latency_s, per_block_s = self._costs(tier)
            return latency_s + num_blocks * per_block_s

    @property
    def compute_s(self) -> float | None:
        """Estimated seconds to compute one more block in a step; None if nothing was measured."""
        with self._lock:
            return None if self._prefill is None else self._prefill.each_s * self.block_size

    def is_worth_loading(self, tier: Tier) -> bool:
        """Return whether one block of this tier is predicted to load faster than it computes."""
        return self.num_worth_loading([tier]) == 1

    def num_worth_loading(self, tiers: Sequence[Tier], num_queued: int = 0) -> int:
        """Return how many of the leading blocks to load; `tiers` says where each block is.

        The number maximizes the time saved: each block saves its compute time and costs its load time, the
        first of each tier the latency too. `num_queued` blocks of other requests are loaded first. Unknown
        costs count as zero, so that they get measured.
        """
        with self._lock:
            if self._prefill is None:
                return len(tiers)
            compute_s = self._prefill.each_s * self.block_size
            gain, best, count = -self._queue_s(tiers, num_queued), 0.0, 0
            costs = {tier: self._costs(tier) for tier in set(tiers)}
            met: set[Tier] = set()
            for number, tier in enumerate(tiers, start=1):
                latency_s, per_block_s = costs[tier]
                gain += compute_s - per_block_s - (0.0 if tier in met else latency_s)
                met.add(tier)
                if gain > best:
                    best, count = gain, number
            return count

    def gain_s(self, tiers: Sequence[Tier], num_tokens: int, num_queued: int = 0) -> float:
        """Return the seconds saved by loading all these blocks if `num_tokens` tokens aren't computed then.

        `num_queued` blocks of other requests are loaded first. Unknown costs count as zero; as long as
        computing is unknown, a token counts as a second.
        """
        with self._lock:
            if self._prefill is None:
                return float(num_tokens)
            gain = self._prefill.each_s * num_tokens - self._queue_s(tiers, num_queued)
            for tier, count in Counter(tiers).items():
                latency_s, per_block_s = self._costs(tier)
                gain -= latency_s + per_block_s * count
            return gain

    def _queue_s(self, tiers: Sequence[Tier], num_queued: int) -> float:
        return num_queued * self._costs(tiers[0])[1] if tiers else 0.0

    def _costs(self, tier: Tier) -> tuple[float, float]:
        """Return latency and seconds per block, less the longer nothing was measured; 0 if never."""
        reads = self._reads.get(tier)
        if reads is None:
            return 0.0, 0.0
        weight = 0.5 ** (max(0.0, self._clock() - reads.seen_at) / _FORGIVE_S)
        return float(weight * reads.fixed_s), float(weight * reads.each_s)
