"""The checkpoints that are kept on the device, and who of them goes.

A checkpoint is kept as KV is: the policy that ranks blocks ranks checkpoints too, by the same hints, owners,
sessions and quotas, and the tiers below learn all that of its blocks. It leaves no later than the KV that it
stands behind, for alone it serves nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stemma.errors import IntegrityError
from stemma.memory.cache.charges import Charges
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.places import Pieces, Places
from stemma.memory.cache.slots import Slots
from stemma.memory.cache.turns import CachedKV, Turn, checkpoint_goes, turn_of
from stemma.memory.device.slabs import PAGES, STATES
from stemma.memory.kv_events import BlocksRemoved, CheckpointStored, KVEventSink
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.prefix.eviction.ranking import Ranking
from stemma.prefix.keys import fingerprints, owner_tag
from stemma.types import BlockKey, RetentionHint, Tier

_MOST_AT_ONCE = 32
"""KV blocks evicted before it is asked again whether it is a checkpoint's turn."""


@dataclass(slots=True)
class Checkpoint:
    """One of them."""

    number: int
    """What the policy calls it."""
    owner: str
    """Whose quota it counts to (`Namespace.owner`); empty: nobody's."""
    state: int | None
    pages: tuple[int, ...]
    blocks: tuple[DeviceBlock, ...]
    """Its blocks as the tiers below see them; empty without any."""
    pieces: tuple[BlockKey, ...]
    """Keys of its blocks below the device; others know it by the last one."""
    hint: RetentionHint
    used_at: float
    num_uses: int = 1
    is_below: bool = False
    """It was loaded from a tier below."""
    is_rolling: bool = False
    """Taken behind an answer's tokens while it was written: the next one replaces it."""


