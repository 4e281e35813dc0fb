"""The hazard policy: what it learns, when it gives way to LRU, and how little it remembers."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, Ending
from stemma.prefix.eviction.records import GHOSTS_PER_BLOCK, RecordTable
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
from stemma.prefix.eviction.shadows import LearnedShadow, Shadows
from stemma.prefix.eviction.tool_paces import NUM_PACES, ToolPaces
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
            int(classify(np.array([count, count], dtype=np.int32), length, pause, end, pace)[place])
            for count in (1, 2, 3, 5, 9, 33)
            for length in (1, 5, 9, 17, 33, 65)
            for pause in range(NO_PAUSE + 1)
            for place in (0, 1)
            for length_of_answer in (0, 150, 300, 900, 2000)
            for end, pace in (
                *((Conclusion(ending, length_of_answer), 0) for ending in Ending),
                *((Conclusion(Ending.TOOL, length_of_answer), pace) for pace in range(1, NUM_PACES)),
            )
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
        assert all(np.isfinite(model.value_of(int(kind[0]), age)) for age in AGE_EDGES_S.tolist())


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
    assert model.value_of(int(kind[0]), 10.0) == pytest.approx(0.02, rel=0.15)


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


def shadowed(num_blocks: int, capacity: int) -> tuple[Shadows, np.ndarray]:
    """Shadows of a cache of `capacity` blocks, and the records of blocks that were never used."""
    table = RecordTable(max_ghosts=10)
    records, _ = table.enter(num_blocks, prints(*range(1, num_blocks + 1)), 0)
    return Shadows(table, ReuseModel(), capacity), records


class TestShadows:
    def test_lru_is_live_until_the_learned_order_leads(self):
        """A loop over more than fits: LRU has no hits; by values, all equal here, some blocks stay."""
        shadows, records = shadowed(12, 10)
        assert not shadows.learned_leads
        for step in range(400):
            shadows.look_up(records[step % 12 : step % 12 + 1], 10, float(step // 12))
        assert shadows.learned_leads

    def test_lru_is_back_once_the_lead_is_lost(self):
        table = RecordTable(max_ghosts=10)
        records, _ = table.enter(12, prints(*range(1, 13)), 0)
        shadows = Shadows(table, ReuseModel(), 10)
        for step in range(400):
            shadows.look_up(records[step % 12 : step % 12 + 1], 10, float(step // 12))
        assert shadows.learned_leads
        table.costs[records[:5]] = 1e6  # five blocks seem worth keeping, and nobody wants them
        for dead in range(5):
            shadows.look_up(records[dead : dead + 1], 10, 40.0)
        for step in range(2000):
            place = 5 + step % 7
            shadows.look_up(records[place : place + 1], 10, 41.0 + step)
        assert not shadows.learned_leads

    def test_large_caches_are_sampled(self):
        shadows, records = shadowed(1_000_000, 1_000_000)
        tracemalloc.start()
        shadows.look_up(records, 1_000_000, 0.0)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 400 * 100 < held < 2000 * 700  # one block takes some 500 bytes in both


class TestLearnedShadow:
    def test_children_go_before_their_parents(self):
        table = RecordTable(max_ghosts=10)
        records, _ = table.enter(3, prints(1, 2, 3), 0)
        shadow = LearnedShadow(table, ReuseModel())
        for identity, record, parent in zip((1, 2, 3), records.tolist(), (-1, 1, 2), strict=True):
            shadow.use(identity, record, parent)
        for gone in (3, 2, 1):
            shadow.evict(1, 5.0)
            assert gone not in shadow
            assert len(shadow) == gone - 1

    def test_of_two_leaves_the_less_valuable_goes(self):
        table = RecordTable(max_ghosts=10)
        records, _ = table.enter(2, prints(1, 2), 0)
        table.used_s[records] = (0.0, 50.0)
        shadow = LearnedShadow(table, ReuseModel())
        for identity, record in zip((1, 2), records.tolist(), strict=True):
            shadow.use(identity, record, -1)
        shadow.evict(1, 60.0)
        assert 2 in shadow
        assert 1 not in shadow

    def test_expensive_blocks_stay(self):
        table = RecordTable(max_ghosts=10)
        records, _ = table.enter(2, prints(1, 2), 0)
        table.costs[records] = (2.0, 0.1)
        shadow = LearnedShadow(table, ReuseModel())
        for identity, record in zip((1, 2), records.tolist(), strict=True):
            shadow.use(identity, record, -1)
        shadow.evict(1, 60.0)
        assert 1 in shadow
        assert 2 not in shadow


def test_a_conclusion_classifies_what_nobody_else_used_since() -> None:
    """The tool's prompt comes back in 10 s, the others' never: of two equal prompts the tool's stays."""
    policy = HazardPolicy()
    tool, turn = Conclusion(Ending.TOOL, 50), Conclusion(Ending.TURN, 50)
    rng = np.random.default_rng(1)

    events = sorted(
        [(float(n), n, n % 2 == 0) for n in range(1, 1500)]
        + [(n + 10.0 + rng.random(), n, True) for n in range(2, 1500, 2)]
    )
    slot_of: dict[int, int] = {}
    free, hits = list(range(14)), 0
    for now, identity, is_tool in events:
        slot = slot_of.get(identity)
        if slot is not None:
            hits += 1
            policy.access(ids(slot), now)
        else:
            slot = slot_of[identity] = free.pop()
            policy.insert(ids(slot), now, prints(identity))
            policy.offer(slot)
        policy.conclude(ids(slot), tool if is_tool and now == identity else turn)
        if not free:
            victim = policy.victim(now)
            assert victim is not None
            policy.drop(victim, now, evicted=True)
            free.append(victim)
            del slot_of[next(key for key, value in slot_of.items() if value == victim)]

    assert hits > 300  # LRU's 13 blocks hold 9 s of traffic: no hit


