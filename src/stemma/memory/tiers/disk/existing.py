"""Opens what a server left on disk, without knowing its settings: for `stemma cache`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stemma.config.sizes import format_size
from stemma.errors import StorageError
from stemma.memory.tiers.disk.disk_store import DiskStore, size_for_blocks
from stemma.memory.tiers.disk.record import DISK_FORMAT_VERSION, RECORD_BYTES, RECORD_DTYPE, sound_records
from stemma.memory.tiers.disk.spaces import INDEX, Manifest, SpaceInfo, list_spaces
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import FORMAT_VERSION, KeySpace


def find_space(root: Path, digest: str | None) -> SpaceInfo:
    """Return the sub-directory whose name starts with `digest`; without one, the only one there is.

    Raises StorageError if there is none, or several to choose from.
    """
    spaces = [space for space in list_spaces(root) if space.path.name.startswith(digest or "")]
    if len(spaces) == 1:
        return spaces[0]
    names = ", ".join(space.path.name for space in spaces) or "none"
    raise StorageError(f"{root} has no single cache {digest or ''}; there are: {names}")


def space_of(manifest: Manifest) -> KeySpace:
    """Return the key space of a sub-directory."""
    return KeySpace(manifest.model_fingerprint, manifest.kv_layout, manifest.block_size)


def open_existing(space: SpaceInfo, clock: Callable[[], float] = time.time) -> DiskStore:
    """Open a sub-directory at the size it has. Raises StorageError if its manifest is damaged, StorageLocked
    if a server uses it."""
    manifest = space.manifest
    if manifest is None:
        raise StorageError(f"{space.path} has a damaged manifest; `stemma cache gc` removes it")
    if (reason := unreadable(space)) is not None:
        raise StorageError(f"{space.path} {reason}")
    # The index covers all slots, even those of a truncated slab; if it is lost, the slabs give the size.
    slab_bytes = sum(slab.stat().st_size for slab in space.path.glob("slab-*"))
    index = space.path / INDEX
    index_slots = index.stat().st_size // RECORD_BYTES if index.exists() else 0
    num_slots = max(index_slots, slab_bytes // manifest.slot_bytes)
    size_bytes = size_for_blocks(manifest, max(1, num_slots))
    policy = make_policy("lru")
    return DiskStore(space.path.parent, space_of(manifest), manifest.block_bytes, size_bytes, policy, clock)


def unreadable(space: SpaceInfo) -> str | None:
    """Return why this version can't read a sub-directory whose manifest is sound; None if it can.

    Servers use another sub-directory of the same model then, and cut this one down when they need its room.
    """
    found = space.manifest
    if found is None or (found.disk_format, found.key_format) == (DISK_FORMAT_VERSION, FORMAT_VERSION):
        return None
    return (
        f"has format {found.disk_format}.{found.key_format}, this version reads "
        f"{DISK_FORMAT_VERSION}.{FORMAT_VERSION}; `stemma cache clear` removes it"
    )


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The blocks that an index names."""

    num_blocks: int = 0
    stored_bytes: int = 0
    """As they are stored, packed or not."""
    whole_bytes: int = 0
    """As they are in use."""

    @property
    def note(self) -> str:
        """For people: the bytes of their KV if some are packed, else nothing."""
        return f" for {format_size(self.whole_bytes)} of KV" if self.stored_bytes < self.whole_bytes else ""


def held_blocks(*spaces: SpaceInfo) -> HeldBlocks:
    """Return what sub-directories hold together, without taking locks; unreadable ones hold nothing."""
    num_blocks = stored = whole = 0
    for space in spaces:
        if space.manifest is not None:
            lengths = _lengths(space, space.manifest.block_bytes)
            num_blocks += len(lengths)
            stored += int(lengths.sum(dtype=np.int64))
            whole += len(lengths) * space.manifest.block_bytes
    return HeldBlocks(num_blocks, stored, whole)


def _lengths(space: SpaceInfo, block_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the bytes of each block, as stored."""
    try:
        raw = memoryview((space.path / INDEX).read_bytes())
    except OSError:
        return np.empty(0, np.uint32)
    raw = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES]
    lengths: npt.NDArray[np.uint32] = np.frombuffer(raw, RECORD_DTYPE)["length"]
    return lengths[sound_records(raw, 0, block_bytes)]
