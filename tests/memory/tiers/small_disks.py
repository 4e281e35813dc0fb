"""Disk stores of a few small blocks."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.block_store_suite import BLOCK_BYTES
from tests.memory.manual_clock import ManualClock

from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.files import FileLayer
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import (
    new_manifest,
)
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.keys import KeySpace

SPACE = KeySpace("model-a", "layout-a", 16)
SLOT_BYTES = new_manifest(SPACE, BLOCK_BYTES, 1 << 20).slot_bytes


def size_for(capacity_blocks: int) -> int:
    return 65536 + capacity_blocks * (SLOT_BYTES + RECORD_BYTES)


def make_disk(
    root: Path,
    capacity_blocks: int = 64,
    *,
    space: KeySpace = SPACE,
    clock: ManualClock | None = None,
    files: FileLayer | None = None,
    ttl_s: float | None = None,
    monotonic: ManualClock | None = None,
) -> DiskStore:
    clock = clock or ManualClock()
    return DiskStore(
        root,
        space,
        BLOCK_BYTES,
        size_for(capacity_blocks),
        LRUPolicy(),
        clock,
        default_ttl_s=ttl_s,
        files=files,
        monotonic=monotonic or clock,
    )


def allocated_bytes(root: Path) -> int:
    return sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
