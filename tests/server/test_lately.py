"""Percentiles and sums of the last minute and the last hour."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.server.observe.lately import GROWTH, HOUR_S, SLOT_S, Lately


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("draw", [lambda rng: rng.expovariate(2.0), lambda rng: rng.lognormvariate(-4, 2)])
def test_percentiles_are_within_five_percent(draw: Callable[[random.Random], float]) -> None:
    rng, lately = random.Random(1), Lately(Clock())
    times = sorted(max(1e-3, draw(rng)) for _ in range(5000))
    for seconds in times:
        lately.time("token", seconds)
    found = lately.told()["minute"]["times"]["token"]
    assert found["count"] == len(times)
    for name, at in (("p50", 2499), ("p95", 4749)):
        assert found[name] == pytest.approx(times[at], rel=0.05)


def test_the_minute_forgets_and_so_does_the_hour() -> None:
    clock = Clock()
    lately = Lately(clock)
    lately.count("refused", "ada", "rate_limited")
    lately.time("first_token", 0.5)
    clock.now += 50
    assert lately.told()["minute"]["sums"] == [["refused", "ada", "rate_limited", 1]]
    clock.now += 60
    told = lately.told()
    assert told["minute"] == {"times": {}, "sums": []}
    assert told["hour"]["sums"] == [["refused", "ada", "rate_limited", 1]]
    clock.now += HOUR_S
    assert lately.told() == {
        "minute": {"times": {}, "sums": []},
        "hour": {"times": {}, "sums": []},
        "totals": {"refused": 1},
    }


def test_one_time_is_all_percentiles_and_odd_times_are_bounded() -> None:
    lately = Lately(Clock())
    for seconds in (0.0, -1.0):
        lately.time("least", seconds)
    lately.time("most", 1e9)
    times = lately.told()["hour"]["times"]
    assert times["least"]["p50"] == times["least"]["p95"] == pytest.approx(1e-4)
    assert 1000 < times["most"]["p95"] < 1000 * GROWTH**40


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 50)), max_size=60))
def test_an_hours_sum_is_that_of_what_came_within_it(events: list[tuple[int, int]]) -> None:
    clock = Clock()
    lately, came = Lately(clock), []
    for gap_s, amount in events:
        clock.now += gap_s
        came.append((clock.now, amount))
        lately.count("prompt", amount=amount)
    hour = lately.told()["hour"]["sums"]
    told = hour[0][1] if hour else 0
    least = sum(amount for at, amount in came if at > clock.now - HOUR_S)
    most = sum(amount for at, amount in came if at > clock.now - HOUR_S - SLOT_S)
    assert least <= told <= most


def test_kinds_are_bounded() -> None:
    lately = Lately(Clock())
    for number in range(3000):
        lately.count("refused", f"tenant {number}", "rate_limited")
    sums = lately.told()["hour"]["sums"]
    assert len(sums) == 501
    assert sums[0] == ["refused", "others", "others", 2500]