class Checkpoints:
    """Checkpoints by the key of the last KV block before them, and their places. Not thread-safe."""

    def __init__(
        self,
        places: Places,
        block_size: int,
        lower: LowerTiers | None,
        clock: Callable[[], float],
        policy: EvictionPolicy | None = None,
    ) -> None:
        """`policy` None: the least recently used go first."""
        self.places, self._block_size = places, block_size
        self.states = Slots(places.slabs, places.states_per_slab, STATES)
        self.pages = Slots(places.slabs, places.pages_per_slab, PAGES)
        self.pieces = Pieces(places, block_size)
        self.kv: CachedKV | None = None
        """What shares the memory; None: nothing that can leave."""
        self.num_evicted = 0
        self.events: KVEventSink | None = None
        """Learns of checkpoints that enter and leave the device; None: nobody does."""
        self._lower, self._clock = lower, clock
        self._ranking = Ranking(policy or LRUPolicy())
        self._charges = Charges(places.slabs.slab, places.states_per_slab, places.pages_per_slab)
        self._kept: dict[BlockKey, Checkpoint] = {}
        self._key_of: dict[int, BlockKey] = {}
        """Checkpoints by their number."""
        self._of_state: dict[int, BlockKey] = {}
        """Checkpoints by their state."""
        self._free_numbers: list[int] = []
        self._untold: list[tuple[BlockKey, Checkpoint]] = []
        """Checkpoints that entered since `tell`."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._kept

    def __getitem__(self, key: BlockKey) -> Checkpoint:
        return self._kept[key]

    def get(self, key: BlockKey) -> Checkpoint | None:
        """Return the checkpoint behind the block with this key."""
        return self._kept.get(key)

    # -- in and out -----------------------------------------------------------------------------------

    def enter(
        self,
        lease: Lease,
        position: int,
        state: int | None,
        pages: tuple[int, ...],
        *,
        is_below: bool,
        is_rolling: bool,
    ) -> None:
        """Keep what a lease leaves behind `position` tokens; it holds these places too."""
        assert lease.state is not None
        key = lease.key(position // self._block_size - 1)
        for page in pages:
            self.pages.keep(page)
        if state is not None:
            self.states.keep(state)
            self._of_state[state] = key
        chain = self.pieces.chain(lease.key, position)
        number = self._free_numbers.pop() if self._free_numbers else len(self._key_of)
        before = lease.state.checkpoint
        after = self.get(lease.key(before // self._block_size - 1)) if before else None
        traits = self._traits(lease, position, after)
        entered = Checkpoint(
            number,
            traits.owner,
            state,
            pages,
            self._describe(lease, position, chain, state, pages),
            tuple(piece for piece, _ in chain),
            traits.hint,
            self._clock(),
            is_below=is_below,
            is_rolling=is_rolling,
        )
        self._kept[key], self._key_of[number] = entered, key
        self._ranking.enter(number, self._clock(), traits)
        self._untold.append((key, entered))
        self._charges.enter(entered.owner, key, state, pages)
        self._charge(entered.owner)
        self.keep_quotas()

    def use(self, found: Checkpoint) -> None:
        """Count a use."""
        found.num_uses += 1
        found.used_at = self._clock()
        self._ranking.use(found.number, found.used_at)
        self._charges.use(found.owner, self._key_of[found.number])
        if self._lower is not None and self._lower.stores:
            self._lower.on_hit(found.blocks)

    def renew_hints(self, lease: Lease, keys: Iterable[BlockKey]) -> None:
        """Let a lease's hints hold for its checkpoints among `keys`, those of its leading blocks in order."""
        for block, key in enumerate(keys):
            if block >= lease.roots.num_public and (one := self._kept.get(key)) is not None:
                traits = self._traits(lease, (block + 1) * self._block_size, None)
                one.hint = traits.hint
                one.blocks = tuple(replace(each, hint=one.hint) for each in one.blocks)
                self._ranking.hint(one.number, self._clock(), traits)
                if self._lower is not None and self._lower.stores:
                    self._lower.on_renew(one.blocks)

    def conclude(self, key: BlockKey, conclusion: Conclusion) -> None:
        """Tell the policy how the request ended that left this checkpoint, or went on from it."""
        self._ranking.conclude(self._kept[key].number, conclusion)

    def drop(self, key: BlockKey, *, evicted: bool = True) -> None:
        """Free a checkpoint's places, as far as nobody else holds them."""
        self.tell()
        one = self._kept.pop(key)
        del self._key_of[one.number]
        self._free_numbers.append(one.number)
        self._ranking.leave(one.number, self._clock(), evicted=evicted)
        if self._lower is not None:
            self._lower.on_evict(one.blocks)
        if self.events is not None:
            self.events.put(BlocksRemoved(one.pieces[-1:], Tier.DEVICE))
        if one.state is not None:
            del self._of_state[one.state]
            self.states.let_go(one.state)
        for page in one.pages:
            self.pages.let_go(page)
        self._charges.leave(one.owner, key, one.state, one.pages)
        self._charge(one.owner)

    def drop_behind(self, keys: Iterable[BlockKey]) -> None:
        """Drop the checkpoints behind KV blocks that left the device, or move them down as these were."""
        for key in keys:
            if key in self._kept:
                self.drop(key)
                self.num_evicted += 1

    def tell(self) -> None:
        """Tell others and the tiers below of the checkpoints that entered, whose KV is committed by now."""
        entered, self._untold = self._untold, []
        for key, one in entered:
            if self.events is not None:
                self.events.put(CheckpointStored(one.pieces, key))
            if self._lower is not None and not one.is_below:
                self._lower.on_commit(one.blocks)

    def flush(self, kept: set[BlockKey]) -> int:
        """Drop all but those behind these keys; return how many."""
        dropped = [key for key in self._kept if key not in kept]
        for key in dropped:
            self.drop(key, evicted=False)
        return len(dropped)

    def holdings(self) -> tuple[list[int | None], list[int]]:
        """Return the states and the pages that all of them hold."""
        return (
            [one.state for one in self._kept.values()],
            [page for one in self._kept.values() for page in one.pages],
        )

    def holdings_of(self, owner: str) -> tuple[set[int], set[int]]:
        """Return the states and the pages that those of an owner hold (slow)."""
        own = [one for one in self._kept.values() if one.owner == owner]
        states = {one.state for one in own if one.state is not None}
        return states, {page for one in own for page in one.pages}

    def check(self) -> None:
        """Raise IntegrityError unless each owner is charged for what its checkpoints hold (slow)."""
        for owner in {one.owner for one in self._kept.values()} | self._charges.owners:
            states, pages = self.holdings_of(owner)
            if self._charges.num_blocks(owner) != self._charges.cost(len(states), len(pages)):
                raise IntegrityError("an owner is charged for other checkpoints than it has")

    @property
    def told_keys(self) -> set[BlockKey]:
        """Those whose KV is committed."""
        return self._kept.keys() - {key for key, _ in self._untold}

    # -- room -----------------------------------------------------------------------------------------

    def take(self, slots: Slots) -> int | None:
        """Return a place that nobody held, making room if need be; None: others hold all."""
        while not slots.num_free:
            key = self._first(lambda one: self._frees(one, slots))
            if key is None and not self._can_empty():
                return None
            if not (self._evict_kv(key, for_blocks=False) or self._evict(key)):
                return None
        return slots.take()

    def can_take(self, slots: Slots) -> bool:
        """Whether `take` would find a place."""
        if not slots.count or slots.num_free:
            return True
        return self._first(lambda one: self._frees(one, slots)) is not None or self._can_empty()

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that would be free without checkpoints."""
        return (self.states.num_spare_slabs + self.pages.num_spare_slabs) * self.places.slabs.slab

    def make_room(self, num_blocks: int) -> bool:
        """Evict up to so many KV blocks, or the checkpoint whose turn it is before; False: nothing can go."""
        key = self._first(self._frees_any)
        return self._evict_kv(key, num_blocks, for_blocks=True) or self._evict(key)

    def _evict_kv(self, before: BlockKey | None, num_blocks: int = 1, *, for_blocks: bool) -> bool:
        """Evict KV, unless it is the turn of a checkpoint; return whether any was."""
        first = None if self.kv is None else self.kv.first()
        if first is None or self.kv is None:
            return False
        key, turn = first
        if before is not None and checkpoint_goes(
            self._turn(self._kept[before]),
            turn,
            self._clock(),
            serves=key in self._kept,
            for_blocks=for_blocks,
        ):
            return False
        return self.kv.evict(min(num_blocks, _MOST_AT_ONCE)) > 0

    def _evict(self, key: BlockKey | None) -> bool:
        if key is None:
            return False
        if key in self._kept:  # else it left with its KV
            self.drop(key)
            self.num_evicted += 1
        return True

    def _can_empty(self) -> bool:
        return self.kv is not None and self.places.slabs.can_empty(self.kv.present())

    def _turn(self, one: Checkpoint) -> Turn:
        return turn_of(one.hint, one.used_at, self._clock())

    def held(self, one: Checkpoint, slots: Slots) -> Sequence[int]:
        """Return the places of a kind that a checkpoint holds."""
        if slots is self.pages:
            return one.pages
        return () if one.state is None else (one.state,)

    def take_back(self, state: int) -> bool:
        """Drop the checkpoint that one sequence alone goes on from, so that it may write in place."""
        if self.states.holders(state) == 2 and state in self._of_state:
            self.drop(self._of_state[state], evicted=False)
            return True
        return False

    def _frees_any(self, one: Checkpoint) -> bool:
        return self._frees(one, self.states) or self._frees(one, self.pages)

    def _frees(self, one: Checkpoint, slots: Slots) -> bool:
        return any(slots.holders(place) == 1 for place in self.held(one, slots))

    def _first(self, may_leave: Callable[[Checkpoint], bool]) -> BlockKey | None:
        number = self._ranking.first(self._clock(), lambda one: may_leave(self._kept[self._key_of[one]]))
        return None if number is None else self._key_of[number]

    # -- quotas ---------------------------------------------------------------------------------------

    def keep_quotas(self) -> None:
        """Evict what owners hold beyond their quotas, KV or checkpoint; what sequences hold stays."""
        if self.kv is not None:
            for owner in self.kv.owners_over_quota():
                while self._lose_oldest(self.kv, owner):
                    pass

    def _lose_oldest(self, kv: CachedKV, owner: str) -> bool:
        """Evict what an owner used the longest ago; False: it holds no more than it may, or all is in use."""
        if owner not in kv.owners_over_quota():
            return False
        used_at = kv.oldest_of(owner)
        key = self._charges.first(owner, lambda one: self._frees_any(self._kept[one]))
        if used_at is not None and (key is None or used_at <= self._kept[key].used_at):
            return kv.evict_over_quota()
        return self._evict(key)

    def _charge(self, owner: str) -> None:
        if self.kv is not None and owner:
            self.kv.charge(owner, self._charges.num_blocks(owner))

    # -- what others know of them -----------------------------------------------------------------------

    def _traits(self, lease: Lease, position: int, after: Checkpoint | None) -> BlockTraits:
        """Return what the policy knows of a checkpoint: what it knows of the block before it."""
        block = position // self._block_size - 1
        is_public = block < lease.roots.num_public
        gap = position if lease.state is None else position - lease.state.checkpoint
        return BlockTraits(
            fingerprints([lease.key(block)]),
            np.array([max(self._block_size, gap)], dtype=np.float32),
            lease.hint(block),
            owner="" if is_public else lease.namespace.owner,
            session=0 if is_public else lease.session,
            came_from=0 if lease.session else lease.session_of(block),
            after=-1 if after is None else after.number,
        )

    def _describe(
        self,
        lease: Lease,
        position: int,
        chain: Sequence[tuple[BlockKey, BlockKey]],
        state: int | None,
        pages: Sequence[int],
    ) -> tuple[DeviceBlock, ...]:
        """Return a checkpoint's blocks, whose keys `chain` has, as the tiers below see them; none without."""
        if self._lower is None:
            return ()
        block, size = position // self._block_size - 1, self._block_size
        owner = "" if block < lease.roots.num_public else owner_tag(lease.namespace.owner)
        return tuple(
            DeviceBlock(block_id, piece, parent, size, lease.hint(block), owner, lease.session_of(block))
            for block_id, (piece, parent) in zip(self.pieces.blocks_of(state, pages), chain, strict=True)
        )
