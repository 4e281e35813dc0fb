"""Index of one lower tier: which slot holds which key, and which block is evicted next.

A lower tier isn't a prefix tree: in exclusive mode the head of a chain may be on the device and its tail
here, and blocks may arrive child first. So this index is a table of keys that counts the children of each key
*in this tier*. A block may be evicted when that count is zero and nobody pins it (leaves first). Blocks are
ranked by an `EvictionPolicy`, the same classes as on the device.

Where the tier above says which blocks it holds too, these *duplicates* go before all others, leaf or not:
nothing is lost with them. Of them the one goes first that was marked last, since it stays above the longest
and so costs its next write last.

A policy that raises breaks nothing: the tables change first, and LRU takes over (`eviction/fallback.py`).

A slot is *free*, *reserved* (being written, not found by lookups yet) or *live*. Operations are O(1) per
block plus the policy's cost. Not thread-safe: the store that owns it holds its lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from stemma.errors import IntegrityError
from stemma.prefix.eviction.fallback import fall_back
from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy
from stemma.prefix.eviction.quotas import QuotaPolicy
from stemma.types import NO_HINT, BlockKey, RetentionHint

_NO_PARENT = BlockKey(b"")


class TierIndex:
    """Slots ``0 .. capacity_blocks - 1`` of one tier by block key."""

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy) -> None:
        self.capacity_blocks = capacity_blocks
        self.num_evicted = 0
        self.num_policy_failures = 0
        """How often the policy raised and LRU took over: 0, or 1."""
        self._policy = policy
        self._slot_of: dict[BlockKey, int] = {}
        self._key_of: list[BlockKey | None] = [None] * capacity_blocks
        self._parent_of: list[BlockKey] = [_NO_PARENT] * capacity_blocks
        """By slot; None and no parent if it isn't live. Lists: a tier may have millions of slots."""
        self._owner_of: list[str] = [""] * capacity_blocks
        """By slot: whose a live block is."""
        self._quotas: Mapping[str, int] = {}
        self._num_children: dict[BlockKey, int] = {}
        """By key, present here or not: number of live blocks whose parent it is."""
        self._pins: dict[BlockKey, int] = {}
        """By key, not slot: a pin survives the drop of a damaged block and applies once it is back."""
        self.watcher: Callable[[BlockKey, bool], None] | None = None
        """Called with each key that enters (True) or leaves (False); not with those of `restore`."""
        self._duplicates: OrderedDict[BlockKey, None] = OrderedDict()
        """Keys of live blocks that the tier above holds too: pinned ones, then in the order of marking."""
        self._freed: list[int] = []
        self._unused_from = 0
        """Slots from here on were never used (so that files can grow in order)."""
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slot_of

    @property
    def num_taken(self) -> int:
        """Number of slots that are live or reserved."""
        return self._unused_from - len(self._freed)

    @property
    def num_opened(self) -> int:
        """Upper bound of the slots ever used: all are below this number."""
        return self._unused_from

    @property
    def num_duplicates(self) -> int:
        """Number of live blocks that the tier above holds too."""
        return len(self._duplicates)

    def find(self, key: BlockKey) -> int | None:
        """Return the slot that holds `key`."""
        return self._slot_of.get(key)

    def key_of(self, slot: int) -> BlockKey:
        """Return the key that a live slot holds."""
        key = self._key_of[slot]
        assert key is not None
        return key

    def owner_of(self, slot: int) -> str:
        """Return whose block a live slot holds; empty: nobody's."""
        return self._owner_of[slot]

    def live(self) -> Iterator[tuple[int, BlockKey, BlockKey]]:
        """Yield (slot, key, parent) of every live block; the index must not change during this."""
        for key, slot in self._slot_of.items():
            yield slot, key, self._parent_of[slot]

    def newest(self, max_blocks: int) -> list[tuple[int, BlockKey, BlockKey]]:
        """Return (slot, key, parent) of the live blocks that entered last, newest first. O(max_blocks)."""
        last = islice(reversed(self._slot_of.items()), max_blocks)
        return [(slot, key, self._parent_of[slot]) for key, slot in last]

    def reserve(self, end: int | None = None) -> int | None:
        """Take a free slot for writing, or None if there is none below `end`: then call `evict`."""
        if self._freed:
            slot = self._freed.pop()
        elif self._unused_from < (self.capacity_blocks if end is None else end):
            slot = self._unused_from
            self._unused_from += 1
        else:
            return None
        self._reserved.add(slot)
        return slot

    def victim(self, now: float) -> int | None:
        """Return the slot that `evict` would free, still live, or None if nothing may be evicted.

        Blocks of owners over their quota come first, then duplicates.
        """
        if not self.num_over_quota and (duplicate := self._duplicate()) is not None:
            return duplicate
        try:
            return self._policy.victim(now)
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)
            return self._policy.victim(now)

    def evict(self, now: float) -> int | None:
        """Evict the policy's victim; return its freed slot, or None if nothing may be evicted."""
        return self._evict(self.victim(now), now)

    def evict_duplicate(self, now: float) -> int | None:
        """Evict a block that the tier above holds too; return its freed slot, or None if there is none."""
        return self._evict(self._duplicate(), now)

    def _evict(self, slot: int | None, now: float) -> int | None:
        if slot is not None:
            self._leave(slot, now, evicted=True)
            self.num_evicted += 1
            self._freed.append(slot)
        return slot

    def free(self, slot: int) -> None:
        """Free a reserved slot whose write failed."""
        self._reserved.remove(slot)
        self._freed.append(slot)

    def commit(self, slot: int, key: BlockKey, parent: BlockKey, now: float, traits: BlockTraits) -> None:
        """Make a reserved slot live, so that `find` returns it."""
        assert key not in self._slot_of
        self._reserved.remove(slot)
        self._enter([slot], [key], [parent], [traits.owner])
        if self.watcher is not None:
            self.watcher(key, True)
        count = self._num_children.get(parent, 0)
        self._num_children[parent] = count + 1
        covers = count == 0 and parent in self._slot_of and parent not in self._pins
        try:
            self._policy.insert(np.asarray([slot], dtype=np.int32), now, traits)
            if covers:
                self._policy.withdraw(self._slot_of[parent])
            if key not in self._num_children and key not in self._pins:
                self._policy.offer(slot)
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)

    def restore(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey],
        parent_at: npt.NDArray[np.int64],
        now: float,
        traits: BlockTraits,
        owners: Sequence[str] | None = None,
        hints: Sequence[RetentionHint] = (),
    ) -> None:
        """Fill an empty index after a restart.

        Blocks come most recently used first, parents before children, with unique keys. `parent_at` gives the
        position of each block's parent, or -1. `owners`: whose they are; None: nobody's. `hints`: by block;
        empty: none.
        """
        assert not self._slot_of
        assert not self._reserved
        self._enter(slots, keys, parents, owners or [""] * len(slots))
        counts = np.bincount(parent_at[parent_at >= 0], minlength=len(keys))
        above = np.flatnonzero(counts)
        self._num_children = dict(
            zip(map(keys.__getitem__, above.tolist()), counts[above].tolist(), strict=True)
        )
        self._num_children.update(Counter(parents[n] for n in np.flatnonzero(parent_at < 0).tolist()))
        is_free = np.ones(max(slots, default=-1) + 1, dtype=np.bool_)
        is_free[np.asarray(slots, dtype=np.int64)] = False
        self._unused_from = len(is_free)
        self._freed = np.flatnonzero(is_free)[::-1].tolist()
        try:
            self._policy.insert(np.asarray(slots, dtype=np.int32), now, traits)
            hinted: dict[RetentionHint, list[int]] = {}
            for slot, hint in zip(slots, hints, strict=False):
                if hint is not NO_HINT:
                    hinted.setdefault(hint, []).append(slot)
            for hint, ids in hinted.items():
                self._policy.hint(np.asarray(ids, dtype=np.int32), now, BlockTraits(hint=hint))
            for n in np.flatnonzero(counts == 0).tolist():
                self._policy.offer(slots[n])
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)

    def touch(self, slots: Sequence[int], now: float) -> None:
        """Tell the policy that these live blocks were used, in order from the root."""
        if slots:
            try:
                self._policy.access(np.asarray(slots, dtype=np.int32), now)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    def renew(self, slots: Sequence[int], hint: RetentionHint, now: float) -> None:
        """Let another hint hold for live blocks."""
        leaves = [slot for slot in slots if self.is_leaf(slot)]
        try:
            for slot in leaves:
                self._policy.withdraw(slot)
            self._policy.hint(np.asarray(slots, dtype=np.int32), now, BlockTraits(hint=hint))
            for slot in leaves:
                self._policy.offer(slot)
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)

    def mark_duplicates(self, keys: Iterable[BlockKey]) -> None:
        """Note that the tier above holds these keys; those that aren't here are ignored."""
        for key in keys:
            if key in self._slot_of:
                self._duplicates[key] = None
                self._duplicates.move_to_end(key, last=key not in self._pins)

    def unmark_duplicates(self, keys: Iterable[BlockKey]) -> None:
        """Note that the tier above doesn't hold these keys any more."""
        for key in keys:
            self._duplicates.pop(key, None)

    def _duplicate(self) -> int | None:
        """Return the slot of the duplicate marked last that nobody pins."""
        key = next(reversed(self._duplicates), None)
        return None if key is None or key in self._pins else self._slot_of[key]

    def pin(self, key: BlockKey) -> None:
        """Forbid eviction of a key that is present; pins nest."""
        slot = self._slot_of[key]
        count = self._pins.get(key, 0)
        self._pins[key] = count + 1
        if key in self._duplicates:
            self._duplicates.move_to_end(key, last=False)
        if count == 0 and key not in self._num_children:
            try:
                self._policy.withdraw(slot)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    def unpin(self, key: BlockKey) -> None:
        """Remove one pin; raise ValueError if there is none."""
        count = self._pins.get(key, 0) - 1
        if count < 0:
            raise ValueError("unpin of a block that has no pin")
        if count:
            self._pins[key] = count
            return
        del self._pins[key]
        if key in self._duplicates:
            self._duplicates.move_to_end(key)
        slot = self._slot_of.get(key)
        if slot is not None and key not in self._num_children:
            try:
                self._policy.offer(slot)
            except Exception as error:  # noqa: BLE001 - see `_policy_failed`
                self._policy_failed(error)

    def is_pinned(self, slot: int) -> bool:
        """Return whether eviction of a live slot is forbidden."""
        return self.key_of(slot) in self._pins

    def has_children(self, slot: int) -> bool:
        """Return whether this live block has a child in this tier."""
        return self._num_children.get(self.key_of(slot), 0) > 0

    def is_leaf(self, slot: int) -> bool:
        """Return whether a live slot may be evicted: it has no child here and nobody pins it."""
        return not self.has_children(slot) and not self.is_pinned(slot)

    def parent_slot(self, slot: int) -> int | None:
        """Return the slot of a live block's parent; None if that isn't here."""
        return self._slot_of.get(self._parent_of[slot])

    def is_live(self, slot: int) -> bool:
        """Return whether a slot holds a block."""
        return self._key_of[slot] is not None

    def take_victims(
        self, num_blocks: int, now: float, is_next: Callable[[int, int], bool]
    ) -> list[tuple[int, BlockKey, BlockKey]]:
        """Pin the leaves that the policy ranks first; return (slot, key, parent) of each, children first.

        After a leaf comes its parent, if that has no other child and ``is_next(leaf slot, parent slot)``: an
        unused chain is evicted as a whole.
        """
        taken: list[tuple[int, BlockKey, BlockKey]] = []
        while len(taken) < num_blocks and (slot := self.victim(now)) is not None:
            at: int | None = slot
            while at is not None and len(taken) < num_blocks:
                key, parent = self.key_of(at), self._parent_of[at]
                self.pin(key)
                taken.append((at, key, parent))
                above = self._slot_of.get(parent)
                is_only_child = self._num_children[parent] == 1 and parent not in self._pins
                at = above if above is not None and is_only_child and is_next(slot, above) else None
        return taken

    def drop(self, slot: int, now: float) -> None:
        """Drop a live block, leaf or not, pinned or not, and free its slot."""
        self._leave(slot, now, evicted=False)
        self._freed.append(slot)

    def set_quotas(self, quotas: Mapping[str, int], oldest_first: Sequence[int]) -> None:
        """Set how many blocks each owner may hold; others hold any number. Evicts nothing. O(blocks).

        `oldest_first`: the live slots in order of their last use.
        """
        self._quotas = dict(quotas)
        base = self._base_policy()
        self._policy = base
        if not quotas:
            return
        policy = QuotaPolicy(base, quotas)
        for slot in oldest_first:
            if (owner := self._owner_of[slot]) in quotas:
                policy.adopt(np.asarray([slot], dtype=np.int32), BlockTraits(owner=owner), 0.0)
                if self.is_leaf(slot):
                    policy.adopt_candidate(slot)
        self._policy = policy

    @property
    def num_over_quota(self) -> int:
        """Blocks that can be evicted now and whose owners hold too many; `evict` takes them first."""
        return self._policy.num_over if isinstance(self._policy, QuotaPolicy) else 0

    def _base_policy(self) -> EvictionPolicy:
        return self._policy.base if isinstance(self._policy, QuotaPolicy) else self._policy

    def rewind(self) -> bool:
        """Mark all slots as never used if none is live or reserved; return whether it did."""
        if self._slot_of or self._reserved:
            return False
        self._freed.clear()
        self._unused_from = 0
        return True

    def unpinned(self) -> list[int]:
        """Return the live slots that nobody pins."""
        return [slot for key, slot in self._slot_of.items() if key not in self._pins]

    def _enter(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey],
        owners: Sequence[str],
    ) -> None:
        self._slot_of.update(zip(keys, slots, strict=True))
        for slot, key, parent, owner in zip(slots, keys, parents, owners, strict=True):
            self._key_of[slot], self._parent_of[slot], self._owner_of[slot] = key, parent, owner

    def _leave(self, slot: int, now: float, *, evicted: bool) -> None:
        key, parent = self.key_of(slot), self._parent_of[slot]
        self._key_of[slot], self._parent_of[slot], self._owner_of[slot] = None, _NO_PARENT, ""
        del self._slot_of[key]
        self._duplicates.pop(key, None)
        if self.watcher is not None:
            self.watcher(key, False)
        was_candidate = key not in self._num_children and key not in self._pins
        count = self._num_children[parent] - 1
        if count:
            self._num_children[parent] = count
        else:
            del self._num_children[parent]
        try:
            if not was_candidate:
                # `drop` takes candidates only.
                self._policy.offer(slot)
            self._policy.drop(slot, now, evicted=evicted)
            if not count and parent in self._slot_of and parent not in self._pins:
                self._policy.offer(self._slot_of[parent])
        except Exception as error:  # noqa: BLE001 - see `_policy_failed`
            self._policy_failed(error)

    def _policy_failed(self, error: Exception) -> None:
        """Continue with LRU; the tables are consistent. Raises `error` if LRU was in use already."""
        leaves = (s for k, s in self._slot_of.items() if k not in self._num_children and k not in self._pins)
        self._policy = fall_back(self._base_policy(), error, self._slot_of.values(), leaves)
        self.num_policy_failures += 1
        self.set_quotas(self._quotas, list(self._slot_of.values()))

    def check(self) -> None:
        """Raise IntegrityError if slots, keys, children and pins disagree."""
        keys = {slot: key for slot, key in enumerate(self._key_of) if key is not None}
        live = set(keys)
        parents = [self._parent_of[slot] for slot in sorted(live)]
        pinned = [key in self._pins for key in self._duplicates]
        problems: Iterable[tuple[bool, str]] = (
            (not self._duplicates.keys() <= self._slot_of.keys(), "a duplicate isn't here"),
            (pinned != sorted(pinned, reverse=True), "a pinned duplicate isn't before all others"),
            ({k: s for s, k in keys.items()} != self._slot_of, "keys and slots disagree"),
            (_NO_PARENT in parents, "a live slot has no parent key"),
            (dict(Counter(parents)) != self._num_children, "children are miscounted"),
            (any(count < 1 for count in self._pins.values()), "a pin count is below one"),
            (len(set(self._freed)) != len(self._freed), "a slot is free twice"),
            (bool(live & set(self._freed)), "a live slot is free"),
            (bool(live & self._reserved), "a live slot is reserved"),
            (
                len(live) + len(self._freed) + len(self._reserved) != self._unused_from,
                "a slot is lost",
            ),
            (self._unused_from > self.capacity_blocks, "more slots than the capacity"),
        )
        for broken, what in problems:
            if broken:
                raise IntegrityError(f"tier index: {what}")
