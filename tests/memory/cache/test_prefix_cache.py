"""PrefixCache on tiny pools: exact block ids, who is evicted, and what every lease holds."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory.buffers import HashBuffer
from tests.memory.cache.served_prompts import (
    NS,
    Clock,
    buffer_of,
    compute_all,
    forked,
    make_cache,
    miss_of,
    reserved,
    run,
    tokens,
)

from stemma.errors import IntegrityError
from stemma.memory.cache.elsewhere import OtherModels
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.prefix.explain import MissReason, Parting
from stemma.prefix.hashed import HashIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import Tier


@pytest.fixture(params=["radix", "hash"])
def kind(request) -> str:
    return request.param


def test_the_second_identical_request_reuses_163_of_164_tokens(kind):
    """The MindIE example: with blocks of 128 they reuse 128."""
    cache = make_cache(8, 128, kind)
    prompt = tokens(range(164))
    assert run(cache, prompt) == 0
    assert cache.match(NS, prompt) == 163
    assert run(cache, prompt) == 163


def test_a_shared_prefix_shorter_than_a_block_is_reused(kind):
    cache = make_cache(8, 128, kind)
    run(cache, tokens(range(40), range(1000, 1100)))
    assert run(cache, tokens(range(40), range(2000, 2100))) == 40


def test_block_tables_are_exact(kind):
    """4 blocks of 4: shared blocks keep their ids, the parting block is copied to a fresh one."""
    cache = make_cache(8, 4, kind)
    first = reserved(cache, NS, tokens(range(10)))
    assert first.block_table.tolist() == [0, 1, 2]
    compute_all(cache, first)
    cache.free(first, 10)
    assert cache.stats().num_cached_blocks == 3
    second = reserved(cache, NS, tokens(range(6), 90, 91, 92))
    assert second.num_cached_tokens == 6
    assert second.block_table.tolist() == [0, 3, 4]
    buffer_of(cache).verify(second, 6)
    compute_all(cache, second)
    cache.free(second, 9)
    cache.check()


def test_eviction_takes_the_oldest_chain_tail_first(kind):
    cache = make_cache(5, 2, kind)
    run(cache, tokens(1, 2, 3, 4))
    run(cache, tokens(5, 6, 7, 8))
    lease = reserved(cache, NS, tokens(9, 10, 11))
    assert sorted(lease.block_table.tolist()) == [1, 4]
    assert cache.match(NS, tokens(1, 2, 3, 4, 0)) == 2
    assert cache.match(NS, tokens(5, 6, 7, 8, 0)) == 4
    cache.free(lease, 0)
    cache.check()


@pytest.mark.parametrize("index", [RadixIndex, HashIndex])
def test_the_policy_is_told_how_a_request_ended(index):
    """All blocks of a whole sequence, full ones of a part, none of what isn't cached."""

    class Told(LRUPolicy):
        def conclude(self, block_ids, conclusion):
            told.append((len(block_ids), conclusion))

    told: list[tuple[int, Conclusion]] = []
    key_space = KeySpace("model", "layout", 4)
    made = RadixIndex(4, Told()) if index is RadixIndex else HashIndex(key_space, Told())
    cache = PrefixCache(HashBuffer(8, 4), made, key_space, clock=Clock())
    run(cache, tokens(range(10)))
    conclusion = Conclusion(Ending.TOOL, 3)
    for sequence in (tokens(range(10), 5), tokens(range(9), 77, 5), tokens(50, 51)):
        cache.conclude(NS, sequence, conclusion)
    assert told == [(3, conclusion), (2, conclusion)]
    cache.check()


