"""Which of two ways a prompt takes: through something remote that may save work, or alone.

Both ways are estimated end to end by who asks. The faster one is taken. The other one is tried now and then,
since networks and servers change, and early where it isn't known: what is never tried is never known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from stemma.smoothed import Smoothed

EXPLORE_EVERY = 5
"""Of the first prompts, the one that goes alone as long as that isn't measured."""
LEAST_TRIED_S = 0.02
"""The remote way isn't left for a try where going it costs less than this."""
_DEAR = 8.0
"""Nor where going alone is expected to take so many times as long."""


class Way(Enum):
    """The way of a prompt."""

    THROUGH = auto()
    """Something remote is asked first."""
    ALONE = auto()


@dataclass(frozen=True, slots=True)
class Costs:
    """What the two ways of a prompt are expected to take, in seconds. None: it was never measured."""

    first_s: float | None
    """What going the remote way costs before it is known whether it helps."""
    through_s: float | None
    """All of it, `first_s` included."""
    alone_s: float | None
    is_alone_known: bool = True
    """Whether going alone was measured lately, with prompts like this one; else a try would tell."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a prompt."""

    way: Way
    is_try: bool
    """Whether the other way is expected to be faster."""


class TwoWays:
    """The decisions about one kind of prompts. Not thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        least_s: float,
        margin: float,
        again_s: float,
        retries_alone: bool,
    ) -> None:
        """`least_s`: a remote way that costs less before it is known whether it helps is always taken.

        Going alone has to take less than the share `margin` of the remote way. After `again_s` without a try
        the slower way is tried; going alone only if it isn't known, or with `retries_alone`.
        """
        self._clock = clock
        self._least_s = least_s
        self._margin = margin
        self._again_s = again_s
        self._retries_alone = retries_alone
        self._length = Smoothed()
        """Of prompts, in tokens."""
        self._num_prompts = 0
        self._has_tried_alone = False
        self._tried_at = clock()
        self.num_alone = 0
        """Prompts that went alone, though something remote could have been asked."""

    def choose(self, num_tokens: int, costs: Costs) -> Choice:
        """Return the way of a prompt."""
        self._num_prompts += 1
        self._length.observe(num_tokens)
        choice = Choice(self._better(costs), is_try=False)
        if self._tries(choice.way, num_tokens, costs):
            self._tried_at = self._clock()
            self._has_tried_alone |= choice.way is Way.THROUGH
            choice = Choice(Way.THROUGH if choice.way is Way.ALONE else Way.ALONE, is_try=True)
        self.num_alone += choice.way is Way.ALONE
        return choice

    def _better(self, costs: Costs) -> Way:
        if costs.first_s is None or costs.first_s < self._least_s:
            return Way.THROUGH
        if costs.through_s is None or costs.alone_s is None:
            return Way.THROUGH
        return Way.ALONE if costs.alone_s < self._margin * costs.through_s else Way.THROUGH

    def _tries(self, better: Way, num_tokens: int, costs: Costs) -> bool:
        """Return whether to take the other way: with no long prompt, which would hold up others."""
        if costs.first_s is None or num_tokens > self._length.mean_s:
            return False
        if better is Way.ALONE:
            return self._is_time()
        if costs.first_s < LEAST_TRIED_S or _is_dear(costs):
            return False
        is_known = costs.is_alone_known and costs.alone_s is not None
        if not is_known and not self._has_tried_alone:
            return self._num_prompts % EXPLORE_EVERY == 0
        return (self._retries_alone or not is_known) and self._is_time()

    def _is_time(self) -> bool:
        return self._clock() >= self._tried_at + self._again_s


def _is_dear(costs: Costs) -> bool:
    if costs.through_s is None or costs.alone_s is None:
        return False
    return costs.alone_s > _DEAR * costs.through_s
