"""Whether the way through a prefill server pays, end to end, against the decode server computing the prompt.

Both ways are measured up to the answer: the prefill, then what the decode server takes to load it from the
pool; or the decode server alone. As long as one of them isn't known, one of the first few requests goes that
way; later the worse one is tried again now and then, since servers and networks change.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from stemma.smoothed import Smoothed

BASE_TOKENS = 64
"""Cost of a request whose prompt is cached, in prompt tokens."""
_EXPLORE_EVERY = 5
"""Of the requests as long as the decode server alone isn't measured."""
_AGAIN_S = 30.0
LEAST_S = 0.02
"""A prefill server that takes less is always asked."""
_MARGIN = 0.9
"""The decode server alone has to take less than this share: it has answers to decode."""


class Way(Enum):
    """The way of a request."""

    THROUGH = auto()
    """First a prefill server, then a decode server."""
    ALONE = auto()


class Detour:
    """The measures of one group of servers and one kind of answers, whole or streamed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loading = Smoothed()
        """Seconds of the decode server for each prompt token, behind a prefill."""
        self._alone = Smoothed()
        self._length = Smoothed()
        """Of prompts, in tokens."""
        self._num_requests = 0
        self._tried_at = clock()
        self.num_alone = 0
        """Requests that went to a decode server at once, though a prefill server could have been asked."""

    def choose(self, num_tokens: int, prefill_s: float | None) -> Way:
        """Return the way of a prompt; `prefill_s`: what a prefill server will take, None: it isn't known."""
        self._num_requests += 1
        self._length.observe(num_tokens)
        way = self._better(num_tokens, prefill_s)
        if self._explores(num_tokens, prefill_s):
            self._tried_at = self._clock()
            way = Way.THROUGH if way is Way.ALONE else Way.ALONE
        self.num_alone += way is Way.ALONE
        return way

    def observe(self, way: Way, num_tokens: int, seconds: float) -> None:
        """Note what the decode server took for its part of a prompt."""
        (self._loading if way is Way.THROUGH else self._alone).observe(seconds / (num_tokens + BASE_TOKENS))

    def _better(self, num_tokens: int, prefill_s: float | None) -> Way:
        if prefill_s is None or prefill_s < LEAST_S:
            return Way.THROUGH
        if not self._loading.num_samples or not self._alone.num_samples:
            return Way.THROUGH
        units = num_tokens + BASE_TOKENS
        through_s = prefill_s + units * self._loading.mean_s
        return Way.ALONE if units * self._alone.mean_s < _MARGIN * through_s else Way.THROUGH

    def _explores(self, num_tokens: int, prefill_s: float | None) -> bool:
        """Return whether to try the other way: with no long prompt, which would hold up answers."""
        if prefill_s is None or prefill_s < LEAST_S or num_tokens > self._length.mean_s:
            return False
        if not self._alone.num_samples:
            return self._num_requests >= _EXPLORE_EVERY and self._num_requests % _EXPLORE_EVERY == 0
        return self._clock() >= self._tried_at + _AGAIN_S