@pytest.mark.parametrize("index", [RadixIndex, HashIndex])
def test_the_policy_learns_whose_blocks_enter(index):
    """All that a request commits has its session, its partial tail and its answer too; a fork's has none."""

    class Told(LRUPolicy):
        def insert(self, block_ids, now, traits):
            told.append((len(block_ids), traits.session))
            super().insert(block_ids, now, traits)

    told: list[tuple[int, int]] = []
    key_space = KeySpace("model", "layout", 4)
    made = RadixIndex(4, Told()) if index is RadixIndex else HashIndex(key_space, Told())
    cache = PrefixCache(HashBuffer(16, 4), made, key_space, clock=Clock())
    lease = cache.reserve(NS, tokens(range(10)), session=7)
    assert lease is not None
    compute_all(cache, lease)
    twin = cache.fork(lease, 10)
    assert twin is not None
    cache.free(lease, 10)
    assert told == [(2, 7), (1, 7)]
    assert twin.session == 0
    cache.free(twin, 10)
    run(cache, tokens(50, 51, 52, 53, 54))
    assert {session for _, session in told[2:]} == {0}


def test_a_running_request_is_never_evicted(kind):
    cache = make_cache(4, 2, kind)
    lease = reserved(cache, NS, tokens(range(6)))
    compute_all(cache, lease)
    assert cache.reserve(NS, tokens(90, 91, 92)) is None
    assert not cache.extend(lease, 9)
    assert cache.extend(lease, 8)
    buffer_of(cache).verify(lease, 6)
    cache.check()
    cache.free(lease, 6)
    assert cache.reserve(NS, tokens(90, 91, 92)) is not None


def test_reserve_that_fails_takes_nothing(kind):
    cache = make_cache(4, 2, kind)
    run(cache, tokens(1, 2, 3, 4))
    holder = reserved(cache, NS, tokens(7, 8, 9))
    before = cache.stats()
    assert cache.reserve(NS, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9)) is None
    assert cache.stats() == before
    cache.check()
    cache.free(holder, 0)


def test_the_block_copied_from_survives_until_the_copy(kind):
    """The only block that can be evicted is the one whose head we want: it is copied first or not at all."""
    cache = make_cache(3, 4, kind)
    run(cache, tokens(range(8)))
    lease = reserved(cache, NS, tokens(0, 1, 2, 3, 4, 5, 99))
    assert lease is not None
    buffer_of(cache).verify(lease, lease.num_cached_tokens)
    assert lease.num_cached_tokens == 6
    cache.free(lease, lease.num_cached_tokens)
    holder = reserved(cache, NS, tokens(50, 51, 52, 53, 54, 55))
    buffer_of(cache).verify(holder, holder.num_cached_tokens)
    cache.check()


def test_without_room_for_source_and_copy_the_head_is_recomputed(kind):
    cache = make_cache(2, 4, kind)
    run(cache, tokens(range(4)))
    lease = reserved(cache, NS, tokens(0, 1, 9, 9, 9))
    assert lease is not None
    assert lease.num_cached_tokens == 0
    assert miss_of(lease).reason is MissReason.NO_ROOM
    cache.free(lease, 0)
    cache.check()


def test_what_a_step_under_way_may_use_is_not_handed_out(kind):
    """Duplicates that a commit found, and all that a lease had, stay until the last step is over."""
    cache = make_cache(6, 4, kind)
    prompt = tokens(range(9))
    one, two = reserved(cache, NS, prompt), reserved(cache, NS, prompt)
    compute_all(cache, one)
    cache.open_fence()
    cache.open_fence()
    own = two.block_table[:2].tolist()
    compute_all(cache, two)
    assert two.block_table[:2].tolist() != own
    cache.free(two, 9)
    cache.check()
    cache.close_fence()
    assert cache.reserve(NS, tokens(range(50, 53))) is None
    cache.close_fence()
    cache.check()
    assert not cache.has_fence
    assert cache.num_available == 3
    cache.free(one, 9)
    cache.check()


def test_identical_blocks_are_merged_on_commit(kind):
    cache = make_cache(8, 2, kind)
    one, two = reserved(cache, NS, tokens(range(5))), reserved(cache, NS, tokens(range(5)))
    assert not set(one.block_table.tolist()) & set(two.block_table.tolist())
    compute_all(cache, one)
    compute_all(cache, two)
    assert two.block_table[:2].tolist() == one.block_table[:2].tolist()
    assert two.block_table[2] != one.block_table[2]
    assert cache.stats().num_deduplicated_blocks == 2
    buffer_of(cache).verify(two, 5)
    cache.check()
    cache.free(one, 5)
    cache.free(two, 5)
    cache.check()
    assert cache.stats().num_free_blocks == 5


