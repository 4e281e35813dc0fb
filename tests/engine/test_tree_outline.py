"""The tree as numbers: what only lower tiers hold hangs where its parent is."""

from __future__ import annotations

import numpy as np

from stemma.engine.core.tree_outline import DeviceBlocks, TreeOutline, add_copies, add_lower
from stemma.memory.tiers.block_store import HeldBlock
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import BlockKey, Tier

SIZE = 4
ROOT = BlockKey(b"r" * 32)


def key(n: int) -> BlockKey:
    return BlockKey(bytes([n]) * 32)


def held(n: int, parent: BlockKey, age_s: float = 1.0) -> HeldBlock:
    return HeldBlock(key(n), parent, age_s)


def two_nodes() -> tuple[TreeOutline, DeviceBlocks]:
    """A node of blocks 1, 2 with a child of block 3, on the device."""
    outline = TreeOutline(
        SIZE, [DEFAULT_NAMESPACE], num_nodes=2, parents=[-1, 0], roots=[0, 0], starts=[0, 8]
    )
    outline.num_tokens, outline.first_tokens = [8, 4], [[1], [2]]
    outline.ages_s, outline.pinned, outline.on_device = [5.0, 6.0], [False, False], [True, True]
    keys = np.frombuffer(key(1) + key(2) + key(3), dtype=np.uint8).reshape(3, 32)
    return outline, DeviceBlocks(keys, [0, 0, 1], [4, 8, 12])


def test_copies_are_those_of_the_last_block():
    outline, blocks = two_nodes()
    add_copies(outline, blocks, lambda keys: {Tier.HOST: [k == key(2) for k in keys], Tier.DISK: [True] * 2})
    assert outline.below == ["host disk", "disk"]


def lower(held_blocks: dict[Tier, list[HeldBlock]], max_nodes: int = 10) -> TreeOutline:
    outline, blocks = two_nodes()
    add_copies(outline, blocks, lambda keys: {})
    add_lower(outline, blocks, held_blocks, {ROOT: 0}, max_nodes)
    return outline


def test_runs_of_blocks_hang_from_the_block_before_them():
    """4 and 5 follow block 1 in the middle of a node; 6 forks from 4; 2 is on the device anyway."""
    disk = [held(6, key(4)), held(5, key(4), 9.0), held(4, key(1)), held(2, key(1))]
    outline = lower({Tier.HOST: [held(5, key(4), 2.0)], Tier.DISK: disk})
    assert outline.parents[2:] == [0, 2, 2]
    assert outline.starts[2:] == [4, 8, 8]
    assert outline.num_tokens[2:] == [4, 4, 4]
    assert sorted(zip(outline.below[2:], outline.ages_s[2:], strict=True)) == [
        ("disk", 1.0),
        ("disk", 1.0),
        ("host disk", 2.0),
    ]
    assert outline.on_device == [True, True, False, False, False]
    assert outline.num_nodes == len(outline.parents) == 5


def test_a_run_is_one_node_as_long_as_its_tiers_are_the_same():
    disk = [held(n, key(n - 1)) for n in range(11, 15)] + [held(10, ROOT)]
    outline = lower({Tier.HOST: [held(10, ROOT), held(11, key(10))], Tier.DISK: disk})
    assert outline.parents[2:] == [-1, 2]
    assert outline.roots[2:] == [0, 0]
    assert outline.starts[2:] == [0, 8]
    assert outline.num_tokens[2:] == [8, 12]
    assert outline.below[2:] == ["host disk", "disk"]


def test_what_follows_nothing_known_has_no_start():
    outline = lower({Tier.DISK: [held(20, key(19)), held(21, key(20))]})
    assert (outline.parents[2:], outline.roots[2:], outline.starts[2:]) == ([-1], [1], [None])
    assert outline.num_tokens[2:] == [8]


def test_it_is_bounded():
    outline = lower({Tier.DISK: [held(n, ROOT) for n in range(20, 60)]}, max_nodes=7)
    assert len(outline.parents) == len(outline.below) == len(outline.on_device) == 7
    assert outline.num_nodes == 42
    none_drawn = TreeOutline(SIZE, [], num_nodes=1)
    blocks = DeviceBlocks(np.frombuffer(key(1), dtype=np.uint8).reshape(1, 32), [-1], [4])
    add_copies(none_drawn, blocks, lambda keys: {})
    add_lower(none_drawn, blocks, {Tier.DISK: [held(2, key(1))]}, {}, 0)
    assert none_drawn.parents == []
