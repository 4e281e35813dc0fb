"""Blocks that a server's tiers hold at this moment, by the names that routers know: told at once to who asks.

Lower tiers know the keys of their blocks only, and so does a disk that is opened again. The names of blocks
and checkpoints on disk are therefore kept in a file beside them (`names_file.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path

import numpy as np

from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, BlocksStored, KVEvent
from stemma.told import adapter_root
from stemma.types import BlockKey, Tier
from stemma_router.kv_events.live_checkpoints import BITS, LiveCheckpoints
from stemma_router.kv_events.names import CHECKPOINT, chain_of, told_words
from stemma_router.kv_events.names_file import Names, NamesFile
from stemma_router.kv_events.schema import BlocksHeld

_TIER_BITS = 8
_PART = 65_536
"""Blocks of one message."""
_MAX_LEFT = 100_000
"""Blocks that left every tier, whose names are still known: a slow tier may have them a moment later."""
_SPARE_RECORDS = 10_000


class LiveBlocks:
    """The blocks and checkpoints of one server. Not thread-safe."""

    def __init__(self, block_size: int, path: Path | None = None, *, has_checkpoints: bool = False) -> None:
        """`path`: where names of blocks on disk are kept; None: nowhere."""
        self._block_size = block_size
        self._has_checkpoints = has_checkpoints
        self._blocks: dict[BlockKey, int] = {}
        """Name of each block, times 256, and the bits of its tiers."""
        self._left: OrderedDict[BlockKey, int] = OrderedDict()
        self._checkpoints = LiveCheckpoints()
        self._file = None if path is None else NamesFile(path)
        self._restored = None if self._file is None else self._file.read()
        """Names of an earlier process, until the disk tells which of its blocks there still are."""
        self._most_records = _SPARE_RECORDS

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop everything: events were lost."""
        self._blocks.clear()
        self._left.clear()
        self._checkpoints.clear()

    def note(self, event: KVEvent) -> list[KVEvent]:
        """Note an event of the cache; return what subscribers can use of it.

        Of a block that was in no tier, a copy tells them a key without a name: a snapshot has both.
        Checkpoints are told when all of their pieces are in a tier, and when one has left.
        """
        if isinstance(event, BlocksStored):
            return [event, *self._store(event)]
        if isinstance(event, BlocksCopied):
            return self._copy(event)
        if isinstance(event, BlocksRemoved):
            return self._remove(event)
        name = self._name(event.behind)
        if name is None:
            return []
        told = self._checkpoints.store(event, name ^ CHECKPOINT)
        self._keep({})
        return told

    def snapshot(self) -> Iterator[BlocksHeld]:
        """Yield all that is held; at least one message, perhaps empty."""
        blocks = ((key, word >> _TIER_BITS, word & 0xFF) for key, word in tuple(self._blocks.items()))
        held = chain(blocks, list(self._checkpoints.held()))
        yield self._held(list(islice(held, _PART)))
        while part := list(islice(held, _PART)):
            yield self._held(part)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _held(self, part: list[tuple[BlockKey, int, int]]) -> BlocksHeld:
        keys, names, tiers = zip(*part, strict=True) if part else ((), (), ())
        return BlocksHeld(
            hashes=told_words(keys).astype("<u8").tobytes(),
            names=np.array(names, dtype="<u8").tobytes(),
            tiers=bytes(tiers),
            block_size=self._block_size,
            has_checkpoints=self._has_checkpoints,
        )

    def _store(self, event: BlocksStored) -> list[KVEvent]:
        """Note blocks on the device; return in which lower tiers they were before they had names."""
        parent: int | None = adapter_root(event.namespace.adapter or None)
        if event.parent is not None:
            parent = self._name(event.parent)
        if parent is None:
            return []
        names = dict(zip(event.keys, chain_of(event.tokens, self._block_size, parent), strict=True))
        below = {key: bits for key in names if (bits := self._checkpoints.take_tiers(key))}
        for key, name in names.items():
            self._add(key, name, BITS[Tier.DEVICE] | below.get(key, 0))
        there = {
            tier: tuple(key for key, bits in below.items() if bits & BITS[tier])
            for tier in (Tier.HOST, Tier.DISK)
        }
        self._keep({key: names[key] for key in there[Tier.DISK]})
        return [BlocksCopied(keys, tier) for tier, keys in there.items() if keys]

    def _copy(self, event: BlocksCopied) -> list[KVEvent]:
        known = tuple(key for key in event.keys if key in self._blocks)
        named = {key: name for key in event.keys if (name := self._name(key)) is not None}
        for key, name in named.items():
            self._add(key, name, BITS[event.tier])
        told = self._checkpoints.copy((key for key in event.keys if key not in named), event.tier)
        if event.tier is Tier.DISK and self._restored is not None:
            self._restore(self._restored)
        else:
            self._keep(named if event.tier is Tier.DISK else {})
        return [BlocksCopied(known, event.tier), *told] if known else told

    def _restore(self, restored: Names) -> None:
        """Note what is still there of an earlier process: the first blocks of a disk were found there."""
        self._restored = None
        for pieces, name in restored.checkpoints:
            self._checkpoints.restore(pieces, name)
        self._checkpoints.take_new_on_disk()
        self._write_anew()

    def _keep(self, named: Mapping[BlockKey, int]) -> None:
        """Keep names of blocks that came to disk; write the file anew if most of it is of no use."""
        new = Names(named, self._checkpoints.take_new_on_disk())
        if self._file is not None and new.num_records:
            self._file.append(new)
            if self._file.num_records > self._most_records:
                self._write_anew()

    def _write_anew(self) -> None:
        bit = BITS[Tier.DISK]
        blocks = {key: word >> _TIER_BITS for key, word in self._blocks.items() if word & bit}
        held = Names(blocks, self._checkpoints.on_disk())
        self._most_records = 2 * held.num_records + _SPARE_RECORDS
        if self._file is not None:
            self._file.write(held)

    def _remove(self, event: BlocksRemoved) -> list[KVEvent]:
        named = tuple(key for key in event.keys if key in self._blocks)
        nameless = [key for key in event.keys if key not in self._blocks]
        for key in dict.fromkeys(named):
            word = self._blocks[key] & ~BITS[event.tier]
            if word & 0xFF:
                self._blocks[key] = word
            else:
                del self._blocks[key]
                self._left[key] = word >> _TIER_BITS
        while len(self._left) > _MAX_LEFT:
            self._left.popitem(last=False)
        told = self._checkpoints.remove(nameless, event.tier)
        return [BlocksRemoved(named, event.tier), *told] if named else told

    def _add(self, key: BlockKey, name: int, bits: int) -> None:
        self._left.pop(key, None)
        self._blocks[key] = self._blocks.get(key, name << _TIER_BITS) | bits

    def _name(self, key: BlockKey) -> int | None:
        word = self._blocks.get(key)
        if word is not None:
            return word >> _TIER_BITS
        return self._left.get(key, None if self._restored is None else self._restored.blocks.get(key))
