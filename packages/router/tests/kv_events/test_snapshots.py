"""A router that comes late, or missed messages, is told all that a server holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
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

from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, BlocksStored
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import Tier
from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events import publisher as publisher_module
from stemma_router.kv_events.live_blocks import LiveBlocks
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.schema import BlocksHeld, MalformedEvents, decode, encode


async def test_a_router_that_starts_late_knows_what_happened_long_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is kept to be replayed: the blocks themselves are told."""
    monkeypatch.setattr(publisher_module, "KEPT_BATCHES", 0)
    publisher = start()
    for number in range(300):
        publisher.put(stored(number))
    publisher.put(BlocksRemoved((key(7),), Tier.DEVICE))
    publisher.put(BlocksCopied((key(8),), Tier.DISK))
    publisher.put(BlocksRemoved((key(8),), Tier.DEVICE))
    expected = [number for number in range(300) if number != 7]
    async with Following(publisher.endpoint, publisher.replay_endpoint) as following:
        await following.sees(expected, range(300))
        async with asyncio.timeout(10):  # the last blocks are known a moment before the snapshot counts
            while following.subscription.num_snapshots != 1:
                await asyncio.sleep(0.01)
        assert following.subscription.num_gaps == 0
        publisher.put(stored(301))
        await following.sees([*expected, 301], range(310))
        publisher.put(BlocksRemoved((key(8),), Tier.DISK))
        await following.sees([n for n in expected if n != 8] + [301], range(310))
    publisher.close()


async def test_messages_that_are_no_longer_kept_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "KEPT_BATCHES", 1)
    publisher = start()
    async with (
        Relay(publisher.endpoint) as relay,
        Following(relay.endpoint, publisher.replay_endpoint) as following,
    ):
        async with asyncio.timeout(20):
            while relay.num_passed == 0:
                publisher.put(stored(0))
                await asyncio.sleep(0.05)
        await following.sees([0], range(9))
        await lose(relay, publisher, 4)
        async with asyncio.timeout(20):
            while held(following.holdings, range(9)) != [0, 1, 2, 3, 4, 5]:
                publisher.put(stored(5))
                await asyncio.sleep(0.05)
        assert following.subscription.num_lost == 0
        assert following.subscription.num_snapshots >= 1
    publisher.close()


def stored_run(count: int) -> BlocksStored:
    keys = tuple(key(number) for number in range(count))
    return BlocksStored(keys, None, np.arange(count * SIZE, dtype=np.int32), DEFAULT_NAMESPACE)


def test_names_of_blocks_on_disk_outlive_the_process(tmp_path: Path) -> None:
    """And what a damaged file says is never believed."""
    path = tmp_path / "block-names"
    first = LiveBlocks(SIZE, path)
    first.note(stored_run(5))
    first.note(BlocksCopied(tuple(key(number) for number in range(4)), Tier.DISK))
    first.note(BlocksRemoved((key(1),), Tier.DISK))
    first.close()
    [before] = first.snapshot()

    def found(keys: list[int]) -> dict[bytes, bytes]:
        """What a new process tells whose disk holds these blocks."""
        again = LiveBlocks(SIZE, path)
        told = again.note(BlocksCopied(tuple(key(number) for number in keys), Tier.DISK))
        assert told == [], "subscribers don't know these blocks"
        [event] = again.snapshot()
        words = [event.hashes[n : n + 8] for n in range(0, len(event.hashes), 8)]
        assert set(event.tiers) <= {4}
        return dict(zip(words, [event.names[n : n + 8] for n in range(0, len(event.names), 8)], strict=True))

    names = np.frombuffer(before.names, dtype="<u8").tolist()
    assert names == chain_of(np.arange(5 * SIZE, dtype=np.int32), SIZE)
    kept = found([0, 2, 3, 77])
    assert list(kept.values()) == [before.names[8 * n : 8 * n + 8] for n in (0, 2, 3)]
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data[:-5])
    assert len(found([0, 2, 3])) == 1
    path.write_bytes(b"something else")
    assert found([0, 2, 3]) == {}
    path.unlink()
    path.mkdir()
    assert found([0, 2, 3]) == {}


def test_the_file_of_names_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "block-names"
    live = LiveBlocks(SIZE, path)
    live.note(stored_run(100))
    for _ in range(400):
        live.note(BlocksCopied(tuple(key(number) for number in range(100)), Tier.DISK))
    assert path.stat().st_size < 15_000 * 52


def test_a_block_is_known_a_while_after_it_left_every_tier() -> None:
    """A tier that is written on eviction has it a moment later."""
    live = LiveBlocks(SIZE)
    live.note(stored_run(2))
    live.note(BlocksRemoved((key(0),), Tier.DEVICE))
    assert len(live) == 1
    live.note(BlocksCopied((key(0),), Tier.HOST))
    [event] = live.snapshot()
    assert sorted(event.tiers) == [1, 2]


@pytest.mark.parametrize(
    "event",
    [
        BlocksHeld(b"x" * 8, b"y" * 8, b"", 4),
        BlocksHeld(b"x" * 7, b"y" * 8, b"\1", 4),
        BlocksHeld(b"", b"", b"", 0),
        BlocksHeld(b"", b"", b"", 10**9),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_malformed(event: BlocksHeld) -> None:
    with pytest.raises(MalformedEvents):
        decode(encode(0.0, [event]))


def test_a_snapshot_may_name_unknown_tiers() -> None:
    holdings = Holdings(secret=1)
    follower = EventFollower(0, holdings)
    words = np.arange(1, 4, dtype="<u8").tobytes()
    follower.take(decode(encode(0.0, [BlocksHeld(words, words, bytes([1, 200, 5]), SIZE)])))
    assert holdings.depths([1, 2, 3], 1) == [1]
    assert holdings.num_blocks(0) == 2
    assert tokens(1).shape == (SIZE,)
