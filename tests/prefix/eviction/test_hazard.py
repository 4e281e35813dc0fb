"""The hazard policy: what it learns, when it gives way to LRU, and how little it remembers."""

import tracemalloc

import numpy as np
import pytest

from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.records import GHOSTS_PER_BLOCK, RecordTable
from stemma.prefix.eviction.regret import LRUShadow
from stemma.prefix.eviction.reuse_model import (
    AGE_EDGES_S,
    NO_PAUSE,
    NUM_CLASSES,
    OpenLifetimes,
    ReuseModel,
    age_bin,
    classify,
    gittins_index,
    pause_level,
)
from stemma.types import RetentionHint


def ids(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int32)


def prints(*numbers: int) -> BlockTraits:
    return BlockTraits(fingerprints=np.asarray(numbers, dtype=np.uint64))


class TestClasses:
    def test_levels(self):
        assert [pause_level(s) for s in (0.0, 2.0, 2.1, 299.0, 1e6)] == [0, 0, 1, 4, NO_PAUSE - 1]
        assert age_bin(0.0) == 0
        assert age_bin(float(AGE_EDGES_S[-1]) * 100) == len(AGE_EDGES_S) - 1

    def test_classes_are_distinct_and_in_range(self):
        seen = {
            int(classify(np.array([count, count], dtype=np.int32), length, pause)[place])
            for count in (1, 2, 3, 5, 9, 33)
            for length in (1, 5, 9, 17, 33, 65)
            for pause in range(NO_PAUSE + 1)
            for place in (0, 1)
        }
        assert seen == set(range(NUM_CLASSES))


class TestGittins:
    def test_constant_hazard_is_its_own_index(self):
        hazards = np.full((1, len(AGE_EDGES_S)), 0.01)
        assert gittins_index(hazards) == pytest.approx(hazards, rel=1e-6)

    def test_sees_a_peak_ahead(self):
        hazards = np.full((1, len(AGE_EDGES_S)), 1e-4)
        peak = age_bin(50.0)
        hazards[0, peak] = 0.05
        index = gittins_index(hazards)[0]
        assert index[0] < index[age_bin(20.0)] < index[peak]
        assert index[0] > 10 * index[peak + 1]

    def test_decreasing_hazard_looks_no_further(self):
        hazards = np.geomspace(1e-1, 1e-6, len(AGE_EDGES_S))[None, :]
        assert gittins_index(hazards) == pytest.approx(hazards, rel=1e-2)


def test_years_without_traffic_are_no_overflow():
    model = ReuseModel()
    kind = classify(np.array([1], dtype=np.int32), 1, NO_PAUSE)
    for now in (1.0, 1e8, 1e10):
        model.learn(kind, np.array([now - 1.0]), np.ones(1), now)
        model.censor(OpenLifetimes(kind, np.array([now - 5.0]), np.ones(1)), now)
        model.fit(OpenLifetimes(kind, np.array([now - 0.5]), np.ones(1)), now)
        assert np.isfinite(model.index_of(int(kind[0]))).all()


def test_model_finds_the_hazard_of_exponential_lifetimes():
    """Lifetimes with 0.02 reuses per second; a third is still open after 60 s."""
    rng = np.random.default_rng(1)
    model = ReuseModel()
    lengths = rng.exponential(50.0, 6000)
    kind = classify(np.array([1], dtype=np.int32), 1, NO_PAUSE)
    weight = np.ones(1)
    for length in lengths[lengths < 60.0]:
        model.learn(kind, np.array([60.0 - length]), weight, 60.0)
    num_open = int((lengths >= 60.0).sum())
    model.fit(OpenLifetimes(np.repeat(kind, num_open), np.zeros(num_open), np.ones(num_open)), 60.0)
    index = model.index_of(int(kind[0]))
    assert index[age_bin(10.0)] == pytest.approx(0.02, rel=0.15)


