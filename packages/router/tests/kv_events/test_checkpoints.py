"""A router believes in a checkpoint as long as a server can go on from it: on the device, or by pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from packages.router.tests.kv_events.publishing import SIZE, key

from stemma.memory.kv_events import BlocksCopied, BlocksRemoved, BlocksStored, CheckpointStored, KVEvent
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import BlockKey, Tier
from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events import live_checkpoints
from stemma_router.kv_events.live_blocks import LiveBlocks
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.names_file import Names, NamesFile
from stemma_router.kv_events.publisher import wire_event
from stemma_router.kv_events.schema import decode, encode

NUM_BLOCKS = 6
TOKENS = np.arange(NUM_BLOCKS * SIZE, dtype=np.int32)
CHAIN = chain_of(TOKENS, SIZE)
LOWER = (Tier.HOST, Tier.DISK)
NUMBERS = st.integers(0, NUM_BLOCKS - 1)


def pieces_of(number: int) -> tuple[BlockKey, ...]:
    """A state in two pieces, and the pages of the last two blocks: neighbours share one."""
    state = (key(1000 + 10 * number), key(1001 + 10 * number))
    return (*state, *(key(100 + page) for page in range(max(0, number - 1), number + 1)))


PIECES = sorted({piece for number in range(NUM_BLOCKS) for piece in pieces_of(number)})


class Router:
    """What a router knows that followed a server from some time on."""

    def __init__(self, live: LiveBlocks, *, has_checkpoints: bool = True) -> None:
        self.holdings = Holdings(secret=1)
        self._has_checkpoints = has_checkpoints
        self._follower = EventFollower(0, self.holdings)
        self._follower.take(list(live.snapshot()))

    def take(self, events: Sequence[KVEvent]) -> None:
        told = [wire_event(event, SIZE, has_checkpoints=self._has_checkpoints) for event in events]
        self._follower.take(decode(encode(0.0, told)))

    @property
    def depth(self) -> int:
        [depth] = self.holdings.depths(CHAIN, 1)
        return depth


class Server(RuleBasedStateMachine):
    """KV of a prompt stays on the device; checkpoints and their pieces come and go by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBlocks(SIZE, has_checkpoints=True)
        self.routers = [Router(self.live)]
        self.on_device = set[int]()
        self.known = set[int]()
        self.below: dict[Tier, set[BlockKey]] = {tier: set() for tier in LOWER}
        keys = tuple(key(number) for number in range(NUM_BLOCKS))
        self.note(BlocksStored(keys, None, TOKENS, DEFAULT_NAMESPACE))

    def note(self, event: KVEvent) -> None:
        told = self.live.note(event)
        for router in self.routers:
            router.take(told)

    @rule(number=NUMBERS)
    def take(self, number: int) -> None:
        self.on_device.add(number)
        self.known.add(number)
        self.note(CheckpointStored(pieces_of(number), key(number)))

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.on_device.discard(number)
        self.note(BlocksRemoved(pieces_of(number)[-1:], Tier.DEVICE))

    @rule(keys=st.lists(st.sampled_from(PIECES), min_size=1), tier=st.sampled_from(LOWER))
    def copy(self, keys: list[BlockKey], tier: Tier) -> None:
        self.below[tier].update(keys)
        self.note(BlocksCopied(keys, tier))

    @rule(number=NUMBERS, tier=st.sampled_from(LOWER))
    def copy_whole(self, number: int, tier: Tier) -> None:
        self.copy(list(pieces_of(number)), tier)

    @rule(keys=st.lists(st.sampled_from(PIECES), min_size=1), tier=st.sampled_from(LOWER))
    def lose(self, keys: list[BlockKey], tier: Tier) -> None:
        self.below[tier].difference_update(keys)
        self.note(BlocksRemoved(keys, tier))

    @rule()
    def another_router(self) -> None:
        self.routers.append(Router(self.live))

    def is_found(self, number: int) -> bool:
        held = self.below[Tier.HOST] | self.below[Tier.DISK]
        return number in self.on_device or held.issuperset(pieces_of(number))

    @invariant()
    def routers_believe_what_the_server_finds(self) -> None:
        found = max((number + 1 for number in self.known if self.is_found(number)), default=0)
        assert {router.depth for router in self.routers} == {found}


@pytest.mark.slow
def test_routers_believe_what_the_server_finds() -> None:
    run_state_machine_as_test(Server, settings=settings(max_examples=60, stateful_step_count=30))


