"""GDSF in a cache whose blocks have costs."""

from __future__ import annotations

import pytest
from tests.memory.buffers import HashBuffer
from tests.memory.cache.served_prompts import NS, Clock, run, tokens

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.cost import block_costs
from stemma.prefix.hashed import HashIndex
from stemma.prefix.keys import KeySpace
from stemma.prefix.radix import RadixIndex
from stemma_lab.policies.gdsf import GDSFPolicy


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize(("attention_equal_at", "left"), [(1e9, (20, 7)), (8.0, (23, 4))])
def test_with_costs_deep_blocks_outlive_shallow_ones(kind, attention_equal_at, left):
    """A long prompt, a short one, and one more: the older gives way, or what is recomputed in less time."""
    key_space = KeySpace("model", "layout", 4)
    policy = GDSFPolicy()
    index = RadixIndex(4, policy) if kind == "radix" else HashIndex(key_space, policy)
    costs = block_costs(9, 4, attention_equal_at)
    cache = PrefixCache(HashBuffer(9, 4), index, key_space, block_costs=costs, clock=Clock())
    long, short = tokens(range(100, 124)), tokens(range(200, 208))
    for prompt in (long, short, tokens(range(300, 304))):
        run(cache, prompt)
    assert (cache.match(NS, long), cache.match(NS, short)) == left
