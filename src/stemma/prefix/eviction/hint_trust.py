"""HintTrust: what clients' hints of priority are worth, as the traffic shows it.

A hint claims that blocks come back more, or less, often than others of their class: by a factor of 2 for
every 10 points of priority. That claim is where this begins. What follows counts: reuses of blocks with such
a hint over the reuses that their classes' hazards let expect (the standardised mortality ratio of life
tables, with a gamma prior around the claim). So a hint that the traffic refutes loses its effect, and one
that it bears out keeps it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from stemma.types import DEFAULT_PRIORITY, RetentionHint

Float64 = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]

_LONG_S = 900.0
"""A longer time to live is another claim than a short one."""
_LIFETIMES = 3
_STEPS = 5
_NUM_LEVELS = (2 * _STEPS + 1) * _LIFETIMES
_HALF_LIFE_S = 1800.0
_MOST = 32.0
"""Largest factor, and the inverse of the smallest: that of priority 100 as it is claimed."""


def level_of(hint: RetentionHint) -> int:
    """Return the number of what a hint claims: priority in tens, and whether it ends soon, late, never."""
    step = round((hint.priority - DEFAULT_PRIORITY) / 10)
    lifetime = 0 if hint.ttl_s is None else 1 if hint.ttl_s <= _LONG_S else 2
    return (step + _STEPS) * _LIFETIMES + lifetime


def claimed(level: int) -> float:
    """Return the factor that hints of a level claim."""
    return float(2.0 ** (level // _LIFETIMES - _STEPS))


class HintTrust:
    """Reuses of hinted blocks, and those that their classes let expect; faded."""

    def __init__(self) -> None:
        self._reuses: Float64 = np.zeros(_NUM_LEVELS)
        self._expected: Float64 = np.zeros(_NUM_LEVELS)
        self._factors = [claimed(level) for level in range(_NUM_LEVELS)]
        self._faded_s = -math.inf

    def factor(self, level: int) -> float:
        """Return by how much a block with such a hint is worth more than one of its class."""
        return self._factors[level]

    def expect(self, levels: Levels, reuses: Float64) -> None:
        """Count the reuses expected of blocks since they were counted last, by their classes."""
        np.add.at(self._expected, levels, reuses)

    def reused(self, levels: Levels, weights: Float64) -> None:
        """Count reuses."""
        np.add.at(self._reuses, levels, weights)

    def judge(self, prior: float, now: float) -> None:
        """Compute the factors anew; `prior` weighs the claims, in reuses."""
        known = self._reuses + self._expected > 0.0
        for level in np.flatnonzero(known).tolist():
            root = math.sqrt(claimed(level))
            ratio = (self._reuses.item(level) + prior * root) / (self._expected.item(level) + prior / root)
            self._factors[level] = min(max(ratio, 1.0 / _MOST), _MOST)
        if math.isfinite(self._faded_s):
            fade = 0.5 ** ((now - self._faded_s) / _HALF_LIFE_S)
            self._reuses *= fade
            self._expected *= fade
        self._faded_s = now
