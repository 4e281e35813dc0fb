"""Whether a server may be asked: by how its answers end, by checks, and by what its operator says.

A server that fails three times in a row, or half of the time, is ejected: it gets no requests for a while.
Then it is half open: one request at a time, and the first that succeeds brings it back; one that fails ejects
it for twice as long. Checks (`/health`) say apart from that whether it answers at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    """How far a server may be asked, best first."""

    HEALTHY = "healthy"
    HALF_OPEN = "half_open"
    """The time of its ejection is over; one request tries it."""
    EJECTED = "ejected"
    DOWN = "down"
    """Checks find no answer, or one that says that it doesn't serve."""
    DRAINING = "draining"
    """It ends what it has."""


class Check(StrEnum):
    """The finding of a check."""

    SERVES = "serves"
    REFUSES = "refuses"
    """It answers that it takes no requests: it drains, or its engine has failed."""
    SILENT = "silent"
    """No answer in time, or no connection."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When a server is ejected, and for how long."""

    consecutive_failures: int = 3
    window: int = 20
    """Latest outcomes that the share of failures is taken of."""
    min_outcomes: int = 10
    """Fewer say nothing about a share."""
    failure_share: float = 0.5
    ejection_s: float = 5.0
    """The first time; each further one lasts twice as long."""
    longest_ejection_s: float = 120.0
    silent_checks: int = 3
    """Checks in a row without an answer after which what a server had is lost. It gets no more requests after
    the first of them; any answer ends that."""


class ServerHealth:
    """The health of one server. Not thread-safe."""

    def __init__(self, policy: HealthPolicy, clock: Callable[[], float]) -> None:
        self.is_draining = False
        self.num_ejections = 0
        self._policy = policy
        self._clock = clock
        self._outcomes: deque[tuple[int, bool]] = deque(maxlen=policy.window)
        """Number and success of the latest outcomes."""
        self._number = 0
        self._in_a_row = 0
        self._doublings = 0
        self._ejected_until: float | None = None
        self._ejected_by = 0
        """The failure that ejected it."""
        self._is_probed = False
        self._refuses = False
        self._num_silent = 0

    @property
    def standing(self) -> Standing:
        """How far it may be asked now."""
        if self.is_draining:
            return Standing.DRAINING
        if self._refuses or self._num_silent:
            return Standing.DOWN
        if self._ejected_until is None:
            return Standing.HEALTHY
        is_over = self._clock() >= self._ejected_until and not self._is_probed
        return Standing.HALF_OPEN if is_over else Standing.EJECTED

    def begin(self) -> bool:
        """Note a request; return whether it is a probe, whose end decides on an ejection."""
        if self._ejected_until is None:
            return False
        self._is_probed = True
        return True

    def succeed(self, *, is_probe: bool = False) -> None:
        """Note a good answer. One of a request from before an ejection says nothing."""
        if self._ejected_until is not None:
            if is_probe:
                self._restore()
        else:
            self._count(is_good=True)
            self._in_a_row = 0
            if all(is_good for _, is_good in self._outcomes) and len(self._outcomes) == self._policy.window:
                self._doublings = 0

    def fail(self, *, is_probe: bool = False) -> int:
        """Note a failure that is the server's; return its number, for `pardon`."""
        self._number += 1
        if self._ejected_until is not None:
            if is_probe:
                self.eject()
            return self._number  # else it is of a request from before the ejection
        self._count(is_good=False)
        self._in_a_row += 1
        if self._fails_often():
            self.eject()
        return self._number

    def pardon(self, number: int) -> None:
        """Take back a failure that turned out to be the request's own, and the ejection that it caused."""
        if self._ejected_until is not None:
            if self._ejected_by == number:
                self._doublings -= 1
                self.num_ejections -= 1
                self._restore()
            return
        if (number, False) in self._outcomes:
            self._outcomes.remove((number, False))
            self._in_a_row = max(0, self._in_a_row - 1)

    def withdraw(self) -> None:
        """Note the end of a probe that says nothing: its client left, or the fault was its own."""
        self._is_probed = False

    def eject(self) -> None:
        """Send it nothing for a while."""
        policy = self._policy
        duration = min(policy.ejection_s * 2**self._doublings, policy.longest_ejection_s)
        self._ejected_until = self._clock() + duration
        self._ejected_by = self._number
        self._doublings = min(self._doublings + 1, 16)
        self._is_probed = False
        self.num_ejections += 1

    def check(self, found: Check) -> bool:
        """Note a check; return whether with it the server has become silent: what it had is lost."""
        self._refuses = found is Check.REFUSES
        self._num_silent = self._num_silent + 1 if found is Check.SILENT else 0
        return self._num_silent == self._policy.silent_checks

    def _count(self, *, is_good: bool) -> None:
        self._outcomes.append((self._number, is_good))

    def _fails_often(self) -> bool:
        policy, num_outcomes = self._policy, len(self._outcomes)
        num_failed = sum(not is_good for _, is_good in self._outcomes)
        is_share = num_outcomes >= policy.min_outcomes and num_failed >= policy.failure_share * num_outcomes
        return self._in_a_row >= policy.consecutive_failures or is_share

    def _restore(self) -> None:
        self._ejected_until = None
        self._is_probed = False
        self._in_a_row = 0
        self._outcomes.clear()
