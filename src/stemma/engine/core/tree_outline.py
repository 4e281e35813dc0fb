"""The prefix tree as numbers: which nodes there are, how long, how recently used, what tiers below have.

The device's index knows the tree; a local tier below knows each block's key and its parent's. So what only
lower tiers hold hangs where its first block's parent is: in a node of the device, or at a namespace's root. A
pool is asked key by key and lists nothing, so what only a pool holds can't be drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.tiers.block_store import HeldBlock
from stemma.prefix.headed import HeadedIndex
from stemma.prefix.keys import Namespace
from stemma.prefix.radix import Edge, RadixIndex
from stemma.types import BlockKey, Tier

MAX_NODES = 10_000
MAX_BELOW = 16_384
"""Blocks that are read of each tier below the device: those that entered it last."""
NO_PARENT = -1
_FIRST_TOKENS = 12


@dataclass(slots=True)
class TreeOutline:
    """Nodes of all namespaces, parents before their children, parallel lists.

    First come the device's, nearest to the roots first, then what only lower tiers hold.
    """

    block_size: int
    namespaces: list[Namespace]
    num_nodes: int = 0
    """Nodes there are; the lists hold as many as were asked for at most."""
    parents: list[int] = field(default_factory=list)
    """Number of the parent; -1: a namespace's root."""
    roots: list[int] = field(default_factory=list)
    """Number of the namespace; `len(namespaces)`: unknown, since nobody here has what is before it."""
    starts: list[int | None] = field(default_factory=list)
    """Tokens before the node; None: unknown."""
    num_tokens: list[int] = field(default_factory=list)
    """Tokens of the node itself."""
    first_tokens: list[list[int]] = field(default_factory=list)
    """Empty where only lower tiers hold it: they keep no tokens."""
    ages_s: list[float | None] = field(default_factory=list)
    """Seconds since the last use of its last block; None: it owns no block."""
    pinned: list[bool] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    """Local tiers below the device that hold a copy of its last block, e.g. ``host disk``."""
    on_device: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class DeviceBlocks:
    """The blocks of an outline, one entry each, for `add_copies` and `add_lower`."""

    keys: npt.NDArray[np.uint8]
    """[n, 32]."""
    nodes: list[int]
    """Number of the node; -1: it isn't drawn."""
    ends: list[int]
    """Tokens up to the end of the block."""


def outline_tree(cache: PrefixCache, max_nodes: int) -> tuple[TreeOutline, DeviceBlocks]:
    """Return the outline of the device. On the step loop: some 3 us a node, and 0.1 us a block."""
    index = cache.index
    index = index.inner if isinstance(index, HeadedIndex) else index
    outline = TreeOutline(cache.block_size, [])
    blocks: list[int] = []
    nodes: list[int] = []
    ends: list[int] = []
    queue: deque[tuple[int, int, int, Edge]] = deque()
    if isinstance(index, RadixIndex):
        for namespace, edges in index.edges():
            queue.extend((NO_PARENT, len(outline.namespaces), 0, edge) for edge in edges)
            outline.namespaces.append(namespace)
    last_blocks: list[int] = []
    while queue:
        parent, root, num_before, edge = queue.popleft()
        own = edge.block_ids
        node = outline.num_nodes if outline.num_nodes < max_nodes else NO_PARENT
        if node >= 0:
            outline.parents.append(parent)
            outline.roots.append(root)
            outline.starts.append(edge.start)
            outline.num_tokens.append(edge.num_tokens)
            outline.first_tokens.append(edge.first(_FIRST_TOKENS))
            outline.pinned.append(edge.is_pinned)
            outline.on_device.append(True)
            last_blocks.append(len(blocks) + len(own) - 1 if own else -1)
        blocks += own
        nodes += [node] * len(own)
        size, num_before = cache.block_size, num_before + len(own)
        ends += range((num_before - len(own) + 1) * size, (num_before + 1) * size, size)
        queue.extend((node, root, num_before, child) for child in edge.children())
        outline.num_nodes += 1
    if not blocks:
        return outline, DeviceBlocks(np.zeros((0, 32), dtype=np.uint8), [], [])
    ages, keys = cache.describe_blocks(np.asarray(blocks, dtype=np.int32))
    outline.ages_s = [float(ages[last]) if last >= 0 else None for last in last_blocks]
    return outline, DeviceBlocks(keys, nodes, ends)


def add_copies(
    outline: TreeOutline,
    blocks: DeviceBlocks,
    lookup: Callable[[Sequence[BlockKey]], dict[Tier, list[bool]]],
) -> None:
    """Fill `below` of the device's nodes. For any thread: `lookup` asks the stores."""
    last = {node: place for place, node in enumerate(blocks.nodes) if node >= 0}
    keys = [BlockKey(blocks.keys[place].tobytes()) for place in last.values()]
    found = lookup(keys)
    outline.below = [""] * len(outline.parents)
    for n, node in enumerate(last):
        outline.below[node] = " ".join(tier.value for tier, there in found.items() if there[n])


def add_lower(
    outline: TreeOutline,
    blocks: DeviceBlocks,
    held: Mapping[Tier, Sequence[HeldBlock]],
    roots: Mapping[BlockKey, int],
    max_nodes: int,
) -> None:
    """Add what only lower tiers hold, a run of blocks with one successor and the same tiers as one node.

    `held` are blocks of each tier, `roots` the numbers of namespaces by root. For any thread. At most
    `max_nodes` nodes are held by the outline in the end; what hangs from nodes that aren't drawn isn't drawn.
    """
    on_device = {BlockKey(key.tobytes()): place for place, key in enumerate(blocks.keys)}
    parent_of: dict[BlockKey, BlockKey] = {}
    tiers_of: dict[BlockKey, str] = {}
    ages: dict[BlockKey, float] = {}
    for tier, ones in held.items():
        for one in ones:
            if one.key in on_device:
                continue
            parent_of[one.key] = one.parent
            tiers_of[one.key] = f"{tiers_of.get(one.key, '')} {tier.value}".strip()
            ages[one.key] = min(one.age_s, ages.get(one.key, one.age_s))
    children: dict[BlockKey, list[BlockKey]] = {}
    for key, parent in parent_of.items():
        children.setdefault(parent, []).append(key)
    queue: deque[tuple[int, int, int | None, BlockKey]] = deque()
    for key, parent in parent_of.items():
        if parent in parent_of:
            continue
        place = on_device.get(parent)
        if place is None:
            known = roots.get(parent)
            number = len(outline.namespaces) if known is None else known
            queue.append((NO_PARENT, number, None if known is None else 0, key))
        elif (node := blocks.nodes[place]) >= 0:
            queue.append((node, outline.roots[node], blocks.ends[place], key))
    while queue:
        up, number, start, key = queue.popleft()
        num_blocks, last = 1, key
        while len(after := children.get(last, [])) == 1 and tiers_of[after[0]] == tiers_of[key]:
            last = after[0]
            num_blocks += 1
        outline.num_nodes += 1
        if len(outline.parents) >= max_nodes:
            continue
        outline.parents.append(up)
        outline.roots.append(number)
        outline.starts.append(start)
        outline.num_tokens.append(num_blocks * outline.block_size)
        outline.first_tokens.append([])
        outline.ages_s.append(ages[last])
        outline.pinned.append(False)
        outline.below.append(tiers_of[key])
        outline.on_device.append(False)
        end = None if start is None else start + num_blocks * outline.block_size
        queue.extend((len(outline.parents) - 1, number, end, child) for child in children.get(last, []))
