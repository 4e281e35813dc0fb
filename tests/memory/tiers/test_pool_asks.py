"""A pool that makes prompts slower isn't waited for, and asked again later, beside them."""

from __future__ import annotations

import pytest
from tests.contracts.block_store_suite import ROOT, key_of
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.transfer_rig import Rig, SlowStore

from stemma.memory.tiers.estimate import LoadEstimator
from stemma.memory.tiers.pool_asks import Ask, PoolAsks
from stemma.types import Tier

FAR_S = 0.2
BLOCK_S = 0.016
"""To compute a block: 1,000 tokens a second."""


class Asked:
    """Decisions about one prompt after the other, of 64 blocks, by a pool that answers after a time."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.estimator = LoadEstimator(16, self.clock)
        self.estimator.observe_prefill(1000, 1.0)
        self.asks = PoolAsks(self.estimator, self.clock)

    def prompt(self, ask_s: float, num_found: int, num_blocks: int = 64, after_s: float = 1.0) -> Ask:
        self.clock.now += after_s
        decision = self.asks.decide(num_blocks)
        if decision is not Ask.NOT:
            self.asks.observe(num_blocks, num_found, ask_s)
        return decision


def test_cold_prompts_leave_a_far_pool_within_ten_and_ask_again_later_beside_them() -> None:
    asked = Asked()
    first = [asked.prompt(FAR_S, 0) for _ in range(10)]
    assert first[0] is Ask.AWAITED
    assert first[-1] is not Ask.AWAITED
    later = [asked.prompt(FAR_S, 0) for _ in range(100)]
    assert Ask.AWAITED not in later
    assert 8 <= later.count(Ask.BESIDE) <= 10
    # Cold prompts wait for less than a twentieth of what they take, over all.
    assert asked.asks.num_awaited * FAR_S < 0.05 * 110 * 64 * BLOCK_S


def test_a_pool_that_has_what_is_wanted_is_waited_for_again() -> None:
    asked = Asked()
    for _ in range(20):
        asked.prompt(FAR_S, 0)
    found = [asked.prompt(FAR_S, 64, after_s=11.0) for _ in range(4)]
    assert found[:1] == [Ask.BESIDE]
    assert found[-1] is Ask.AWAITED


def test_a_near_pool_is_always_asked() -> None:
    asked = Asked()
    assert {asked.prompt(0.01, 0) for _ in range(50)} == {Ask.AWAITED}


def test_short_prompts_do_not_wait_for_hits_that_take_longer_than_computing() -> None:
    asked = Asked()
    for num_blocks in (8, 64):
        asked.estimator.observe_load(Tier.POOL, num_blocks, FAR_S + num_blocks * 0.001)
    assert asked.prompt(FAR_S, 8, num_blocks=8) is Ask.AWAITED, "nobody knows yet what asking takes"
    assert asked.prompt(FAR_S, 8, num_blocks=8) is not Ask.AWAITED  # 0.13 s to compute
    assert asked.prompt(FAR_S, 64, num_blocks=64) is Ask.AWAITED  # 1 s


class CountedPool(SlowStore):
    """A pool that answers questions late, as the test's clock says."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.num_asked = 0
        self._clock = clock

    def exists_many(self, keys):
        self.num_asked += 1
        self._clock.now += FAR_S
        return super().exists_many(keys)


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    for transfer in made.opened:
        transfer.close()


def test_prompts_do_not_ask_a_pool_that_is_far_and_empty(rig: Rig) -> None:
    pool = CountedPool(rig.clock)
    transfer = rig.open(pool)
    transfer.observe_prefill(1000, 1.0)
    for number in range(100):
        prefetch = transfer.prefetch(ROOT, [key_of(f"{number}/{n}") for n in range(64)])
        assert prefetch is not None
        prefetch.probe.result(20)
    assert pool.num_asked <= 15


@pytest.mark.parametrize("always", [False, True])
def test_who_wants_the_pool_asked_always_has_it_asked(rig: Rig, always: bool) -> None:
    pool = CountedPool(rig.clock)
    transfer = rig.open(pool, ask_always=always)
    transfer.observe_prefill(1000, 1.0)
    for number in range(30):
        prefetch = transfer.prefetch(ROOT, [key_of(f"{number}/{n}") for n in range(64)])
        assert prefetch is not None
        prefetch.probe.result(20)
    assert (pool.num_asked == 30) is always
