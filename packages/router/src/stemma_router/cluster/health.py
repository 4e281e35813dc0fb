"""Whether a server may be asked: by how its answers end, by checks, and by what its operator says.

A server that fails three times in a row, or half of the time, is ejected: it gets no requests for a while.
Then it is half open: one request at a time, and the first that succeeds brings it back; one that fails ejects
it for twice as long. Checks (`/health`) say apart from that whether it answers at all.
"""

from __future__ import annotations

from collections import Counter, deque
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


class Cause(StrEnum):
    """Why a server was ejected."""

    IN_A_ROW = "in_a_row"
    """It failed several times in a row."""
    OFTEN = "often"
    """It failed at a large share of the latest requests."""
    PROBE = "probe"
    """The request that tried it after an ejection failed, or was slow."""
    SLOW = "slow"
    """It is several times as slow as the others."""


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

    def __init__(
        self,
        policy: HealthPolicy,
        clock: Callable[[], float],
        note: Callable[[str, str], None] = lambda what, why: None,
    ) -> None:
        """`note` is told what becomes of the server, and why, in words."""
        self.is_draining = False
        self.ejections: Counter[Cause] = Counter()
        self._note = note
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
        self._cause = Cause.IN_A_ROW
        """Of the latest ejection."""
        self._is_probed = False
        self._refuses = False
        self._num_silent = 0

    @property
    def num_ejections(self) -> int:
        """How often it was ejected."""
        return self.ejections.total()

    @property
    def ejected_for_s(self) -> float:
        """How long its ejection lasts still; 0: it isn't ejected, or may be tried."""
        return 0.0 if self._ejected_until is None else max(0.0, self._ejected_until - self._clock())

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
                self._restore("a request that tried it succeeded")
        else:
            self._count(is_good=True)
            self._in_a_row = 0
            if all(is_good for _, is_good in self._outcomes) and len(self._outcomes) == self._policy.window:
                self._doublings = 0

    def fail(self, why: str = "failed", *, is_probe: bool = False) -> int:
        """Note a failure that is the server's; return its number, for `pardon`."""
        self._number += 1
        if self._ejected_until is not None:
            if is_probe:
                self.eject(Cause.PROBE, f"the request that tried it: {why}")
            return self._number  # else it is of a request from before the ejection
        self._count(is_good=False)
        self._in_a_row += 1
        if self._in_a_row >= self._policy.consecutive_failures:
            self.eject(Cause.IN_A_ROW, f"{self._in_a_row} failures in a row, the last: {why}")
        elif self._fails_often():
            self.eject(Cause.OFTEN, f"half of its latest requests failed, the last: {why}")
        return self._number

    def pardon(self, number: int) -> None:
        """Take back a failure that turned out to be the request's own, and the ejection that it caused."""
        if self._ejected_until is not None:
            if self._ejected_by == number:
                self._doublings -= 1
                self.ejections[self._cause] -= 1
                self._restore("another server failed alike: the request's own fault")
            return
        if (number, False) in self._outcomes:
            self._outcomes.remove((number, False))
            self._in_a_row = max(0, self._in_a_row - 1)

    def withdraw(self) -> None:
        """Note the end of a probe that says nothing: its client left, or the fault was its own."""
        self._is_probed = False

    def eject(self, cause: Cause, why: str) -> None:
        """Send it nothing for a while; `why`: in words."""
        policy = self._policy
        duration = min(policy.ejection_s * 2**self._doublings, policy.longest_ejection_s)
        self._ejected_until = self._clock() + duration
        self._ejected_by = self._number
        self._doublings = min(self._doublings + 1, 16)
        self._is_probed = False
        self._cause = cause
        self.ejections[cause] += 1
        self._note("ejected", f"{why}; for {duration:g} s")

    def check(self, found: Check) -> bool:
        """Note a check; return whether with it the server has become silent: what it had is lost."""
        was_well = not (self._refuses or self._num_silent)
        self._refuses = found is Check.REFUSES
        self._num_silent = self._num_silent + 1 if found is Check.SILENT else 0
        if was_well and found is not Check.SERVES:
            said = "it says that it takes no requests" if self._refuses else "no answer to a check"
            self._note("down", said)
        elif not was_well and found is Check.SERVES:
            self._note("up", "it answers checks again")
        return self._num_silent == self._policy.silent_checks

    def _count(self, *, is_good: bool) -> None:
        self._outcomes.append((self._number, is_good))

    def _fails_often(self) -> bool:
        policy, num_outcomes = self._policy, len(self._outcomes)
        num_failed = sum(not is_good for _, is_good in self._outcomes)
        return num_outcomes >= policy.min_outcomes and num_failed >= policy.failure_share * num_outcomes

    def _restore(self, why: str) -> None:
        self._note("back", why)
        self._ejected_until = None
        self._is_probed = False
        self._in_a_row = 0
        self._outcomes.clear()
