"""The prefix tree as numbers: which nodes there are, how long, how recently used, what tiers below have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.headed import HeadedIndex
from stemma.prefix.keys import Namespace
from stemma.prefix.radix import Edge, RadixIndex
from stemma.types import BlockKey, Tier

MAX_NODES = 10_000
NO_PARENT = -1
_FIRST_TOKENS = 12


@dataclass(slots=True)
class TreeOutline:
    """Nodes of all namespaces, parents before their children, nearest to the roots first; parallel lists."""

    block_size: int
    namespaces: list[Namespace]
    num_nodes: int = 0
    """Nodes there are; the lists hold `MAX_NODES` at most."""
    parents: list[int] = field(default_factory=list)
    """Number of the parent; -1: a namespace's root."""
    roots: list[int] = field(default_factory=list)
    """Number of the namespace."""
    starts: list[int] = field(default_factory=list)
    """Tokens before the node."""
    num_tokens: list[int] = field(default_factory=list)
    """Of the node itself."""
    first_tokens: list[list[int]] = field(default_factory=list)
    ages_s: list[float | None] = field(default_factory=list)
    """Seconds since the last use of its last block; None: it owns no block."""
    pinned: list[bool] = field(default_factory=list)
    last_keys: list[BlockKey | None] = field(default_factory=list)
    """Key of its last block; None: it owns no block."""
    below: list[str] = field(default_factory=list)
    """Local tiers below the device that hold a copy of its last block, e.g. ``host disk``."""


def outline_tree(cache: PrefixCache, max_nodes: int) -> TreeOutline:
    """Return the outline without `below`. On the step loop: some 3 us for each node."""
    index = cache.index
    index = index.inner if isinstance(index, HeadedIndex) else index
    outline = TreeOutline(cache.block_size, [])
    if not isinstance(index, RadixIndex):
        return outline
    queue: deque[tuple[int, int, Edge]] = deque()
    for namespace, edges in index.edges():
        queue.extend((NO_PARENT, len(outline.namespaces), edge) for edge in edges)
        outline.namespaces.append(namespace)
    last_blocks: list[int] = []
    while queue:
        parent, root, edge = queue.popleft()
        if outline.num_nodes < max_nodes:
            outline.parents.append(parent)
            outline.roots.append(root)
            outline.starts.append(edge.start)
            outline.num_tokens.append(edge.num_tokens)
            outline.first_tokens.append(edge.first(_FIRST_TOKENS))
            outline.pinned.append(edge.is_pinned)
            last_blocks.append(edge.last_block)
            queue.extend((outline.num_nodes, root, child) for child in edge.children())
        else:
            queue.extend((NO_PARENT, root, child) for child in edge.children())
        outline.num_nodes += 1
    _add_blocks(cache, outline, last_blocks)
    return outline


def _add_blocks(cache: PrefixCache, outline: TreeOutline, last_blocks: Sequence[int]) -> None:
    """Add ages and keys of the nodes' last blocks, -1 for none."""
    blocks = np.asarray(last_blocks, dtype=np.int32)
    ages, keys = cache.describe_blocks(np.maximum(blocks, 0))
    for n, block in enumerate(last_blocks):
        outline.ages_s.append(float(ages[n]) if block >= 0 else None)
        outline.last_keys.append(BlockKey(keys[n].tobytes()) if block >= 0 else None)


def add_copies(outline: TreeOutline, lookup: Callable[[Sequence[BlockKey]], dict[Tier, list[bool]]]) -> None:
    """Fill `below`. For any thread: `lookup` asks the stores, an absent key is asked for like any other."""
    keys = [key if key is not None else BlockKey(b"") for key in outline.last_keys]
    found = lookup(keys)
    outline.below = [
        " ".join(tier.value for tier, there in found.items() if there[n]) for n in range(len(keys))
    ]
