"""BlockAllocator: exact ids, all or nothing, and what check() finds."""

import numpy as np
import pytest

from stemma.errors import IntegrityError, OutOfBlocks
from stemma.memory.device.allocator import BlockAllocator


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_hands_out_ids_in_order_and_reuses_the_last_freed_first():
    allocator = BlockAllocator(6)
    assert allocator.allocate(2).tolist() == [0, 1]
    assert allocator.allocate(3).tolist() == [2, 3, 4]
    assert allocator.free(ids(1, 2)) == 2
    assert allocator.num_free == 3
    assert allocator.allocate(3).tolist() == [1, 2, 5]
    allocator.check()


def test_knows_which_ids_were_never_used():
    allocator = BlockAllocator(6)
    assert allocator.first_unused == 0
    allocator.allocate(3)
    allocator.free(ids(0, 1, 2))
    allocator.allocate(2)
    assert allocator.first_unused == 3
    allocator.allocate(4)
    assert allocator.first_unused == 6


def test_allocates_all_or_nothing():
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check()


def test_a_block_is_free_when_its_last_holder_lets_go():
    allocator = BlockAllocator(2)
    block = allocator.allocate(1)
    allocator.acquire(block)
    assert allocator.free(block) == 0
    assert allocator.num_free == 1
    assert allocator.free(block) == 1
    assert allocator.num_free == 2
    allocator.check()


def test_refuses_what_cannot_be():
    allocator = BlockAllocator(2)
    with pytest.raises(AssertionError):
        allocator.free(ids(0))
    with pytest.raises(AssertionError):
        allocator.acquire(ids(0))
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(0)


def test_check_finds_a_block_that_is_free_twice():
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    allocator.free(ids(0, 0))  # distinct ids were asked for
    with pytest.raises(IntegrityError, match="free stack"):
        allocator.check()
