"""TierTransfer over real stores and a small device buffer: what goes down, what comes up, what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest
from tests.contracts.block_store_suite import ROOT, bytes_of, key_of
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.transfer_rig import BLOCK, TIMEOUT_S, Rig, SlowStore

from stemma.errors import StorageError
from stemma.memory.tiers import chunks
from stemma.memory.tiers.block_store import BlockPut, ReadResult
from stemma.memory.tiers.copies_down import num_staging_slots
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.estimate import LoadEstimator
from stemma.memory.tiers.lower import PassedOver
from stemma.memory.tiers.transfer import TierTransfer
from stemma.types import BlockKey, Tier


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for transfer in rig.opened:
        transfer.check()
        transfer.close()
        transfer.close()


def keys(blocks: Sequence[DeviceBlock]) -> list[BlockKey]:
    return [block.key for block in blocks]


def load(rig: Rig, transfer: TierTransfer, wanted: Sequence[BlockKey], first_id: int = 16) -> int:
    """Load into the device, check the bytes, and return how many arrived."""
    future = transfer.load(wanted, range(first_id, first_id + len(wanted)))
    count = future.result(TIMEOUT_S)
    for n, key in enumerate(wanted[:count]):
        assert rig.content(first_id + n) == bytes_of(key, BLOCK)
    return count


def test_evicted_blocks_come_back_from_the_host(rig: Rig) -> None:
    transfer = rig.open(rig.host(8))
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    assert transfer.match(keys(blocks)) == []
    transfer.on_evict(blocks[::-1])
    rig.wipe()
    assert transfer.match([*keys(blocks), key_of("absent")]) == [Tier.HOST] * 4
    assert load(rig, transfer, keys(blocks)) == 4
    assert transfer.match(keys(blocks)) == [Tier.HOST] * 4
    stats = transfer.stats()
    assert stats.loads.loaded_blocks == {Tier.HOST: 4}
    assert stats.tiers[Tier.HOST].num_blocks == 4


def test_exclusive_moves_instead_of_copying(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), exclusive=True)
    blocks = rig.fill("a", 3)
    transfer.on_evict(blocks[::-1])
    assert load(rig, transfer, keys(blocks)) == 3
    assert transfer.match(keys(blocks)) == []


def test_what_the_device_holds_too_makes_room_in_the_host(rig: Rig) -> None:
    host = rig.host(4)
    transfer = rig.open(host)
    old, promoted = rig.fill("old", 2), rig.fill("promoted", 2, 2)
    transfer.on_evict(old[::-1])
    transfer.on_evict(promoted[::-1])
    assert load(rig, transfer, keys(promoted)) == 2
    transfer.on_commit(promoted)
    transfer.on_evict(rig.fill("new", 1, 4))
    assert host.exists_many(keys(old + promoted)) == [True, True, False, True]
    transfer.on_evict(promoted[1:])  # it leaves the device: no longer a duplicate, and not written again
    assert host.counters.written_bytes == 5 * BLOCK
    transfer.on_evict(rig.fill("newer", 1, 5))
    assert host.exists_many(keys(old + promoted)) == [True, False, False, True]


def test_a_flushed_device_holds_no_duplicates(rig: Rig) -> None:
    host = rig.host(4)
    transfer = rig.open(host)
    blocks = rig.fill("a", 2)
    transfer.on_evict(blocks[::-1])
    transfer.on_commit(blocks)
    assert host.num_duplicates == 2
    transfer.on_drop(blocks)
    assert host.num_duplicates == 0


def test_duplicates_are_no_candidates_where_they_would_not_be_written_again(rig: Rig) -> None:
    host = rig.host(4)
    transfer = rig.open(host, writes={Tier.HOST: "write_through"})
    transfer.on_commit(rig.fill("a", 2))
    assert (len(host.newest(9)), host.num_duplicates) == (2, 0)


def test_duplicates_leave_a_full_host_without_a_write_to_the_disk(rig: Rig) -> None:
    host, disk = rig.host(8), rig.disk()
    transfer = rig.open(host, disk, writes={Tier.HOST: "write_back", Tier.DISK: "write_back"})
    blocks = rig.fill("a", 7)
    transfer.on_evict(blocks[::-1])
    transfer.drain(TIMEOUT_S)
    transfer.on_commit(blocks)
    transfer.on_evict(rig.fill("b", 1, 8))  # none is free: one block has to go
    transfer.drain(TIMEOUT_S)
    assert (host.num_free, host.num_duplicates) == (7, 0)
    assert disk.counters.written_bytes == 0


def test_partial_blocks_stay_on_the_device(rig: Rig) -> None:
    transfer = rig.open(rig.host(8))
    (block,) = rig.fill("a", 1)
    transfer.on_evict([DeviceBlock(block.block_id, block.key, ROOT, 7)])
    assert transfer.match([block.key]) == []


def test_a_match_ends_at_the_first_gap(rig: Rig) -> None:
    transfer = rig.open(rig.host(8))
    blocks = rig.fill("a", 3)
    transfer.on_evict([blocks[2], blocks[0]])
    assert transfer.match(keys(blocks)) == [Tier.HOST]


def test_write_through_to_disk_survives_a_restart(rig: Rig) -> None:
    transfer = rig.open(rig.disk())
    blocks = rig.fill("a", 5)
    transfer.on_commit(blocks)
    assert transfer.drain(TIMEOUT_S)
    transfer.close()
    rig.wipe()
    transfer = rig.open(rig.disk())
    assert transfer.match(keys(blocks)) == [Tier.DISK] * 5
    assert load(rig, transfer, keys(blocks)) == 5


def test_write_back_reaches_the_disk_when_the_host_runs_full(rig: Rig) -> None:
    writes = {Tier.HOST: "write_back", Tier.DISK: "write_back"}
    transfer = rig.open(rig.host(16), rig.disk(), writes=writes)
    chains = [rig.fill(name, 2, 2 * n) for n, name in enumerate("abcdefghijkl")]
    for chain in chains:
        transfer.on_evict(chain[::-1])
        assert transfer.drain(TIMEOUT_S)
    assert [transfer.match(keys(chain))[0] for chain in (chains[0], chains[-1])] == [Tier.DISK, Tier.HOST]
    for chain in chains:
        assert load(rig, transfer, keys(chain), first_id=28) == 2


def test_selective_write_through_waits_for_the_second_use(rig: Rig) -> None:
    transfer = rig.open(rig.disk(), writes={Tier.DISK: "write_through_selective"})
    blocks = rig.fill("a", 2)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    assert transfer.match(keys(blocks)) == []
    transfer.on_hit(blocks[:1])
    transfer.drain(TIMEOUT_S)
    assert transfer.match(keys(blocks)) == [Tier.DISK]


def test_what_finds_no_room_waits_on_the_device(rig: Rig) -> None:
    disk = rig.disk()
    transfer = rig.open(disk, staging_blocks=4)
    blocks = rig.fill("a", 14)
    transfer.on_commit(blocks)
    assert transfer.stats().num_waiting_writes >= 6
    transfer.on_commit(blocks)  # once is enough
    while transfer.copy_waiting():
        time.sleep(0.001)
    assert transfer.drain(TIMEOUT_S)
    assert disk.num_blocks == 14
    assert transfer.stats().dropped_writes == {"buffer_full": 0, "evicted_waiting": 0}
    rig.wipe()
    assert load(rig, transfer, keys(blocks)) == 14


def test_what_waits_is_written_at_the_end(rig: Rig) -> None:
    disk = rig.disk()
    transfer = rig.open(disk, staging_blocks=4)
    blocks = rig.fill("a", 14)
    transfer.on_commit(blocks)
    transfer.close()
    rig.wipe()
    again = rig.open(rig.disk())
    assert again.match(keys(blocks)) == [Tier.DISK] * 14
    assert load(rig, again, keys(blocks)) == 14


def test_what_waits_is_copied_before_it_leaves(rig: Rig) -> None:
    transfer = rig.open(rig.disk(), staging_blocks=4)
    blocks = rig.fill("a", 9)
    transfer.on_commit(blocks)
    transfer.on_evict(blocks[::-1])
    rig.wipe()
    assert transfer.drain(TIMEOUT_S)
    assert load(rig, transfer, keys(blocks)) == 9


def test_what_leaves_before_there_is_room_is_counted(rig: Rig) -> None:
    pool = SlowStore()
    transfer = rig.open(pool, staging_blocks=4)
    blocks = rig.fill("a", 7)
    pool.gate.clear()
    transfer.on_commit(blocks)
    assert transfer.stats().num_waiting_writes == 3
    transfer.on_evict(blocks[:0:-1])
    rig.wipe()
    assert not transfer.copy_waiting()
    assert transfer.stats().dropped_writes == {"buffer_full": 0, "evicted_waiting": 3}
    transfer.on_commit(rig.fill("b", 2))
    transfer.on_drop(rig.fill("b", 2))
    assert transfer.stats().num_waiting_writes == 0
    pool.gate.set()
    assert transfer.drain(TIMEOUT_S)


@pytest.mark.parametrize(
    ("block_bytes", "block_size", "expected"), [(8_400_000, 64, 64), (2_000, 16, 67108), (1 << 30, 16, 256)]
)
def test_the_buffer_holds_two_steps_of_any_model(block_bytes: int, block_size: int, expected: int) -> None:
    assert num_staging_slots(None, block_bytes, block_size, 2048) == expected
    assert num_staging_slots(1 << 20, block_bytes, block_size, 2048) == max(4, (1 << 20) // block_bytes)


def test_blocks_of_several_tiers_in_one_load(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), rig.disk(), writes={Tier.HOST: "write_back", Tier.DISK: "write_through"})
    blocks = rig.fill("a", 6)
    transfer.on_commit(blocks[2:])
    transfer.on_evict(blocks[:3][::-1])
    transfer.drain(TIMEOUT_S)
    rig.wipe()
    assert transfer.match(keys(blocks)) == [Tier.HOST] * 3 + [Tier.DISK] * 3
    assert load(rig, transfer, keys(blocks)) == 6


def test_a_corrupt_block_ends_the_load_and_is_counted(rig: Rig) -> None:
    disk = rig.disk()
    transfer = rig.open(disk)
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    slab = next(disk.path.glob("slab-*"))
    data = bytearray(slab.read_bytes())
    at = data.find(bytes_of(blocks[2].key, BLOCK)[:64])
    data[at + 5] ^= 1
    slab.write_bytes(data)
    assert load(rig, transfer, keys(blocks)) == 2
    assert transfer.stats().loads.lost_blocks == {(Tier.DISK, ReadResult.CORRUPT): 1}
    assert transfer.match(keys(blocks)) == [Tier.DISK] * 2


@pytest.mark.parametrize("bad", [0, 1, 4, 5, 10])
@pytest.mark.parametrize("to_host", [False, True])
def test_nothing_after_a_damaged_block_is_delivered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, bad: int, to_host: bool
) -> None:
    """Chunks of two: the next one is read already when the damage is found."""
    monkeypatch.setattr(chunks, "CHUNK_BLOCKS", 2)
    disk, host = rig.disk(), rig.host(16)
    transfer = rig.open(*([host] if to_host else []), disk)
    blocks = rig.fill("a", 11)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    slab = next(disk.path.glob("slab-*"))
    data = bytearray(slab.read_bytes())
    data[data.find(bytes_of(blocks[bad].key, BLOCK)[:64]) + 5] ^= 1
    slab.write_bytes(data)
    rig.wipe()
    if to_host:
        assert transfer.prefetch(ROOT, keys(blocks)) is not None
        while transfer.stats().num_queued_blocks:
            threading.Event().wait(0.005)
        assert host.exists_many(keys(blocks)) == [True] * bad + [False] * (11 - bad)
        buffers = [memoryview(bytearray(BLOCK)) for _ in range(bad)]
        host.get_many(keys(blocks[:bad]), buffers)
        assert [bytes(buffer) for buffer in buffers] == [bytes_of(key, BLOCK) for key in keys(blocks[:bad])]
    else:
        assert load(rig, transfer, keys(blocks)) == bad
        assert all(rig.content(16 + n) == bytes(BLOCK) for n in range(bad, 11))
    assert transfer.stats().loads.lost_blocks == {(Tier.DISK, ReadResult.CORRUPT): 1}
    assert disk.remove(keys(blocks)) == 10, "no block is pinned any more"


def test_a_block_lost_in_one_tier_is_taken_from_the_next(rig: Rig) -> None:
    disk, pool = rig.disk(), SlowStore()
    transfer = rig.open(disk, pool)
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    slab = next(disk.path.glob("slab-*"))
    slab.write_bytes(bytes(slab.stat().st_size))
    assert load(rig, transfer, keys(blocks)) == 4
    assert transfer.stats().loads.loaded_blocks == {Tier.POOL: 4}


def test_a_late_load_ends_at_its_limit_and_writes_nothing_afterwards(rig: Rig) -> None:
    pool = SlowStore()
    transfer = rig.open(pool, load_timeout_s=0.2)
    blocks = rig.fill("a", 3)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    rig.wipe()
    pool.gate.clear()
    future = transfer.load(keys(blocks), [20, 21, 22])
    assert not wait([future], timeout=0.3).done, "the limit is the clock's, which stands still"
    rig.clock.now += 1.0
    assert future.result(TIMEOUT_S) == 0
    pool.gate.set()
    transfer.close()  # waits for the thread that reads
    assert rig.content(20) == bytes(BLOCK)
    assert transfer.stats().loads.num_late_loads == 1


@pytest.mark.parametrize("result", [ReadResult.CORRUPT, ReadResult.ERROR, ReadResult.LATE])
def test_failing_requests_instead_of_computing(rig: Rig, result: ReadResult) -> None:
    pool = SlowStore()
    transfer = rig.open(pool, fail_on_load_failure=True)
    blocks = rig.fill("a", 2)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    pool.results = [ReadResult.HIT, result]
    with pytest.raises(StorageError, match=str(result)):
        transfer.load(keys(blocks), [20, 21]).result(TIMEOUT_S)


def test_a_block_that_is_gone_is_no_failure(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), fail_on_load_failure=True)
    blocks = rig.fill("a", 2)
    transfer.on_evict(blocks[:1])
    assert load(rig, transfer, keys(blocks)) == 1


def test_prefetch_moves_disk_blocks_to_the_host_and_keeps_their_origin(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), rig.disk())
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    ahead = transfer.prefetch(ROOT, keys(blocks))
    assert ahead is not None
    assert ahead.probe.done()
    host = transfer.stores[0]
    while not all(host.exists_many(keys(blocks))):
        threading.Event().wait(0.005)
    while transfer.stats().num_queued_blocks:
        threading.Event().wait(0.005)
    assert transfer.match(keys(blocks)) == [Tier.DISK] * 4
    assert load(rig, transfer, keys(blocks)) == 4
    stats = transfer.stats().loads
    assert stats.loaded_blocks == {Tier.HOST: 4}
    assert stats.prefetched_blocks == {Tier.DISK: 4}


def test_the_pool_is_probed_ahead_never_on_the_step_loop(rig: Rig) -> None:
    pool = SlowStore()
    transfer = rig.open(pool)
    blocks = rig.fill("a", 2)
    pool.put_many([BlockPut(key, ROOT, memoryview(bytes_of(key, BLOCK))) for key in keys(blocks)])
    assert transfer.match(keys(blocks)) == []
    ahead = transfer.prefetch(ROOT, keys(blocks))
    assert ahead is not None
    ahead.probe.result(TIMEOUT_S)
    assert transfer.match(keys(blocks)) == [Tier.POOL] * 2


def test_best_effort_takes_only_what_the_host_has(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), rig.disk(), prefetch="best_effort")
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.on_evict(blocks[:2][::-1])
    transfer.drain(TIMEOUT_S)
    assert transfer.match(keys(blocks)) == [Tier.HOST] * 2
    assert transfer.passed_over(keys(blocks)[2:]) == PassedOver(2, Tier.DISK, is_awaited=False)
    assert transfer.passed_over([key_of("absent")]) is None


def test_what_computes_faster_is_passed_over(rig: Rig) -> None:
    transfer = rig.open(rig.disk())
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.drain(TIMEOUT_S)
    transfer.estimator.observe_load(Tier.DISK, 1, 10.0)
    transfer.observe_prefill(1600, 0.01)
    assert transfer.match(keys(blocks)) == []
    assert transfer.passed_over(keys(blocks)) == PassedOver(4, Tier.DISK, is_awaited=True)


def test_flush_leaves_nothing_behind(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), rig.disk())
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    transfer.on_evict(blocks[:3][::-1])
    assert transfer.flush() == {Tier.HOST: 3, Tier.DISK: 4}
    assert transfer.match(keys(blocks)) == []
    assert transfer.lookup(keys(blocks)) == {Tier.HOST: [False] * 4, Tier.DISK: [False] * 4}


def test_detach_and_attach(rig: Rig) -> None:
    transfer = rig.open(rig.host(8), rig.disk())
    blocks = rig.fill("a", 2)
    transfer.on_commit(blocks)
    finish = transfer.detach(Tier.DISK)
    assert finish is not None
    assert transfer.match(keys(blocks)) == []
    finish()
    transfer.attach(rig.disk())
    assert transfer.match(keys(blocks)) == [Tier.DISK] * 2
    assert transfer.detach(Tier.POOL) is None


def test_estimates_decide_how_much_to_load() -> None:
    clock = ManualClock()
    estimator = LoadEstimator(16, clock)
    slow_first = [Tier.HOST] * 3 + [Tier.DISK] * 5
    assert estimator.num_worth_loading(slow_first) == 8
    estimator.observe_prefill(1600, 1.0)
    assert estimator.compute_s == pytest.approx(0.01)
    estimator.observe_load(Tier.HOST, 10, 0.01)
    assert estimator.num_worth_loading(slow_first) == 8
    estimator.observe_load(Tier.DISK, 1, 0.05)
    assert estimator.num_worth_loading(slow_first) == 3
    assert not estimator.is_worth_loading(Tier.DISK)
    assert estimator.num_worth_loading([Tier.DISK, Tier.HOST, Tier.HOST]) == 0
    # A slow stretch is worth it if enough lies behind it.
    assert estimator.num_worth_loading([Tier.DISK] + [Tier.HOST] * 9) == 10
    # A tier that was slow is tried again some time.
    clock.now += 200.0
    assert estimator.is_worth_loading(Tier.DISK)


def test_a_tier_far_away_is_worth_it_for_much_at_once() -> None:
    """200 ms away, a millisecond a block; computing a block takes ten."""
    estimator = LoadEstimator(16, ManualClock())
    estimator.observe_prefill(1600, 1.0)
    for count in (64, 1, 8, 64, 2):
        estimator.observe_load(Tier.POOL, count, 0.2 + 0.001 * count)
    assert estimator.load_s(Tier.POOL, 64) == pytest.approx(0.264, rel=0.05)
    assert estimator.load_s(Tier.POOL, 1) == pytest.approx(0.201, rel=0.05)
    assert estimator.num_worth_loading([Tier.POOL] * 10) == 0
    assert estimator.num_worth_loading([Tier.POOL] * 40) == 40
    for _ in range(30):  # reads of one size say nothing new of the latency
        estimator.observe_load(Tier.POOL, 64, 0.264)
    assert estimator.num_worth_loading([Tier.POOL] * 10) == 0
    for _ in range(30):  # it came nearer
        estimator.observe_load(Tier.POOL, 64, 0.064)
    assert estimator.num_worth_loading([Tier.POOL] * 10) == 10


def test_the_fixed_part_of_a_step_is_not_the_tokens_time() -> None:
    """A step takes 0.1 s and a millisecond a token; most are the short rests behind hits."""
    estimator = LoadEstimator(16, ManualClock())
    for num_tokens in (64, 64, 256, 64, 100, 64, 64, 64):
        estimator.observe_prefill(num_tokens, 0.1 + 0.001 * num_tokens)
    assert estimator.compute_s == pytest.approx(0.016, rel=0.01)
    for _ in range(50):  # one size only: the fixed part stays
        estimator.observe_prefill(64, 0.164)
    assert estimator.compute_s == pytest.approx(0.016, rel=0.01)
    for num_tokens in (64, 10_000, 64):  # the larger step was faster: nothing below zero
        estimator.observe_prefill(num_tokens, 0.1)
    compute_s = estimator.compute_s
    assert compute_s is not None
    assert 0.0 <= compute_s < 0.016
    estimator.observe_prefill(1, 100.0)  # too short to say anything
    assert estimator.compute_s == compute_s


def test_whether_prompts_of_a_size_were_computed_is_known_for_a_minute() -> None:
    clock = ManualClock()
    estimator = LoadEstimator(16, clock)
    assert estimator.has_computed(3), "shorter steps aren't measured"
    assert not estimator.has_computed(16)
    estimator.observe_prefill(128, 1.0)
    assert [estimator.has_computed(count) for count in (4, 16, 17)] == [True, True, False]
    clock.now += 61.0
    assert not estimator.has_computed(16)


def test_a_load_does_not_ask_the_pool_for_what_was_seen_there(rig: Rig) -> None:
    """Each question costs a round trip, which a load from far away would make twice."""

    class Counted(SlowStore):
        num_asked = 0

        def exists_many(self, keys):
            self.num_asked += 1
            return super().exists_many(keys)

    pool = Counted()
    transfer = rig.open(pool)
    blocks = rig.fill("a", 4)
    transfer.on_commit(blocks)
    assert transfer.drain(TIMEOUT_S)
    transfer.flush()
    prefetch = transfer.prefetch(ROOT, keys(blocks))
    assert prefetch is not None
    prefetch.probe.result(TIMEOUT_S)
    assert transfer.load(keys(blocks), [20, 21, 22, 23]).result(TIMEOUT_S) == 4
    assert pool.num_asked == 1
    pool.remove(keys(blocks)[2:])  # another server did
    assert transfer.load(keys(blocks), [20, 21, 22, 23]).result(TIMEOUT_S) == 2


def test_blocks_that_spare_nothing_cost_their_time() -> None:
    estimator = LoadEstimator(16, ManualClock())
    assert estimator.gain_s([Tier.DISK] * 100, 16) > 0, "nothing is known"
    estimator.observe_prefill(1600, 1.0)
    assert estimator.gain_s([Tier.DISK] * 100, 16) > 0, "what a read costs isn't known"
    for count in (1, 10, 100):
        estimator.observe_load(Tier.DISK, count, 0.1 + 0.005 * count)
    assert estimator.gain_s([Tier.DISK] * 100, 1600) == pytest.approx(0.4, rel=0.01)
    assert estimator.gain_s([Tier.DISK] * 300, 1600) == pytest.approx(-0.6, rel=0.01)
    assert estimator.gain_s([Tier.DISK] * 100, 1600, num_queued=100) == pytest.approx(-0.1, abs=0.01)


def test_blocks_of_others_in_the_queue_count_as_waiting_time() -> None:
    estimator = LoadEstimator(16, ManualClock())
    estimator.observe_prefill(1600, 1.0)
    estimator.observe_load(Tier.HOST, 10, 0.05)
    assert estimator.num_worth_loading([Tier.HOST] * 4) == 4
    assert estimator.num_worth_loading([Tier.HOST] * 4, num_queued=100) == 0
