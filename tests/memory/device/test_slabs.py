"""SlabAllocator: blocks and whole slabs out of one memory, checked after every operation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import OutOfBlocks
from stemma.memory.device.slabs import PAGES, STATES, SlabAllocator
from stemma.types import BlockIds


def test_blocks_fill_the_fullest_slabs_first() -> None:
    slabs = SlabAllocator(12, 4)
    first, second = slabs.allocate(6), slabs.allocate(3)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    slabs.free(first[:3])
    slabs.free(second[2:])
    assert slabs.num_empty == 1
    assert slabs.allocate(4).tolist() == [0, 1, 2, 8], "an empty slab last"


def test_an_empty_slab_may_hold_anything_and_is_cleared_in_between() -> None:
    cleared: list[int] = []
    slabs = SlabAllocator(8, 4, cleared.append)
    blocks = slabs.allocate(8)
    with pytest.raises(OutOfBlocks):
        slabs.allocate(1)
    slabs.free(blocks[:4])
    assert slabs.take_slab(STATES) == 0
    assert (cleared, slabs.num_free) == ([0], 0)
    slabs.give_back(0)
    assert slabs.take_slab(STATES) == 0
    slabs.give_back(0)
    assert slabs.take_slab(PAGES) == 0
    slabs.give_back(0)
    assert slabs.allocate(2).tolist() == [0, 1]
    assert cleared == [0, 0, 0], "not where the kind stays the same"


@settings(max_examples=100, deadline=None)
@given(slab=st.integers(1, 5), steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=40))
def test_nothing_is_handed_out_twice(slab: int, steps: list[tuple[int, int]]) -> None:
    slabs = SlabAllocator(6 * slab, slab)
    held: list[BlockIds] = []
    taken: list[int] = []
    for action, number in steps:
        if action == 0:
            free = slabs.num_free
            if number <= free:
                ids = slabs.allocate(number)
                assert len(set(ids.tolist())) == number
                assert slabs.num_free == free - number
                held.append(ids)
        elif action == 1 and held:
            slabs.free(held.pop(number % len(held)))
        elif action == 2 and slabs.num_empty:
            taken.append(slabs.take_slab(STATES if number % 2 else PAGES))
        elif action == 3 and taken:
            slabs.give_back(taken.pop(number % len(taken)))
        slabs.check()
        blocks = [block for ids in held for block in ids.tolist()]
        places = [block for one in taken for block in range(one * slab, (one + 1) * slab)]
        assert len(set(blocks + places)) == len(blocks + places)
        assert slabs.num_free == 6 * slab - len(blocks + places)