def test_the_tail_of_a_running_prompt_can_be_reused_and_goes_on_growing(kind):
    cache = make_cache(8, 4, kind)
    first = reserved(cache, NS, tokens(range(6)))
    compute_all(cache, first)
    cache.commit(first, 6, tail=True)
    second = reserved(cache, NS, tokens(range(6)))
    assert second.num_cached_tokens == 5
    buffer_of(cache).verify(second, 5)
    for token in (6, 7, 8):
        first.buffer.extend([token])
    cache.extend(first, 9)
    buffer_of(cache).compute(first, 6, 9)
    cache.commit(first, 9)
    cache.check()
    compute_all(cache, second)
    cache.free(first, 9)
    cache.free(second, 6)
    cache.check()
    assert cache.match(NS, tokens(range(10))) == 9


def test_fork_shares_full_blocks_and_copies_the_tail(kind):
    cache = make_cache(8, 4, kind)
    lease = reserved(cache, NS, tokens(range(6)))
    compute_all(cache, lease)
    twin = forked(cache, lease, 6)
    assert twin.block_table[0] == lease.block_table[0]
    assert twin.block_table[1] != lease.block_table[1]
    for one, token in ((lease, 70), (twin, 80)):
        one.buffer.extend([token])
        buffer_of(cache).compute(one, 6, 7)
    buffer_of(cache).verify(lease, 7)
    buffer_of(cache).verify(twin, 7)
    cache.check()
    cache.free(lease, 7)
    cache.free(twin, 7)
    cache.check()


def test_fork_works_with_the_cache_off():
    cache = make_cache(6, 4, "off")
    lease = reserved(cache, NS, tokens(range(6)))
    compute_all(cache, lease)
    twin = forked(cache, lease, 6)
    buffer_of(cache).verify(twin, 6)
    assert cache.fork(lease, 6) is not None
    assert cache.stats().num_free_blocks == 2
    cache.check()
    cache.free(lease, 6)
    cache.free(twin, 6)
    cache.check()


def test_disabled_keeps_nothing():
    cache = make_cache(4, 4, "off")
    prompt = tokens(range(8))
    assert run(cache, prompt) == 0
    assert run(cache, prompt) == 0
    assert cache.stats().num_free_blocks == 4
    lease = reserved(cache, NS, prompt)
    assert miss_of(lease).reason is MissReason.DISABLED


def test_namespaces_share_nothing(kind):
    cache = make_cache(8, 4, kind)
    prompt = tokens(range(9))
    run(cache, prompt, Namespace(salt="a"))
    assert run(cache, prompt, Namespace(salt="b")) == 0
    assert run(cache, prompt, Namespace(adapter="a")) == 0
    assert run(cache, prompt, Namespace(salt="a")) == 8


def test_flush_drops_what_nobody_holds_and_says_how_much(kind):
    cache = make_cache(8, 2, kind)
    run(cache, tokens(range(6)))
    lease = reserved(cache, NS, tokens(0, 1, 9, 9))
    assert cache.flush() == 2
    assert cache.match(NS, tokens(range(6))) == 2
    cache.free(lease, 0)
    cache.check()
    assert cache.flush() == 1
    assert cache.stats().num_free_blocks == 8
    assert miss_of(reserved(cache, NS, tokens(range(6)))).reason is MissReason.FLUSHED


def test_why_a_prompt_missed(kind):
    cache = make_cache(6, 4, kind)

    def reason(prompt: np.ndarray) -> MissReason:
        lease = reserved(cache, NS, prompt)
        cache.free(lease, 0)
        return miss_of(lease).reason

    assert reason(tokens(range(6))) is MissReason.COLD
    run(cache, tokens(range(10)))
    assert reason(tokens(range(10))) is MissReason.LAST_TOKEN
    assert reason(tokens(range(6), 99, 99)) is MissReason.DIVERGED
    assert reason(tokens(range(4), 99, 99)) is MissReason.DIVERGED
    assert reason(tokens(range(10), 99, 99)) is MissReason.EXTENDS
    assert reason(tokens(99, 98, 97)) is MissReason.COLD
    holder = reserved(cache, NS, tokens(range(500, 519)))
    cache.free(holder, 0)
    assert reason(tokens(range(10))) is MissReason.EVICTED


