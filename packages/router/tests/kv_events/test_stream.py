"""Events from a publisher to a follower: what the follower believes is what the cache holds."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from packages.router.tests.kv_events.publishing import (
    SIZE,
    Following,
    Relay,
    held,
    key,
    lose,
    start,
    stored,
    tokens,
)

from stemma.errors import ConfigError
from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, CheckpointStored
from stemma.types import Tier
from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events import publisher as publisher_module
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored


async def test_events_before_and_after_the_subscription_arrive() -> None:
    publisher = start()
    for number in range(5):
        publisher.put(stored(number))
    async with Following(publisher.endpoint, publisher.replay_endpoint) as following:
        await following.sees([0, 1, 2, 3, 4], range(9))
        publisher.put(stored(7))
        publisher.put(BlocksRemoved((key(2), key(8)), Tier.DEVICE))
        await following.sees([0, 1, 3, 4, 7], range(9))
        assert following.follower.block_size == SIZE
    publisher.close()


async def test_a_server_that_starts_anew_holds_nothing_of_before() -> None:
    first = start()
    endpoint, replay = first.endpoint, first.replay_endpoint
    async with Following(endpoint, replay) as following:
        first.put(stored(1))
        await following.sees([1], range(9))
        first.put(stored(2))
        await following.sees([1, 2], range(9))
        first.close()
        second = start(endpoint, replay)
        async with asyncio.timeout(20):
            while held(following.holdings, range(9)) != [5]:  # until the socket is connected again
                second.put(stored(5))
                await asyncio.sleep(0.05)
    second.close()


async def test_missed_messages_are_replayed() -> None:
    publisher = start()
    async with (
        Relay(publisher.endpoint) as relay,
        Following(relay.endpoint, publisher.replay_endpoint) as following,
    ):
        async with asyncio.timeout(20):
            while relay.num_passed == 0:  # until the relay is connected
                publisher.put(stored(0))
                await asyncio.sleep(0.05)
        await following.sees([0], range(9))
        await lose(relay, publisher, 3)
        async with asyncio.timeout(20):
            while held(following.holdings, range(9)) != [0, 1, 2, 3, 5]:
                publisher.put(stored(5))
                await asyncio.sleep(0.05)
    publisher.close()


async def test_a_gap_that_cannot_be_filled_drops_what_was_known() -> None:
    publisher = start(replay=None)
    async with Relay(publisher.endpoint) as relay, Following(relay.endpoint, None) as following:
        async with asyncio.timeout(20):
            while held(following.holdings, range(2)) != [1]:
                publisher.put(stored(1))
                await asyncio.sleep(0.05)
        await lose(relay, publisher, 3)
        publisher.put(stored(6))
        await following.sees([6], range(9))
    publisher.close()


async def test_events_that_come_too_fast_clear_instead_of_lying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_QUEUED", 4)
    publisher = start()
    async with Following(publisher.endpoint, publisher.replay_endpoint) as following:
        publisher.put(stored(0))
        await following.sees([0], range(3))
        for number in range(1, 400):
            publisher.put(stored(number % 100))
        publisher.put(BlocksRemoved((key(0),), Tier.DEVICE))
        async with asyncio.timeout(10):
            while 0 in held(following.holdings, range(100)):
                await asyncio.sleep(0.01)
    publisher.close()


def test_an_address_in_use_is_a_config_error() -> None:
    publisher = start()
    with pytest.raises(ConfigError, match="KV events can't be published"):
        start(publisher.endpoint)
    publisher.close()


def test_a_follower_leaves_out_blocks_that_it_cannot_place() -> None:
    holdings = Holdings(secret=1)
    follower = EventFollower(0, holdings)
    follower.take([BlockStored([1], 99, [1, 2, 3, 4], 4, None, "GPU", None)])  # unknown predecessor
    follower.take([BlockStored([2, 3], None, [1, 2, 3, 4], 4, None, "GPU", None)])  # too few tokens
    follower.take([BlockStored([4], None, [], 4, None, "CPU", None)])  # no tokens, never seen before
    follower.take([BlockStored([5], None, [-1, 2, 3, 4], 4, None, "GPU", None)])
    assert holdings.num_ids == 0
    follower.take([BlockRemoved([1, 2, 77], "GPU"), AllBlocksCleared()])


def test_a_block_is_held_until_it_left_every_tier() -> None:
    holdings = Holdings(secret=1)
    follower = EventFollower(0, holdings)
    chain = chain_of(tokens(3), SIZE)
    follower.take([BlockStored([b"k"], None, [3] * SIZE, SIZE, None, "GPU", None)])
    follower.take([BlockStored([b"k"], None, [], SIZE, None, "CPU", None), BlockRemoved([b"k"], "GPU")])
    follower.take([BlockStored([b"k"], None, [], SIZE, None, "CPU", None)])  # told twice
    assert holdings.depths(chain, 1) == [1]
    follower.take([BlockRemoved([b"k", b"k"], "CPU")])
    follower.take([BlockStored([b"k"], None, [], SIZE, None, "CPU", None)])  # its tokens are unknown by now
    assert holdings.depths(chain, 1) == [0]


def test_groups_of_vllm_that_keep_windows_or_states_dont_remove_kv() -> None:
    """Their blocks have the same hashes as those with KV."""
    holdings = Holdings(secret=1)
    follower = EventFollower(0, holdings)
    chain = chain_of(tokens(3), SIZE)

    def stored_in(group: int, kind: str) -> BlockStored:
        return BlockStored(
            [5], None, [3] * SIZE, SIZE, None, "GPU", None, group_idx=group, kv_cache_spec_kind=kind
        )

    follower.take([stored_in(1, "mamba")])
    assert holdings.depths(chain, 1) == [1], "there may be no other group"
    follower.take([stored_in(0, "full_attention"), stored_in(1, "mamba"), BlockRemoved([5], "GPU", 1)])
    assert holdings.depths(chain, 1) == [1]
    follower.take([BlockRemoved([5], "GPU", 0)])
    assert holdings.depths(chain, 1) == [0]


async def test_checkpoints_arrive_with_the_blocks_before_them() -> None:
    publisher = start(has_checkpoints=True)
    publisher.put(stored(1))
    publisher.put(stored(2))
    publisher.put(CheckpointStored((key(100),), key(1)))
    publisher.put(CheckpointStored((key(101),), key(77)))  # behind a block that nobody told of
    async with Following(publisher.endpoint, publisher.replay_endpoint) as following:
        await following.sees([1], range(9))
        publisher.put(CheckpointStored((key(102),), key(2)))
        await following.sees([1, 2], range(9))
        publisher.put(BlocksCopied((key(102),), Tier.DISK))
        publisher.put(BlocksRemoved((key(100), key(102)), Tier.DEVICE))
        await following.sees([2], range(9))
        publisher.put(BlocksRemoved((key(102),), Tier.DISK))
        await following.sees([], range(9))
    publisher.close()
