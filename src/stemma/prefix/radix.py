"""RadixIndex: a radix tree over tokens, after SGLang's RadixAttention (arXiv 2312.07104).

An edge holds a run of tokens and the ids of the blocks in it; an edge is stored in the node below it. Prompts
may diverge anywhere, so an edge may start and end in the middle of a block:

* A block belongs to the node that holds its *last* token. Block `i` of a chain is thus
  ``node.blocks[i - node.start // block_size]``.
* If prompts diverge inside a block, each of them has its own block (the caller copied the head), and the node
  above the branch owns none for it. A match that ends there is served by the block of any descendant: all of
  them hold the same head.
* A leaf may end in a partial block; an inner node never does, since a longer insert supersedes it.
* An inner node has at least two children (the root may have fewer): a chain without branches is one node,
  regardless of how it grew and what was evicted.

Tokens and block ids of a node are growable int arrays, so a chain that grows block by block costs
amortised O(new tokens) of copying.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from stemma.errors import IntegrityError
from stemma.prefix.eviction.policy import DEFAULT_TRAITS, BlockTraits, EvictionPolicy
from stemma.prefix.index import MAX_FOLLOWING, NO_TOKENS, Inserted, Match
from stemma.prefix.keys import Namespace
from stemma.prefix.ledger import NO_BLOCKS, LedgerIndex, traits_from
from stemma.types import BlockIds, TokenArray

_SHORT_EDGE = 1 << 10
_FIRST_COMPARE = 1 << 8
_LAST_COMPARE = 1 << 14


class _Node:
    """The edge from its parent: tokens [start, start + len(tokens)) of a sequence, and their blocks."""

    __slots__ = ("blocks", "children", "parent", "recent", "start", "tokens")

    def __init__(self, parent: _Node | None, start: int, tokens: array[int], blocks: array[int]) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[int, _Node] = {}
        self.recent: _Node | None = None
        """The child on the most recently inserted path."""

    def next_child(self) -> _Node | None:
        """Return the child used last (or any, if that one is gone); None for a leaf."""
        if self.recent is not None:
            return self.recent
        return next(iter(self.children.values()), None)


class _Root(_Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, 0, array("i"), array("i"))
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the tree as seen from outside."""

    depth: int
    """0 for the children of the root."""
    start: int
    """Tokens before this node."""
    tokens: TokenArray
    block_ids: BlockIds
    num_pins: int
    """Pins of the node's first block (none if it owns no block)."""


class Edge:
    """A node of the tree for outlines: read at once, before the index changes."""

    __slots__ = ("_index", "_node")

    def __init__(self, index: RadixIndex, node: _Node) -> None:
        self._index = index
        self._node = node

    @property
    def start(self) -> int:
        """Tokens before this node."""
        return self._node.start

    @property
    def num_tokens(self) -> int:
        """Tokens of the node itself."""
        return len(self._node.tokens)

    @property
    def block_ids(self) -> list[int]:
        """Ids of the blocks that it owns."""
        return self._node.blocks.tolist()

    @property
    def is_pinned(self) -> bool:
        """Whether its first block is pinned."""
        return bool(self._node.blocks) and self._index.is_pinned(self._node.blocks[0])

    def first(self, num_tokens: int) -> list[int]:
        """Return its first tokens."""
        return self._node.tokens[:num_tokens].tolist()

    def children(self) -> Iterator[Edge]:
        """Yield the nodes below."""
        for node in self._node.children.values():
            yield Edge(self._index, node)


