"""A pool that makes prompts slower isn't waited for, and asked again later, beside them."""

from __future__ import annotations

import pytest
from tests.contracts.block_store_suite import ROOT, key_of
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.transfer_rig import Rig, SlowStore

from stemma.memory.tiers.estimate import LoadEstimator
from stemma.memory.tiers.pool_asks import PoolAsk, PoolAsks
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
        self.token_s: float | None = None

    @classmethod
    def behind_hits(cls, token_s: float = 0.0002) -> Asked:
        """Of an engine that has just started; loading takes as long as asking."""
        asked = cls()
        asked.estimator = LoadEstimator(16, asked.clock)
        asked.asks = PoolAsks(asked.estimator, asked.clock)
        asked.token_s = token_s
        return asked

    def prompt(self, ask_s: float, num_found: int, num_blocks: int = 64, after_s: float = 1.0) -> PoolAsk:
        self.clock.now += after_s
        decision = self.asks.decide(num_blocks)
        if decision is not PoolAsk.NOT:
            self.asks.observe(num_blocks, num_found, ask_s)
        if self.token_s is not None:
            is_hit = decision is PoolAsk.AWAITED
            num_tokens = 64 if is_hit else 64 + 16 * num_blocks
            self.estimator.observe_prefill(num_tokens, 0.1 + self.token_s * num_tokens)
            if is_hit:
                self.estimator.observe_load(Tier.POOL, num_blocks, ask_s)
        return decision


def test_cold_prompts_leave_a_far_pool_within_ten_and_ask_again_later_beside_them() -> None:
    asked = Asked()
    first = [asked.prompt(FAR_S, 0) for _ in range(10)]
    assert first[0] is PoolAsk.AWAITED
    assert first[-1] is not PoolAsk.AWAITED
    later = [asked.prompt(FAR_S, 0) for _ in range(100)]
    assert PoolAsk.AWAITED not in later
    assert 8 <= later.count(PoolAsk.BESIDE) <= 10
    # Cold prompts wait for less than a twentieth of what they take, over all.
    assert first.count(PoolAsk.AWAITED) * FAR_S < 0.05 * 110 * 64 * BLOCK_S


def test_a_pool_that_has_what_is_wanted_is_waited_for_again() -> None:
    asked = Asked()
    for _ in range(20):
        asked.prompt(FAR_S, 0)
    found = [asked.prompt(FAR_S, 64, after_s=11.0) for _ in range(4)]
    assert found[:1] == [PoolAsk.BESIDE]
    assert found[-1] is PoolAsk.AWAITED


def test_a_near_pool_is_always_asked() -> None:
    asked = Asked()
    assert {asked.prompt(0.01, 0) for _ in range(50)} == {PoolAsk.AWAITED}


def test_short_prompts_do_not_wait_for_hits_that_take_longer_than_computing() -> None:
    asked = Asked()
    for num_blocks in (8, 64):
        asked.estimator.observe_load(Tier.POOL, num_blocks, FAR_S + num_blocks * 0.001)
    assert asked.prompt(FAR_S, 8, num_blocks=8) is PoolAsk.AWAITED, "nobody knows yet what asking takes"
    assert asked.prompt(FAR_S, 8, num_blocks=8) is not PoolAsk.AWAITED  # 0.13 s to compute
    assert asked.prompt(FAR_S, 64, num_blocks=64) is PoolAsk.AWAITED  # 1 s


def test_hits_that_are_slower_than_computing_are_left_within_ten_though_only_their_rests_were_measured() -> (
    None
):
    """A step takes 0.1 s and 0.2 ms a token: the 64 tokens behind hits say 1.8 ms, and 1.7 s for 960 more."""
    asked = Asked.behind_hits()
    found = [asked.prompt(FAR_S, 60, num_blocks=60) for _ in range(10)]
    assert found[0] is PoolAsk.AWAITED
    assert found[-1] is PoolAsk.NOT
    later = [asked.prompt(FAR_S, 60, num_blocks=60) for _ in range(200)]
    assert PoolAsk.AWAITED not in later
    assert PoolAsk.BESIDE in later, "it is asked again, while nobody waits"


def test_hits_that_pay_are_kept_and_computed_only_now_and_then() -> None:
    asked = Asked.behind_hits(token_s=0.001)
    found = [asked.prompt(FAR_S, 60, num_blocks=60) for _ in range(300)]
    assert found.count(PoolAsk.AWAITED) >= 290
    assert PoolAsk.BESIDE not in found


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
