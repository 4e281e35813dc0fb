"""Blocks that a server's tiers hold at this moment, by the names that routers know: told at once to who asks.

Lower tiers know the keys of their blocks only, and so does a disk that is opened again. The names of blocks
on disk are therefore kept in a file beside them. A record that is missing or damaged there means that routers
don't know of that block, never that anything wrong is served.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stemma.kv_events.names import CHECKPOINT, adapter_root, chain_of, told_words
from stemma.kv_events.schema import BlocksHeld
from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, BlocksStored, CheckpointStored, KVEvent
from stemma.types import BlockKey, Tier

_log = logging.getLogger(__name__)

BITS = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4, Tier.POOL: 4}
"""By tier: its bit in `BlocksHeld.tiers`."""
_TIER_BITS = 8
_PART = 65_536
"""Blocks of one message."""
_MAX_LEFT = 100_000
"""Blocks that left every tier, whose names are still known: a slow tier may have them a moment later."""
_HEADER = b"stemma block names 1\n"
_RECORD = np.dtype([("key", "V32"), ("name", "<u8"), ("check", "<u4")])
_SPARE_RECORDS = 10_000


class LiveBlocks:
    """The blocks of one server. Not thread-safe."""

    def __init__(self, block_size: int, path: Path | None = None, *, has_checkpoints: bool = False) -> None:
        """`path`: where names of blocks on disk are kept; None: nowhere."""
        self._block_size = block_size
        self._has_checkpoints = has_checkpoints
        self._blocks: dict[BlockKey, int] = {}
        """Name of each block, times 256, and the bits of its tiers."""
        self._left: OrderedDict[BlockKey, int] = OrderedDict()
        self._file = None if path is None else NamesFile(path)
        self._restored = {} if self._file is None else self._file.read()
        """Names of an earlier process, until the disk tells which of its blocks there still are."""

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop everything: events were lost."""
        self._blocks.clear()
        self._left.clear()

    def note(self, event: KVEvent) -> KVEvent | None:
        """Note an event; return what subscribers can use of it, None for nothing.

        Of a block that was in no tier, a copy tells them a key without a name: a snapshot has both.
        """
        if isinstance(event, BlocksStored):
            self._store(event)
        elif isinstance(event, CheckpointStored):
            name = self._name(event.behind)
            if name is None:
                return None
            self._add(event.key, name ^ CHECKPOINT, BITS[Tier.DEVICE])
        elif isinstance(event, BlocksRemoved):
            self._remove(event)
        else:
            told = tuple(key for key in event.keys if key in self._blocks)
            self._copy(event)
            return BlocksCopied(told, event.tier) if told else None
        return event

    def _held(self, keys: list[BlockKey]) -> BlocksHeld:
        words = [self._blocks[key] for key in keys]
        return BlocksHeld(
            hashes=told_words(keys).astype("<u8").tobytes(),
            names=np.array([word >> _TIER_BITS for word in words], dtype="<u8").tobytes(),
            tiers=bytes(word & 0xFF for word in words),
            block_size=self._block_size,
            has_checkpoints=self._has_checkpoints,
        )

    def snapshot(self) -> Iterator[BlocksHeld]:
        """Yield all blocks; at least one message, perhaps empty."""
        keys = iter(tuple(self._blocks))
        yield self._held(list(islice(keys, _PART)))
        while part := list(islice(keys, _PART)):
            yield self._held(part)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _store(self, event: BlocksStored) -> None:
        parent = adapter_root(event.namespace.adapter or None)
        if event.parent is not None:
            known = self._name(event.parent)
            if known is None:
                return
            parent = known
        for key, name in zip(event.keys, chain_of(event.tokens, self._block_size, parent), strict=True):
            self._add(key, name, BITS[Tier.DEVICE])

    def _copy(self, event: BlocksCopied) -> None:
        named = {key: name for key in event.keys if (name := self._name(key)) is not None}
        for key, name in named.items():
            self._add(key, name, BITS[event.tier])
        if event.tier is Tier.DISK and self._file is not None:
            self._keep(self._file, named)

    def _keep(self, file: NamesFile, named: Mapping[BlockKey, int]) -> None:
        """Keep the names of blocks that came to disk; write the file anew if most of it is of no use."""
        restored, self._restored = self._restored, {}  # the first blocks are those that were found there
        if restored or file.num_records > 2 * len(self._blocks) + _SPARE_RECORDS:
            bit = BITS[Tier.DISK]
            file.write({key: word >> _TIER_BITS for key, word in self._blocks.items() if word & bit})
        else:
            file.append(named)

    def _remove(self, event: BlocksRemoved) -> None:
        for key in event.keys:
            word = self._blocks.get(key, 0) & ~BITS[event.tier]
            if word & 0xFF:
                self._blocks[key] = word
            elif self._blocks.pop(key, None) is not None:
                self._left[key] = word >> _TIER_BITS
        while len(self._left) > _MAX_LEFT:
            self._left.popitem(last=False)

    def _add(self, key: BlockKey, name: int, bit: int) -> None:
        self._left.pop(key, None)
        self._blocks[key] = self._blocks.get(key, name << _TIER_BITS) | bit

    def _name(self, key: BlockKey) -> int | None:
        word = self._blocks.get(key)
        if word is not None:
            return word >> _TIER_BITS
        return self._left.get(key, self._restored.get(key))


class NamesFile:
    """Names by key, in a file that grows until it is written anew. A failure ends its use, not the server."""

    def __init__(self, path: Path) -> None:
        self.num_records = 0
        self._path = path
        self._is_usable = True

    def read(self) -> dict[BlockKey, int]:
        """Return the names of all intact records."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return {}
        if not data.startswith(_HEADER):
            return {}
        body = data[len(_HEADER) :]
        records = np.frombuffer(body[: len(body) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD)
        records = records[records["check"] == _checks(records)]
        self.num_records = len(records)
        return dict(zip(map(BlockKey, records["key"].tolist()), records["name"].tolist(), strict=True))

    def append(self, names: Mapping[BlockKey, int]) -> None:
        """Add records."""
        if names and self._is_usable:
            is_new = self.num_records == 0
            self._put("wb" if is_new else "ab", self._path, _packed(names), is_new)
            self.num_records += len(names)

    def write(self, names: Mapping[BlockKey, int]) -> None:
        """Let the file hold these records and no others; a crash leaves it as it was."""
        draft = self._path.with_suffix(".draft")
        if self._is_usable and self._put("wb", draft, _packed(names), True):
            try:
                draft.replace(self._path)
            except OSError as error:
                self._fail(error)
            self.num_records = len(names)

    def close(self) -> None:
        """Use it no more."""
        self._is_usable = False

    def _put(self, mode: str, path: Path, data: bytes, with_header: bool) -> bool:
        try:
            with path.open(mode) as file:
                file.write(_HEADER + data if with_header else data)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        self._is_usable = False
        _log.warning("routers won't know after a restart what lies on disk: %s: %s", self._path, error)


def _packed(names: Mapping[BlockKey, int]) -> bytes:
    records = np.zeros(len(names), dtype=_RECORD)
    records["key"] = np.array(list(names), dtype="V32")
    records["name"] = np.array(list(names.values()), dtype=np.uint64)
    records["check"] = _checks(records)
    return records.tobytes()


def _checks(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    """Return a checksum of each record: its words, multiplied and folded."""
    folded = records["name"].astype(np.uint64)
    words = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)
    for column in words.T:
        folded = (folded ^ column) * np.uint64(0x9E3779B97F4A7C15)
    return (folded >> np.uint64(32)).astype(np.uint32)
