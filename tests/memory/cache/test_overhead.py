"""What the cache counts for its tables bounds what it allocates for them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.memory.buffers import HashBuffer

from stemma.memory.cache.overhead import bytes_per_block, fixed_bytes
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.prefix.radix import RadixIndex

NUM_BLOCKS = 530
"""Just above a power of two: arrays that grow by doubling are half empty."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("policy", "block_size"), [("lru", 1), ("hazard", 16), ("retention", 16)])
def test_tables_take_no_more_than_is_counted(policy: str, block_size: int) -> None:
    """Short prompts take the most nodes; six times the capacity fills the tables of evicted blocks too."""
    buffer = HashBuffer(NUM_BLOCKS, block_size)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 100_000, (6 * NUM_BLOCKS // 2, 2 * block_size)).astype(np.int32)
    tracemalloc.start()
    try:
        key_space = KeySpace("model", "layout", block_size)
        index = RadixIndex(block_size, make_policy(policy))
        cache = PrefixCache(buffer, index, key_space, policy_name=policy)
        for tokens in prompts:
            lease = cache.reserve(DEFAULT_NAMESPACE, tokens, 0)
            assert lease is not None
            cache.free(lease, len(tokens))
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cache.stats().num_cached_blocks == NUM_BLOCKS
    counted = fixed_bytes(policy) + NUM_BLOCKS * bytes_per_block(block_size, policy)
    assert allocated <= counted
