"""What the hazard policy makes of names of conversations: learned, bounded, nothing before it is sure."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages.lab.tests.sessions import branching_trace, hits, renamed

from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.records import RecordTable
from stemma.prefix.eviction.reuse_model import ReuseModel
from stemma.prefix.eviction.reuse_trust import ReuseTrust
from stemma.prefix.eviction.sessions import RESERVED_BYTES, Sessions
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace, session_number
from stemma.prefix.radix import RadixIndex

Prompts = list[tuple[list[int], int]]


class TestReuseTrust:
    @given(
        claim=st.sampled_from([0.25, 1.0, 4.0]),
        reuses=st.floats(0.0, 1e6),
        expected=st.floats(0.0, 1e6),
        prior=st.floats(1e-3, 1e3),
    )
    def test_a_factor_lies_between_the_claim_and_what_was_seen(self, claim, reuses, expected, prior):
        trust = ReuseTrust([claim])
        trust.expect(np.zeros(1, dtype=np.int64), np.array([expected]))
        trust.reused(np.zeros(1, dtype=np.int64), np.array([reuses]))
        trust.judge(prior, 1.0)
        seen = min(max(reuses / max(expected, 1e-12), 1 / 32), 32.0)
        low, high = sorted((claim, seen))
        assert low * (1 - 1e-9) <= trust.factor(0) <= high * (1 + 1e-9)

    def test_what_was_never_seen_is_believed(self):
        trust = ReuseTrust([1.0, 4.0])
        trust.judge(3.0, 5.0)
        assert [trust.factor(0), trust.factor(1)] == [1.0, 4.0]


def table_of(num_blocks: int) -> tuple[RecordTable, np.ndarray]:
    table = RecordTable(max_ghosts=10)
    prints = np.arange(1, num_blocks + 1, dtype=np.uint64)
    return table, table.enter(num_blocks, BlockTraits(fingerprints=prints), 0)[0]


class TestSessions:
    def test_a_later_prompt_leaves_what_it_does_not_share(self):
        table, records = table_of(6)
        sessions = Sessions(table, ReuseModel())
        table.users[records[:4]] = 1
        assert not len(sessions.follow(7, 1, records[:4], 0.0))
        table.users[records[[0, 1, 4]]] = 2
        assert sessions.follow(7, 2, records[[0, 1, 4]], 1.0).tolist() == records[2:4].tolist()
        assert not len(sessions.follow(7, 2, records[[0, 1, 4, 5]], 1.0))  # it grew
        assert not len(sessions.follow(8, 3, records[:1], 2.0))  # another session

    def test_what_somebody_else_used_since_is_not_left(self):
        table, records = table_of(4)
        sessions = Sessions(table, ReuseModel())
        table.users[records] = 1
        sessions.follow(7, 1, records, 0.0)
        table.users[records[:3]] = 2  # of nobody that we know
        assert sessions.follow(7, 3, records[:0], 1.0).tolist() == records[3:].tolist()

    def test_what_was_left_after_its_eviction_is_left_when_it_comes_back(self):
        table, records = table_of(1000)
        sessions = Sessions(table, ReuseModel())
        table.users[records] = 1
        sessions.follow(7, 1, records, 0.0)
        for record in records[-10:].tolist():  # to a tier below
            table.leave(record, remember=True)
        table.users[records[:-500]] = 2
        assert sessions.follow(7, 2, records[:-500], 1.0).tolist() == records[-500:].tolist()
        sampled = set(table.left().tolist()) & set(records[-10:].tolist())
        prints = np.arange(991, 1001, dtype=np.uint64)
        back, known = table.enter(10, BlockTraits(fingerprints=prints, is_use=False), 990)
        assert back.tolist() == known.tolist() == records[-10:].tolist()
        assert sampled
        assert sampled <= set(table.left().tolist())

    def test_a_flood_of_names_takes_bounded_memory(self):
        table, records = table_of(600)
        table.users[records] = 1
        sessions = Sessions(table, ReuseModel())
        tracemalloc.start()
        for number in range(1, 60_000):
            sessions.follow(number, number, records[: number % 600].copy(), float(number))
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < RESERVED_BYTES

    def test_one_prompt_longer_than_all_that_is_kept_is_kept_alone(self):
        table, _ = table_of(1)
        sessions = Sessions(table, ReuseModel())
        long = np.zeros(1 << 20, dtype=np.int32)
        sessions.follow(1, 1, long, 0.0)
        sessions.follow(2, 2, long, 0.0)
        table.users[0] = 2
        assert len(sessions.follow(2, 3, long[:1], 1.0))
        assert not len(sessions.follow(1, 4, long[:1], 2.0))  # forgotten

    def test_what_a_load_brought_is_left_by_the_prompt_that_goes_on_elsewhere(self):
        """Of several loads; but what the session itself is known to have sent counts for more."""
        table, records = table_of(8)
        sessions = Sessions(table, ReuseModel())
        for number, part in ((1, records[:3]), (2, records[3:6])):
            table.users[part] = number
            sessions.recall(7, number, part)
        table.users[records[[0, 1, 6]]] = 3
        assert sessions.follow(7, 3, records[[0, 1, 6]], 1.0).tolist() == records[2:6].tolist()
        table.users[records[2:6]] = 4
        sessions.recall(7, 4, records[2:6])
        table.users[records[[0, 7]]] = 5
        assert sessions.follow(7, 5, records[[0, 7]], 2.0).tolist() == records[[1, 6]].tolist()


class TestNumbers:
    def test_names_of_different_namespaces_are_different_sessions(self):
        names = [("a", "", "b"), ("", "a", "b"), ("ab", "", ""), ("", "", "ab"), ("1:", "", "a")]
        seen = [session_number(Namespace(salt, adapter), name) for salt, adapter, name in names]
        assert seen[2] == 0
        assert len(set(seen)) == len(seen)
        assert session_number(Namespace("a", ""), "b") == seen[0]

    def test_a_number_is_the_same_in_every_process(self):
        assert session_number(Namespace("a", "b"), "c") == 0x3945D06

    def test_any_text_is_a_name(self):
        assert 0 < session_number(Namespace(), "\ud800\0é" * 90) < 2**32


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    capacity=st.integers(1, 12),
)
def test_any_names_on_any_prompts_leave_the_index_whole(prompts: Prompts, capacity: int) -> None:
    """The policy never fails, and evicts what it is asked to, whatever its factor for left blocks."""
    policy = HazardPolicy()
    index = RadixIndex(1, policy)
    free = list(range(200))[::-1]
    for number, (tokens, session) in enumerate(prompts):
        policy._sessions.factor = (0.1, 1.0, 3.0)[number % 3]  # noqa: SLF001 - hundreds of prompts teach it
        now, chain = float(number), np.array(tokens, dtype=np.int32)
        found = index.match(DEFAULT_NAMESPACE, chain)
        index.touch(found.block_ids, now)
        fresh = [free.pop() for _ in range(len(chain) - found.num_tokens)]
        block_ids = np.concatenate((found.block_ids, np.array(fresh, dtype=np.int32))).astype(np.int32)
        prints = np.cumsum(chain.astype(np.uint64) * np.uint64(7) + np.uint64(1))
        if fresh:
            index.insert(DEFAULT_NAMESPACE, chain, block_ids, now, BlockTraits(prints, session=session))
        excess = index.num_blocks - capacity
        if excess > 0:
            evicted = index.evict(excess, now)
            assert len(evicted) == excess
            free += evicted.tolist()
        index.check()
    assert not index.num_policy_failures


class TestReplay:
    """Sessions that leave branches, which nobody comes back to; made up."""

    @pytest.mark.slow
    def test_what_names_tell_pays(self):
        trace = branching_trace()
        assert hits(trace) > 1.02 * hits(renamed(trace, "absent"))

    @pytest.mark.slow
    @pytest.mark.parametrize("names", ["equal", "shuffled", "new"])
    def test_a_lie_costs_nothing(self, names):
        trace = branching_trace()
        honest = hits(renamed(trace, "absent"))
        assert hits(renamed(trace, names)) > 0.99 * honest
