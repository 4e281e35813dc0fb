"""Estimates whether loading a prefix is faster than computing it, from measurements in the running server.

Each tier has an estimate of seconds per block, a moving average of measured reads; prefill has an estimate of
seconds per token. A hit is loaded only as far as that is predicted to be faster. Measurements lose weight
with age, so a tier that was slow once is tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from stemma.types import Tier

_WEIGHT = 0.2
"""Weight of a new observation in the moving average."""
_FORGIVE_S = 60.0
"""Time without an observation after which a tier's estimated cost counts half."""


class LoadEstimator:
    """Costs of loading and of computing. Thread-safe."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._load_s: dict[Tier, float] = {}
        self._seen_at: dict[Tier, float] = {}
        self._prefill_s: float | None = None

    def observe_load(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Learn from a read of `num_blocks` blocks. Failed reads count too: they take time."""
        if num_blocks < 1:
            return
        per_block = seconds / num_blocks
        with self._lock:
            before = self._load_s.get(tier, per_block)
            self._load_s[tier] = before + _WEIGHT * (per_block - before)
            self._seen_at[tier] = self._clock()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that did (almost) nothing but prefill `num_tokens` tokens."""
        if num_tokens < 1:
            return
        per_token = seconds / num_tokens
        with self._lock:
            before = per_token if self._prefill_s is None else self._prefill_s
            self._prefill_s = before + _WEIGHT * (per_token - before)

    def load_s(self, tier: Tier) -> float | None:
        """Return the estimated seconds to load a block, or None if nothing was measured."""
        with self._lock:
            return self._load_s_now(tier)

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

        The number maximizes the time saved: each block saves its compute time and costs its load time.
        `num_queued` blocks of other requests are loaded first. Unknown costs count as zero, so that they get
        measured.
        """
        with self._lock:
            if self._prefill_s is None:
                return len(tiers)
            compute_s = self._prefill_s * self._block_size
            queue_s = num_queued * (self._load_s_now(tiers[0]) or 0.0) if tiers else 0.0
            gain, best, count = -queue_s, 0.0, 0
            for number, tier in enumerate(tiers, start=1):
                gain += compute_s - (self._load_s_now(tier) or 0.0)
                if gain > best:
                    best, count = gain, number
            return count

    def _load_s_now(self, tier: Tier) -> float | None:
        measured = self._load_s.get(tier)
        if measured is None:
            return None
        age_s = max(0.0, self._clock() - self._seen_at[tier])
        return float(measured * 0.5 ** (age_s / _FORGIVE_S))
