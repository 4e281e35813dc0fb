"""Whether counts of draws fit a distribution."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def chi_square_fits(counts: npt.NDArray[np.int64], p: npt.NDArray[np.float64]) -> bool:
    """Return whether counts [V] could come from p [V]: within five standard deviations of chi-square."""
    assert counts[p == 0].sum() == 0
    expected = p * counts.sum()
    few = expected < 5
    observed = np.append(counts[~few], counts[few].sum()).astype(np.float64)
    expected = np.append(expected[~few], expected[few].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    return bool(statistic < freedom + 5 * math.sqrt(2 * freedom))
