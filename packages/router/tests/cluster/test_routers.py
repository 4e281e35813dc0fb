"""Routers: each orders all replicas; ours weighs what is cached against what waits."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.routers import (
    ROUTERS,
    CacheAware,
    Placements,
    Rendezvous,
    ReplicaLoad,
    RoutedRequest,
)


@pytest.mark.parametrize("name", ROUTERS)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9000), st.integers(0, 20)), min_size=1, max_size=6)
)
def test_an_order_names_each_replica_once(name, replicas) -> None:
    loads = [ReplicaLoad(requests, tokens) for requests, tokens, _ in replicas]
    depths = [depth for _, _, depth in replicas]
    ask = RoutedRequest(list(range(20)), 330, 16)
    assert sorted(ROUTERS[name]().order(ask, loads, depths)) == list(range(len(replicas)))


def test_a_prompt_goes_where_its_prefix_is() -> None:
    ask = RoutedRequest(list(range(10)), 165, 16)
    assert CacheAware().order(ask, [ReplicaLoad() for _ in range(3)], [0, 4, 9])[:2] == [2, 1]


def test_a_long_queue_sends_a_hot_prefix_elsewhere() -> None:
    ask = RoutedRequest(list(range(10)), 165, 16)
    busy = [ReplicaLoad(), ReplicaLoad(9, 100_000)]
    assert CacheAware().order(ask, busy, [0, 10])[0] == 0
    busy[1].num_tokens = 200
    assert CacheAware().order(ask, busy, [0, 10])[0] == 1


def test_what_must_be_computed_goes_where_little_was_computed_lately() -> None:
    loads = [ReplicaLoad(num_recent=9000.0), ReplicaLoad(num_recent=1000.0)]
    half_cached, whole = RoutedRequest(list(range(10)), 165, 16), RoutedRequest(list(range(100)), 1605, 16)
    assert CacheAware().order(half_cached, loads, [9, 0])[0] == 0  # little is missing: it stays
    assert CacheAware().order(whole, loads, [20, 0])[0] == 1  # much is: it would evict others there
    assert CacheAware().order(whole, [ReplicaLoad(), ReplicaLoad()], [20, 0])[0] == 0


def test_a_router_that_saw_few_requests_of_full_caches_does_not_heed_their_differences() -> None:
    """As after its start: what it placed so far evicts next to nothing."""
    whole = RoutedRequest(list(range(100)), 1605, 16)
    few = [ReplicaLoad(num_recent=9000.0, num_earlier=1e6), ReplicaLoad(num_recent=1000.0, num_earlier=1e6)]
    assert CacheAware().order(whole, few, [20, 0])[0] == 0
    placements = Placements(CacheAware(), 2, Holdings(secret=1))
    placements.holdings.store(0, range(10_000, 20_000))
    placements.end(placements.begin(RoutedRequest([7], 20, 16), 0))
    assert [load.num_earlier for load in placements.loads] == [80_000, 80_000]
    for number in range(100):
        placements.end(placements.begin(RoutedRequest([number], 2000, 16), 0))
    assert placements.loads[0].num_earlier == 0  # all of it has been replaced since


def test_older_tokens_count_less_and_none_without_events() -> None:
    silent = Placements(CacheAware(), 2, Holdings(secret=1), has_events=False)
    silent.end(silent.begin(RoutedRequest([1], 20, 16), 0))
    assert silent.loads[0].num_recent == 0
    placements = Placements(CacheAware(), 2, Holdings(secret=1))
    placements.holdings.store(0, range(1000, 1010))
    for chain in ([2], [3]):
        placements.end(placements.begin(RoutedRequest(chain, 20, 16), 0))
    assert 20 < placements.loads[0].num_recent < 40
    placements.end(placements.begin(RoutedRequest(list(range(100)), 1600, 16), 1))
    assert placements.loads[0].num_recent < 40 / 2.7


def test_beginnings_that_do_not_divide_evenly_take_all_of_the_memory() -> None:
    """Six beginnings, four replicas: without regard to what each computed they stay as 2, 2, 1 and 1."""
    placements = Placements(CacheAware(), 4, Holdings(secret=1))
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(4)]
    num_sent = [0] * 4
    rng = random.Random(0)
    lengths = [20] * 48
    for _ in range(480):
        number = rng.randrange(48)
        lengths[number] += 2
        own = range(1000 * (number + 1), 1000 * (number + 1) + lengths[number] - 20)
        chain = [*range(20 * (number % 6), 20 * (number % 6) + 20), *own]
        ask = RoutedRequest(chain, 16 * len(chain) + 5, 16)
        replica = placements.order(ask)[0]
        placement = placements.begin(ask, replica)
        num_sent[replica] += 1
        cache = caches[replica]
        for one in reversed(chain):
            cache[one] = None
            cache.move_to_end(one)
        evicted = [cache.popitem(last=False)[0] for _ in range(max(0, len(cache) - 150))]
        placements.holdings.store(replica, chain)
        placements.holdings.remove(replica, evicted)
        placements.end(placement)
    assert max(num_sent) < 1.3 * 120  # 170 without


def test_equal_replicas_get_the_same_prompt_by_its_beginning_and_different_ones_spread() -> None:
    idle = [ReplicaLoad() for _ in range(4)]
    firsts = [CacheAware().order(RoutedRequest([head], 20, 16), idle, [0] * 4)[0] for head in range(200)]
    assert firsts == [
        CacheAware().order(RoutedRequest([head, 7], 40, 16), idle, [0] * 4)[0] for head in range(200)
    ]
    assert all(30 < firsts.count(replica) < 70 for replica in range(4))


def test_rendezvous_moves_only_the_share_of_a_replica_that_is_gone() -> None:
    four, three = [ReplicaLoad() for _ in range(4)], [ReplicaLoad() for _ in range(3)]
    for head in range(100):
        before = Rendezvous().order(RoutedRequest([head], 20, 16), four, [0] * 4)
        after = Rendezvous().order(RoutedRequest([head], 20, 16), three, [0] * 3)
        assert after == [replica for replica in before if replica != 3]


def test_requests_under_way_count_as_load_and_as_cached() -> None:
    placements = Placements(CacheAware(), 2, Holdings(secret=1))
    ask = RoutedRequest([1, 2, 3], 50, 16)
    first = placements.order(ask)[0]
    placement = placements.begin(ask, first)
    assert (placement.num_missing, placements.loads[first].num_tokens) == (50, 50)
    assert placements.depths(RoutedRequest([1, 2, 3, 4], 66, 16))[first] == 3
    second = placements.begin(ask, first)
    assert second.num_missing == 2
    placements.note_first_token(placement)
    placements.note_first_token(placement)
    assert (placements.loads[first].num_tokens, placements.loads[first].num_running) == (2, 1)
    placements.end(placement)
    assert placements.depths(RoutedRequest([1, 2, 3, 4], 66, 16))[first] == 3
    placements.end(second)
    load = placements.loads[first]
    assert load == ReplicaLoad(number=first, num_recent=load.num_recent, num_earlier=load.num_earlier)
    assert placements.depths(RoutedRequest([1, 2, 3, 4], 66, 16)) == [0, 0]


def test_replicas_with_blocks_of_another_size_count_by_tokens() -> None:
    placements = Placements(CacheAware(), 2, Holdings(secret=1))
    small, large = list(range(1, 13)), list(range(101, 104))
    ask = RoutedRequest(small, 200, 16, chains={64: large})
    placements.block_sizes = {0: 16, 1: 64}
    placements.holdings.store(0, small[:3])
    placements.holdings.store(1, large[:2])
    assert placements.depths(ask) == [3, 8]
    assert placements.order(ask)[0] == 1
    placement = placements.begin(ask, 1)
    assert placement.num_missing == 200 - 128
    assert placements.depths(ask) == [3, 12], "it computes the third of its own blocks now"
    placements.end(placement)
    assert placements.depths(ask) == [3, 8]
