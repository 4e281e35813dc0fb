"""A circuit breaker: while a pool is broken, nobody waits for it.

Closed: calls go through. One late call opens the circuit at once (every further call could cost its
deadline), as do several quick failures in a row. Open: calls are refused. After a wait, one *probe* runs in
the background, so that no request waits for it: its success closes the circuit, its failure doubles the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum


class Circuit(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """Open, with a probe running."""


class CircuitBreaker:
    """Thread-safe; `clock` is in seconds and monotonic."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures_to_open: int = 3,
        first_wait_s: float = 1.0,
        longest_wait_s: float = 30.0,
        probe_limit_s: float = 10.0,
    ) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._probe_limit_s = probe_limit_s
        self._lock = threading.Lock()
        self._state = Circuit.CLOSED
        self._num_failures = 0
        self._wait_s = first_wait_s
        self._since = clock()
        self.num_opened = 0
        """How often the circuit went from closed to open."""

    @property
    def state(self) -> Circuit:
        """The state now."""
        return self._state

    @property
    def allows(self) -> bool:
        """Whether calls go through."""
        return self._state is Circuit.CLOSED

    def succeeded(self) -> None:
        """Report a call that was answered in time; only a probe's answer closes an open circuit."""
        with self._lock:
            if self._state is Circuit.CLOSED:
                self._num_failures = 0

    def failed(self) -> None:
        """Report a call that failed quickly."""
        with self._lock:
            self._num_failures += 1
            if self._state is Circuit.CLOSED and self._num_failures >= self._failures_to_open:
                self._open()

    def timed_out(self) -> None:
        """Report a call that wasn't answered in time."""
        with self._lock:
            if self._state is Circuit.CLOSED:
                self._open()

    def begin_probe(self) -> bool:
        """Return True to one caller once the wait is over: it must make a call and `end_probe`."""
        with self._lock:
            now = self._clock()
            if self._state is Circuit.HALF_OPEN and now - self._since > self._probe_limit_s:
                self._back_off(now)  # the probe itself never ended
            if self._state is not Circuit.OPEN or now - self._since < self._wait_s:
                return False
            self._state, self._since = Circuit.HALF_OPEN, now
            return True

    def end_probe(self, success: bool) -> None:
        """Report the probe's result. A probe that exceeded its limit changes nothing."""
        with self._lock:
            if self._state is not Circuit.HALF_OPEN:
                return
            if success:
                self._state, self._num_failures = Circuit.CLOSED, 0
                self._wait_s = self._first_wait_s
            else:
                self._back_off(self._clock())

    def _open(self) -> None:
        self._state, self._since = Circuit.OPEN, self._clock()
        self.num_opened += 1

    def _back_off(self, now: float) -> None:
        self._state, self._since = Circuit.OPEN, now
        self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
