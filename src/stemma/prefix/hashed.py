"""HashIndex: a table of chained SHA-256 keys, after vLLM's automatic prefix caching.

Full blocks are found by their key, which names the block and everything before it, so no tree is walked:
one hash and one lookup per block. vLLM stops there. To reuse *part* of a block, and to know which blocks are
leaves, this index also stores the children of each block. They are sorted by their tokens, as big-endian
bytes: the child that shares the longest run of tokens with a prompt is then adjacent to the prompt's own
position, found by one bisection.

Among the children of a block, a partial one is never a prefix of another: the longer supersedes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import IntegrityError
from stemma.prefix.eviction.policy import DEFAULT_TRAITS, BlockTraits, EvictionPolicy
from stemma.prefix.index import MAX_FOLLOWING, NO_TOKENS, Inserted, Match
from stemma.prefix.keys import KeySpace, Namespace, chain_keys
from stemma.prefix.ledger import NO_BLOCKS, LedgerIndex, traits_from
from stemma.types import BlockIds, BlockKey, TokenArray


class _Contents:
    """Tokens and parent of each block, by id. Rows of ids that aren't in the index are stale."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.keys: list[bytes] = []
        self.parents: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.lengths: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.tokens: npt.NDArray[np.uint32] = np.empty((0, block_size), dtype=">u4")

    def reserve(self, num_ids: int) -> None:
        """Make room for ids below `num_ids`."""
        size = len(self.keys)
        if num_ids <= size:
            return
        new_size = max(num_ids, size + (size >> 1), 1024)
        self.keys.extend([b""] * (new_size - size))
        for name in ("parents", "lengths", "tokens"):
            old = getattr(self, name)
            new = np.zeros((new_size, *old.shape[1:]), dtype=old.dtype)
            new[:size] = old
            setattr(self, name, new)

    def sort_key(self, block_id: int) -> bytes:
        """Return the block's tokens as bytes whose order is that of the tokens."""
        return self.tokens[block_id, : self.lengths.item(block_id)].tobytes()

    def common_length(self, block_id: int, sort_key: bytes) -> int:
        """Return how many leading tokens the block shares with tokens that have this sort key."""
        own = self.sort_key(block_id)
        length = min(len(own), len(sort_key))
        differs = np.frombuffer(own, np.uint8, length) != np.frombuffer(sort_key, np.uint8, length)
        where = int(differs.argmax())
        return (where if differs[where] else length) // 4