def whole_on_disk(path: Path) -> LiveBlocks:
    """A server whose disk has two checkpoints of an earlier process, and of a third one all but a piece."""
    live = LiveBlocks(SIZE, path, has_checkpoints=True)
    keys = tuple(key(number) for number in range(NUM_BLOCKS))
    live.note(BlocksStored(keys, None, TOKENS, DEFAULT_NAMESPACE))
    live.note(BlocksCopied(keys, Tier.DISK))
    for number in (1, 3, 5):
        live.note(CheckpointStored(pieces_of(number), key(number)))
        live.note(BlocksCopied(pieces_of(number), Tier.DISK))
    live.close()
    again = LiveBlocks(SIZE, path, has_checkpoints=True)
    left = [piece for number in (1, 3, 5) for piece in pieces_of(number) if piece != pieces_of(5)[0]]
    assert again.note(BlocksCopied((*keys, *left), Tier.DISK)) == [], "subscribers don't know these"
    return again


def test_checkpoints_on_disk_outlive_the_process_if_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "names"
    live = whole_on_disk(path)
    router = Router(live)
    assert router.depth == 4
    router.take(live.note(BlocksRemoved(pieces_of(3)[:1], Tier.DISK)))
    assert router.depth == 2
    router.take(live.note(CheckpointStored(pieces_of(5), key(5))))
    assert router.depth == 6
    router.take(live.note(BlocksCopied(pieces_of(5)[:1], Tier.DISK)))
    router.take(live.note(BlocksRemoved(pieces_of(5)[-1:], Tier.DEVICE)))
    assert router.depth == 6, "the disk has all of it by now"
    live.close()
    assert [pieces for pieces, _ in NamesFile(path).read().checkpoints] == [
        pieces_of(1),
        pieces_of(3),
        pieces_of(5),
    ]


@given(st.integers(0, 3 * 4 - 1), st.integers(0, 51))
@settings(max_examples=40)
def test_a_checkpoint_with_a_damaged_record_is_none(tmp_path_factory, record: int, byte: int) -> None:
    path = tmp_path_factory.mktemp("names") / "names"
    NamesFile(path).write(Names({}, [(pieces_of(number), number) for number in (2, 3, 4)]))
    data = bytearray(path.read_bytes())
    start = len(data) - 3 * 4 * 52
    data[start + 52 * record + byte] ^= 4
    path.write_bytes(data)
    kept = [number for number in (2, 3, 4) if number != 2 + record // 4]
    assert NamesFile(path).read().checkpoints == [(pieces_of(number), number) for number in kept]
    path.write_bytes(data[: start + 52 * record] + data[start + 52 * (record + 1) :])
    assert NamesFile(path).read().checkpoints == [(pieces_of(number), number) for number in kept]


def test_the_file_of_names_stays_small_with_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "names"
    live = whole_on_disk(path)
    for _ in range(4000):
        live.note(BlocksRemoved(pieces_of(3)[:1], Tier.DISK))
        live.note(BlocksCopied(pieces_of(3)[:1], Tier.DISK))
    assert path.stat().st_size < 12_000 * 52


def test_checkpoints_that_left_are_forgotten_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_checkpoints, "MAX_LEFT_PIECES", 6)
    live = LiveBlocks(SIZE, has_checkpoints=True)
    keys = tuple(key(number) for number in range(NUM_BLOCKS))
    live.note(BlocksStored(keys, None, TOKENS, DEFAULT_NAMESPACE))
    for number in (2, 5):
        live.note(CheckpointStored(pieces_of(number), key(number)))
        live.note(BlocksRemoved(pieces_of(number)[-1:], Tier.DEVICE))
    router = Router(live)
    router.take(live.note(BlocksCopied(pieces_of(2), Tier.HOST)))
    assert router.depth == 0
    router.take(live.note(BlocksCopied(pieces_of(5), Tier.HOST)))
    assert router.depth == 6


def test_a_block_that_was_below_before_it_had_a_name_is_known_to_be_there(tmp_path: Path) -> None:
    """As one that another server left in a pool, or of which the file of names was lost."""
    live = LiveBlocks(SIZE, tmp_path / "names")
    router = Router(live, has_checkpoints=False)
    router.take(live.note(BlocksCopied((key(0),), Tier.DISK)))
    router.take(live.note(BlocksStored((key(0),), None, TOKENS[:SIZE], DEFAULT_NAMESPACE)))
    router.take(live.note(BlocksRemoved((key(0),), Tier.DEVICE)))
    assert router.depth == 1
    live.close()
    assert NamesFile(tmp_path / "names").read().blocks == {key(0): CHAIN[0]}
