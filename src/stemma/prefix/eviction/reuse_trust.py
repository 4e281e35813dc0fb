"""ReuseTrust: what is said of blocks, by clients or by the names of their sessions, and what it is worth.

It claims that such blocks come back more, or less, often than others of their class, by a factor. That claim
is where this begins. What follows counts: reuses of such blocks over the reuses that their classes' hazards
let expect (the standardised mortality ratio of life tables, with a gamma prior around the claim). So what the
traffic refutes loses its effect, and what it bears out keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]

_HALF_LIFE_S = 1800.0
_MOST = 32.0
"""Largest factor, and the inverse of the smallest: that of priority 100 as it is claimed."""


class ReuseTrust:
    """Reuses of blocks of which something is said, and those that their classes let expect; faded."""

    def __init__(self, claims: Sequence[float]) -> None:
        """`claims`: the factor that each level of what may be said claims; 1: none."""
        self._claims = tuple(claims)
        self._reuses: Float64 = np.zeros(len(self._claims))
        self._expected: Float64 = np.zeros(len(self._claims))
        self._factors = list(self._claims)
        self._faded_s = -math.inf

    def factor(self, level: int) -> float:
        """Return by how much a block of which that is said is worth more than one of its class."""
        return self._factors[level]

    def expect(self, levels: Levels, reuses: Float64) -> None:
        """Count the reuses expected of blocks since they were counted last, by their classes."""
        np.add.at(self._expected, levels, reuses)

    def reused(self, levels: Levels, weights: Float64) -> None:
        """Count reuses of blocks whose claims have these levels, by their weights."""
        np.add.at(self._reuses, levels, weights)

    def judge(self, prior: float, now: float) -> None:
        """Compute the factors anew; `prior` weighs the claims, in reuses."""
        known = self._reuses + self._expected > 0.0
        for level in np.flatnonzero(known).tolist():
            root = math.sqrt(self._claims[level])
            ratio = (self._reuses.item(level) + prior * root) / (self._expected.item(level) + prior / root)
            self._factors[level] = min(max(ratio, 1.0 / _MOST), _MOST)
        if math.isfinite(self._faded_s):
            fade = 0.5 ** ((now - self._faded_s) / _HALF_LIFE_S)
            self._reuses *= fade
            self._expected *= fade
        self._faded_s = now
