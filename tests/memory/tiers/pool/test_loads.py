"""Loads from a real Mooncake pool: straight into memory its client knows, and never into memory in use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch
from tests.contracts.block_store_suite import ROOT, bytes_of, key_of
from tests.memory.tiers.pool.faulty import FaultyBackend
from tests.memory.tiers.pool.servers import MooncakeMaster

from stemma.config.settings import PoolSettings
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.backend import Parts
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.registered import RegisteredMemory
from stemma.memory.tiers.pool.registry import open_pool_backend
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import BlockKey, Tier

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")
BLOCK = LAYOUT.block_bytes
TIMEOUT_S = 30.0
NUM_BLOCKS = 100


class Watched(FaultyBackend):
    """Remembers what was registered and what was read into."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(open_pool_backend("mooncake", config))
        self.registered = RegisteredMemory()
        self.read: list[Parts] = []

    def register(self, memory: memoryview) -> None:
        super().register(memory)
        self.registered.add(memory)

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        self.read.extend(into)
        return super().get_many(keys, into)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.stop()


class Rig:
    """A device, a host tier of eight blocks, and a pool that is introduced and attached as a server does."""

    def __init__(self, master: MooncakeMaster) -> None:
        self.config = master.config()
        self.kv = DeviceKV(LAYOUT, NUM_BLOCKS)
        self.host = HostStore(BLOCK, 8 * BLOCK, LRUPolicy(), time.monotonic)
        self.transfer = TierTransfer(
            DeviceCopy(self.kv),
            self.host,
            [],
            TransferPolicy({}, load_timeout_s=1000.0),
            time.monotonic,
            block_size=LAYOUT.block_size,
            num_staging_slots=16,
        )
        self.attach()

    def attach(self, deadline_s: float = 5.0) -> None:
        self.backend = Watched(self.config)
        settings = PoolSettings(name="mooncake", deadline_s=deadline_s)
        self.pool = PoolStore(self.backend, PoolKeys("loads"), BLOCK, settings)
        self.transfer.introduce(self.pool)
        self.transfer.attach(self.pool)

    def attach_anew(self, deadline_s: float = 5.0) -> None:
        """With another client. Mooncake keeps a client's values in its memory: they go with it."""
        finish = self.transfer.detach(Tier.POOL)
        assert finish is not None
        finish()
        self.attach(deadline_s)

    def put(self, keys: Sequence[BlockKey]) -> None:
        puts = [BlockPut(key, ROOT, memoryview(bytes_of(key, BLOCK))) for key in keys]
        assert set(self.pool.put_many(puts)) == {PutResult.STORED}

    def load(self, keys: Sequence[BlockKey]) -> Future[int]:
        return self.transfer.load(keys, range(len(keys)))

    def content(self, block_id: int) -> bytes:
        return self.kv.block_bytes_view(block_id).numpy().tobytes()


@pytest.fixture
def rig(master: MooncakeMaster) -> Iterator[Rig]:
    rig = Rig(master)
    yield rig
    rig.backend.gate.set()
    rig.transfer.close()


def keys_of(name: str, count: int = NUM_BLOCKS) -> list[BlockKey]:
    return [key_of(f"{name}/{n}") for n in range(count)]


def test_blocks_are_read_straight_into_registered_memory(rig: Rig) -> None:
    keys = keys_of("a")
    rig.put(keys)
    for _ in range(2):
        rig.kv.data.zero_()
        assert rig.load(keys).result(TIMEOUT_S) == NUM_BLOCKS
        assert [rig.content(n) for n in range(NUM_BLOCKS)] == [bytes_of(key, BLOCK) for key in keys]
        # One part a value, known to the client; from there to the device it is one copy.
        assert len(rig.backend.read) == NUM_BLOCKS
        assert all(len(parts) == 1 for parts in rig.backend.read)
        assert all(rig.backend.registered.covers(parts[0]) for parts in rig.backend.read)
        assert rig.pool.staging.slots.num_taken == 0
        # And once more with another client: what is attached at run time is no different.
        rig.attach_anew()
        rig.put(keys)


def test_a_late_transfer_has_its_memory_for_itself(rig: Rig) -> None:
    near, far = keys_of("near", 4), keys_of("far", 8)
    rig.attach_anew(deadline_s=0.5)
    rig.host.put_many([BlockPut(key, ROOT, memoryview(bytes_of(key, BLOCK))) for key in near])
    rig.put(far)
    assert rig.pool.exists_many(far) == [True] * 8
    rig.backend.exists_many = rig.backend.inner.exists_many  # type: ignore[method-assign]
    rig.backend.gate.clear()  # so that only reads hang
    rig.kv.data.zero_()
    assert rig.load(far).result(TIMEOUT_S) == 0  # at the deadline, not when the backend is done
    assert rig.pool.staging.slots.num_taken == 8
    assert rig.pool.counters.reasons["late"] == 8
    # The workers are free for other loads, and the pool is left alone.
    assert rig.load(near).result(TIMEOUT_S) == 4
    assert rig.load(far).result(TIMEOUT_S) == 0
    before = rig.kv.data.clone()
    rig.backend.gate.set()
    end = time.monotonic() + TIMEOUT_S
    while rig.pool.staging.slots.num_taken:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert torch.equal(rig.kv.data, before)
    assert [rig.content(n) for n in range(4)] == [bytes_of(key, BLOCK) for key in near]
