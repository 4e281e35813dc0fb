"""Ranking of single things: the policy's order, what may not leave now, a policy that raises."""

from __future__ import annotations

import pytest
from tests.prefix.failing_policy import FailingPolicy

from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.ranking import Ranking


def ranked(count: int) -> Ranking:
    ranking = Ranking(LRUPolicy())
    for number in range(count):
        ranking.enter(number, float(number), BlockTraits())
    return ranking


def anything(_number: int) -> bool:
    return True


def test_what_may_not_leave_now_is_passed_over_and_keeps_its_turn() -> None:
    ranking = ranked(3)
    assert ranking.first(3.0, lambda number: number != 0) == 1
    assert ranking.first(3.0, lambda _number: False) is None
    assert ranking.first(3.0, anything) == 0
    ranking.use(0, 3.0)
    assert ranking.first(4.0, anything) == 1
    ranking.leave(1, 4.0, evicted=True)
    assert ranking.first(4.0, anything) == 2


@pytest.mark.parametrize("armed", range(1, 12))
def test_a_policy_that_raises_is_replaced_and_nothing_is_lost(armed: int) -> None:
    policy = FailingPolicy(LRUPolicy())
    policy.arm(armed)
    ranking = Ranking(policy)
    for number in range(3):
        ranking.enter(number, float(number), BlockTraits())
    ranking.use(1, 3.0)
    left = []
    while (first := ranking.first(4.0, anything)) is not None:
        ranking.leave(first, 4.0, evicted=True)
        left.append(first)
    assert sorted(left) == [0, 1, 2]