class RadixIndex(LedgerIndex):
    """Cached prefixes as a radix tree per namespace. See the module's docstring."""

    def __init__(self, block_size: int, policy: EvictionPolicy | None = None) -> None:
        super().__init__(block_size, policy)
        self._roots: dict[Namespace, _Root] = {}
        self._leaves: dict[int, _Node] = {}
        """Last block of each leaf -> the leaf."""
        self._tails = self._leaves

    @override
    def match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        path, num_tokens = self._walk(self._roots.get(namespace), tokens)
        following = NO_TOKENS
        if path and num_tokens < len(tokens):
            following = _following(path[-1], num_tokens, MAX_FOLLOWING)
        return Match(num_tokens, self._blocks_along(path, num_tokens), following)

    @override
    def insert(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        block_ids: BlockIds,
        now: float,
        traits: BlockTraits = DEFAULT_TRAITS,
    ) -> Inserted:
        self._require_lengths(len(tokens), block_ids, traits)
        root = self._roots.get(namespace)
        path, num_present = self._walk(root, tokens)
        for node in path:
            assert node.parent is not None
            node.parent.recent = node
        present = self._blocks_along(path, num_present)
        if num_present == len(tokens):
            return Inserted(present, NO_BLOCKS, NO_BLOCKS)

        first = num_present // self.block_size
        offered = block_ids[first:]
        # If a leaf ends exactly here in a partial block, that block is superseded or has grown.
        partial = -1
        if num_present % self.block_size and self._ends_in_leaf(path, num_present):
            partial = int(present[-1])
        grown = partial >= 0 and partial == offered[0]
        added = offered[1:] if grown else offered
        self._ledger.require_new(added)

        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        dropped = NO_BLOCKS
        if partial >= 0:
            if grown:
                self._ledger.set_partial(partial, False)
            else:
                dropped = np.array([partial], dtype=np.int32)
                self._ledger.remove(dropped)
        self._ledger.add(added)
        covered = self._attach(path[-1] if path else root, tokens, num_present, offered)
        if len(tokens) % self.block_size:
            self._ledger.set_partial(int(offered[-1]), True)
        after = int(present[first - 1]) if first else -1
        self._tell_policy(
            offered,
            now,
            traits_from(traits, first, after, namespace.owner),
            dropped_partial=partial,
            withdrawn=covered,
        )
        return Inserted(np.concatenate((present[:first], offered)), added.copy(), dropped)

    def _evict(self, num_blocks: int, now: float, evicted: list[int]) -> None:
        victim = self._policy.victim(now) if num_blocks > len(evicted) else None
        while victim is not None:
            leaf = self._leaves.pop(victim)
            try:
                victim = self._evict_tail(leaf, victim, num_blocks, now, evicted)
            finally:
                self._trim(leaf)

    def _trim(self, leaf: _Node) -> None:
        """Shorten a leaf, and adjust the tree around it, to the blocks that it has left."""
        if not leaf.blocks:
            self._remove(leaf)
            return
        end = (leaf.start // self.block_size + len(leaf.blocks)) * self.block_size
        del leaf.tokens[end - leaf.start :]
        self._leaves[leaf.blocks[-1]] = leaf

    def _evict_tail(
        self, leaf: _Node, victim: int, num_blocks: int, now: float, evicted: list[int]
    ) -> int | None:
        """Evict blocks from the end of `leaf` while the policy names them; return the victim after them.

        This is the hot loop of eviction: the tree is updated once for all these blocks.
        """
        policy, pins, blocks = self._policy, self._ledger.pins, leaf.blocks
        while True:
            policy.drop(victim, now, evicted=True)
            evicted.append(victim)
            blocks.pop()
            tail = blocks[-1] if blocks else -1
            if tail >= 0 and not pins[tail]:
                policy.offer(tail)
            if len(evicted) == num_blocks:
                return None
            following = policy.victim(now)
            if following is None or following != tail:
                return following
            victim = following

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` before; empty if `tokens` aren't cached.

        If several sequences continue from there, the one inserted last is followed. Read-only.
        """
        path, num_tokens = self._walk(self._roots.get(namespace), tokens)
        if not path or num_tokens < len(tokens):
            return NO_TOKENS
        return _following(path[-1], num_tokens, max_tokens)

    @override
    def walk(self) -> Iterator[tuple[Namespace, TokenArray, BlockIds]]:
        for namespace, root in self._roots.items():
            for node, path in _descend(root):
                if not node.children:
                    end = node.start + len(node.tokens)
                    chain = np.concatenate([np.array(edge.tokens, dtype=np.int32) for edge in path])
                    yield namespace, chain, self._blocks_along(path, end)

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have cached tokens."""
        return list(self._roots)

    def edges(self) -> Iterator[tuple[Namespace, list[Edge]]]:
        """Yield the namespaces and the nodes at their roots. O(1) a node that is visited."""
        for namespace, root in self._roots.items():
            yield namespace, [Edge(self, node) for node in root.children.values()]

    def is_pinned(self, block_id: int) -> bool:
        """Return whether a block of the index is pinned."""
        return bool(self._ledger.pins[block_id])

    def nodes(self, namespace: Namespace) -> Iterator[NodeView]:
        """Yield the nodes of one namespace, parents first, without the root."""
        root = self._roots.get(namespace)
        if root is None:
            return
        for node, path in _descend(root):
            yield NodeView(
                depth=len(path) - 1,
                start=node.start,
                tokens=np.array(node.tokens, dtype=np.int32),
                block_ids=np.array(node.blocks, dtype=np.int32),
                num_pins=int(self._ledger.pins[node.blocks[0]]) if node.blocks else 0,
            )

    @override
    def check(self) -> None:
        full: set[int] = set()
        partial: set[int] = set()
        leaves: dict[int, _Node] = {}
        num_owned = 0
        for namespace, root in self._roots.items():
            if root.namespace != namespace or root.tokens or root.blocks or not root.children:
                raise IntegrityError(f"the root of {namespace} is malformed")
            self._check_children(root)
            for node, path in _descend(root):
                self._check_node(node)
                num_owned += len(node.blocks)
                full.update(node.blocks)
                if not node.children:
                    leaves[node.blocks[-1]] = node
                    if (node.start + len(node.tokens)) % self.block_size:
                        partial.add(node.blocks[-1])
                    self._check_pins([block_id for edge in path for block_id in edge.blocks])
        if num_owned != len(full):
            raise IntegrityError("a block is in two places")
        if leaves != self._leaves:
            raise IntegrityError("the table of leaves isn't the leaves of the tree")
        self._ledger.check(full - partial, partial)

    def _check_node(self, node: _Node) -> None:
        end = node.start + len(node.tokens)
        num_blocks = end // self.block_size - node.start // self.block_size
        if not node.children and end % self.block_size:
            num_blocks += 1
        if not node.tokens:
            raise IntegrityError("a node has no tokens")
        if len(node.children) == 1:
            raise IntegrityError("a chain without a branch is more than one node")
        if len(node.blocks) != num_blocks:
            raise IntegrityError(
                f"tokens {node.start}..{end} have {len(node.blocks)} blocks, not {num_blocks}"
            )
        self._check_children(node)

    def _check_children(self, node: _Node) -> None:
        end = node.start + len(node.tokens)
        for first, child in node.children.items():
            if child.parent is not node or child.tokens[0] != first or child.start != end:
                raise IntegrityError("a child doesn't fit its parent")
        if node.recent is not None and node.recent not in node.children.values():
            raise IntegrityError("the child used last is no child")

    def _check_pins(self, chain: list[int]) -> None:
        pinned = self._ledger.pins[chain] > 0
        if (pinned[1:] & ~pinned[:-1]).any():
            raise IntegrityError("a pinned block hangs below an unpinned one")

    def _walk(self, root: _Root | None, tokens: TokenArray) -> tuple[list[_Node], int]:
        """Return the nodes that `tokens` run through (the last perhaps in part), and the tokens matched."""
        path: list[_Node] = []
        node: _Node | None = root
        matched, num_tokens = 0, len(tokens)
        while node is not None and matched < num_tokens:
            node = node.children.get(tokens.item(matched))
            if node is None:
                break
            path.append(node)
            common = _common_length(node.tokens, tokens, matched)
            matched += common
            if common < len(node.tokens):
                break
        return path, matched

    def _blocks_along(self, path: list[_Node], num_tokens: int) -> BlockIds:
        """Return the blocks of the first `num_tokens` tokens of `path`."""
        if not path:
            return NO_BLOCKS
        needed = -(-num_tokens // self.block_size)
        found = array("i")
        for node in path[:-1]:
            found.extend(node.blocks)
        found.extend(path[-1].blocks[: needed - len(found)])
        if len(found) < needed:
            # The tokens end in a block that branches further down: any descendant's block has this head.
            below: _Node | None = path[-1].next_child()
            while below is not None and not below.blocks:
                below = below.next_child()
            assert below is not None
            found.append(below.blocks[0])
        return np.frombuffer(found, dtype=np.int32)

    def _ends_in_leaf(self, path: list[_Node], num_tokens: int) -> bool:
        return bool(path) and not path[-1].children and num_tokens == path[-1].start + len(path[-1].tokens)

    def _attach(self, node: _Node, tokens: TokenArray, start: int, block_ids: BlockIds) -> int:
        """Attach ``tokens[start:]`` and their blocks below token `start` of the chain that ends in `node`.

        Returns the block that is no longer a candidate because it now has a descendant, or -1.
        """
        covered = -1
        rest, blocks = _int_array(tokens[start:]), _int_array(block_ids)
        if node.parent is not None and start < node.start + len(node.tokens):
            node = self._split(node, start - node.start)
        if node.parent is not None and not node.children:
            tail = node.blocks[-1]
            del self._leaves[tail]
            if start % self.block_size:
                node.blocks.pop()
            elif not self._ledger.pins[tail]:
                covered = tail
            node.tokens.extend(rest)
            node.blocks.extend(blocks)
            leaf = node
        else:
            leaf = _Node(node, start, rest, blocks)
            node.children[rest[0]] = leaf
            node.recent = leaf
        self._leaves[blocks[-1]] = leaf
        return covered

    def _split(self, lower: _Node, length: int) -> _Node:
        """Cut `lower` after `length` tokens; return the new node that holds the part above."""
        parent = lower.parent
        assert parent is not None
        assert 0 < length < len(lower.tokens)
        middle = lower.start + length
        num_upper = middle // self.block_size - lower.start // self.block_size
        # The upper part keeps the arrays: it is usually the longer one, and only the rest is copied.
        upper = _Node(parent, lower.start, lower.tokens, lower.blocks)
        lower.tokens = upper.tokens[length:]
        lower.blocks = upper.blocks[num_upper:]
        del upper.tokens[length:]
        del upper.blocks[num_upper:]
        lower.start = middle
        lower.parent = upper
        upper.children[lower.tokens[0]] = lower
        parent.children[upper.tokens[0]] = upper
        if parent.recent is lower:
            parent.recent = upper
        return upper

    def _remove(self, leaf: _Node) -> None:
        """Remove a leaf that has no block left; join its parent with an only child."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        if parent.recent is leaf:
            parent.recent = None
        if isinstance(parent, _Root):
            if not parent.children:
                del self._roots[parent.namespace]
        elif len(parent.children) == 1:
            self._merge(parent)

    def _merge(self, upper: _Node) -> None:
        """Join a node with its only child. The child stays, so nothing below it changes."""
        (lower,) = upper.children.values()
        parent = upper.parent
        assert parent is not None
        upper.tokens.extend(lower.tokens)
        upper.blocks.extend(lower.blocks)
        lower.tokens, lower.blocks, lower.start, lower.parent = (
            upper.tokens,
            upper.blocks,
            upper.start,
            parent,
        )
        parent.children[lower.tokens[0]] = lower
        if parent.recent is upper:
            parent.recent = lower


def _descend(root: _Node) -> Iterator[tuple[_Node, list[_Node]]]:
    """Yield every node below `root`, parents first, with the path that leads to it (itself included)."""
    stack = [(child, [child]) for child in reversed(root.children.values())]
    while stack:
        node, path = stack.pop()
        yield node, path
        stack.extend((child, [*path, child]) for child in reversed(node.children.values()))


def _int_array(values: TokenArray | BlockIds) -> array[int]:
    return array("i", np.asarray(values, dtype=np.int32).tobytes())


def _common_length(edge: array[int], tokens: TokenArray, offset: int) -> int:
    """Return how many tokens `edge` and ``tokens[offset:]`` share from their start; the first is known to.

    Short edges mostly match as a whole, so their bytes are compared first. Otherwise runs of growing length
    are compared, so the cost is proportional to the common part, not to the whole edge.
    """
    length = len(edge)
    if length <= _SHORT_EDGE and tokens[offset : offset + length].tobytes() == edge.tobytes():
        return length
    length = min(length, len(tokens) - offset)
    run = np.frombuffer(edge, dtype=np.int32)
    start, size = 0, _FIRST_COMPARE
    while start < length:
        stop = min(start + size, length)
        differs = run[start:stop] != tokens[offset + start : offset + stop]
        where = int(differs.argmax())
        if differs[where]:
            return start + where
        start = stop
        size = min(4 * size, _LAST_COMPARE)
    return length


def _following(last: _Node, num_tokens: int, max_tokens: int) -> TokenArray:
    """Return up to `max_tokens` tokens behind token `num_tokens` of the chain that ends in or at `last`."""
    found = array("i")
    node: _Node | None = last
    skip = num_tokens - last.start
    while node is not None and len(found) < max_tokens:
        found.extend(node.tokens[skip : skip + max_tokens - len(found)])
        node, skip = node.next_child(), 0
    return np.array(found, dtype=np.int32)
