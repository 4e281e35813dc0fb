"""Gaps between the requests of a busy server are no idle time, and vain looks become rare."""

from __future__ import annotations

import pytest

from stemma.server.history.preparing import (
    BUSY_REQUESTS,
    BUSY_S,
    LOOKS_EVERY,
    REST_S,
    VAIN_LOOKS,
    Idleness,
    Worth,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_server_that_others_keep_busy_rests_longer(clock: Clock) -> None:
    idleness = Idleness(clock)
    for _ in range(BUSY_REQUESTS - 1):
        idleness.came(goes_on=False)
    assert idleness.rest_s == REST_S
    clock.now += 0.2
    idleness.came(goes_on=False)
    assert idleness.rest_s == pytest.approx(BUSY_S - 0.2)
    clock.now += BUSY_S - 0.25  # whatever is left of it, no less than any server rests
    assert idleness.rest_s == REST_S


def test_few_requests_in_a_second_are_no_load(clock: Clock) -> None:
    idleness = Idleness(clock)
    for _ in range(20):
        idleness.came(goes_on=False)
        clock.now += BUSY_S / (BUSY_REQUESTS - 1)
        assert idleness.rest_s == REST_S


def test_a_lone_conversation_never_makes_a_server_busy(clock: Clock) -> None:
    idleness = Idleness(clock)
    idleness.came(goes_on=False)
    for _ in range(20):
        clock.now += 0.01
        idleness.came(goes_on=True)
        assert idleness.rest_s == REST_S


def test_vain_looks_become_rare_and_one_find_brings_them_back() -> None:
    worth = Worth()
    for _ in range(VAIN_LOOKS):
        assert worth.looks()
        worth.told(0)
    looked = [worth.looks() for _ in range(3 * LOOKS_EVERY)]
    assert sum(looked) == 3
    worth.told(40)
    assert all(worth.looks() for _ in range(VAIN_LOOKS))
