"""How fast a server computes, measured at answers that didn't wait in a queue, and when that is too slow.

Two things are measured: seconds up to a stream's first byte for each prompt token, and seconds of a whole
answer for each token. A server is slow whose mean is several times the median of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from stemma.smoothed import Smoothed

FEW_SAMPLES = 10
"""Fewer say nothing of a server."""
_SLOW_FACTOR = 5.0
_BASE_TOKENS = 64
"""Cost of a request whose prompt is cached, in prompt tokens."""
_PROMPT_TOKENS = 20
"""Prompt tokens that take as long as one of an answer."""


class Measure:
    """Seconds for a unit of work."""

    def __init__(self, least_s: float) -> None:
        """`least_s`: differences below it say nothing, whatever the factor."""
        self._each = Smoothed()
        self._least_s = least_s

    @property
    def mean_s(self) -> float | None:
        """The mean of the latest; None until there are enough."""
        return self._each.mean_s if self._each.num_samples >= FEW_SAMPLES else None

    def observe(self, units: float, seconds: float) -> float:
        """Note that so many units took so long; return the seconds for one."""
        self._each.observe(seconds / units)
        return seconds / units

    def is_slow(self, each_s: float | None, others: Sequence[float | None]) -> bool:
        """Return whether `each_s` is that of a slow server; `others`: the means of the others."""
        known = [one for one in others if one is not None]
        if each_s is None or not known:
            return False
        median = statistics.median(known)
        return each_s > _SLOW_FACTOR * median and each_s - median > self._least_s


@dataclass(slots=True)
class Pace:
    """The measures of one server."""

    prefill: Measure = field(default_factory=lambda: Measure(0.00025))
    """For a prompt token, up to the first byte."""
    whole: Measure = field(default_factory=lambda: Measure(0.02))
    """For a token of an answer that comes whole."""


def prefill_units(num_tokens: int) -> float:
    """Return the work up to a first byte, in prompt tokens."""
    return num_tokens + _BASE_TOKENS


def whole_units(num_tokens: int, num_output: int) -> float:
    """Return the work of a whole answer, in its tokens."""
    return 1 + num_output + num_tokens / _PROMPT_TOKENS
