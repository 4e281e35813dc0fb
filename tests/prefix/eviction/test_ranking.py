"""Ranking of single things: the policy's order, what may not leave now, quotas, a policy that raises."""

from __future__ import annotations

import pytest
from tests.prefix.failing_policy import FailingPolicy

from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.ranking import Ranking


def ranked(*owners: str) -> Ranking:
    ranking = Ranking(LRUPolicy())
    for number, owner in enumerate(owners):
        ranking.enter(number, float(number), BlockTraits(owner=owner))
    return ranking


def anything(_number: int) -> bool:
    return True


def test_what_may_not_leave_now_is_passed_over_and_keeps_its_turn() -> None:
    ranking = ranked("", "", "")
    assert ranking.first(3.0, lambda number: number != 0) == 1
    assert ranking.first(3.0, lambda _number: False) is None
    assert ranking.first(3.0, anything) == 0
    ranking.use(0, 3.0)
    assert ranking.first(4.0, anything) == 1
    ranking.leave(1, 4.0, evicted=True)
    assert ranking.first(4.0, anything) == 2


def test_who_has_too_many_pays_alone() -> None:
    ranking = ranked("ada", "bob", "bob", "bob")
    ranking.set_quotas({"bob": 2})
    assert ranking.num_over_quota == 1
    assert ranking.first(4.0, anything) == 1
    assert ranking.first(4.0, lambda number: number == 0, over_quota=True) is None
    ranking.leave(1, 4.0, evicted=True)
    assert ranking.first(4.0, anything, over_quota=True) is None
    assert ranking.first(4.0, anything) == 0
    ranking.set_quotas({})
    assert ranking.num_over_quota == 0


@pytest.mark.parametrize("armed", range(1, 12))
def test_a_policy_that_raises_is_replaced_and_nothing_is_lost(armed: int) -> None:
    policy = FailingPolicy(LRUPolicy())
    policy.arm(armed)
    ranking = Ranking(policy)
    ranking.set_quotas({"bob": 1})
    for number, owner in enumerate(("ada", "bob", "bob")):
        ranking.enter(number, float(number), BlockTraits(owner=owner))
    ranking.use(1, 3.0)
    left = []
    while (first := ranking.first(4.0, anything)) is not None:
        ranking.leave(first, 4.0, evicted=True)
        left.append(first)
    assert sorted(left) == [0, 1, 2]
    assert left[0] in (1, 2), "of the owner over its quota"