def test_a_conversation_reuses_its_own_answer(kind):
    cache = make_cache(16, 4, kind)
    lease = reserved(cache, NS, tokens(range(7)))
    compute_all(cache, lease)
    for token in range(7, 12):
        lease.buffer.extend([token])
        cache.extend(lease, lease.num_tokens)
        buffer_of(cache).compute(lease, lease.num_tokens - 2, lease.num_tokens - 1)
        cache.commit(lease, lease.num_tokens - 1)
    cache.free(lease, 11)  # the last token drawn has no KV
    assert run(cache, tokens(range(12), 50, 51)) == 11


def test_check_finds_a_leaked_reference(kind):
    cache = make_cache(4, 4, kind)
    lease = reserved(cache, NS, tokens(range(6)))
    cache.check()
    lease.block_table[1] = lease.block_table[0]  # its own second block is now nobody's
    with pytest.raises(IntegrityError, match="reference counts"):
        cache.check()


def test_cached_tokens_are_reported_by_tier(kind):
    cache = make_cache(4, 4, kind)
    run(cache, tokens(range(6)))
    lease = reserved(cache, NS, tokens(range(6)))
    assert lease.cached_by_tier == {Tier.DEVICE: 5}


def test_a_sequence_may_grow_to_what_pins_leave():
    cache = make_cache(num_blocks=8, block_size=4)
    pinned = tokens(range(20))
    run(cache, pinned)
    held = cache.hold(NS, pinned)  # 5 blocks
    assert cache.max_tokens(NS, tokens(range(100, 110))) == 3 * 4
    # What it shares with the pin it needn't have room for: 4 blocks, for the last token is always computed.
    assert cache.max_tokens(NS, pinned) == (3 + 4) * 4
    assert cache.max_tokens(Namespace(salt="other"), pinned) == 3 * 4
    twice = cache.hold(NS, pinned[:8])
    assert cache.max_tokens(NS, tokens(range(100, 110))) == 3 * 4
    assert cache.reserve(NS, tokens(range(100, 113)), 0) is None
    for lease in (held, twice):
        cache.free(lease, lease.num_tokens)
    assert cache.max_tokens(NS, tokens(range(100, 110))) == 8 * 4


def test_the_tail_of_a_sequence_that_a_step_still_uses_is_not_available():
    """Evicting it frees nothing, so the whole cache would go for a prompt that can't be had."""
    cache = make_cache(num_blocks=4, block_size=4)
    run(cache, tokens(range(50, 54)))  # one block that could be evicted
    lease = reserved(cache, NS, tokens(range(6)), 0)
    compute_all(cache, lease)
    cache.open_fence()
    cache.free(lease, lease.num_tokens)  # ended; its step is still under way
    assert cache.num_available == 2
    assert cache.reserve(NS, tokens(range(100, 112)), 0) is None
    assert cache.stats().num_evicted_blocks == 0
    cache.close_fence()
    assert cache.num_available == 4
    cache.check()


def test_a_miss_says_how_the_cached_sequence_goes_on(kind):
    cache = make_cache(16, 4, kind)
    run(cache, tokens(range(10)))
    lease = reserved(cache, NS, tokens(range(6), 99, 99))
    assert miss_of(lease).parting == Parting(6, (6, 7, 8, 9))
    cache.free(lease, 0)
    other = reserved(cache, Namespace(salt="other"), tokens(range(6), 99, 99))
    assert miss_of(other).parting is None
    cache.free(other, 0)


def why_missed(cache: PrefixCache, prompt: np.ndarray, namespace: Namespace = NS):
    lease = reserved(cache, namespace, prompt)
    cache.free(lease, 0)
    return lease.miss