class HashIndex(LedgerIndex):
    """Cached prefixes as a table of block keys. See the module's docstring."""

    def __init__(self, key_space: KeySpace, policy: EvictionPolicy | None = None) -> None:
        super().__init__(key_space.block_size, policy)
        self._key_space = key_space
        self._table: dict[bytes, int] = {}
        """Key -> id, full blocks only."""
        self._contents = _Contents(key_space.block_size)
        self._children: dict[int, list[int]] = {}
        """Parent id -> its children, sorted by their tokens. A root has a negative id."""
        self._roots: dict[Namespace, tuple[int, BlockKey]] = {}
        self._root_namespaces: dict[int, Namespace] = {}
        self._spare_roots: list[int] = []
        self._childless: set[int] = set()
        self._tails = self._childless

    @override
    def match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        root = self._roots.get(namespace)
        if root is None or not len(tokens):
            return Match(0, NO_BLOCKS)
        parent, key = root
        block_ids = self._look_up(key, tokens)
        num_tokens = len(block_ids) * self.block_size
        if block_ids:
            parent = block_ids[-1]
        if num_tokens < len(tokens) and parent in self._children:
            child, common = self._closest_child(parent, tokens[num_tokens : num_tokens + self.block_size])
            if common:
                block_ids.append(child)
                num_tokens += common
        following = NO_TOKENS
        if num_tokens and num_tokens < len(tokens):
            following = self._following(block_ids[-1], (num_tokens - 1) % self.block_size + 1)
        return Match(num_tokens, np.array(block_ids, dtype=np.int32), following)

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
        if not len(tokens):
            return Inserted(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)
        parent, root_key = self._roots.get(namespace) or (self._free_root(), self._key_space.root(namespace))
        keys = chain_keys(root_key, tokens, self.block_size)
        present = self._known(keys)
        first = len(present)
        if first:
            parent = present[-1]
        if first == len(block_ids):
            return Inserted(np.array(present, dtype=np.int32), NO_BLOCKS, NO_BLOCKS)

        offered = block_ids[first:]
        partial = -1
        if parent in self._children:
            head = tokens[first * self.block_size : (first + 1) * self.block_size]
            child, common = self._closest_child(parent, head)
            if common == len(head):
                return Inserted(np.array([*present, child], dtype=np.int32), NO_BLOCKS, NO_BLOCKS)
            partial = self._superseded_by(parent, head)
        grown = partial >= 0 and partial == offered[0]
        added = offered[1:] if grown else offered
        self._ledger.require_new(added)

        if not first and namespace not in self._roots:
            self._add_root(namespace, parent, root_key)
        dropped = NO_BLOCKS
        covered = -1
        if partial >= 0:
            self._childless.discard(partial)
            self._unlink(partial)
            if grown:
                self._ledger.set_partial(partial, False)
            else:
                dropped = np.array([partial], dtype=np.int32)
                self._ledger.remove(dropped)
        elif parent in self._childless:
            self._childless.remove(parent)
            if not self._ledger.pins[parent]:
                covered = parent
        self._ledger.add(added)
        self._link(parent, tokens[first * self.block_size :], offered, keys[first:])
        tail = int(offered[-1])
        if len(tokens) % self.block_size:
            self._ledger.set_partial(tail, True)
        self._childless.add(tail)
        behind = traits_from(traits, first, int(parent) if first else -1, namespace.owner)
        self._tell_policy(offered, now, behind, dropped_partial=partial, withdrawn=covered)
        canonical = np.concatenate((np.array(present, dtype=np.int32), offered))
        return Inserted(canonical, added.copy(), dropped)

    def _evict(self, num_blocks: int, now: float, evicted: list[int]) -> None:
        policy, childless, pins = self._policy, self._childless, self._ledger.pins
        parents, keys, table, children = (
            self._contents.parents,
            self._contents.keys,
            self._table,
            self._children,
        )
        while len(evicted) < num_blocks:
            victim = policy.victim(now)
            if victim is None:
                break
            policy.drop(victim, now, evicted=True)
            childless.remove(victim)
            evicted.append(victim)
            table.pop(keys[victim], None)
            parent = parents.item(victim)
            if len(children[parent]) > 1:
                self._unlink(victim)
                continue
            del children[parent]
            if parent < 0:
                self._remove_root(parent)
                continue
            childless.add(parent)
            if not pins[parent]:
                policy.offer(parent)

    @override
    def walk(self) -> Iterator[tuple[Namespace, TokenArray, BlockIds]]:
        contents = self._contents
        for tail in self._childless:
            chain = [tail]
            while (parent := contents.parents.item(chain[-1])) >= 0:
                chain.append(parent)
            chain.reverse()
            runs = [contents.tokens[i, : contents.lengths[i]] for i in chain]
            tokens = np.concatenate(runs).astype(np.uint32).view(np.int32)
            yield self._root_namespaces[parent], tokens, np.array(chain, dtype=np.int32)

    @override
    def check(self) -> None:
        full: set[int] = set()
        partial: set[int] = set()
        childless: set[int] = set()
        num_visited = 0
        if set(self._root_namespaces) != {root for root, _ in self._roots.values()}:
            raise IntegrityError("roots and namespaces disagree")
        stack: list[tuple[int, bytes]] = []
        for namespace, (root, root_key) in self._roots.items():
            if self._root_namespaces[root] != namespace or root_key != self._key_space.root(namespace):
                raise IntegrityError(f"the root of {namespace} is malformed")
            if not self._children.get(root):
                raise IntegrityError(f"the root of {namespace} has no blocks")
            stack.append((root, root_key))
        while stack:
            parent, parent_key = stack.pop()
            children = self._children.get(parent, [])
            num_visited += len(children)
            self._check_children(parent, children)
            if parent >= 0 and not children:
                childless.add(parent)
            for child in children:
                if self._contents.lengths[child] < self.block_size:
                    partial.add(child)
                    stack.append((child, b""))
                    continue
                full.add(child)
                tokens = self._contents.tokens[child].astype(np.uint32).view(np.int32)
                (key,) = chain_keys(BlockKey(parent_key), tokens, self.block_size)
                if self._table.get(key) != child or self._contents.keys[child] != key:
                    raise IntegrityError(f"block {child} isn't under its key")
                stack.append((child, key))
        if num_visited != len(full | partial) or len(self._table) != len(full):
            raise IntegrityError("a block is in two places, or an orphan")
        if any(self._children.get(block_id) for block_id in partial):
            raise IntegrityError("a partial block has descendants")
        if childless != self._childless:
            raise IntegrityError("the set of leaves isn't the leaves of the table")
        self._ledger.check(full, partial)

    def _check_children(self, parent: int, children: list[int]) -> None:
        contents = self._contents
        if parent in self._children and not children:
            raise IntegrityError("an empty list of children")
        for child in children:
            if contents.parents[child] != parent:
                raise IntegrityError(f"block {child} doesn't know its parent")
            if parent >= 0 and self._ledger.pins[child] and not self._ledger.pins[parent]:
                raise IntegrityError("a pinned block hangs below an unpinned one")
        for left, right in pairwise(contents.sort_key(child) for child in children):
            if left >= right or right.startswith(left):
                raise IntegrityError("children are out of order, or one supersedes another")

    def _look_up(self, key: bytes, tokens: TokenArray) -> list[int]:
        """Return the ids of the leading full blocks that are in the table. One SHA-256 per block."""
        data = np.ascontiguousarray(tokens, dtype="<i4").data.cast("B")
        stride = 4 * self.block_size
        get = self._table.get
        found: list[int] = []
        append = found.append
        for start in range(0, len(data) - stride + 1, stride):
            key = sha256(key + data[start : start + stride]).digest()
            block_id = get(key)
            if block_id is None:
                break
            append(block_id)
        return found

    def _following(self, block_id: int, skip: int) -> TokenArray:
        """Return how a cached sequence goes on behind the first `skip` tokens of a block."""
        contents, runs, num_left = self._contents, [], MAX_FOLLOWING
        while num_left:
            end = min(skip + num_left, contents.lengths.item(block_id))
            runs.append(contents.tokens[block_id, skip:end])
            num_left -= end - skip
            children = self._children.get(block_id)
            if not children:
                break
            block_id, skip = children[0], 0
        return np.concatenate(runs).astype(np.uint32).view(np.int32)

    def _known(self, keys: list[BlockKey]) -> list[int]:
        known: list[int] = []
        for key in keys:
            block_id = self._table.get(key)
            if block_id is None:
                break
            known.append(block_id)
        return known

    def _closest_child(self, parent: int, tokens: TokenArray) -> tuple[int, int]:
        """Return the child that shares the longest run of leading tokens, and that run's length."""
        children = self._children[parent]
        wanted = tokens.astype(">u4").tobytes()
        place = bisect_left(children, wanted, key=self._contents.sort_key)
        best = (-1, 0)
        for child in children[max(place - 1, 0) : place + 1]:
            common = self._contents.common_length(child, wanted)
            if common > best[1]:
                best = (child, common)
        return best

    def _superseded_by(self, parent: int, tokens: TokenArray) -> int:
        """Return the partial child that is a proper prefix of `tokens` (there is one at most), or -1."""
        children = self._children[parent]
        wanted = tokens.astype(">u4").tobytes()
        place = bisect_left(children, wanted, key=self._contents.sort_key)
        if place:
            left = self._contents.sort_key(children[place - 1])
            if len(left) < len(wanted) and wanted.startswith(left):
                return children[place - 1]
        return -1

    def _free_root(self) -> int:
        """Return an unused id for a root: -1, -2, ..."""
        return self._spare_roots[-1] if self._spare_roots else -len(self._roots) - 1

    def _add_root(self, namespace: Namespace, root: int, key: BlockKey) -> None:
        if self._spare_roots:
            self._spare_roots.pop()
        self._roots[namespace] = (root, key)
        self._root_namespaces[root] = namespace

    def _remove_root(self, root: int) -> None:
        del self._roots[self._root_namespaces.pop(root)]
        self._spare_roots.append(root)

    def _link(self, parent: int, tokens: TokenArray, block_ids: BlockIds, keys: list[BlockKey]) -> None:
        """Attach a chain of new blocks below `parent`; `keys` are those of its full blocks."""
        contents, ids = self._contents, block_ids.tolist()
        contents.reserve(max(ids) + 1)
        contents.parents[block_ids] = [parent, *ids[:-1]]
        contents.lengths[block_ids] = self.block_size
        num_full = len(keys)
        contents.tokens[block_ids[:num_full]] = tokens[: num_full * self.block_size].reshape(
            -1, self.block_size
        )
        if num_full < len(ids):
            rest = tokens[num_full * self.block_size :]
            contents.tokens[ids[-1], : len(rest)] = rest
            contents.lengths[ids[-1]] = len(rest)
            contents.keys[ids[-1]] = b""
        for block_id, key in zip(ids, keys, strict=False):
            contents.keys[block_id] = key
            self._table[key] = block_id
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = ids[:1]
        else:
            siblings.insert(bisect_left(siblings, contents.sort_key(ids[0]), key=contents.sort_key), ids[0])
        for above, below in pairwise(ids):
            self._children[above] = [below]

    def _unlink(self, block_id: int) -> None:
        """Take a block out of its parent's children."""
        contents = self._contents
        parent = contents.parents.item(block_id)
        siblings = self._children[parent]
        if len(siblings) == 1:
            del self._children[parent]
            return
        del siblings[bisect_left(siblings, contents.sort_key(block_id), key=contents.sort_key)]