class TestRecords:
    def test_a_block_that_returns_is_known(self):
        table = RecordTable(max_ghosts=10)
        first, known = table.enter(2, prints(7, 8), 0)
        assert not len(known)
        table.counts[first] = 5
        for record in first.tolist():
            table.leave(record, remember=True)
        again, known = table.enter(3, prints(9, 8, 7), 0)
        assert known.tolist() == [first[1], first[0]]
        assert table.counts[again].tolist() == [0, 5, 5]

    def test_ghosts_are_bounded(self):
        table = RecordTable(max_ghosts=3)
        for number in range(1, 3000):
            (record,), _ = table.enter(1, prints(number), 0)
            table.leave(int(record), remember=True)
        assert len(table.counts) == 1024
        assert len(table.open_lifetimes().classes) == 3
        assert len(table.take_dropped().classes) == 2999 - 3

    def test_blocks_without_identity_are_not_remembered(self):
        table = RecordTable(max_ghosts=3)
        (record,), _ = table.enter(1, BlockTraits(), 0)
        table.leave(int(record), remember=True)
        assert not len(table.open_lifetimes().classes)


class TestShadow:
    def test_lru_takes_over_where_it_wins_and_gives_back(self):
        shadow = LRUShadow(num_resident=100)
        chain = np.arange(1, 11, dtype=np.uint64)
        shadow.look_up(chain, 0, 100)
        for _ in range(200):
            if not shadow.prefers_lru:
                shadow.look_up(chain, 0, 100)  # the real cache misses what LRU would hold
        assert shadow.prefers_lru
        for _ in range(2000):
            shadow.look_up(chain, 10, 100)
        assert not shadow.prefers_lru

    def test_a_loss_that_goes_on_ends_sooner_than_one_long_prompt(self):
        """40 hits lost at once may be chance; 40 lost one by one, each by another prompt, are not."""
        before = np.arange(1, 5001, dtype=np.uint64)
        sudden, steady = (LRUShadow(num_resident=1000, num_lookups=5000) for _ in range(2))
        for shadow in (sudden, steady):
            shadow.fill(before[:1000])
        sudden.look_up(before[:40], 0, 1000)
        for number in range(40):
            steady.look_up(before[number : number + 1], 0, 1000)
        assert not sudden.prefers_lru
        assert steady.prefers_lru

    def test_no_regret_while_ahead(self):
        shadow = LRUShadow(num_resident=5)
        for start in range(1, 5000, 10):
            shadow.look_up(np.arange(start, start + 10, dtype=np.uint64), 10, 5)
        assert not shadow.prefers_lru

    def test_large_caches_are_sampled(self):
        shadow = LRUShadow(num_resident=1_000_000)
        prints = np.arange(1, 1_000_001, dtype=np.uint64)
        tracemalloc.start()
        shadow.look_up(prints, 0, 1_000_000)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 500 * 100 < held < 4000 * 200  # one block takes 100 to 200 bytes


def drive(policy: HazardPolicy, capacity: int, schedule: list[tuple[float, int]]) -> int:
    """Requests of one block each: (time, identity); return the hits."""
    held: dict[int, int] = {}
    slot_of: dict[int, int] = {}
    free = list(range(capacity + 1))
    hits = 0
    for now, identity in schedule:
        if identity in held:
            hits += 1
            policy.access(ids(held[identity]), now)
            continue
        slot = free.pop()
        held[identity], slot_of[slot] = slot, identity
        policy.insert(ids(slot), now, prints(identity))
        policy.offer(slot)
        if len(held) > capacity:
            victim = policy.victim(now)
            assert victim is not None
            policy.drop(victim, now, evicted=True)
            del held[slot_of.pop(victim)]
            free.append(victim)
    return hits


def test_learns_that_reuse_comes_late():
    """Each block is used once more after 40 s, or never: LRU with room for 20 s of traffic gets no hit."""
    rng = np.random.default_rng(3)
    schedule = []
    for number in range(1, 3000):
        schedule.append((float(number), number))
        if rng.random() < 0.5:
            schedule.append((number + 40.0, number))
    schedule.sort()
    assert drive(HazardPolicy(), 25, schedule) > 300


