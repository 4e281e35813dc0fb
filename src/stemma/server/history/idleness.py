"""When idle time begins, and whether it is worth using: `preparing` asks before it looks at an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

REST_S = 0.1
"""Idle time before anything is prepared: a client that goes on at once finds the server free."""
BUSY_REQUESTS = 4
BUSY_S = 1.0
"""A server to which so many requests of other conversations came within this time is busy, though none may
be open right now."""
VAIN_LOOKS = 16
"""After so many answers in a row that left nothing to compute, the template seems to leave nothing out."""
LOOKS_EVERY = 8
"""Then one of so many answers is looked at, since traffic changes."""


class Idleness:
    """Says how long a server must have rested. Gaps between the requests of a busy one are no idle time.

    A conversation that goes on from the newest answer says nothing: a lone agent with quick tools is the one
    whom preparing helps most, and what is computed for it when it comes is its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._others: deque[float] = deque(maxlen=BUSY_REQUESTS)
        """When the latest requests came that went on from another answer than the newest, or from none."""

    def came(self, *, goes_on: bool) -> None:
        """Note a request. `goes_on`: it is the turn after the newest answer."""
        if not goes_on:
            self._others.append(self._clock())

    @property
    def rest_s(self) -> float:
        """Seconds without any request after which idle time begins, from now."""
        if len(self._others) < BUSY_REQUESTS:
            return REST_S
        return max(REST_S, self._others[0] + BUSY_S - self._clock())


class Worth:
    """Which answers are looked at: to render a turn twice takes time even if nothing is left to compute."""

    def __init__(self) -> None:
        self._num_vain = 0
        self._num_skipped = 0

    def looks(self) -> bool:
        """Return whether to look at the next answer."""
        if self._num_vain < VAIN_LOOKS:
            return True
        self._num_skipped = (self._num_skipped + 1) % LOOKS_EVERY
        return not self._num_skipped

    def told(self, num_computed: int) -> None:
        """Note what was left to compute after an answer."""
        self._num_vain = 0 if num_computed else self._num_vain + 1
