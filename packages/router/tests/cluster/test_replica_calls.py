"""Replicas that come and go: their numbers, what is still known of them, requests on their way."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable

import numpy as np
import pytest

from stemma_router.cluster.replica_calls import CallRouter

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from stemma_router.cluster.replica_calls import Homes, ReplicaCall, ReplicaPlace, RoutedCall
from stemma_router.cluster.routers import (
    CacheAware,
    Placement,
    Placements,
    PrefixAffinity,
    RoundRobin,
    RoutedRequest,
)
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.schema import CPU, GPU, STORAGE, BlockRemoved, BlockStored

TOKENS = np.arange(64, dtype=np.int32)
CHAIN = chain_of(TOKENS, 16)
ASK = RoutedRequest(CHAIN, 64, 16)


def place(disk: str | None) -> ReplicaPlace:
    return ReplicaPlace("tcp://127.0.0.1:1", None, disk, 1)


def stored(medium: str, count: int = 4) -> BlockStored:
    tokens = TOKENS[: 16 * count].tolist() if medium == GPU else []
    return BlockStored([bytes([n]) for n in range(count)], None, tokens, 16, None, medium, None)


def test_a_successor_with_the_same_disk_has_number_and_knowledge() -> None:
    placements = Placements(CacheAware(), 0)
    homes = Homes(placements)
    one, _ = homes.take("a", place("disk-0"))
    two, _ = homes.take("b", place("disk-1"))
    assert (one.number, two.number) == (0, 1)
    one.follower.take([stored(GPU), stored(CPU), stored(STORAGE, 3)])
    assert placements.depths(RoutedRequest(CHAIN, 10**6, 16)) == [4, 0]
    one.replica = None
    one.follower.restart()
    assert placements.depths(RoutedRequest(CHAIN, 10**6, 16)) == [3, 0]
    again, is_restart = homes.take("c", place("disk-0"))
    assert (again.number, is_restart) == (0, True)
    again.follower.take([BlockRemoved([b"\x02"], STORAGE)])
    assert placements.depths(RoutedRequest(CHAIN, 10**6, 16)) == [2, 0]
    again.replica = None
    other, is_restart = homes.take("d", place("disk-9"))
    assert (other.number, is_restart) == (0, False)
    assert placements.depths(RoutedRequest(CHAIN, 10**6, 16)) == [0, 0]


def test_routers_see_those_that_run() -> None:
    placements = Placements(CacheAware(), 3)
    placements.holdings.store(1, CHAIN)
    assert placements.order(ASK)[0] == 1
    assert sorted(placements.order(ASK, [0, 2])) == [0, 2]
    homes = [Placements(router, 4).order(ASK, [1, 3]) for router in (RoundRobin(), PrefixAffinity())]
    assert [sorted(home) for home in homes] == [[1, 3], [1, 3]]
    full = Placements(CacheAware(), 4).order(ASK)
    assert Placements(CacheAware(), 4).order(ASK, [0, 1, 3]) == [one for one in full if one != 2]


class Router(CallRouter):
    """Runs what is posted at once."""

    def __init__(self) -> None:
        self.placements = Placements(CacheAware(), 2)

    def begin(self, ask: RoutedRequest, replica: Hashable) -> Placement | None:
        return self.placements.begin(ask, int(str(replica)))

    def post(self, work: Callable[[], None]) -> None:
        work()

    def names(self) -> tuple[str, ...]:
        return ()

    def describe(self) -> dict[str, object]:
        return {}


def test_a_call_counts_where_it_is_and_once() -> None:
    router = Router()
    call = RoutedCall(ReplicaCall("POST", "/", (), b"x"), ASK)
    assert pickle.loads(pickle.dumps(call)) == call.call

    def loads() -> list[tuple[int, int]]:
        return [(load.num_requests, load.num_running) for load in router.placements.loads]

    call.place(router, "0")
    call.place(router, "1")
    assert loads() == [(0, 0), (1, 0)]
    call.note_first_token()
    call.note_first_token()
    assert loads() == [(0, 0), (1, 1)]
    call.end()
    call.end()
    call.place(router, "0")  # it was cancelled while a replica was being chosen
    assert loads() == [(0, 0), (0, 0)]
