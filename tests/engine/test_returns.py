"""Blocks of conversations that come back are on the device before the turn, loaded while nobody waits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stemma.config.settings import TierSettings
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.types import Tier, as_tokens
from tests.engine.harness import Harness, greedy, prompt
from tests.engine.tier_rounds import BLOCK_SIZE, TIMEOUT_S, expected
from tests.engine.tier_rounds import serve as rounds
from tests.memory.manual_clock import ManualClock

__all__ = ["expected", "rounds"]  # fixtures
TURN = prompt(1, 100)
"""Six full blocks and a part; a device of 32 may hold eight that were loaded ahead."""
NUM_BLOCKS = 32
BIG = 10**9
SALTED = Namespace(salt="mine")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def serve(harness: Callable[..., Harness], clock: ManualClock) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**tiers: object) -> Harness:
        fields = {"load_when": "always", "load_ahead_bandwidth": BIG, "prefetch": "wait_complete", **tiers}
        one = harness(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            tiers=TierSettings.model_validate(fields),
            clock=clock,
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.engine.close()


def ask(one: Harness, tokens: np.ndarray, namespace: Namespace = DEFAULT_NAMESPACE, ending=Ending.TOOL):
    """Serve a prompt and tell how it ended; return its answer."""
    request_id = one.add(tokens, greedy(4), namespace=namespace)
    one.run()
    answer = one.answers[request_id]
    whole = np.concatenate((tokens, as_tokens(answer.token_ids[0])))
    one.engine.conclude(namespace, whole, Conclusion(ending, 4))
    return answer


def press(one: Harness) -> None:
    """Have everything else leave the device for the tiers below."""
    for seed in range(100, 106):
        one.serve(prompt(seed, 100), greedy(4))
    one.cache.below.drain(TIMEOUT_S)


def rest(one: Harness, clock: ManualClock, seconds: float) -> None:
    """Let idle time pass, in steps as the step loop makes them."""
    end_s, deadline = clock() + seconds, time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        again_s = one.engine.use_idle_time()
        if again_s is None or clock() + again_s > end_s:
            one.cache.check()
            clock.now = max(clock.now, end_s)
            return
        if one.cache.loads():
            time.sleep(0.002)  # real threads load
        else:
            clock.now += again_s
    raise AssertionError("idle work doesn't come to an end")


def next_turn(one: Harness, expected, namespace: Namespace = DEFAULT_NAMESPACE) -> dict[Tier, int]:
    """Ask the next turn; return its cached tokens by tier."""
    longer = np.concatenate((TURN, prompt(2, 20)))
    request_id = one.add(longer, greedy(4), namespace=namespace)
    one.run()
    assert one.answers[request_id].token_ids[0] == expected(longer)
    report = one.answers[request_id].cache
    assert report is not None
    return report.cached_by_tier


@pytest.mark.parametrize("namespace", [DEFAULT_NAMESPACE, SALTED], ids=["plain", "salted"])
@pytest.mark.parametrize(
    "tiers",
    [
        {"host_cache": "64MB"},
        {"host_cache": "64MB", "host_exclusive": True},
        {"disk_cache_size": "10MB"},
        {"host_cache": "200kB", "disk_cache_size": "10MB"},
    ],
    ids=["host", "exclusive host", "disk", "small host and disk"],
)
def test_the_next_turn_finds_its_blocks_on_the_device(serve, expected, clock, tmp_path, tiers, namespace):
    if "disk_cache_size" in tiers:
        tiers = {"disk_cache": tmp_path, **tiers}
    one = serve(**tiers)
    assert ask(one, TURN, namespace).token_ids[0] == expected(TURN)
    press(one)
    assert one.cache.match(namespace, TURN) == 0
    rest(one, clock, 1.0)
    assert one.cache.match(namespace, TURN) == 0  # not due yet
    rest(one, clock, 5.0)
    other = DEFAULT_NAMESPACE if namespace is SALTED else SALTED
    assert one.cache.match(namespace, TURN) == 96
    assert one.cache.match(other, TURN) == 0
    assert next_turn(one, expected, namespace) == {Tier.DEVICE: 96}
    stats = one.engine.stats()
    assert (stats.num_blocks_ahead, stats.num_used_ahead, stats.num_wasted_ahead) == (6, 6, 0)


def test_without_the_setting_or_an_ending_nothing_moves(serve, clock):
    for settings, ending in (({"load_ahead_bandwidth": 0}, Ending.TOOL), ({}, Ending.UNKNOWN)):
        one = serve(host_cache="64MB", **settings)
        ask(one, TURN, ending=ending)
        press(one)
        rest(one, clock, 100.0)
        assert one.engine.stats().num_blocks_ahead == 0


def test_what_leaves_unused_is_wasted_and_comes_once(serve, clock):
    one = serve(host_cache="64MB")
    ask(one, TURN)
    press(one)
    rest(one, clock, 5.0)
    press(one)
    press(one)
    rest(one, clock, 100.0)
    stats = one.engine.stats()
    assert (stats.num_blocks_ahead, stats.num_used_ahead, stats.num_wasted_ahead) == (6, 0, 6)


def test_the_budget_of_bytes_a_second(serve, clock):
    block_bytes = serve(host_cache="64MB").cache.below.stores[0].block_bytes
    one = serve(host_cache="64MB", load_ahead_bandwidth=2 * block_bytes)
    ask(one, TURN)
    press(one)
    rest(one, clock, 2.1)  # due after 2 s; 2 blocks were saved up
    assert one.engine.stats().num_blocks_ahead == 2
    rest(one, clock, 0.8)
    assert one.engine.stats().num_blocks_ahead == 3
    rest(one, clock, 10.0)
    assert one.engine.stats().num_blocks_ahead == 6


def test_no_more_than_a_quarter_of_the_device_waits_for_its_turn(serve, clock):
    one = serve(host_cache="64MB")
    for seed in range(1, 5):
        ask(one, prompt(seed, 100))
    press(one)
    rest(one, clock, 100.0)
    assert one.engine.stats().num_blocks_ahead == NUM_BLOCKS // 4


def test_a_request_ends_the_load(serve, expected, clock):
    one = serve(host_cache="64MB", host_exclusive=True)
    ask(one, TURN)
    press(one)
    clock.now += 3.0
    assert one.engine.use_idle_time() is not None
    while one.engine.use_idle_time() == 0.0:
        pass
    request_id = one.add(prompt(9, 100), greedy(4))  # the load is under way, or has just ended
    assert not one.cache.loads()
    one.run()
    assert one.answers[request_id].token_ids[0] == expected(prompt(9, 100))
    assert sum(next_turn(one, expected).values()) == 96  # none was lost between two tiers


def test_how_soon_they_come_back_is_learned(serve, clock):
    one = serve(host_cache="64MB")
    for seed in range(20, 32):
        ask(one, prompt(seed, 60))
        clock.now += 30.0
        one.serve(np.concatenate((prompt(seed, 60), prompt(3, 20))), greedy(1))
    ask(one, TURN)
    press(one)
    rest(one, clock, 25.0)
    assert one.engine.stats().num_blocks_ahead == 0
    rest(one, clock, 10.0)
    assert one.engine.stats().num_blocks_ahead == 6


def damaged(path: Path) -> None:
    for slab in path.rglob("slab-*"):
        content = bytearray(slab.read_bytes())
        content[700::4096] = bytes(byte ^ 1 for byte in content[700::4096])
        slab.write_bytes(content)


def test_a_damaged_disk_delivers_nothing_and_is_asked_once(serve, expected, clock, tmp_path):
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    ask(one, TURN)
    press(one)
    damaged(tmp_path)
    rest(one, clock, 100.0)
    assert one.engine.stats().num_blocks_ahead == 0
    assert next_turn(one, expected) == {}


def test_after_a_kill_only_what_was_asked_since_is_loaded(serve, expected, clock, tmp_path):
    one = serve(disk_cache=tmp_path / "killed", disk_cache_size="10MB")
    ask(one, TURN)
    press(one)
    shutil.copytree(tmp_path / "killed", tmp_path / "left")  # the files as they are, and no lock
    two = serve(disk_cache=tmp_path / "left", disk_cache_size="10MB")
    rest(two, clock, 100.0)
    assert two.engine.stats().num_blocks_ahead == 0  # notes are of one process
    assert next_turn(two, expected) == {Tier.DISK: 96}
