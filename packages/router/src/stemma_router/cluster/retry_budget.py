"""How many requests that failed elsewhere a server takes: a fifth of its own, and always a few.

Without a bound, the servers that still answer would compute everything twice as soon as one fails.
"""

from __future__ import annotations

from collections.abc import Callable

_SHARE = 0.2
_BURST = 100.0
"""Size of a burst that it allows: the requests under way of a server that just failed."""
_PER_S = 5.0


class RetryBudget:
    """A token bucket that a server's own requests fill. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = _BURST
        self._at = clock()

    def note_request(self) -> None:
        """Note a request that failed nowhere before."""
        self._level = min(_BURST, self._level + _SHARE)

    def has_room(self) -> bool:
        """Return whether `take` would take one."""
        now = self._clock()
        self._level = min(_BURST, self._level + (now - self._at) * _PER_S)
        self._at = now
        return self._level >= 1

    def take(self) -> bool:
        """Take a request that failed elsewhere; False: it must not be sent here."""
        if not self.has_room():
            return False
        self._level -= 1
        return True
