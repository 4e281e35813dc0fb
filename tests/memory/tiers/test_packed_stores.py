"""Stores that keep blocks packed: more of them in the same bytes, and each as it was put."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.memory.manual_clock import ManualClock
from tests.memory.packed_blocks import BLOCK_BYTES, LAYOUT, blocks, codec, read

from stemma.cli.cache import ls_command
from stemma.cli.doctor.command import tier_rows
from stemma.cli.doctor.storage import examine_tiers
from stemma.config.settings import PoolSettings, TierSettings
from stemma.config.sizes import format_size
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.tiers.block_store import BlockStore, PutResult, ReadResult
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.spaces import Manifest, new_manifest
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.opening import open_pool
from stemma.native.process_memory import resident_bytes
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.keys import KeySpace

SPACE = KeySpace("model", LAYOUT.describe(), LAYOUT.block_size)
BUDGET = 40 * BLOCK_BYTES


def make_disk(root: Path, packer: BlockCodec | None, budget: int = BUDGET) -> DiskStore:
    return DiskStore(root, SPACE, BLOCK_BYTES, budget, LRUPolicy(), ManualClock(), codec=packer)


def make_host(budget: int = BUDGET) -> HostStore:
    return HostStore(BLOCK_BYTES, budget, LRUPolicy(), ManualClock(), codec=codec())


def pack_all(store: BlockStore) -> None:
    if isinstance(store, HostStore):
        while store.num_whole_blocks:
            assert store.pack_next(0.0)


def disk_bytes(root: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in root.rglob("*") if file.is_file())


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostStore | DiskStore]:
    made = make_host() if request.param == "host" else make_disk(tmp_path, codec())
    yield made
    made.check()
    made.close()


def test_more_blocks_fit(store: HostStore | DiskStore) -> None:
    put = [block for n in range(20) for block in blocks(f"a{n}", 4)]
    for n in range(0, 80, 4):
        assert store.put_many(put[n : n + 4]) == [PutResult.STORED] * 4
        pack_all(store)
    assert store.num_blocks > 1.3 * 40
    assert store.stored_bytes < BUDGET
    assert abs(store.capacity_blocks - store.num_blocks) <= 2
    results = read(store, put)
    assert results.count(ReadResult.HIT) == store.num_blocks


def test_blocks_that_do_not_shrink_are_among_them(store: HostStore | DiskStore) -> None:
    put = blocks("a", 30, noisy=range(0, 30, 3))
    store.put_many(put)
    pack_all(store)
    assert read(store, put) == [ReadResult.HIT] * 30


def test_any_order_of_events_stays_within_the_budget(store: HostStore | DiskStore, tmp_path: Path) -> None:
    draw = random.Random(7)
    chains = [blocks(f"c{n}", 12, noisy=[n]) for n in range(10)]
    known = [block for chain in chains for block in chain]
    before = resident_bytes()
    for _ in range(150):
        chain = draw.choice(chains)
        event = draw.random()
        if event < 0.6:
            store.put_many(chain[: draw.randint(1, 12)])
        elif event < 0.75:
            store.remove([block.key for block in draw.sample(known, 5)])
        elif event < 0.8:
            store.clear()
        if draw.random() < 0.5:
            pack_all(store)
        store.check()
        assert ReadResult.CORRUPT not in read(store, draw.sample(known, 10))
        if isinstance(store, DiskStore):
            assert disk_bytes(tmp_path) <= BUDGET
    if isinstance(store, HostStore):
        assert resident_bytes() - before < BUDGET + 24 * 2**20


def test_readers_are_not_disturbed_by_packing() -> None:
    store, put = make_host(), blocks("a", 30, noisy=[3])
    ends = threading.Event()

    def pack() -> None:
        while not ends.is_set():
            store.pack_next(0.01)

    packing = threading.Thread(target=pack)
    packing.start()
    try:
        for round_ in range(6):
            store.put_many(put)
            for _ in range(10):
                assert set(read(store, put)) <= {ReadResult.HIT}
            if round_ % 2:
                store.clear()
    finally:
        ends.set()
        packing.join()
    store.check()
    store.close()
    assert not store.pack_next(0.0)


def test_a_restart_finds_packed_blocks(tmp_path: Path) -> None:
    disk, put = make_disk(tmp_path, codec()), blocks("a", 30, noisy=[5])
    disk.put_many(put)
    stored = disk.stored_bytes
    disk.close()
    again = make_disk(tmp_path, codec())
    assert again.stored_bytes == stored
    assert read(again, put) == [ReadResult.HIT] * 30
    assert again.verify()["ok"] == 30
    again.put_many(blocks("b", 60))
    assert disk_bytes(tmp_path) <= BUDGET
    again.check()


@pytest.mark.parametrize("packs", [True, False])
def test_doctor_and_cache_ls_tell_the_kv_of_packed_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packs: bool
) -> None:
    store = make_disk(tmp_path, codec() if packs else None)
    store.put_many(blocks("a", 20))
    store.close()
    tiers = examine_tiers(TierSettings(disk_cache=tmp_path), None)
    assert tiers.disk is not None
    held = tiers.disk.held
    assert (held.num_blocks, held.whole_bytes) == (20, 20 * BLOCK_BYTES)
    assert (held.stored_bytes < 0.8 * held.whole_bytes) == packs
    said = f" for {format_size(20 * BLOCK_BYTES)} of KV, "
    assert (said in dict(tier_rows(tiers))["disk tier"]) == packs
    ls_command(tmp_path)
    assert (said in capsys.readouterr().out) == packs


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)], ids=["off", "on"])
def test_what_the_other_setting_left_is_read(tmp_path: Path, first: bool, then: bool) -> None:
    disk, put = make_disk(tmp_path, codec() if first else None), blocks("a", 30)
    disk.put_many(put)
    disk.close()
    again = make_disk(tmp_path, codec() if then else None)
    assert read(again, put) == [ReadResult.HIT] * 30
    again.put_many(blocks("b", 60))
    again.check()
    assert disk_bytes(tmp_path) <= BUDGET + 16384
    assert ReadResult.CORRUPT not in read(again, put + blocks("b", 60))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_flipped_bit_on_disk_is_a_miss(tmp_path: Path, share: float) -> None:
    disk, (block,) = make_disk(tmp_path, codec()), blocks("a", 1)
    disk.put_many([block])
    (slab,) = tmp_path.rglob("slab-*")
    with slab.open("r+b") as file:
        place = 128 + int(share * disk.stored_bytes)
        file.seek(place)
        (found,) = file.read(1)
        file.seek(place)
        file.write(bytes([found ^ 4]))
    assert read(disk, [block]) == [ReadResult.CORRUPT]
    assert disk.num_blocks == 0


def test_a_file_system_without_holes_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("stemma.memory.tiers.disk.files.FileLayer.punch", refuse)
    disk = make_disk(tmp_path, codec())
    put = [block for n in range(60) for block in blocks(f"a{n}", 1, noisy=[0] if n < 30 else [])]
    for block in put:
        disk.put_many([block])
    assert disk.counters.reasons["enotsup"] > 0
    assert ReadResult.CORRUPT not in read(disk, put)


@pytest.mark.parametrize("packs", [True, False])
def test_servers_of_either_setting_share_a_pool(tmp_path: Path, packs: bool) -> None:
    def opened(packer: BlockCodec | None) -> BlockStore:
        config = tmp_path / "pool.json"
        config.write_text(json.dumps({"path": str(tmp_path / "pool")}))
        settings = PoolSettings(name="directory", config=config)
        return open_pool(settings, SPACE, BLOCK_BYTES, pin_memory=False, codec=packer)

    writer, reader = opened(codec() if packs else None), opened(None if packs else codec())
    put = blocks("a", 6, noisy=[2])
    assert writer.put_many(put) == [PutResult.STORED] * 6
    assert read(reader, put) == [ReadResult.HIT] * 6
    loan = reader.lend_many([block.key for block in put])
    assert loan is not None
    assert [bytes(place) for place in loan.places] == [bytes(block.data) for block in put]
    loan.free()
    stored = sum(file.stat().st_size for file in (tmp_path / "pool").rglob("*") if file.is_file())
    assert (stored < 0.8 * 6 * BLOCK_BYTES) == packs
    for one in (writer, reader):
        one.close()


def test_a_cleared_disk_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slabs are gone, and with them what their slots took."""

    def four_slots(space: KeySpace, block_bytes: int, size_bytes: int) -> Manifest:
        return replace(new_manifest(space, block_bytes, size_bytes), slots_per_slab=4)

    monkeypatch.setattr("stemma.memory.tiers.disk.disk_store.new_manifest", four_slots)
    disk = make_disk(tmp_path, codec())
    put = [block for n in range(20) for block in blocks(f"a{n}", 4)]
    for round_ in range(2):
        for n in range(0, 80, 4):
            assert disk.put_many(put[n : n + 4]) == [PutResult.STORED] * 4
        assert disk.num_blocks > 50, round_
        assert disk.clear() > 0
        assert disk_bytes(tmp_path) < 2 * BLOCK_BYTES
    disk.check()
