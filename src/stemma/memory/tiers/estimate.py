"""Estimates whether loading is faster than computing, from measurements in the running server.

A read from a tier takes a fixed latency and seconds per block, both fitted to the reads measured last, as
long as these were of different sizes. Prefill has an estimate of seconds per token. What is
loaded, KV and states alike, costs what its blocks cost and saves the tokens that needn't be computed then.
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
"""Relative deviation of sizes from which on latency is told from time per block."""


class _Reads:
    """Moving averages over the reads of one tier."""

    def __init__(self) -> None:
        self._means: list[float] | None = None
        self.latency_s = 0.0
        self.per_block_s = 0.0
        self.seen_at = 0.0

    def observe(self, num_blocks: int, seconds: float, now: float) -> None:
        """Fit ``seconds / n = per_block_s + latency_s / n``, so that small reads weigh as much as large."""
        x, y = 1.0 / num_blocks, seconds / num_blocks
        new = [x, y, x * x, x * y]
        before = self._means or new
        self._means = [old + _WEIGHT * (one - old) for old, one in zip(before, new, strict=True)]
        mean_x, mean_y, mean_xx, mean_xy = self._means
        spread = mean_xx - mean_x * mean_x
        if spread > (_LEAST_SPREAD * mean_x) ** 2:
            self.latency_s = max(0.0, (mean_xy - mean_x * mean_y) / spread)
        self.latency_s = min(self.latency_s, mean_y / mean_x)
        self.per_block_s = max(0.0, mean_y - self.latency_s * mean_x)
        self.seen_at = now


class LoadEstimator:
    """Costs of loading and of computing. Thread-safe."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: dict[Tier, _Reads] = {}
        self._prefill_s: float | None = None

    def observe_load(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Learn from a read of `num_blocks` blocks. Failed reads count too: they take time."""
        if num_blocks < 1:
            return
        with self._lock:
            self._reads.setdefault(tier, _Reads()).observe(num_blocks, seconds, self._clock())

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that did (almost) nothing but prefill `num_tokens` tokens."""
        if num_tokens < 1:
            return
        per_token = seconds / num_tokens
        with self._lock:
            before = per_token if self._prefill_s is None else self._prefill_s
            self._prefill_s = before + _WEIGHT * (per_token - before)

    def load_s(self, tier: Tier, num_blocks: int = 1) -> float | None:
        """Return the estimated seconds to load blocks at once, or None if nothing was measured."""
        with self._lock:
            if tier not in self._reads:
                return None
            latency_s, per_block_s = self._costs(tier)
            return latency_s + num_blocks * per_block_s

    @property
    def compute_s(self) -> float | None:
        """Estimated seconds to compute a block, the limit for loading one; None if nothing was measured."""
        with self._lock:
            return None if self._prefill_s is None else self._prefill_s * self._block_size

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
            if self._prefill_s is None:
                return len(tiers)
            compute_s = self._prefill_s * self._block_size
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
            if self._prefill_s is None:
                return float(num_tokens)
            gain = self._prefill_s * num_tokens - self._queue_s(tiers, num_queued)
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
        return float(weight * reads.latency_s), float(weight * reads.per_block_s)
