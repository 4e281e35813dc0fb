"""Tiers below the device that are a dict, for tests of the contract between both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from tests.memory.buffers import HashBuffer
from tests.memory.manual_clock import ManualClock

from stemma.memory.kv_events import KVEventSink
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.lower import LowerTiers, PassedOver
from stemma.memory.tiers.tier_stats import LoadCounters, TransferStats
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import BlockKey, Tier

BLOCK_BYTES = 64


class DictTiers(LowerTiers):
    """Keeps demoted blocks in a dict; loads end when the test says so."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, npt.NDArray[np.int64]] = {}
        self.committed: list[DeviceBlock] = []
        self.evicted: list[DeviceBlock] = []
        self.loads: list[tuple[list[BlockKey], list[int], Future[int]]] = []
        self.buffer = HashBuffer(1, 1)
        """The cache's, once there is one."""
        self.is_worth_loading = True
        self.is_awaited = True
        self._store = HostStore(BLOCK_BYTES, BLOCK_BYTES, LRUPolicy(), ManualClock())
        """Only its presence counts: what the tiers hold is in `blocks`."""

    def match(self, keys: Sequence[BlockKey]) -> Sequence[Tier]:
        return (Tier.HOST,) * self.num_held(keys) if self.is_worth_loading and self.is_awaited else ()

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        found = 0
        while found < len(keys) and keys[found] in self.blocks:
            found += 1
        return found

    def passed_over(self, keys: Sequence[BlockKey]) -> PassedOver | None:
        count = self.num_held(keys)
        return PassedOver(count, Tier.HOST, self.is_awaited) if count else None

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        return (self._store,)

    @property
    def must_probe(self) -> bool:
        return False

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], num_spared: int | None = None
    ) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        self.loads.append((list(keys), list(block_ids), future))
        return future

    def prefetch(self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str] = ()) -> None:
        return None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None: ...

    def on_hit(self, blocks: Sequence[DeviceBlock]) -> None: ...

    def on_commit(self, blocks: Sequence[DeviceBlock]) -> None:
        self.committed += blocks

    def on_evict(self, blocks: Sequence[DeviceBlock]) -> None:
        self.evicted += blocks
        for block in blocks:
            self.blocks[block.key] = self.buffer.data[block.block_id].copy()

    def watch(self, sink: KVEventSink) -> None: ...

    def set_quotas(self, quotas: Mapping[Tier, Mapping[str, int]]) -> None: ...

    def lookup(self, keys: Sequence[BlockKey]) -> dict[Tier, list[bool]]:
        return {Tier.HOST: [key in self.blocks for key in keys]}

    def pin(self, keys: Sequence[BlockKey]) -> dict[Tier, list[BlockKey]]:
        return {Tier.HOST: [key for key in keys if key in self.blocks]}

    def unpin(self, pinned: Mapping[Tier, Sequence[BlockKey]]) -> None: ...

    def read(self, key: BlockKey, into: memoryview) -> bool:
        if key not in self.blocks:
            return False
        into[:] = self.blocks[key].view(np.uint8).data
        return True

    def flush(self) -> dict[Tier, int]:
        num_dropped = len(self.blocks)
        self.blocks.clear()
        return {Tier.HOST: num_dropped}

    def drain(self, timeout_s: float) -> bool:
        return True

    def stats(self) -> TransferStats:
        return TransferStats({}, LoadCounters(), {}, 0, 0, None)

    def check(self) -> None: ...

    def close(self) -> None: ...

    def finish(self, num_loaded: int | None = None) -> None:
        keys, block_ids, future = self.loads.pop(0)
        num_loaded = len(keys) if num_loaded is None else num_loaded
        for key, block_id in list(zip(keys, block_ids, strict=True))[:num_loaded]:
            self.buffer.data[block_id] = self.blocks[key]
        future.set_result(num_loaded)
