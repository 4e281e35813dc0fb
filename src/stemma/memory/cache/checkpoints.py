"""The checkpoints that are kept on the device, and who of them goes.

A checkpoint is kept as KV is: the policy that ranks blocks ranks checkpoints too, by the same hints, owners,
sessions and quotas, and the tiers below learn all that of its blocks. It leaves no later than the KV that it
stands behind, for alone it serves nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.slots import Slots
from stemma.memory.cache.turns import CachedKV, Turn, turn_of
from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import PAGES, STATES, SlabAllocator
from stemma.memory.kv_events import BlocksRemoved, CheckpointStored, KVEventSink
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.prefix.eviction.ranking import Ranking
from stemma.prefix.keys import fingerprints, owner_tag
from stemma.types import BlockKey, RetentionHint, Tier

_STATE, _PAGE = b"stemma.state", b"stemma.window"
_MOST_AT_ONCE = 32
"""KV blocks evicted before it is asked again whether it is a checkpoint's turn."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where states and pages lie on the device."""

    slabs: SlabAllocator
    """Of the memory that they share with the blocks."""
    states_per_slab: int
    state_blocks: Callable[[int], range]
    """Takes a state; returns the ids of its blocks."""
    pages_per_slab: int = 0
    page_blocks: Callable[[int], range] = lambda _page: range(0)
    copy_page: Callable[[int, int], None] = lambda _source, _target: None
    windows: WindowGroup | None = None
    """Layers with windows, which have pages; None: there are none."""
    num_reserved: int = 0
    """Blocks that no sequence can have: room for its states and pages."""


@dataclass(slots=True)
class Checkpoint:
    """One of them."""

    number: int
    """What the policy calls it."""
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
        self.kv: CachedKV | None = None
        """What shares the memory; None: nothing that can leave."""
        self.num_evicted = 0
        self.events: KVEventSink | None = None
        """Learns of checkpoints that enter and leave the device; None: nobody does."""
        self._lower, self._clock = lower, clock
        self._ranking = Ranking(policy or LRUPolicy())
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
        chain = self.chain(lease.key, position)
        number = self._free_numbers.pop() if self._free_numbers else len(self._key_of)
        entered = Checkpoint(
            number,
            state,
            pages,
            self._describe(lease, position, chain, state, pages),
            tuple(piece for piece, _ in chain),
            lease.hint(position // self._block_size - 1),
            self._clock(),
            is_below=is_below,
            is_rolling=is_rolling,
        )
        before = lease.state.checkpoint
        after = self.get(lease.key(before // self._block_size - 1)) if before else None
        self._kept[key], self._key_of[number] = entered, key
        self._ranking.enter(number, self._clock(), self._traits(lease, position, after))
        self._untold.append((key, entered))
        self._keep_quotas()

    def use(self, found: Checkpoint) -> None:
        """Count a use."""
        found.num_uses += 1
        found.used_at = self._clock()
        self._ranking.use(found.number, found.used_at)
        if self._lower is not None and self._lower.stores:
            self._lower.on_hit(found.blocks)

    def renew_hints(self, lease: Lease, keys: Iterable[BlockKey]) -> None:
        """Let a lease's hints hold for its checkpoints among `keys`, those of its leading blocks in order."""
        for block, key in enumerate(keys):
            if (one := self._kept.get(key)) is not None:
                traits = self._traits(lease, (block + 1) * self._block_size, None)
                one.hint = traits.hint
                self._ranking.hint(one.number, self._clock(), traits)

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

    def set_quotas(self, shares: Mapping[str, float]) -> None:
        """Set which share of the memory the checkpoints of each owner (`Namespace.owner`) may take alone, and
        drop what is beyond."""
        counts = (self.states.count, self.pages.count // max(1, self.most_pages))
        room = min(count for count in counts if count)
        self._ranking.set_quotas({owner: int(share * room) for owner, share in shares.items()})
        self._keep_quotas()

    def holdings(self) -> tuple[list[int | None], list[int]]:
        """Return the states and the pages that all of them hold."""
        return (
            [one.state for one in self._kept.values()],
            [page for one in self._kept.values() for page in one.pages],
        )

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
            if not (self._evict_kv(key) or self._evict(key)):
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
        return self._evict_kv(key, num_blocks) or self._evict(key)

    def _evict_kv(self, before: BlockKey | None, num_blocks: int = 1) -> bool:
        """Evict KV, unless it is the turn of a checkpoint; return whether any was."""
        oldest = None if self.kv is None else self.kv.oldest()
        if oldest is None or self.kv is None:
            return False
        if before is not None and self._turn(self._kept[before]) < oldest:
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

    def _first(self, may_leave: Callable[[Checkpoint], bool], *, over_quota: bool = False) -> BlockKey | None:
        number = self._ranking.first(
            self._clock(), lambda one: may_leave(self._kept[self._key_of[one]]), over_quota=over_quota
        )
        return None if number is None else self._key_of[number]

    def _keep_quotas(self) -> None:
        """Drop what owners hold beyond their quotas; what sequences hold as well stays."""

        while (key := self._first(self._frees_any, over_quota=True)) is not None:
            self._evict(key)

    # -- names ----------------------------------------------------------------------------------------

    @property
    def most_pages(self) -> int:
        """Pages of a checkpoint behind a full window."""
        windows = self.places.windows
        return 0 if windows is None else -(-windows.window // self._block_size)

    def first_block(self, position: int) -> int:
        """Return the first block whose keys a token at `position` or later may see through a window."""
        assert self.places.windows is not None
        return self.places.windows.first_seen(position) // self._block_size

    def window_blocks(self, position: int) -> range:
        """Return the full blocks before `position` that tokens from there on see through a window."""
        if self.places.windows is None:
            return range(0)
        return range(self.first_block(position), position // self._block_size)

    def chain(self, key_of: Callable[[int], BlockKey], position: int) -> list[tuple[BlockKey, BlockKey]]:
        """Return key and parent of each block of a checkpoint: its state's, then its pages'."""
        chain: list[tuple[BlockKey, BlockKey]] = []

        def add(kind: bytes, key: BlockKey, count: int) -> None:
            parent = key
            for number in range(count):
                piece = BlockKey(hashlib.sha256(kind + number.to_bytes(4, "little") + key).digest())
                chain.append((piece, parent))
                parent = piece

        if self.states.count:
            add(_STATE, key_of(position // self._block_size - 1), len(self.places.state_blocks(0)))
        for block in self.window_blocks(position):
            add(_PAGE, key_of(block), len(self.places.page_blocks(0)))
        return chain

    def blocks_of(self, state: int | None, pages: Iterable[int]) -> list[int]:
        """Return the ids of the blocks of a state and pages."""
        blocks = [] if state is None else list(self.places.state_blocks(state))
        return blocks + [block for page in pages for block in self.places.page_blocks(page)]

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
            DeviceBlock(block_id, piece, parent, size, lease.hint(block), owner)
            for block_id, (piece, parent) in zip(self.blocks_of(state, pages), chain, strict=True)
        )
