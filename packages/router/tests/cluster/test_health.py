"""The health of a server equals what its whole history says, read anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stemma_router.cluster.health import Cause, Check, HealthPolicy, ServerHealth, Standing
from stemma_router.cluster.prefill_speed import PrefillSpeed
from stemma_router.cluster.retry_budget import RetryBudget

POLICY = HealthPolicy(consecutive_failures=3, window=6, min_outcomes=4, ejection_s=10, longest_ejection_s=40)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model:
    """Reads the history from its beginning: (time, kind)."""

    history: list[tuple[float, str]] = field(default_factory=list)

    def standing(self, now: float) -> Standing:
        outcomes: list[bool] = []
        until, doublings, is_probed, checks = None, 0, False, []
        for at, kind in self.history:
            if kind in ("serves", "refuses", "silent"):
                checks.append(kind)
            elif kind == "begin":
                is_probed = until is not None
            elif kind == "withdraw":
                is_probed = False
            elif until is None and kind in ("good", "bad"):
                outcomes = [*outcomes, kind == "good"][-POLICY.window :]
                if outcomes == [True] * POLICY.window:
                    doublings = 0
                often = len(outcomes) >= POLICY.min_outcomes and 2 * sum(outcomes) <= len(outcomes)
                if outcomes[-3:] == [False] * 3 or (kind == "bad" and often):
                    until, doublings = at + min(40.0, 10 * 2**doublings), doublings + 1
            elif until is not None and is_probed and kind == "good":
                until, outcomes, is_probed = None, [], False
            elif until is not None and is_probed and kind == "bad":
                until, doublings, is_probed = at + min(40.0, 10 * 2**doublings), doublings + 1, False
        if checks and checks[-1] != "serves":
            return Standing.DOWN
        if until is None:
            return Standing.HEALTHY
        return Standing.HALF_OPEN if now >= until and not is_probed else Standing.EJECTED


def standing(health: ServerHealth) -> Standing:
    return health.standing


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["good", "bad", "bad", "bad", "begin", "withdraw", "serves", "refuses", "silent"]),
        st.floats(0, 15),
    ),
    max_size=60,
)


@given(EVENTS)
def test_standing_is_that_of_the_whole_history(events) -> None:
    clock, model = Clock(), Model()
    health = ServerHealth(POLICY, clock)
    is_probe = False
    for kind, later in events:
        clock.now += later
        model.history.append((clock.now, kind))
        if kind == "begin":
            is_probe = health.begin()
        elif kind == "withdraw":
            health.withdraw()
            is_probe = False
        elif kind == "good":
            health.succeed(is_probe=is_probe)
            is_probe = False
        elif kind == "bad":
            health.fail(is_probe=is_probe)
            is_probe = False
        else:
            health.check(Check(kind))
        assert standing(health) is model.standing(clock.now)


def test_a_probe_brings_a_server_back_or_ejects_it_for_longer() -> None:
    clock = Clock()
    health = ServerHealth(POLICY, clock)
    for wait in (10, 20, 40, 40):
        while standing(health) is Standing.HEALTHY:
            health.fail()
        clock.now += wait - 0.1
        assert standing(health) is Standing.EJECTED
        clock.now += 0.2
        assert standing(health) is Standing.HALF_OPEN
        assert health.begin()
        assert standing(health) is Standing.EJECTED, "one probe at a time"
        health.fail(is_probe=True)
    clock.now += 50
    health.succeed(is_probe=health.begin())
    assert standing(health) is Standing.HEALTHY
    assert health.num_ejections == 5


def test_what_was_the_requests_own_fault_is_taken_back() -> None:
    health = ServerHealth(POLICY, Clock())
    numbers = [health.fail() for _ in range(3)]
    assert standing(health) is Standing.EJECTED
    health.pardon(numbers[0])
    assert standing(health) is Standing.EJECTED, "another failure ejected it"
    health.pardon(numbers[2])
    assert (standing(health), health.num_ejections) == (Standing.HEALTHY, 0)
    for _ in range(20):
        health.pardon(health.fail())
    assert standing(health) is Standing.HEALTHY


def test_each_ejection_and_return_says_why() -> None:
    clock, notes = Clock(), []
    health = ServerHealth(POLICY, clock, lambda what, why: notes.append((what, why)))
    for _ in range(3):
        health.fail("unsent")
    clock.now += 10
    health.fail("late", is_probe=health.begin())
    clock.now += 20
    health.succeed(is_probe=health.begin())
    for one in (Check.SILENT, Check.SILENT, Check.SERVES, Check.REFUSES, Check.SERVES):
        health.check(one)
    for kind in "good", "bad", "good", "bad":
        health.succeed() if kind == "good" else health.fail("failed")
    assert notes == [
        ("ejected", "3 failures in a row, the last: unsent; for 10 s"),
        ("ejected", "the request that tried it: late; for 20 s"),
        ("back", "a request that tried it succeeded"),
        ("down", "no answer to a check"),
        ("up", "it answers checks again"),
        ("down", "it says that it takes no requests"),
        ("up", "it answers checks again"),
        ("ejected", "half of its latest requests failed, the last: failed; for 40 s"),
    ]
    assert health.ejections == {Cause.IN_A_ROW: 1, Cause.PROBE: 1, Cause.OFTEN: 1}
    assert health.ejected_for_s == 40


def test_only_silence_loses_what_a_server_had() -> None:
    health = ServerHealth(POLICY, Clock())
    found = [Check.SILENT, Check.REFUSES, *[Check.SILENT] * 4]
    assert [health.check(one) for one in found] == [False, False, False, False, True, False]


def test_the_time_limit_follows_what_was_measured() -> None:
    speed = PrefillSpeed()
    assert 60 < speed.limit_s(2000) < 600
    for _ in range(50):
        speed.observe(2000, 2.0)
    assert 5 < speed.limit_s(2000) < 20
    assert speed.limit_s(0) < 6
    for _ in range(50):
        speed.observe(2000, 200.0)
    assert speed.limit_s(2000) > 600


def test_a_retry_budget_is_a_fifth_of_the_requests_and_a_few() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    assert sum(budget.take() for _ in range(500)) == 100
    for _ in range(50):
        budget.note_request()
    assert sum(budget.take() for _ in range(500)) == pytest.approx(10, abs=1)
    clock.now += 2
    assert sum(budget.take() for _ in range(500)) == pytest.approx(10, abs=1)
