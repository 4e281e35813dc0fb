"""How long a server takes to its first byte, measured; and from that, how long to wait for one.

Seconds are divided by the prompt tokens that the server had to compute until then, those that waited before
included, and a few that stand for what a request costs anyway.
"""

from __future__ import annotations

from stemma.smoothed import Smoothed

_BASE_TOKENS = 64
"""Cost of a request whose prompt is cached, in prompt tokens."""
_SLACK = 4.0
"""Requests that other routers sent wait there too, and answers under way take their part."""
_LEAST_S = 5.0
_LATE_GROWTH = 1.25
_OPTIONAL_SLACK, _LEAST_OPTIONAL_S = 2.0, 1.0
_UNKNOWN_S_PER_TOKEN = 0.02
"""Assumed until a server is measured: a large model on a few cores."""


class PrefillSpeed:
    """Measured seconds for each prompt token of one server."""

    def __init__(self) -> None:
        self._each = Smoothed(_UNKNOWN_S_PER_TOKEN)

    @property
    def num_samples(self) -> int:
        """How often it was measured."""
        return self._each.num_samples

    @property
    def mean_s(self) -> float:
        """Seconds for each token."""
        return self._each.mean_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note that `num_tokens` were computed, and the first byte came, after `seconds`."""
        self._each.observe(seconds / (num_tokens + _BASE_TOKENS))

    def note_late(self) -> None:
        """Note that nobody waited longer: it may have become slower, or hang."""
        self._each.mean_s *= _LATE_GROWTH

    def expected_s(self, num_tokens: int) -> float:
        """Return how long a first byte takes after `num_tokens` prompt tokens."""
        return self._each.mean_s * (num_tokens + _BASE_TOKENS)

    def limit_s(self, num_tokens: int) -> float:
        """Return how long to wait for the first byte after `num_tokens` prompt tokens."""
        return _LEAST_S + _SLACK * self._slowest_s(num_tokens)

    def optional_limit_s(self, num_tokens: int) -> float:
        """Return how long to wait where another server can do the same work from the start.

        Until the server was measured, as long as for any other.
        """
        if self.num_samples == 0:
            return self.limit_s(num_tokens)
        return max(_LEAST_OPTIONAL_S, _OPTIONAL_SLACK * self._slowest_s(num_tokens))

    def _slowest_s(self, num_tokens: int) -> float:
        return self._each.slowest_s * (num_tokens + _BASE_TOKENS)
