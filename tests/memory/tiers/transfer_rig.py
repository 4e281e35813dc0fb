"""A small device buffer and stores below it, for transfers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.contracts.block_store_suite import ROOT, bytes_of, key_of
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import SPACE

from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult, ReadResult
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import BlockKey, Tier

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
BLOCK = LAYOUT.block_bytes
TIMEOUT_S = 20.0


class SlowStore(BlockStore):
    """A pool whose calls wait until the test lets them go on, and give what the test says."""

    tier = Tier.POOL

    def __init__(self) -> None:
        self._inner = HostStore(BLOCK, 64 * BLOCK, LRUPolicy(), ManualClock())
        self.block_bytes = BLOCK
        self.counters = self._inner.counters
        self.gate = threading.Event()
        self.gate.set()
        self.results: list[ReadResult] | None = None

    def exists_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._inner.exists_many(keys)

    def get_many(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[ReadResult]:
        self.gate.wait(TIMEOUT_S)
        results = self._inner.get_many(keys, into)
        return results if self.results is None else self.results[: len(keys)]

    def put_many(self, blocks: Sequence[BlockPut]) -> list[PutResult]:
        self.gate.wait(TIMEOUT_S)
        return self._inner.put_many(blocks)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        return self._inner.remove(keys)

    def close(self) -> None:
        self._inner.close()


class Rig:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.kv = DeviceKV(LAYOUT, 32)
        self.clock = ManualClock()
        self.opened: list[TierTransfer] = []

    def host(self, num_blocks: int) -> HostStore:
        return HostStore(BLOCK, num_blocks * BLOCK, LRUPolicy(), self.clock)

    def disk(self) -> DiskStore:
        return DiskStore(self.tmp_path, SPACE, BLOCK, 100 * BLOCK, LRUPolicy(), self.clock)

    def open(self, *stores: BlockStore, **policy) -> TierTransfer:
        writes = {Tier.HOST: "write_back", Tier.DISK: "write_through", Tier.POOL: "write_through"}
        policy.setdefault("writes", writes)
        policy.setdefault("load_timeout_s", 1000.0)
        num_slots = policy.pop("staging_blocks", 16)
        transfer = TierTransfer(
            DeviceCopy(self.kv),
            next((store for store in stores if isinstance(store, HostStore)), None),
            [store for store in stores if store.tier is not Tier.HOST],
            TransferPolicy(**policy),
            self.clock,
            block_size=16,
            num_staging_slots=num_slots,
        )
        self.opened.append(transfer)
        return transfer

    def fill(self, name: str, length: int, first_id: int = 0) -> list[DeviceBlock]:
        """Compute a chain of blocks on the device."""
        blocks, parent = [], ROOT
        for n in range(length):
            key = key_of(f"{name}/{n}")
            data = torch.frombuffer(bytes_of(key, BLOCK), dtype=torch.uint8)
            self.kv.block_bytes_view(first_id + n).copy_(data)
            blocks.append(DeviceBlock(first_id + n, key, parent, 16))
            parent = key
        return blocks

    def wipe(self) -> None:
        self.kv.data.zero_()

    def content(self, block_id: int) -> bytes:
        return self.kv.block_bytes_view(block_id).numpy().tobytes()
