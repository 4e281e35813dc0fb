"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

import pytest

from stemma.memory.tiers.pool.breaker import Circuit, CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock, failures_to_open=3, first_wait_s=1.0, longest_wait_s=4.0, probe_limit_s=10.0)


def test_quick_failures_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows
    breaker.failed()
    assert breaker.state is Circuit.OPEN
    assert breaker.num_opened == 1


def test_one_late_call_opens_it(breaker: CircuitBreaker) -> None:
    breaker.timed_out()
    assert not breaker.allows


def test_one_probe_goes_after_the_wait_and_its_success_closes(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.timed_out()
    assert not breaker.begin_probe()
    clock.now = 1.0
    assert [breaker.begin_probe(), breaker.begin_probe()] == [True, False]
    assert breaker.state is Circuit.HALF_OPEN
    assert not breaker.allows
    breaker.end_probe(True)
    assert breaker.allows


def test_each_failed_probe_doubles_the_wait_up_to_a_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.timed_out()
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        clock.now += wait_s - 0.01
        assert not breaker.begin_probe()
        clock.now += 0.02
        assert breaker.begin_probe()
        breaker.end_probe(False)
    assert breaker.num_opened == 1


def test_a_success_that_comes_late_does_not_close_it(breaker: CircuitBreaker) -> None:
    breaker.timed_out()
    breaker.succeeded()
    assert not breaker.allows


def test_a_probe_that_never_returns_is_given_up(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.timed_out()
    clock.now = 1.0
    assert breaker.begin_probe()
    clock.now = 12.0
    assert not breaker.begin_probe()
    breaker.end_probe(True)
    assert breaker.state is Circuit.OPEN
    clock.now = 14.0
    assert breaker.begin_probe()