def test_a_prompt_cached_for_another_adapter_says_so(kind):
    cache = make_cache(16, 4, kind)
    prompt = tokens(range(17))
    run(cache, prompt, Namespace("ada", "poet"))
    miss = why_missed(cache, prompt, Namespace("ada"))
    assert miss.reason is MissReason.OTHER_ADAPTER
    assert "16 tokens" in miss.detail
    assert "poet" in miss.detail
    assert why_missed(cache, tokens(range(40, 57)), Namespace("ada")).reason is MissReason.COLD


def test_what_another_salt_has_cached_is_kept_apart_for_the_operator(kind):
    cache = make_cache(16, 4, kind)
    prompt = tokens(range(17))
    run(cache, prompt, Namespace("ada"))
    miss = why_missed(cache, prompt, Namespace("bob"))
    assert miss.reason is MissReason.COLD
    assert "tenant" not in miss.detail
    assert miss.num_tokens_of_others == 16


def test_a_prompt_that_another_model_left_on_disk_says_so():
    class Left(OtherModels):
        def find(self, namespace, tokens):
            return 8, "by another model"

    cache = make_cache(16, 4, other_models=Left())
    miss = why_missed(cache, tokens(range(17)))
    assert miss.reason is MissReason.MODEL_CHANGED
    assert "first 8 tokens" in miss.detail


def test_an_evicted_block_says_what_for():
    cache = make_cache(4, 4)
    run(cache, tokens(range(13)))
    run(cache, tokens(range(20, 33)))
    assert "to make room for" in why_missed(cache, tokens(range(13))).detail


def test_blocks_that_come_back_within_a_minute_are_regretted():
    now = [0.0]
    key_space = KeySpace("model", "layout", 4)
    cache = PrefixCache(HashBuffer(4, 4), RadixIndex(4), key_space, clock=lambda: now[0])
    first, other = tokens(range(12)), tokens(range(20, 32))
    run(cache, first)
    run(cache, other)
    now[0] = 59.0
    run(cache, first)
    soon = cache.stats().num_regretted_blocks
    assert soon >= 2
    now[0] = 200.0
    run(cache, other)
    assert cache.stats().num_regretted_blocks == soon


def test_blocks_are_touched_in_the_order_of_their_first_use(monkeypatch):
    cache = make_cache(8, 4)
    touched: list[int] = []
    monkeypatch.setattr(cache.buffer, "touch", touched.append, raising=False)
    assert [cache.touch_ahead(2) for _ in range(3)] == [True, True, False]
    assert touched == [0, 1]
    run(cache, tokens(range(13)))  # takes blocks 0 to 3
    assert [cache.touch_ahead(3) for _ in range(4)] == [True, True, True, False]
    assert touched == [0, 1, 4, 5, 6]
    assert [cache.touch_ahead(100) for _ in range(2)] == [True, False]
    run(cache, tokens(range(100, 110)))
    assert not cache.touch_ahead(100)
    assert touched == [0, 1, 4, 5, 6, 7]


def _rested(cache, num_tokens):
    """A request of `num_tokens` tokens, all computed, that rests."""
    lease = reserved(cache, NS, tokens(range(num_tokens)))
    compute_all(cache, lease)
    blocks = lease.block_table.tolist()
    cache.rest(lease, num_tokens)
    return blocks


def test_the_first_to_go_on_takes_the_blocks_and_others_copy_the_last(kind):
    cache = make_cache(8, 4, kind)
    blocks = _rested(cache, 6)
    assert cache.match(NS, tokens(range(6), 70)) == 6
    first, second, third = (reserved(cache, NS, tokens(range(6), last)) for last in (70, 80, 90))
    assert first.block_table[:2].tolist() == blocks
    assert {one.block_table[0] for one in (second, third)} == {blocks[0]}
    assert len({one.block_table[1] for one in (first, second, third)}) == 3
    assert cache.stats().num_copied_heads == 2
    for one in (first, second, third):
        assert one.num_cached_tokens == 6
        assert miss_of(one).reason is MissReason.LAST_TOKEN
        compute_all(cache, one)
        buffer_of(cache).verify(one, 7)
    cache.end_rests()
    cache.check()
    # The first goes on too, and somebody else goes on from where it came from.
    cache.rest(first, 7)
    fourth = reserved(cache, NS, tokens(range(6), 70, 71))
    assert fourth.block_table[:2].tolist() == blocks
    for one, length in ((second, 7), (third, 7), (fourth, 7)):
        cache.free(one, length)
    cache.end_rests()
    cache.check()
    for last in (70, 80, 90):
        assert cache.match(NS, tokens(range(6), last, 0)) == 7