def test_without_fingerprints_it_works_as_lru():
    policy = HazardPolicy()
    policy.insert(ids(0), 0.0, BlockTraits())
    policy.insert(ids(1), 1.0, BlockTraits())
    policy.access(ids(0), 2.0)
    policy.offer(0)
    policy.offer(1)
    assert policy.victim(3.0) == 1


def test_hints():
    """A short time to live goes first once it is over; priority is a factor of worth."""
    policy = HazardPolicy()
    policy.insert(ids(0), 0.0, BlockTraits())
    policy.insert(ids(1), 50.0, BlockTraits(hint=RetentionHint(ttl_s=5.0)))
    policy.offer(0)
    policy.offer(1)
    assert policy.victim(51.0) == 0
    assert policy.victim(80.0) == 1


def test_expensive_blocks_stay():
    """Of blocks of one kind, whose reuse after 10 s was seen 200 times."""
    policy = HazardPolicy()
    for block_id in range(2, 202):
        policy.insert(ids(block_id), 0.0, prints(block_id))
    for block_id in range(2, 202):
        policy.access(ids(block_id), 10.0)
    policy.insert(ids(0), 10.0, BlockTraits(costs_s=np.array([2.0], dtype=np.float32)))
    policy.insert(ids(1), 11.0, BlockTraits(costs_s=np.array([0.1], dtype=np.float32)))
    policy.offer(0)
    policy.offer(1)
    assert policy.victim(70.0) == 1


def test_stale_entries_are_dropped():
    policy = HazardPolicy()
    policy.insert(ids(0, 1), 0.0, prints(1, 2))
    tracemalloc.start()
    for _ in range(20_000):
        policy.offer(1)
        policy.withdraw(1)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 2**20  # 20,000 entries take 2.3


def test_a_cache_that_never_evicts_keeps_a_bounded_memory() -> None:
    """Only an eviction starts a fit; reuses without one must not pile up."""
    policy = HazardPolicy()
    blocks = np.arange(128, dtype=np.int32)
    policy.insert(blocks, 0.0, BlockTraits(fingerprints=np.arange(1, 129, dtype=np.uint64)))

    def traced(num_prompts: int, start: float) -> int:
        tracemalloc.start()
        for n in range(num_prompts):
            policy.access(blocks, start + n)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held

    traced(600, 1.0)
    assert traced(3000, 1001.0) < 4 * 2**20  # 3,000 prompts would take 9


def test_blocks_that_nobody_reuses_keep_a_bounded_memory() -> None:
    """Lifetimes of forgotten blocks are handed to the model also where it has too little for a fit."""
    policy = HazardPolicy(max_ghosts=64)
    blocks = np.arange(128, dtype=np.int32)
    tracemalloc.start()
    for n in range(400):
        prints = np.arange(1 + n * 128, 1 + (n + 1) * 128, dtype=np.uint64)
        policy.insert(blocks, float(n), BlockTraits(fingerprints=prints))
        for block_id in reversed(blocks.tolist()):
            policy.drop(block_id, float(n), evicted=True)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 4 * 2**20  # 51,000 lifetimes would take 6.6


def test_ghosts_are_bounded_by_the_blocks_that_are_held() -> None:
    """A small cache doesn't remember as much as a large one, and reserves less."""
    table = RecordTable(max_ghosts=1 << 18)
    for number in range(0, 40_000, 4):
        records, _ = table.enter(4, prints(*range(number + 1, number + 5)), 0)
        for record in records.tolist():
            table.leave(record, remember=True)
    assert len(table.open_lifetimes().classes) == 4 * GHOSTS_PER_BLOCK
    small, large = (HazardPolicy().reserved_bytes(num_blocks) for num_blocks in (100, 1 << 20))
    assert large - small > 30 * 2**20
