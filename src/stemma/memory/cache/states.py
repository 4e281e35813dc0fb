"""Checkpoints, which serve only prompts that go on right behind them: recurrent states, and windows of KV.

KV of a prefix serves every longer prompt. A recurrent state, and the last tokens that a sliding window sees,
serve only those that go on behind them. So both are kept where prompts are likely to part, as checkpoints: at
absolute multiples of `unit` tokens, and of these where the tree has branched, where a prompt ends, every
`interval` tokens of a long one, and behind the last tokens of an answer. A checkpoint is found by the key of
the last KV block before it, and is never copied: a sequence reads a state and writes its own elsewhere (alone
with it, in place), and pages of a window are shared, since they are full.

Below the device a checkpoint is blocks like any other, under keys of its own (`piece_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.memory.cache.checkpoints import Checkpoints
from stemma.memory.cache.lease import Lease, LeaseState, StateMove
from stemma.memory.cache.places import Places
from stemma.memory.cache.turns import CachedKV
from stemma.memory.device.layout import WindowGroup
from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.eviction.policy import Conclusion, EvictionPolicy
from stemma.types import BlockKey

CHECKPOINT_TOKENS = 64
"""Checkpoints lie at multiples of this number of tokens, or of a larger block."""
_WINDOWS_APART = 16
_NEAR, _MOST_PIECES = 4, 4096


def _least_interval(windows: WindowGroup | None) -> int:
    """Return how far checkpoints of a long prompt are apart at the least, in tokens.

    Each holds a window: more often, they would hold most of the prompt's KV again. At the beginning of a
    chunk next to nothing is held, and within one they hold the same pages.
    """
    if windows is None:
        return 0
    return windows.window if windows.is_chunked else _WINDOWS_APART * windows.window


class CachedStates:
    """All states and pages of the device. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        places: Places,
        block_size: int,
        lower: LowerTiers | None,
        clock: Callable[[], float],
        *,
        interval: int,
        keeps: bool = True,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """Without `keeps` there are no checkpoints. `policy` ranks them; None: the least recently used go."""
        self.unit = int(np.lcm(CHECKPOINT_TOKENS, block_size))
        self._kept = Checkpoints(places, block_size, lower, clock, policy)
        self._states, self._pages = self._kept.states, self._kept.pages
        self._places, self._block_size = places, block_size
        interval = max(interval, _least_interval(places.windows))
        self._interval = -(-interval // self.unit) * self.unit
        self._keeps = keeps

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints on the device."""
        return len(self._kept)

    @property
    def num_evicted(self) -> int:
        """Checkpoints that were dropped for room, quotas, or with their KV."""
        return self._kept.num_evicted

    @property
    def places(self) -> Places:
        """Where states and pages lie."""
        return self._places

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that would be free without checkpoints."""
        return self._kept.num_spare_blocks

    def share_with(self, kv: CachedKV) -> None:
        """Take room from cached KV, and give it room, as turns come."""
        self._kept.kv = kv

    def make_room(self, num_blocks: int) -> bool:
        """Evict up to so many KV blocks, or a checkpoint; False: nothing can go."""
        return self._kept.make_room(num_blocks)

    def watch(self, sink: KVEventSink) -> None:
        """Tell `sink` of checkpoints that enter and leave the device."""
        self._kept.events = sink

    @property
    def has_room(self) -> bool:
        """Whether a sequence that begins finds a state and a page."""
        return self._kept.can_take(self._states) and self._kept.can_take(self._pages)

    def has(self, key: BlockKey) -> bool:
        """Whether there is a checkpoint behind the block with this key."""
        return key in self._kept

    def deepest(self, keys: npt.NDArray[np.uint8], num_tokens: int) -> int:
        """Return the position of the deepest checkpoint within the leading `num_tokens`; 0: there is none.

        `keys` [n, 32]: those of the leading full blocks, at least as many as `num_tokens` fill.
        """
        for position in range(num_tokens // self.unit * self.unit, 0, -self.unit):
            if BlockKey(keys[position // self._block_size - 1].tobytes()) in self._kept:
                return position
        return 0

    # -- leases ---------------------------------------------------------------------------------------

    def begin(self, lease: Lease, position: int, num_with_kv: int = 0) -> bool:
        """Let a sequence go on behind `position` tokens; False if there is no room for what it computes.

        `num_with_kv`: how far KV was cached.
        """
        found = None if not position else self._kept[self._key_at(lease, position)]
        if found is not None and found.state is not None and not self._kept.can_take(self._states):
            if self._states.holders(found.state) > 1:
                return False  # somebody goes on from it already, and there is nowhere to write
        elif not self.has_room:
            return False
        self._go_on(lease, position, num_with_kv)
        if found is not None:
            self._kept.use(found)
        return True

    def begin_loading(self, lease: Lease, position: int, num_with_kv: int) -> bool:
        """Begin a sequence whose checkpoint is loaded first: it goes to `blocks_of` the lease."""
        own = LeaseState(None, position, num_with_kv)
        lease.state = own
        if self._states.count and (state := self._kept.take(self._states)) is not None:
            own.state = state
        for block in self._kept.pieces.window_blocks(position):
            if (page := self._kept.take(self._pages)) is not None:
                own.pages[block] = page
        is_whole = len(own.pages) == len(self._kept.pieces.window_blocks(position))
        if is_whole and (own.state is not None or not self._states.count):
            return True
        self.end(lease)
        return False

    def begin_earlier(self, lease: Lease, position: int) -> bool:
        """Begin once more, with an earlier checkpoint that is loaded; False: from what is here."""
        assert lease.state is not None
        branch = lease.state.branch
        self.end(lease)
        if self.begin_loading(lease, position, branch):
            return True
        lease.state = LeaseState(None, 0, branch)
        return False

    def finish_loading(self, lease: Lease, keys: npt.NDArray[np.uint8], num_tokens: int) -> int:
        """Return the position that a sequence goes on behind now that its load has ended.

        Where the checkpoint didn't arrive, or not all of the KV of `num_tokens` before it, it is an earlier
        one.
        """
        own = lease.state
        assert own is not None
        if own.position <= num_tokens and lease.has_loaded_state is not False:
            if lease.has_loaded_state:
                self._enter(lease, own.position, own.state, is_rolling=False, is_below=True)
            return own.position
        branch = own.branch
        self.end(lease)
        position = self.deepest(keys, num_tokens)
        self._go_on(lease, position, branch)
        return position

    def twin(self, source: Lease, lease: Lease) -> None:
        """Let a second sequence go on from where `source` is."""
        one = source.state
        assert one is not None
        if one.state is not None:
            self._states.hold(one.state)
        for page in one.pages.values():
            self._pages.hold(page)
        lease.state = twin = LeaseState(one.state, one.position, 0)
        twin.checkpoint, twin.pages = one.checkpoint, dict(one.pages)

    def pin(self, lease: Lease, num_tokens: int) -> None:
        """Let a lease that computes nothing hold the deepest checkpoint within its `num_tokens`.

        It holds none if sequences would be left with less than half of the places.
        """
        position = self.deepest(lease.keys(num_tokens // self._block_size), num_tokens)
        if not position:
            return
        found = self._kept[self._key_at(lease, position)]
        for slots in (self._states, self._pages):
            if slots.num_leased + len(self._kept.held(found, slots)) > slots.count // 2:
                return
        found.is_rolling = False
        self._go_on(lease, position, 0)

    def bring(self, lease: Lease, position: int) -> list[tuple[BlockKey, int]] | None:
        """Make room for a checkpoint that is brought from elsewhere; return its blocks' keys and ids.

        None: it is here already, can't lie at this position, or there is no room. `enter` follows once the
        bytes are there; the lease computes nothing.
        """
        if position % self.unit or not 0 < position <= lease.num_tokens or not self._keeps:
            return None
        if self._key_at(lease, position) in self._kept:
            return None
        self.end(lease)
        if not self.begin_loading(lease, position, 0):
            return None
        return list(zip(self.piece_keys(lease, position), self.blocks_of(lease), strict=True))

    def enter(self, lease: Lease) -> None:
        """Enter the checkpoint that `bring` made room for."""
        own = lease.state
        assert own is not None
        self._enter(lease, own.position, own.state, is_rolling=False)
        self._kept.tell()

    def held(self, lease: Lease) -> tuple[int, list[tuple[BlockKey, int]]]:
        """Return where the checkpoint that a lease holds lies, and its blocks' keys and ids; 0: none."""
        if lease.state is None or not lease.state.position:
            return 0, []
        position = lease.state.position
        return position, list(zip(self.piece_keys(lease, position), self.blocks_of(lease), strict=True))

    def end(self, lease: Lease) -> None:
        """Free what a sequence that ends holds, and what a step took for it."""
        own = lease.state
        if own is None:
            return
        self._drop_move(own)
        if own.state is not None:
            self._states.release(own.state)
        for page in own.pages.values():
            self._pages.release(page)
        lease.state = None

    def plan(self, lease: Lease, start: int, end: int, *, num_drafts: int) -> bool:
        """Decide where a step over tokens [start, end) of a sequence finds and leaves states and pages.

        Returns False if there is no room. Behind a draft the state before it is kept, since the draft may be
        wrong.
        """
        own = lease.state
        assert own is not None
        assert own.position == start, "a state stands for other tokens than KV"
        self._drop_move(own)
        if not self._plan_pages(own, start, end):
            return False
        if not self._states.count:
            own.move = StateMove(None, None)
            return True
        last = own.state
        if last is None or num_drafts or self._states.holders(last) > 1:
            last = self._kept.take(self._states)
            if last is None and not num_drafts and own.state is not None and self._kept.take_back(own.state):
                last = own.state
            if last is None:
                return False
        snapshots: list[tuple[int, int]] = []
        for position in self._wanted(lease, start, end):
            if position == end or (state := self._kept.take(self._states)) is None:
                break
            snapshots.append((position, state))
        own.move = StateMove(own.state, last, tuple(snapshots))
        return True

    def land(self, lease: Lease, end: int, *, num_computed: int) -> bool:
        """Take over what the planned step left, which ends at `end` and of whose tokens `num_computed` hold.

        Returns False if drafts were wrong and there is a state: it is that before the step, so its tokens
        that hold must be computed again.
        """
        own = lease.state
        assert own is not None
        move, start = own.move, own.position
        assert move is not None
        if num_computed < end and self._states.count:
            self._drop_move(own)
            return False
        own.move, own.position = None, num_computed
        wanted = self._wanted(lease, start, num_computed)
        if move.last is not None:
            if own.state is not None and own.state != move.last:
                self._states.release(own.state)
            own.state = move.last
            for position, state in move.snapshots:
                self._enter(lease, position, state, is_rolling=False)
                self._states.release(state)
            wanted = [position for position in wanted if position == num_computed]
        for position in wanted:
            self._enter(lease, position, own.state, is_rolling=num_computed - start == 1)
        for block in [block for block in own.pages if block < self._kept.pieces.first_block(num_computed)]:
            self._pages.release(own.pages.pop(block))
        return True

    # -- below the device -----------------------------------------------------------------------------

    def piece_keys(self, lease: Lease, position: int) -> list[BlockKey]:
        """Return the keys of the blocks that hold the checkpoint of a sequence at `position`."""
        return [piece for piece, _ in self._kept.pieces.chain(lease.key, position)]

    def likely_pieces(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return keys to ask a pool for before a prompt is admitted, whose full blocks have these keys.

        Those of the deepest positions first, then of every `interval`: where prompts end, and where long ones
        leave checkpoints. A few thousand at most.
        """
        deepest = len(keys) * self._block_size // self.unit * self.unit
        near = range(deepest, max(0, deepest - _NEAR * self.unit), -self.unit)
        far = range(deepest // self._interval * self._interval, 0, -self._interval)
        pieces: list[BlockKey] = []
        for position in dict.fromkeys((*near, *far)):
            if len(pieces) > _MOST_PIECES:
                break
            pieces += [piece for piece, _ in self._kept.pieces.chain(lambda block: keys[block], position)]
        return pieces

    def blocks_of(self, lease: Lease) -> list[int]:
        """Return the ids of the blocks of a sequence's state and pages."""
        assert lease.state is not None
        pages = [page for _, page in sorted(lease.state.pages.items())]
        return self._kept.pieces.blocks_of(lease.state.state, pages)

    def tell(self) -> None:
        """Tell others and the tiers below of the checkpoints that entered, whose KV is committed by now."""
        self._kept.tell()

    # -- as with KV -----------------------------------------------------------------------------------

    def drop_behind(self, keys: Iterable[BlockKey]) -> None:
        """Drop the checkpoints behind KV blocks that left the device, or move them down as these were."""
        self._kept.drop_behind(keys)

    def renew_hints(self, lease: Lease) -> None:
        """Let a lease's hints hold for the checkpoints behind its committed blocks, whoever left them."""
        self._kept.renew_hints(lease, (lease.key(block) for block in range(lease.num_committed)))

    def conclude(self, keys: npt.NDArray[np.uint8], num_tokens: int, conclusion: Conclusion) -> None:
        """Tell the policy how the request ended whose deepest checkpoint lies within these tokens."""
        if position := self.deepest(keys, num_tokens):
            self._kept.conclude(BlockKey(keys[position // self._block_size - 1].tobytes()), conclusion)

    def keep_quotas(self) -> None:
        """Evict what owners over their quotas used the longest ago, KV or checkpoint."""
        self._kept.keep_quotas()

    def holdings_of(self, owner: str) -> tuple[set[int], set[int]]:
        """Return the states and the pages that an owner's checkpoints hold (slow)."""
        return self._kept.holdings_of(owner)

    def flush(self, pinned: Iterable[Lease] = ()) -> int:
        """Drop all checkpoints but those that these leases hold (`pin`); return how many."""
        kept = {
            self._key_at(lease, lease.state.position)
            for lease in pinned
            if lease.state is not None and lease.state.position
        }
        return self._kept.flush(kept)

    def check(self, leases: Sequence[Lease], keys: Set[BlockKey] | None = None) -> None:
        """Raise IntegrityError unless states and pages agree with their holders (slow).

        `keys`: those of the KV blocks on the device; None: whoever asks doesn't know them.
        """
        if keys is not None and not self._kept.told_keys <= keys:
            raise IntegrityError("a checkpoint stands behind KV that has left the device")
        self._kept.check()
        held_states, held_pages = self._kept.holdings()
        for lease in leases:
            if (own := lease.state) is None:
                continue
            held_states.append(own.state)
            held_pages += own.pages.values()
            if own.move is not None:
                held_states += [state for _, state in own.move.snapshots]
                if own.move.last != own.state:
                    held_states.append(own.move.last)
        self._states.check(state for state in held_states if state is not None)
        self._pages.check(held_pages)

    # -- windows --------------------------------------------------------------------------------------

    def _plan_pages(self, own: LeaseState, start: int, end: int) -> bool:
        """Give a sequence pages for tokens [start, end) that it may write; False if there is no room."""
        if self._places.windows is None:
            return True
        for block in range(start // self._block_size, (end - 1) // self._block_size + 1):
            shared = own.pages.get(block)
            if shared is not None and self._pages.holders(shared) == 1:
                continue
            page = self._kept.take(self._pages)
            if page is None:
                return False
            if shared is not None:  # a fork's open page
                self._places.copy_page(shared, page)
                self._pages.release(shared)
            own.pages[block] = page
        return True

    # -- checkpoints ----------------------------------------------------------------------------------

    def _key_at(self, lease: Lease, position: int) -> BlockKey:
        return lease.key(position // self._block_size - 1)

    def _go_on(self, lease: Lease, position: int, branch: int) -> None:
        """Let a sequence hold a checkpoint and go on from it; at position 0 from nothing."""
        own = LeaseState(None, position, branch)
        if position:
            found = self._kept[self._key_at(lease, position)]
            own.state = found.state
            own.pages.update(zip(self._kept.pieces.window_blocks(position), found.pages, strict=True))
            if found.state is not None:
                self._states.hold(found.state)
            for page in found.pages:
                self._pages.hold(page)
        lease.state = own

    def _drop_move(self, own: LeaseState) -> None:
        move, own.move = own.move, None
        if move is None:
            return
        if move.last is not None and move.last != own.state:
            self._states.release(move.last)
        for _, state in move.snapshots:
            self._states.release(state)

    def _wanted(self, lease: Lease, start: int, end: int) -> list[int]:
        """Return the positions in (start, end] of which checkpoints are kept, ascending."""
        assert lease.state is not None
        if not self._keeps:
            return []
        first = (start // self.unit + 1) * self.unit
        if end - start == 1:
            return [end] if end == first else []
        num_tokens = lease.num_tokens  # of the prompt, while it is computed
        ends = {known // self.unit * self.unit for known in (num_tokens, num_tokens - 1, lease.state.branch)}
        return [
            position
            for position in range(first, end + 1, self.unit)
            if position in ends or position % self._interval == 0
        ]

    def _enter(
        self, lease: Lease, position: int, state: int | None, *, is_rolling: bool, is_below: bool = False
    ) -> None:
        own = lease.state
        assert own is not None
        if not self._keeps:
            return
        key = self._key_at(lease, position)
        if (known := self._kept.get(key)) is not None:
            self._kept.use(known)
            return
        window = self._kept.pieces.window_blocks(position)
        if not all(block in own.pages for block in window):
            return  # some were freed while the sequence went on
        if is_rolling and own.rolling is not None:
            before = self._kept.get(own.rolling)
            if before is not None and before.is_rolling and before.num_uses == 1:
                self._kept.drop(own.rolling, evicted=False)
        pages = tuple(own.pages[block] for block in window)
        self._kept.enter(lease, position, state, pages, is_below=is_below, is_rolling=is_rolling)
        own.checkpoint = position
        own.rolling = key if is_rolling else None
