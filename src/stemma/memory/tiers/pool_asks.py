"""Whether a prompt waits until the pool was asked for its blocks: a far pool costs each prompt a round trip.

Asking pays where what it saves is expected to exceed what it takes: the share of blocks that the pool had
lately, of the time that loading saves against computing them. Where it doesn't, the prompt starts at once.
Now and then the pool is asked beside it, while nobody waits, so that one that became nearer, or has what is
wanted, is used again. And as long as nobody knows what computing such prompts takes, one of them is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto

from stemma.memory.tiers.estimate import LoadEstimator
from stemma.two_ways import Choice, Costs, TwoWays, Way
from stemma.types import Tier

_WEIGHT = 0.3
"""Weight of a new observation in the moving averages."""
_MARGIN = 0.98
"""A pool is asked as long as starting at once takes more than this share of asking it first."""
_LEAST_S = 0.002
"""One that answers as soon as this is always asked."""
_AGAIN_S = 10.0


class PoolAsk(Enum):
    """How a pool is asked for a prompt."""

    AWAITED = auto()
    BESIDE = auto()
    """The prompt starts meanwhile."""
    NOT = auto()


class PoolAsks:
    """Decides by what asking took and gave. Thread-safe."""

    def __init__(self, estimator: LoadEstimator, clock: Callable[[], float]) -> None:
        self._estimator = estimator
        self._lock = threading.Lock()
        self._ask_s: float | None = None
        self._share = 1.0
        """Of the blocks that were asked for, those that were there."""
        self._ways = TwoWays(clock, least_s=_LEAST_S, margin=_MARGIN, again_s=_AGAIN_S, retries_alone=False)
        self.others_s = 0.0
        """What asking takes the slowest of the other ranks, which ask for their parts at the same time."""

    @property
    def ask_s(self) -> float:
        """What asking takes, from the moment a prompt is queued; 0 if that isn't known."""
        return self._ask_s or 0.0

    def decide(self, num_blocks: int) -> PoolAsk:
        """Return how to ask for a prompt of which so many blocks aren't here."""
        with self._lock:
            choice = self._ways.choose(num_blocks * self._estimator.block_size, self._costs(num_blocks))
        match choice:
            case Choice(Way.THROUGH, is_try=False):
                return PoolAsk.AWAITED
            case Choice(Way.THROUGH):
                return PoolAsk.BESIDE
            case _:
                return PoolAsk.NOT

    def observe(self, num_asked: int, num_found: int, seconds: float) -> None:
        """Note that asking for blocks took so long and found so many of them, from the first on."""
        if not num_asked:
            return
        with self._lock:
            before = seconds if self._ask_s is None else self._ask_s
            self._ask_s = before + _WEIGHT * (seconds - before)
            self._share += _WEIGHT * (num_found / num_asked - self._share)

    def _costs(self, num_blocks: int) -> Costs:
        """Return what the ways take up to the last block of the prompt, which is computed in any case."""
        ask_s = None if self._ask_s is None else max(self._ask_s, self.others_s)
        is_known = self._estimator.has_computed(num_blocks)
        compute_s = self._estimator.compute_s
        if ask_s is None or compute_s is None:
            return Costs(ask_s, None, None, is_known)
        alone_s = num_blocks * compute_s
        load_s = self._estimator.load_s(Tier.POOL, num_blocks) or 0.0
        saved_s = self._share * max(0.0, alone_s - load_s)
        return Costs(ask_s, ask_s + alone_s - saved_s, alone_s, is_known)
