"""Replay and the clairvoyant bound, against exact small cases and brute force."""

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.lab.tests.traces import trace_of

from stemma.errors import ConfigError
from stemma_lab.clairvoyant import replay_min
from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.statistics import (
    hit_ratio_by_depth,
    hit_ratio_by_turn,
    hit_ratio_over_time,
    infer_turns,
    reuse_distances,
    stack_distances,
)
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"

# Chains of a small tree: ids are paths, so equal ids mean equal prefixes.
TREE = [[1], [1, 2], [1, 2, 3], [1, 4], [5], [5, 6], [5, 6, 7], [8, 9]]
chains_of_tree = st.lists(st.sampled_from(TREE), min_size=1, max_size=8)


def lru_by_hand(trace: Trace, capacity: int) -> list[int]:
    """Leaves-first LRU in its plainest form: a list of blocks, deepest of the last chain first."""
    order: list[int] = []
    hits = []
    for request in range(trace.num_requests):
        chain = trace.blocks_of(request).tolist()
        num = next((i for i, block in enumerate(chain) if block not in order), len(chain))
        hits.append(num)
        order = [block for block in order if block not in chain] + chain[::-1]
        order = order[max(0, len(order) - capacity) :]
    return hits


def best_by_search(trace: Trace, capacity: int) -> int:
    """Hit blocks of the best possible sequence of contents, by trying all."""
    chains = [tuple(trace.blocks_of(request).tolist()) for request in range(trace.num_requests)]

    @cache
    def best(request: int, held: frozenset[int]) -> int:
        if request == len(chains):
            return 0
        chain = chains[request]
        num = next((i for i, block in enumerate(chain) if block not in held), len(chain))
        union = held | set(chain)
        keep = min(capacity, len(union))
        return num + max(best(request + 1, frozenset(kept)) for kept in combinations(sorted(union), keep))

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(chains_of_tree, st.integers(1, 5))
def test_lru_equals_plain_lru(chains, capacity):
    trace = trace_of(chains)
    assert replay(trace, "lru", capacity).num_hit_blocks.tolist() == lru_by_hand(trace, capacity)


@settings(max_examples=60, deadline=None)
@given(chains_of_tree, st.integers(1, 4))
def test_min_is_optimal(chains, capacity):
    """Even a cache that may hold blocks without their predecessors can't beat it."""
    trace = trace_of(chains)
    assert replay_min(trace, capacity).num_hit_blocks.sum() == best_by_search(trace, capacity)


@pytest.mark.parametrize("policy", ["lru", "min"])
def test_unlimited_serves_all_that_was_seen(policy):
    trace = trace_of([[1, 2], [1, 2, 3], [1, 4], [1, 2, 3]])
    result = replay(trace, policy, None)
    assert result.num_hit_blocks.tolist() == [0, 2, 1, 3]
    assert result.block_hit_ratio(trace) == 6 / 10
    # The last token of a prompt is computed even if its KV is there.
    assert result.hit_tokens(trace).tolist() == [0, 8, 4, 11]


def test_request_larger_than_the_cache():
    trace = trace_of([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert replay(trace, "lru", 2).num_hit_blocks.tolist() == [0, 2]


def test_sample_of_a_real_trace():
    reader = open_trace(SAMPLE)
    trace = collect("sample", lambda: reader.format.block_size, reader)
    unlimited = replay(trace, "lru", None)
    assert unlimited.num_hit_blocks.tolist() == replay(trace, "min", None).num_hit_blocks.tolist()
    small = replay(trace, "lru", 100).num_hit_blocks.sum()
    assert small <= replay(trace, "min", 100).num_hit_blocks.sum() <= unlimited.num_hit_blocks.sum()


def test_unknown_policy():
    with pytest.raises(ConfigError, match="unknown eviction policy 'fortune'"):
        replay(trace_of([[1]]), "fortune", 1)


def test_progress_counts_every_request():
    trace = trace_of([[1]] * 450)
    seen: list[int] = []
    replay(trace, "lru", 3, progress=seen.append)
    assert sum(seen) == 450


class TestStatistics:
    def test_stack_distances(self):
        trace = trace_of([[1, 2], [3], [1, 2], [1, 2]])
        assert stack_distances(trace).tolist() == [-1, -1, -1, 3, 3, 2, 2]

    @settings(max_examples=40, deadline=None)
    @given(chains_of_tree)
    def test_distance_counts_distinct_blocks(self, chains):
        trace = trace_of(chains)
        for position, distance in enumerate(stack_distances(trace)):
            before = trace.previous_use[position]
            if before < 0:
                assert distance == -1
                continue
            start = trace.offsets[trace.request_of_block[before]]
            end = trace.offsets[trace.request_of_block[position] + 1]
            assert distance == len(set(trace.block_ids[start:end].tolist()))

    def test_reuse_histogram_counts_every_reuse(self):
        trace = trace_of([[1, 2], [3], [1, 2], [1, 2]])
        reuse = reuse_distances(trace)
        assert reuse.num_first_uses == 3
        assert reuse.num_blocks.sum() == reuse.num_by_gap.sum() == 4

    def test_turns_from_prefixes(self):
        trace = trace_of([[1, 2], [1, 2, 3], [9], [1, 2, 3, 4], [9]])
        assert infer_turns(trace).tolist() == [1, 2, 1, 3, 2]

    def test_ratios_by_depth_turn_and_time(self):
        trace = trace_of([[1, 2], [1, 2, 3], [1, 5]])
        result = replay(trace, "lru", None)
        depth = hit_ratio_by_depth(trace, result)
        assert depth.ratios.tolist() == [2 / 3, 1 / 3, 0.0]
        assert depth.num_blocks.tolist() == [3, 3, 1]
        turn = hit_ratio_by_turn(trace, result, 3)
        assert turn.ratios.tolist() == [0.0, 3 / 5, 0.0]
        over_time = hit_ratio_over_time(trace, result, num_bins=2)
        assert over_time.ratios.tolist() == [0.0, 3 / 5]


class TestSavings:
    def test_later_tokens_cost_more(self):
        model = PrefillModel(tokens_per_s=100.0, attention_equal_at=1000.0)
        assert model.seconds(0, 1000) == pytest.approx(15.0)
        blocks = model.block_seconds(2, 500)
        assert blocks.tolist() == pytest.approx([6.25, 8.75])

    def test_flat_if_attention_is_free(self):
        assert PrefillModel(100.0, float("inf")).seconds(np.array([0, 5]), 10).tolist() == [0.1, 0.05]

    def test_prices(self):
        assert Prices(1.0, 0.1).saved(1_000_000) == pytest.approx(0.9)
        assert Prices(1.0, 0.1).bill(2_000_000, 1_000_000) == pytest.approx(1.1)