def test_paces_of_tools() -> None:
    paces = ToolPaces()
    fast, slow, both = (paces.number_of(tools) for tools in (("ls",), ("build",), ("build", "ls")))
    assert len({0, fast, slow, both}) == 4
    assert paces.number_of(("ls", "build", "ls")) == both
    assert paces.number_of(()) == 0
    for _ in range(9):
        paces.learn(fast, 0.0)
        paces.learn(slow, 60.0)
        paces.learn(0, 60.0)
    assert [paces.level(number) for number in (fast, slow, both, 0)] == [1, NUM_PACES - 1, 0, 0]
    for number in range(2000):
        paces.number_of((f"made up {number}",))
    assert paces.number_of(("one more",)) == 0
    assert paces.level(paces.number_of(("ls",))) == 1


@pytest.mark.slow
def test_quick_tools_are_waited_for() -> None:
    """One tool takes 12 s, the other comes back after hours: the names tell which prompts to keep."""
    hits = {}
    for names in (("grep", "deploy"), ("tool", "tool")):
        hits[names[0]] = waited_for(*names)
    assert hits["grep"] > 1.2 * hits["tool"]


def waited_for(quick: str, slow: str) -> int:
    """Conversations that call one of two tools and come back once; return the hits in 14 blocks."""
    policy = HazardPolicy()
    rng = np.random.default_rng(1)
    starts = [(0.5 * number, number, number % 3 == 0) for number in range(1, 6000)]
    events = sorted(
        [*starts, *((now + 12.0 + rng.random(), n, True) for now, n, is_quick in starts if is_quick)]
        + [(now + 200.0 + rng.random(), n, False) for now, n, is_quick in starts if not is_quick]
    )
    slot_of: dict[int, int] = {}
    free, hits = list(range(14)), 0
    for now, identity, is_quick in events:
        slot = slot_of.get(identity)
        is_back = now != 0.5 * identity
        if slot is not None:
            hits += 1
            policy.access(ids(slot), now)
        else:
            slot = slot_of[identity] = free.pop()
            policy.insert(ids(slot), now, prints(identity))
            policy.offer(slot)
        called = (quick if is_quick else slow,)
        policy.conclude(
            ids(slot), Conclusion(Ending.TURN if is_back else Ending.TOOL, 50, () if is_back else called)
        )
        if not free:
            victim = policy.victim(now)
            assert victim is not None
            policy.drop(victim, now, evicted=True)
            free.append(victim)
            del slot_of[next(key for key, value in slot_of.items() if value == victim)]
    return hits


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


def test_blocks_loaded_ahead_of_their_use_are_evictable_and_used_later() -> None:
    """They are ranked as before, and their use counts when it comes."""
    chain = ids(0, 1, 2)
    traits = BlockTraits(fingerprints=np.arange(7, 10, dtype=np.uint64))
    policy = HazardPolicy()
    policy.insert(chain, 0.0, traits)
    for block_id in (2, 1, 0):
        policy.offer(block_id)
        policy.drop(block_id, 1.0, evicted=True)
    policy.insert(chain + 4, 5.0, replace(traits, is_use=False))
    policy.insert(np.array([9], dtype=np.int32), 6.0, BlockTraits())
    policy.offer(6)
    policy.offer(9)
    assert policy.victim(7.0) == 6
    policy.withdraw(6)
    policy.access(chain + 4, 8.0)
    policy.offer(6)
    assert policy.victim(9.0) == 9


def hinted_traffic(priority: int, *, is_true: bool) -> int:
    """Every second block has a hint; some come back after 40 s, by the hint or in spite of it.

    Return the hits in 25 blocks, of those after the first third.
    """
    schedule = []
    for number in range(1, 4500):
        schedule.append((float(number), number))
        if (number % 2 == 0) == is_true:
            schedule.append((number + 40.0, number))
    schedule.sort()
    third = len(schedule) // 3
    hint = RetentionHint(priority=priority)
    hits = [0]

    class Hinted(HazardPolicy):
        """Gets the hints of this traffic, and counts."""

        def insert(self, block_ids: np.ndarray, now: float, traits: BlockTraits) -> None:
            assert traits.fingerprints is not None
            is_even = int(traits.fingerprints[0]) % 2 == 0
            super().insert(block_ids, now, replace(traits, hint=hint) if is_even else traits)

        def access(self, block_ids: np.ndarray, now: float) -> None:
            hits[0] += now > schedule[third][0]
            super().access(block_ids, now)

    drive(Hinted(), 25, schedule)
    return hits[0]


@pytest.mark.slow
def test_a_lying_hint_is_unlearned():
    """What is said to matter most never comes back: after a while that costs next to nothing."""
    assert hinted_traffic(90, is_true=False) > 0.9 * hinted_traffic(50, is_true=False)


@pytest.mark.slow
def test_a_true_hint_pays():
    """Nothing but the hint tells which blocks come back."""
    assert hinted_traffic(70, is_true=True) > 1.3 * hinted_traffic(50, is_true=True)


@pytest.mark.slow
def test_a_hint_that_says_the_opposite_is_understood():
    """Blocks of the lowest priority are the ones that come back."""
    assert hinted_traffic(10, is_true=True) > 1.1 * hinted_traffic(50, is_true=True)
