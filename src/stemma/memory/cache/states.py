"""States of recurrent layers: who holds which, and the checkpoints that later prompts go on from.

KV of a prefix serves every longer prompt; a recurrent state serves only those that go on right behind its
last token. So states are kept where prompts are likely to part: at absolute multiples of `unit` tokens, and
of these where the tree has branched, where a prompt ends, every `interval` tokens of a long one, and behind
the last tokens of an answer. A checkpoint is found by the key of the last KV block before it. It is never
copied: a sequence reads it and writes its own state elsewhere, and alone with a state it writes in place.

Below the device a state is blocks like any other, under keys of its own (`piece_keys`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.memory.cache.lease import Lease, LeaseState, StateMove
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.keys import owner_tag
from stemma.types import BlockKey

CHECKPOINT_TOKENS = 64
"""Checkpoints lie at multiples of this number of tokens, or of a larger block."""
_PIECE = b"stemma.state"


@dataclass(slots=True)
class _Checkpoint:
    state: int
    position: int
    gap: int
    """Tokens that computing it again would cost, from the checkpoint before it."""
    used_at: float
    num_uses: int = 1
    is_rolling: bool = False
    """Taken behind an answer's tokens while it was written: the next one replaces it."""


class CachedStates:
    """All states of the device. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        num_states: int,
        block_size: int,
        blocks_of: Callable[[int], range],
        lower: LowerTiers | None,
        clock: Callable[[], float],
        *,
        interval: int,
        keeps: bool = True,
    ) -> None:
        """`blocks_of` returns the ids of a state's blocks. Without `keeps` there are no checkpoints."""
        self.unit = int(np.lcm(CHECKPOINT_TOKENS, block_size))
        self.num_states = num_states
        self.num_evicted = 0
        self._block_size = block_size
        self._interval = -(-interval // self.unit) * self.unit
        self._blocks_of, self._lower, self._clock, self._keeps = blocks_of, lower, clock, keeps
        self._free = list(range(num_states - 1, -1, -1))
        self._refs: npt.NDArray[np.int32] = np.zeros(num_states, dtype=np.int32)
        self._checkpoints: dict[BlockKey, _Checkpoint] = {}
        self._key_of: dict[int, BlockKey] = {}

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints on the device."""
        return len(self._checkpoints)

    @property
    def num_available(self) -> int:
        """States that are free, or that only the cache holds."""
        return len(self._free) + sum(int(self._refs[one.state] == 1) for one in self._checkpoints.values())

    def has(self, key: BlockKey) -> bool:
        """Whether there is a checkpoint behind the block with this key."""
        return key in self._checkpoints

    def deepest(self, keys: npt.NDArray[np.uint8], num_tokens: int) -> int:
        """Return the position of the deepest checkpoint within the leading `num_tokens`; 0: there is none.

        `keys` [n, 32]: those of the leading full blocks, at least as many as `num_tokens` fill.
        """
        for position in range(num_tokens // self.unit * self.unit, 0, -self.unit):
            if BlockKey(keys[position // self._block_size - 1].tobytes()) in self._checkpoints:
                return position
        return 0

    # -- leases ---------------------------------------------------------------------------------------

    def begin(self, lease: Lease, position: int, num_with_kv: int = 0) -> bool:
        """Let a sequence go on behind `position` tokens; False if no state is free for what it computes.

        `num_with_kv`: how far KV was cached.
        """
        state: int | None = None
        if position:
            state = self._checkpoints[lease.key(position // self._block_size - 1)].state
            if not self.num_available and self._refs[state] > 1:
                return False  # somebody goes on from it already, and there is nowhere to write
            self._refs[state] += 1
            self._use(lease, position)
        elif not self.num_available:
            return False
        lease.state = LeaseState(state, position, num_with_kv)
        return True

    def begin_loading(self, lease: Lease, position: int, num_with_kv: int) -> bool:
        """Begin a sequence whose state is loaded first: it goes to `blocks_of` the lease."""
        state = self.take()
        if state is None:
            return False
        lease.state = LeaseState(state, position, num_with_kv)
        return True

    def finish_loading(self, lease: Lease, keys: npt.NDArray[np.uint8], num_tokens: int) -> int:
        """Return the position of the state that a sequence goes on from now that its load has ended.

        Where the state didn't arrive, or not all of the KV of `num_tokens` before it, it is an earlier one.
        """
        own = lease.state
        assert own is not None
        if own.position <= num_tokens and lease.has_loaded_state is not False:
            if lease.has_loaded_state:
                assert own.state is not None
                self._enter(lease, own.position, own.state, is_rolling=False, is_below=True)
            return own.position
        branch = own.branch
        self.end(lease)
        position = self.deepest(keys, num_tokens)
        state = None
        if position:
            state = self._checkpoints[lease.key(position // self._block_size - 1)].state
            self._refs[state] += 1
        lease.state = LeaseState(state, position, branch)
        return position

    def twin(self, source: Lease, lease: Lease) -> None:
        """Let a second sequence go on from where `source` is."""
        one = source.state
        assert one is not None
        if one.state is not None:
            self._refs[one.state] += 1
        lease.state = LeaseState(one.state, one.position, 0)

    def end(self, lease: Lease) -> None:
        """Free the state of a sequence that ends, and what a step took for it."""
        self._drop_move(lease)
        if lease.state is not None and lease.state.state is not None:
            self._release(lease.state.state)
        lease.state = None

    def plan(self, lease: Lease, start: int, end: int, *, num_drafts: int) -> bool:
        """Decide where a step over tokens [start, end) of a sequence finds and leaves states; False: no room.

        Behind a draft the state before it is kept, since the draft may be wrong.
        """
        own = lease.state
        assert own is not None
        assert own.position == start, "a state stands for other tokens than KV"
        self._drop_move(lease)
        last = own.state
        if last is None or num_drafts or self._refs[last] > 1:
            last = self.take()
            if last is None and not num_drafts and own.state is not None and self._take_back(own.state):
                last = own.state
            if last is None:
                return False
        snapshots: list[tuple[int, int]] = []
        for position in self._wanted(lease, start, end):
            if position == end or (state := self.take()) is None:
                break
            snapshots.append((position, state))
        own.move = StateMove(own.state, last, tuple(snapshots))
        return True

    def land(self, lease: Lease, end: int, *, num_computed: int) -> bool:
        """Take over what the planned step left, which ends at `end` and of whose tokens `num_computed` hold.

        Returns False if drafts were wrong: the state is that before the step, so its tokens that hold must
        be computed again.
        """
        own = lease.state
        assert own is not None
        move, start = own.move, own.position
        assert move is not None
        if num_computed < end:
            self._drop_move(lease)
            return False
        own.move = None
        if own.state is not None and own.state != move.last:
            self._release(own.state)
        own.state, own.position = move.last, end
        for position, state in move.snapshots:
            self._enter(lease, position, state, is_rolling=False)
            self._release(state)
        if end in self._wanted(lease, start, end):
            self._enter(lease, end, move.last, is_rolling=end - start == 1)
        return True

    def _drop_move(self, lease: Lease) -> None:
        own = lease.state
        if own is None or own.move is None:
            return
        if own.move.last != own.state:
            self._release(own.move.last)
        for _, state in own.move.snapshots:
            self._release(state)
        own.move = None

    # -- below the device -----------------------------------------------------------------------------

    def piece_keys(self, key: BlockKey) -> list[BlockKey]:
        """Return the keys of the blocks that hold the state behind the block with this key."""
        return [
            BlockKey(hashlib.sha256(_PIECE + number.to_bytes(4, "little") + key).digest())
            for number in range(len(self._blocks_of(0)))
        ]

    def take(self) -> int | None:
        """Return a state that nobody holds, evicting a checkpoint if need be; None: all are held."""
        if not self._free and not self._evict():
            return None
        state = self._free.pop()
        self._refs[state] = 1
        return state

    def blocks_of(self, lease: Lease) -> list[int]:
        """Return the ids of the blocks of a sequence's state."""
        assert lease.state is not None
        assert lease.state.state is not None
        return list(self._blocks_of(lease.state.state))

    def flush(self) -> int:
        """Drop all checkpoints; return how many."""
        count = len(self._checkpoints)
        for key in list(self._checkpoints):
            self._drop(key)
        return count

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise IntegrityError unless states and their holders agree (slow)."""
        expected = np.zeros(self.num_states, dtype=np.int32)
        for one in self._checkpoints.values():
            expected[one.state] += 1
        for lease in leases:
            own = lease.state
            if own is not None and own.state is not None:
                expected[own.state] += 1
            if own is not None and own.move is not None:
                taken = [own.move.last] if own.move.last != own.state else []
                for state in (*taken, *(state for _, state in own.move.snapshots)):
                    expected[state] += 1
        free = np.zeros(self.num_states, dtype=np.bool_)
        free[self._free] = True
        if not np.array_equal(expected, self._refs) or not np.array_equal(free, expected == 0):
            raise IntegrityError("reference counts of states don't match their holders")

    def _wanted(self, lease: Lease, start: int, end: int) -> list[int]:
        """Return the positions in (start, end] of which checkpoints are kept, ascending."""
        assert lease.state is not None
        if not self._keeps:
            return []
        first = (start // self.unit + 1) * self.unit
        if end - start == 1:
            return [end] if end == first else []
        num_tokens = (
            lease.num_tokens
        )  # of the prompt, while it is computed; whoever repeats it needs the last
        ends = {known // self.unit * self.unit for known in (num_tokens, num_tokens - 1, lease.state.branch)}
        return [
            position
            for position in range(first, end + 1, self.unit)
            if position in ends or position % self._interval == 0
        ]

    def _enter(
        self, lease: Lease, position: int, state: int, *, is_rolling: bool, is_below: bool = False
    ) -> None:
        own = lease.state
        assert own is not None
        key = lease.key(position // self._block_size - 1)
        if key in self._checkpoints:
            self._use(lease, position)
            return
        if is_rolling and own.rolling is not None:
            before = self._checkpoints.get(own.rolling)
            if before is not None and before.is_rolling and before.num_uses == 1:
                self._drop(own.rolling)
        self._refs[state] += 1
        gap = max(self.unit, position - own.checkpoint)
        self._checkpoints[key] = _Checkpoint(state, position, gap, self._clock(), is_rolling=is_rolling)
        self._key_of[state] = key
        own.checkpoint = position
        own.rolling = key if is_rolling else None
        if self._lower is not None and not is_below:
            self._lower.on_commit(self._pieces(lease, key, state))

    def _use(self, lease: Lease, position: int) -> None:
        key = lease.key(position // self._block_size - 1)
        found = self._checkpoints[key]
        found.used_at, found.num_uses = self._clock(), found.num_uses + 1
        if self._lower is not None and self._lower.stores:
            self._lower.on_hit(self._pieces(lease, key, found.state))

    def _pieces(self, lease: Lease | None, key: BlockKey, state: int) -> list[DeviceBlock]:
        """Describe a state to the tiers below: a chain of full blocks behind the KV block `key`."""
        owner = "" if lease is None else owner_tag(lease.namespace.owner)
        keys = self.piece_keys(key)
        parents = [key, *keys[:-1]]
        return [
            DeviceBlock(block_id, piece, parent, self._block_size, owner=owner)
            for block_id, piece, parent in zip(self._blocks_of(state), keys, parents, strict=True)
        ]

    def _evict(self) -> bool:
        """Drop the checkpoint that is worth the least; False if sequences hold all of them.

        All have the same bytes, so worth is the prefill that it spares, times how likely it is wanted: by the
        uses it had and the time since the last one.
        """
        now = self._clock()
        found = [(key, one) for key, one in self._checkpoints.items() if self._refs[one.state] == 1]
        if not found:
            return False
        key, _ = min(found, key=lambda pair: pair[1].gap * pair[1].num_uses / (now - pair[1].used_at + 1.0))
        self._drop(key)
        self.num_evicted += 1
        return True

    def _drop(self, key: BlockKey) -> None:
        one = self._checkpoints.pop(key)
        if self._lower is not None:
            self._lower.on_evict(self._pieces(None, key, one.state))
        del self._key_of[one.state]
        self._release(one.state)

    def _take_back(self, state: int) -> bool:
        """Drop the checkpoint that one sequence alone goes on from, so that it may write in place."""
        if self._refs[state] == 2 and state in self._key_of:
            self._drop(self._key_of[state])
            return True
        return False

    def _release(self, state: int) -> None:
        self._refs[state] -= 1
        if self._refs[state] == 0:
            self._free.append(state)
