"""Whether a prompt waits until the pool was asked for its blocks: a far pool costs each prompt a round trip.

Asking pays where what it saves is expected to exceed what it takes: the share of blocks that the pool had
lately, of the time that loading saves against computing them. Where it doesn't, the prompt starts at once.
Now and then the pool is asked beside it, while nobody waits, so that one that became nearer, or has what is
wanted, is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto

from stemma.memory.tiers.estimate import LoadEstimator
from stemma.types import Tier

_WEIGHT = 0.3
"""Weight of a new observation in the moving averages."""
_LEAST_SHARE = 0.02
"""A pool that takes less than this share of what a prompt takes is always asked."""
_LEAST_S = 0.002
"""And so is one that answers as soon as this."""
_AGAIN_S = 10.0


class Ask(Enum):
    """How a pool is asked for a prompt."""

    AWAITED = auto()
    BESIDE = auto()
    """The prompt starts meanwhile."""
    NOT = auto()


class PoolAsks:
    """Decides by what asking took and gave. Thread-safe."""

    def __init__(self, estimator: LoadEstimator, clock: Callable[[], float]) -> None:
        self._estimator = estimator
        self._clock = clock
        self._lock = threading.Lock()
        self._ask_s: float | None = None
        self._share = 1.0
        """Of the blocks that were asked for, those that were there."""
        self._beside_at = clock()
        self.num_awaited = 0
        self.num_bypassed = 0
        """Prompts that started without waiting for the pool."""

    def decide(self, num_blocks: int) -> Ask:
        """Return how to ask for a prompt of which so many blocks aren't here."""
        with self._lock:
            if self._ask_s is None or self._ask_s <= max(_LEAST_S, self._saved_s(num_blocks)):
                self.num_awaited += 1
                return Ask.AWAITED
            self.num_bypassed += 1
            if self._clock() < self._beside_at + _AGAIN_S:
                return Ask.NOT
            self._beside_at = self._clock()
            return Ask.BESIDE

    def observe(self, num_asked: int, num_found: int, seconds: float) -> None:
        """Note that asking for blocks took so long and found so many of them, from the first on."""
        if not num_asked:
            return
        with self._lock:
            before = seconds if self._ask_s is None else self._ask_s
            self._ask_s = before + _WEIGHT * (seconds - before)
            self._share += _WEIGHT * (num_found / num_asked - self._share)

    def _saved_s(self, num_blocks: int) -> float:
        """Return the seconds that asking is expected to save, loading included."""
        compute_s = self._estimator.compute_s
        if compute_s is None:
            return float("inf")
        all_s = num_blocks * compute_s
        load_s = self._estimator.load_s(Tier.POOL, num_blocks) or 0.0
        return max(self._share * max(0.0, all_s - load_s), _LEAST_SHARE * all_s if load_s < all_s else 0.0)
