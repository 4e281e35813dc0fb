"""Notes of `PrefixCache` on each device block that is in the index: key, parent, length, hints, session.

Struct of arrays, indexed by block id: 110 bytes per block, no Python object of its own, and one indexing
operation returns the keys of a matched chain. Blocks that left are remembered as ghosts, so that a miss can
be explained.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stemma.memory.cache.lease import KEY_BYTES, Lease
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.prefix.explain import Ghost, Ghosts, Miss, MissFacts, MissReason, Parting, explain_miss
from stemma.prefix.index import Match
from stemma.types import NO_HINT, BlockIds, BlockKey, RetentionHint

_ROOT = -1
_GHOSTS_PER_BLOCK = 4
_MIN_GHOSTS = 1024
REGRET_S = 60.0
"""A block that is back that soon would better have stayed."""


class BlockRecords:
    """One row per device block. A block is present if it holds tokens."""

    def __init__(self, num_blocks: int, block_size: int, policy_name: str) -> None:
        self.num_regretted = 0
        """Evicted blocks that entered again less than `REGRET_S` later."""
        self._block_size = block_size
        self._policy_name = policy_name
        self._ghosts = Ghosts(capacity=max(_MIN_GHOSTS, _GHOSTS_PER_BLOCK * num_blocks))
        self._keys: npt.NDArray[np.uint8] = np.zeros((num_blocks, KEY_BYTES), dtype=np.uint8)
        self._parent_keys: npt.NDArray[np.uint8] = np.zeros((num_blocks, KEY_BYTES), dtype=np.uint8)
        self._parents: npt.NDArray[np.int32] = np.full(num_blocks, _ROOT, dtype=np.int32)
        self._num_children: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._num_tokens: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.used_at: npt.NDArray[np.float64] = np.zeros(num_blocks, dtype=np.float64)
        """When a block was entered or last used, the clock's seconds."""
        self._hints = [NO_HINT] * num_blocks
        self._owners: list[str] = [""] * num_blocks
        self._sessions: npt.NDArray[np.uint32] = np.zeros(num_blocks, dtype=np.uint32)

    def add(self, block: DeviceBlock, parent_id: int | None, now: float) -> None:
        """Record a block that entered the index; `parent_id` None: its parent is the namespace's root."""
        block_id = block.block_id
        self._keys[block_id] = np.frombuffer(block.key, dtype=np.uint8)
        self._parent_keys[block_id] = np.frombuffer(block.parent, dtype=np.uint8)
        self._parents[block_id] = _ROOT if parent_id is None else parent_id
        if parent_id is not None:
            self._num_children[parent_id] += 1
        self._num_tokens[block_id] = block.num_tokens
        ghost = self._ghosts.remove(block.key)
        if ghost is not None and ghost.reason is MissReason.EVICTED and now - ghost.gone_at < REGRET_S:
            self.num_regretted += 1
        self.used_at[block_id] = now
        self._hints[block_id] = block.hint
        self._owners[block_id] = block.owner
        self._sessions[block_id] = block.session

    def remove(self, block_id: int) -> None:
        """Drop the record of a block that left the index; do nothing if there is none."""
        if self._num_tokens[block_id]:
            parent = self._parents[block_id]
            if parent != _ROOT:
                self._num_children[parent] -= 1
            self._num_tokens[block_id] = 0

    def drop(self, blocks: list[DeviceBlock], reason: MissReason, now: float, cause: str = "") -> None:
        """Drop the records of blocks that were evicted or flushed, and keep ghosts of them."""
        for block in blocks:
            self._ghosts.add(block.key, Ghost(now, reason, self._policy_name, block.num_tokens, cause))
            self.remove(block.block_id)

    @property
    def num_ghosts(self) -> int:
        """Number of blocks remembered after they left."""
        return len(self._ghosts)

    def explain(self, lease: Lease, found: Match, num_lost: int, now: float) -> Miss:
        """Return why a lease doesn't have more cached tokens.

        `found` is what the index matched; `num_lost` of its tokens were not reused because no block was free.
        """
        num_full, num_tail = divmod(found.num_tokens, self._block_size)
        goes_on = False
        if num_tail:
            goes_on = self.num_tokens(int(found.block_ids[-1])) > num_tail
        elif num_full:
            goes_on = self.has_children(int(found.block_ids[-1]))
        rest = lease.tokens[num_full * self._block_size : (num_full + 1) * self._block_size]
        ghost = self._ghosts.find(lease.key_before(num_full), rest)
        if ghost is not None and ghost.num_tokens <= num_tail:
            ghost = None  # what it held was served from another block
        facts = MissFacts(lease.num_tokens, lease.num_cached_tokens, goes_on, ghost, num_lost)
        miss = explain_miss(facts, now)
        if len(found.following):
            miss = replace(miss, parting=Parting(found.num_tokens, tuple(found.following.tolist())))
        return miss

    def present(self) -> npt.NDArray[np.bool_]:
        """Return which blocks are in the index, shape [num_blocks]."""
        return self._num_tokens > 0

    def num_tokens(self, block_id: int) -> int:
        """Return how many tokens a block holds; 0 if it isn't in the index."""
        return int(self._num_tokens[block_id])

    def hint(self, block_id: int) -> RetentionHint:
        """Return the hint of a block."""
        return self._hints[block_id]

    def renew_hint(self, block_id: int, hint: RetentionHint) -> None:
        """Let another hint hold for a block."""
        self._hints[block_id] = hint

    def has_children(self, block_id: int) -> bool:
        """Return whether a cached block follows this one."""
        return bool(self._num_children[block_id])

    def keys(self, block_ids: BlockIds) -> npt.NDArray[np.uint8]:
        """Return the keys of blocks, [n, 32], a copy."""
        return self._keys[block_ids]

    def key(self, block_id: int) -> BlockKey:
        """Return the key of a block."""
        return BlockKey(self._keys[block_id].tobytes())

    def describe(self, block_id: int) -> DeviceBlock:
        """Return the record in the form that lower tiers take."""
        return DeviceBlock(
            block_id=block_id,
            key=self.key(block_id),
            parent=BlockKey(self._parent_keys[block_id].tobytes()),
            num_tokens=int(self._num_tokens[block_id]),
            hint=self._hints[block_id],
            owner=self._owners[block_id],
            session=self._sessions.item(block_id),
        )