def test_one_may_go_on_from_before_the_first_who_did(kind):
    cache = make_cache(8, 4, kind)
    blocks = _rested(cache, 6)
    first = reserved(cache, NS, tokens(range(6), 70))
    compute_all(cache, first)
    cache.rest(first, 7)
    second = reserved(cache, NS, tokens(range(6), 70, 71))
    third = reserved(cache, NS, tokens(range(6), 80))
    assert second.block_table[:2].tolist() == blocks
    buffer_of(cache).verify(second, 7)
    buffer_of(cache).verify(third, 6)
    cache.check()


def test_what_rests_is_cached_once_nobody_has_gone_on(kind):
    cache = make_cache(8, 4, kind)
    _rested(cache, 6)
    assert reserved(cache, Namespace(salt="other"), tokens(range(6), 70)).num_cached_tokens == 0
    assert cache.match(NS, tokens(range(9))) == 4
    cache.end_rests()
    assert cache.match(NS, tokens(range(9))) == 6
    assert cache.num_available == 6
    cache.check()


def test_what_rests_gives_way_to_others(kind):
    cache = make_cache(4, 4, kind)
    _rested(cache, 6)
    lease = reserved(cache, NS, tokens(range(100, 116)), 0)
    assert lease.num_blocks == 4
    cache.check()
    cache.free(lease, 0)
    _rested(cache, 6)
    running = reserved(cache, NS, tokens(range(50, 54)), 0)
    assert cache.extend(running, 16)
    cache.check()


def test_nothing_rests_while_a_step_is_under_way():
    cache = make_cache(8, 4)
    cache.open_fence()
    blocks = _rested(cache, 6)
    lease = reserved(cache, NS, tokens(range(6), 70))
    assert lease.block_table[1] != blocks[1]
    cache.close_fence()
    cache.check()


def test_a_flush_drops_what_rests(kind):
    cache = make_cache(8, 4, kind)
    _rested(cache, 6)
    assert cache.flush() == 2
    assert cache.stats().num_free_blocks == 8


def test_who_goes_on_from_a_cached_tail_holds_it(kind):
    cache = make_cache(8, 4, kind)
    lease = reserved(cache, NS, tokens(range(6)))
    compute_all(cache, lease)
    cache.commit(lease, 6, tail=True)
    cache.rest(lease, 6)
    heir = reserved(cache, NS, tokens(range(6), 70))
    assert cache.num_available == 6
    cache.free(heir, 6)
    assert cache.num_available == 8
    cache.check()


def test_where_the_first_has_ended_others_find_what_is_cached(kind):
    cache = make_cache(8, 4, kind)
    _rested(cache, 6)
    first = reserved(cache, NS, tokens(range(6), 70))
    compute_all(cache, first)
    cache.free(first, 7)
    second = reserved(cache, NS, tokens(range(6), 80))
    assert second.num_cached_tokens == 6
    buffer_of(cache).verify(second, 6)
    cache.free(second, 6)
    cache.check()


def test_what_is_to_be_computed_again_doesnt_go_on(kind):
    cache = make_cache(8, 4, kind)
    _rested(cache, 6)
    lease = reserved(cache, NS, tokens(range(6), 70), max_cached=3)
    assert lease.num_cached_tokens == 3
    cache.check()


def test_a_twin_shares_blocks_that_nobody_has_committed_yet(kind):
    cache = make_cache(8, 4, kind)
    lease = reserved(cache, NS, tokens(range(6)))
    buffer_of(cache).compute(lease, 0, 6)
    twin = forked(cache, lease, 6)
    buffer_of(cache).verify(twin, 6)
    assert (lease.num_committed, twin.num_committed) == (1, 1)
    cache.check()
