"""The oracles of class hazards: exact greedy eviction by class and age, and never more than is possible."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.lab.tests.agentic import agentic_trace
from packages.lab.tests.traces import trace_of

from stemma.prefix.eviction.reuse_model import AGE_EDGES_S, age_bin
from stemma_lab import class_oracle
from stemma_lab.replay import replay
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"
TREE = [[1], [1, 2], [1, 2, 3], [1, 4], [5], [5, 6], [5, 6, 7], [5, 6, 7, 10, 11], [8, 9]]


def greedy_by_hand(trace: Trace, capacity: int, class_ids: np.ndarray, table: np.ndarray) -> list[int]:
    """Evict the worst block without a block behind it, one at a time; compare all such blocks each time."""
    used: dict[int, tuple[int, int]] = {}
    parent: dict[int, int] = {}
    hits = []
    for request, now in enumerate(trace.timestamps_s.tolist()):
        chain = trace.blocks_of(request).tolist()
        hits.append(next((i for i, block in enumerate(chain) if block not in used), len(chain)))
        for place, block in enumerate(chain):
            used[block] = (int(trace.offsets[request]) + place, request)
            parent[block] = chain[place - 1] if place else -1
        while len(used) > capacity:
            leaves = set(used) - {parent[block] for block in used}

            def rank(block: int, now: float = now) -> tuple[float, int]:
                position, user = used[block]
                return table[class_ids[position], age_bin(now - trace.timestamps_s.item(user))], user

            del used[min(leaves, key=rank)]
    return hits


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(TREE), min_size=1, max_size=14), st.integers(1, 7), st.integers(0, 9))
def test_it_evicts_what_is_worth_least(chains, capacity, seed):
    trace = trace_of(chains)
    rng = np.random.default_rng(seed)
    class_ids = rng.integers(0, 3, trace.num_blocks)
    table = rng.random((3, len(AGE_EDGES_S)))
    ours = class_oracle.replay_with(trace, capacity, class_ids, table).num_hit_blocks.tolist()
    assert ours == greedy_by_hand(trace, capacity, class_ids, table)


@pytest.mark.parametrize("policy", ["oracle", "oracle-crossed"])
def test_it_lies_between_lru_and_the_bound(policy):
    trace = agentic_trace(num_sessions=60, mean_turns=20.0, span_s=900.0)
    for capacity in (300, 1000):
        lru, bound = replay(trace, "lru", capacity), replay(trace, "min", capacity)
        hits = replay(trace, policy, capacity).num_hit_blocks.sum()
        assert lru.num_hit_blocks.sum() < hits <= bound.num_hit_blocks.sum()


@pytest.mark.parametrize("policy", ["oracle", "oracle-crossed"])
def test_sample_of_a_real_trace(policy):
    reader = open_trace(SAMPLE)
    trace = collect("sample", lambda: reader.format.block_size, reader)
    unlimited = replay(trace, "min", None).num_hit_blocks.tolist()
    assert replay(trace, policy, None).num_hit_blocks.tolist() == unlimited
    assert replay(trace, policy, 500).num_hit_blocks.sum() <= replay(trace, "min", 500).num_hit_blocks.sum()


def test_what_it_knows_is_known_when_a_block_is_used():
    """Features of a prompt don't change if what comes after it does."""
    chains = [[1, 2, 3], [1, 2, 3, 4], [5], [1, 2, 3, 4, 6, 7], [1, 2, 8]]
    whole = class_oracle.classify(trace_of(chains))
    for end in range(1, len(chains)):
        part = class_oracle.classify(trace_of(chains[:end]))
        num = len(part.levels[0])
        assert [level.tolist() for level in part.levels] == [level[:num].tolist() for level in whole.levels]
