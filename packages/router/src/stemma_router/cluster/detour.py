"""Whether the way through a prefill server pays, end to end, against the decode server computing the prompt.

Both ways are measured up to the answer: the prefill, then what the decode server takes to load it from the
pool; or the decode server alone.
"""

from __future__ import annotations

from collections.abc import Callable

from stemma.smoothed import Smoothed
from stemma.two_ways import Costs, TwoWays, Way

BASE_TOKENS = 64
"""Cost of a request whose prompt is cached, in prompt tokens."""
_AGAIN_S = 30.0
LEAST_S = 0.02
"""A prefill server that takes less is always asked."""
_MARGIN = 0.9
"""The decode server alone has to take less than this share: it has answers to decode."""


class Detour:
    """The measures of one group of servers and one kind of answers, whole or streamed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._loading = Smoothed()
        """Seconds of the decode server for each prompt token, behind a prefill."""
        self._alone = Smoothed()
        self._ways = TwoWays(clock, least_s=LEAST_S, margin=_MARGIN, again_s=_AGAIN_S, retries_alone=True)

    @property
    def num_alone(self) -> int:
        """Requests that went to a decode server at once, though a prefill server could have been asked."""
        return self._ways.num_alone

    def choose(self, num_tokens: int, prefill_s: float | None) -> Way:
        """Return the way of a prompt; `prefill_s`: what a prefill server will take, None: it isn't known."""
        units = num_tokens + BASE_TOKENS
        load_s, alone_s = _mean_s(self._loading), _mean_s(self._alone)
        costs = Costs(
            first_s=prefill_s,
            through_s=None if prefill_s is None or load_s is None else prefill_s + units * load_s,
            alone_s=None if alone_s is None else units * alone_s,
        )
        return self._ways.choose(num_tokens, costs).way

    def observe(self, way: Way, num_tokens: int, seconds: float) -> None:
        """Note what the decode server took for its part of a prompt."""
        (self._loading if way is Way.THROUGH else self._alone).observe(seconds / (num_tokens + BASE_TOKENS))


def _mean_s(measured: Smoothed) -> float | None:
    return measured.mean_s if measured.num_samples else None
