"""Several tiers in replay: who holds what, and admission that decides by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.lab.tests.agentic import agentic_trace
from packages.lab.tests.traces import trace_of

from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma_lab.admission import AdaptiveAdmission, make_admission
from stemma_lab.replay import replay
from stemma_lab.tiers import SHARINGS, TieredCache, TierPlan, block_of, key_of, replay_tiers

TREE = [[1], [1, 2], [1, 2, 3], [1, 4], [5], [5, 6], [5, 6, 7], [8, 9]]
chains_of_tree = st.lists(st.sampled_from(TREE), min_size=1, max_size=12)


def test_keys_name_blocks():
    assert [block_of(key_of(block)) for block in (0, 1, 2**31 - 1)] == [0, 1, 2**31 - 1]


def test_exclusive_is_one_cache_of_the_sum():
    trace = agentic_trace(num_sessions=12, mean_turns=6.0, span_s=200.0)
    one = replay(trace, "lru", 500).block_hit_ratio(trace)
    two = sum(replay_tiers(trace, TierPlan((200, 300), "lru", "exclusive")).hit_ratios(trace))
    three = sum(replay_tiers(trace, TierPlan((100, 150, 250), "lru", "exclusive")).hit_ratios(trace))
    assert two == pytest.approx(one, abs=0.02)
    assert three == pytest.approx(one, abs=0.02)


def test_inclusive_is_the_larger_one():
    trace = agentic_trace(num_sessions=12, mean_turns=6.0, span_s=200.0)
    one = replay(trace, "lru", 400).block_hit_ratio(trace)
    two = sum(replay_tiers(trace, TierPlan((100, 400), "lru", "inclusive")).hit_ratios(trace))
    assert two == pytest.approx(one, abs=0.01)


def test_a_kept_copy_spares_the_next_write():
    trace = agentic_trace(num_sessions=12, mean_turns=6.0, span_s=200.0)
    exclusive = replay_tiers(trace, TierPlan((100, 600), "lru", "exclusive"))
    kept = replay_tiers(trace, TierPlan((100, 600), "lru", "keep-copy"))
    assert kept.num_written[0] < 0.7 * exclusive.num_written[0]


def test_duplicates_that_go_first_cost_no_hits():
    trace = agentic_trace(num_sessions=12, mean_turns=6.0, span_s=200.0)
    exclusive, auto, kept = (
        replay_tiers(trace, TierPlan((100, 300), "lru", sharing))
        for sharing in ("exclusive", "auto", "keep-copy")
    )
    hits = {name: int(one.hit_blocks.sum()) for name, one in (("e", exclusive), ("a", auto), ("k", kept))}
    assert hits["a"] == pytest.approx(hits["e"], rel=0.002)
    assert hits["a"] > hits["k"]
    assert auto.num_written[0] <= exclusive.num_written[0]


def test_auto_writes_no_more_than_kept_copies_where_the_tier_has_room():
    trace = agentic_trace(num_sessions=6, mean_turns=5.0, span_s=100.0)
    auto, kept = (replay_tiers(trace, TierPlan((80, 10_000), "lru", s)) for s in ("auto", "keep-copy"))
    assert auto.num_written == kept.num_written
    assert (auto.hit_blocks == kept.hit_blocks).all()


@pytest.mark.parametrize("sharing", SHARINGS)
@settings(max_examples=40, deadline=None)
@given(chains_of_tree, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_tier_keeps_its_bound(sharing, chains, device, host, disk):
    trace = trace_of(chains)
    cache = TieredCache(TierPlan((device, host, disk), "lru", sharing))
    for request in range(trace.num_requests):
        hits = cache.serve(trace.blocks_of(request), float(request))
        assert sum(hits) <= len(trace.blocks_of(request))
        assert cache.device.num_blocks <= device
        for tier, size in zip(cache.lower, (host, disk), strict=True):
            assert len(tier.index) <= size
            tier.index.check()
        cache.device.check()


def test_exclusive_never_holds_a_block_twice():
    trace = agentic_trace(num_sessions=6, mean_turns=5.0, span_s=100.0)
    cache = TieredCache(TierPlan((80, 120), "lru", "exclusive"))
    chains = [trace.blocks_of(request) for request in range(trace.num_requests)]
    num_below = 0
    for chain, now in zip(chains, trace.timestamps_s.tolist(), strict=True):
        cache.serve(chain, now)
        below = {block_of(key) for _, key, _ in cache.lower[0].index.live()}
        num_below = max(num_below, len(below))
        for one in chains:
            on_device = one[: cache.device.match(DEFAULT_NAMESPACE, one).num_tokens]
            assert not below & set(on_device.tolist())
    assert num_below > 0


def test_hit_tokens_never_exceed_the_prompt():
    trace = trace_of([[1, 2, 3], [5, 6], [1, 2, 3], [1, 2, 3]])
    result = replay_tiers(trace, TierPlan((2, 3), "lru", "exclusive"))
    assert (result.hit_tokens(trace).sum(axis=1) <= trace.input_tokens - 1).all()


@pytest.mark.slow
def test_adaptive_admission_looks_at_all_tiers_below():
    """A middle tier alone would want reused blocks only; but what it refuses, the last one lacks."""
    rng = np.random.default_rng(0)
    requests = []
    for step in range(4000):
        requests += [
            [100_000 + int(rng.integers(45))],
            [step],
            [max(0, step - 400)],
        ]  # hot; twice
    trace = trace_of(requests)
    plans = {
        name: TierPlan((10, 40, 1000), "lru", "exclusive", name) for name in ("all", "reused", "adaptive")
    }
    ratios = {name: sum(replay_tiers(trace, plan).hit_blocks.sum(axis=0)) for name, plan in plans.items()}
    assert ratios["reused"] < ratios["all"]
    assert ratios["adaptive"] >= 0.98 * ratios["all"]


class TestAdmission:
    def test_fixed_ones(self):
        assert make_admission("all", 10).admits(1, 1)
        assert not make_admission("reused", 10).admits(1, 1)
        assert make_admission("reused", 10).admits(1, 2)

    def test_adaptive_takes_all_when_the_first_reuse_comes_from_below(self):
        admission = AdaptiveAdmission(1000)
        for identity in range(200):
            admission.admits(identity, 1)
            admission.looked_up(identity)
        assert admission.takes_all

    def test_adaptive_filters_when_single_uses_flush_the_tier(self):
        rng = np.random.default_rng(0)
        admission = AdaptiveAdmission(64)
        for number in range(3000):
            admission.admits(1_000_000 + number, 1)
            hot = int(rng.integers(60))
            admission.looked_up(hot)
            admission.admits(hot, 5)
        assert not admission.takes_all
        assert not admission.admits(7_000_000, 1)
