"""What every eviction policy does; each test runs on every name in the registry.

Policies with a naive reference must choose exactly as it does, whatever the calls.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.lab.tests.naive_policies import NAIVE_POLICIES
from tests.prefix.strict_policy import StrictPolicy

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, chain_keys, fingerprints
from stemma.prefix.radix import RadixIndex
from stemma.types import RetentionHint
from stemma_lab.policies.registry import LAB_POLICIES
from stemma_lab.policies.registry import make_lab_policy as make_policy

NUM_IDS = 12

operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "access", "offer", "withdraw", "evict", "evict", "drop", "look"]),
        st.integers(0, 1000),
        st.integers(1, 4),
    ),
    max_size=80,
)


def array(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def traits_of(seed: int, num_blocks: int) -> BlockTraits:
    """Hints that vary with `seed`; fingerprints come from few values, so that blocks return."""
    generator = np.random.default_rng(seed)
    return BlockTraits(
        fingerprints=generator.choice(np.arange(1, 30, dtype=np.uint64), num_blocks, replace=False),
        costs_s=generator.integers(1, 4, num_blocks).astype(np.float32),
        hint=RetentionHint(seed % 3 * 50, (None, 2.0, 9.0)[seed // 3 % 3]),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(NAIVE_POLICIES))
@settings(max_examples=150, deadline=None)
@given(operations=operations)
def test_chooses_as_the_naive_policy_does(name: str, operations: list[tuple[str, int, int]]) -> None:
    policy, naive = make_policy(name), NAIVE_POLICIES[name]()
    present: list[int] = []
    for now, (operation, seed, count) in enumerate(operations):
        if operation == "insert":
            ids = [i for i in range(NUM_IDS) if i not in present][:count]
            if ids:
                traits = traits_of(seed, len(ids))
                policy.insert(array(ids), now, traits)
                naive.insert(ids, now, traits)
                present += ids
        elif operation == "access" and present:
            start = seed % len(present)
            ids = present[start : start + count]
            policy.access(array(ids), now)
            naive.access(ids, now)
        elif operation == "offer":
            for block_id in [i for i in present if i not in naive.candidates][:count]:
                policy.offer(block_id)
                naive.candidates.add(block_id)
        elif operation == "withdraw" and naive.candidates:
            block_id = sorted(naive.candidates)[seed % len(naive.candidates)]
            policy.withdraw(block_id)
            naive.candidates.remove(block_id)
        elif operation in ("evict", "drop"):
            victim = naive.victim(now)
            assert policy.victim(now) == victim
            if victim is not None:
                for each in (policy, naive):
                    each.drop(victim, now, evicted=operation == "evict")
                present.remove(victim)
        else:
            assert policy.victim(now) == naive.victim(now)


@pytest.mark.parametrize("name", sorted(LAB_POLICIES))
def test_nothing_to_evict(name: str) -> None:
    policy = make_policy(name)
    assert policy.victim(0.0) is None
    policy.insert(array([3, 1]), 0.0, traits_of(0, 2))
    assert policy.victim(0.0) is None
    policy.offer(1)
    assert policy.victim(0.0) == policy.victim(1.0) == 1
    policy.withdraw(1)
    assert policy.victim(1.0) is None
    policy.offer(1)
    policy.drop(1, 2.0, evicted=True)
    policy.offer(3)
    assert policy.victim(2.0) == 3
    policy.drop(3, 2.0, evicted=False)
    assert policy.victim(2.0) is None


@pytest.mark.parametrize("name", sorted(LAB_POLICIES))
def test_ids_may_be_large(name: str) -> None:
    policy = make_policy(name)
    policy.insert(array([5000, 2]), 0.0, traits_of(0, 2))
    policy.insert(array([100_000]), 1.0, traits_of(1, 1))
    policy.offer(5000)
    policy.offer(100_000)
    assert policy.victim(2.0) in (5000, 100_000)


@pytest.mark.parametrize("name", sorted(LAB_POLICIES))
def test_works_without_any_hints(name: str) -> None:
    policy = make_policy(name)
    policy.insert(array([0, 1, 2]), 0.0, BlockTraits())
    for block_id in (2, 1, 0):
        policy.offer(block_id)
        assert policy.victim(1.0) == block_id
        policy.drop(block_id, 1.0, evicted=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(LAB_POLICIES))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.integers(1, 3))
def test_both_indexes_evict_the_same(name: str, seed: int, block_size: int) -> None:
    """A cache of 40 blocks under a random load: the index keeps the contract, and the policy the order."""
    key_space = KeySpace("model", "layout", block_size)
    policies = [StrictPolicy(make_policy(name)), StrictPolicy(make_policy(name))]
    indexes: list[PrefixIndex] = [RadixIndex(block_size, policies[0]), HashIndex(key_space, policies[1])]
    generator = np.random.default_rng(seed)
    free = list(range(40))
    history = [array([])]
    for now in range(60):
        earlier = history[generator.integers(len(history))]
        kept = earlier[: generator.integers(len(earlier) + 1)]
        tokens = np.concatenate((kept, generator.integers(0, 3, generator.integers(1, 9)))).astype(np.int32)[
            :24
        ]
        tokens = tokens[: len(tokens) // block_size * block_size]
        history.append(tokens)
        if not len(tokens):
            continue
        shared = indexes[0].match(DEFAULT_NAMESPACE, tokens)
        chain = shared.block_ids[: shared.num_full_blocks(block_size)]
        num_missing = len(tokens) // block_size - len(chain)
        for index in indexes:
            index.touch(chain, float(now))
            index.pin(chain)
        if num_missing > len(free):
            evicted = [index.evict(num_missing - len(free), float(now)).tolist() for index in indexes]
            assert evicted[0] == evicted[1]
            free += evicted[0]
        ids = np.concatenate((chain, array(free[:num_missing])))
        del free[:num_missing]
        keys = chain_keys(key_space.root(DEFAULT_NAMESPACE), tokens, block_size)
        traits = BlockTraits(fingerprints(keys), hint=RetentionHint(int(generator.integers(3)) * 50))
        for index in indexes:
            index.insert(DEFAULT_NAMESPACE, tokens, ids, float(now), traits)
            index.unpin(chain)
            index.check()
            assert index.num_policy_failures == 0
    for index in indexes:
        assert len(index.evict(99, 99.0)) == 40 - len(free)
