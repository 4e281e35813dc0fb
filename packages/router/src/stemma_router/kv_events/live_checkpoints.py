"""Checkpoints that a server's tiers hold at this moment: told as long as they are whole, and else not at all.

On the device a checkpoint is one thing. In the tiers below it lies in pieces, blocks like any other, each of
which may go to another tier, and be lost there, by itself. Without one of them no prompt goes on from the
checkpoint, so routers are told of a checkpoint, never of a piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, CheckpointStored, KVEvent
from stemma.types import BlockKey, Tier
from stemma_router.kv_events.names_file import Pieces

BITS = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4, Tier.POOL: 4}
"""By tier: its bit in `BlocksHeld.tiers`."""
_DISK = BITS[Tier.DISK]
_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
MAX_LEFT_PIECES = 100_000
"""Pieces of checkpoints that are whole nowhere, and still known: a slow tier has the rest a moment later."""


@dataclass(slots=True, eq=False)
class _Checkpoint:
    pieces: Pieces
    name: int
    behind: BlockKey | None = None
    """Key of the block before it; None: an earlier process knew."""
    is_on_device: bool = False
    num_below: int = 0
    """Pieces that are in some tier below the device."""
    num_on_disk: int = 0
    told: int = 0
    """Bits of the tiers that subscribers were told of."""

    @property
    def key(self) -> BlockKey:
        """The key under which it is told."""
        return self.pieces[-1]

    @property
    def tiers(self) -> int:
        """Bits of the tiers that hold it: of those below, the one that would lose it first."""
        on_device = BITS[Tier.DEVICE] if self.is_on_device else 0
        if self.num_on_disk == len(self.pieces):
            return on_device | _DISK
        return on_device | (BITS[Tier.HOST] if self.num_below == len(self.pieces) else 0)


class LiveCheckpoints:
    """The checkpoints of one server, and the blocks below the device that have no name. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[BlockKey, _Checkpoint] = {}
        self._with: dict[BlockKey, list[_Checkpoint]] = {}
        """Checkpoints by piece: those of windows share pieces."""
        self._tiers: dict[BlockKey, int] = {}
        """Bits of the tiers of each piece, and of blocks that nobody named so far."""
        self._left: OrderedDict[BlockKey, None] = OrderedDict()
        """Checkpoints that are whole in no tier, the latest last."""
        self._num_left_pieces = 0
        self._new_on_disk: list[tuple[Pieces, int]] = []

    def clear(self) -> None:
        """Drop everything."""
        for held in (self._known, self._with, self._tiers, self._left, self._new_on_disk):
            held.clear()
        self._num_left_pieces = 0

    def held(self) -> Iterator[tuple[BlockKey, int, int]]:
        """Yield key, name and bits of the tiers of each checkpoint that is whole."""
        return ((one.key, one.name, one.tiers) for one in self._known.values() if one.tiers)

    def on_disk(self) -> list[tuple[Pieces, int]]:
        """Return pieces and name of each checkpoint that is whole on disk."""
        return [(one.pieces, one.name) for one in self._known.values() if one.tiers & _DISK]

    def take_new_on_disk(self) -> list[tuple[Pieces, int]]:
        """Return pieces and name of each checkpoint that became whole on disk since the last call."""
        new, self._new_on_disk = self._new_on_disk, []
        return new

    def restore(self, pieces: Pieces, name: int) -> None:
        """Note a checkpoint that an earlier process had on disk, which has told what is still there."""
        if pieces[-1] not in self._known:
            self._told([self._enter(_Checkpoint(pieces, name))])

    def store(self, event: CheckpointStored, name: int) -> list[KVEvent]:
        """Note a checkpoint on the device; return what subscribers are told."""
        one = self._known.get(event.key)
        if one is None:
            one = self._enter(_Checkpoint(tuple(event.pieces), name))
        one.behind, one.is_on_device = event.behind, True
        return self._told([one])

    def copy(self, keys: Iterable[BlockKey], tier: Tier) -> list[KVEvent]:
        """Note blocks without names that entered a lower tier; return what subscribers are told."""
        return self._move([(key, self._tiers.get(key, 0) | BITS[tier]) for key in keys])

    def remove(self, keys: Iterable[BlockKey], tier: Tier) -> list[KVEvent]:
        """Note checkpoints that left the device, or pieces that left a lower tier; return what is told."""
        if tier is not Tier.DEVICE:
            return self._move([(key, self._tiers.get(key, 0) & ~BITS[tier]) for key in keys])
        found = [self._known[key] for key in keys if key in self._known]
        for one in found:
            one.is_on_device = False
        return self._told(found)

    def take_tiers(self, key: BlockKey) -> int:
        """Return the bits of the tiers of a block that has a name from now on, and is no concern here."""
        return self._tiers.pop(key, 0)

    def _move(self, moved: Iterable[tuple[BlockKey, int]]) -> list[KVEvent]:
        changed: dict[BlockKey, _Checkpoint] = {}
        for key, bits in moved:
            before = self._tiers.pop(key, 0)
            if bits:
                self._tiers[key] = bits
            for one in self._with.get(key, ()):
                one.num_below += bool(bits) - bool(before)
                one.num_on_disk += bool(bits & _DISK) - bool(before & _DISK)
                changed[one.key] = one
        return self._told(changed.values())

    def _told(self, changed: Iterable[_Checkpoint]) -> list[KVEvent]:
        """Return what subscribers are told of checkpoints that may be in other tiers now."""
        events: list[KVEvent] = []
        for one in changed:
            before, one.told = one.told, one.tiers
            if one.told & ~before & _DISK:
                self._new_on_disk.append((one.pieces, one.name))
            for tier in _TIERS:
                if one.told & ~before & BITS[tier]:
                    events += _entered(one, tier, is_told=before != 0)
            gone = [tier for tier in _TIERS if before & ~one.told & BITS[tier]]
            events += [BlocksRemoved((one.key,), tier) for tier in gone]
            if one.told:
                self._keep(one)
            else:
                self._leave(one)
        return events

    def _enter(self, one: _Checkpoint) -> _Checkpoint:
        self._known[one.key] = one
        for piece in one.pieces:
            self._with.setdefault(piece, []).append(one)
            bits = self._tiers.get(piece, 0)
            one.num_below += bool(bits)
            one.num_on_disk += bool(bits & _DISK)
        return one

    def _keep(self, one: _Checkpoint) -> None:
        if one.key in self._left:
            del self._left[one.key]
            self._num_left_pieces -= len(one.pieces)

    def _leave(self, one: _Checkpoint) -> None:
        if one.key not in self._left:
            self._left[one.key] = None
            self._num_left_pieces += len(one.pieces)
        while self._num_left_pieces > MAX_LEFT_PIECES:
            self._drop(self._known[next(iter(self._left))])

    def _drop(self, one: _Checkpoint) -> None:
        self._keep(one)
        del self._known[one.key]
        for piece in one.pieces:
            others = self._with[piece]
            others.remove(one)
            if not others:
                del self._with[piece]


def _entered(one: _Checkpoint, tier: Tier, *, is_told: bool) -> list[KVEvent]:
    """Return how subscribers are told of a further tier; `is_told`: they know the checkpoint already."""
    if is_told and tier is not Tier.DEVICE:
        return [BlocksCopied((one.key,), tier)]
    # Of a checkpoint that an earlier process left nobody knows what it stands behind: a snapshot names it.
    return [] if one.behind is None else [CheckpointStored(one.pieces, one.behind, tier)]
