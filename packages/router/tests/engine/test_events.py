"""The events of a cache tell all that is in it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from stemma import LLM
from stemma.types import TokenArray

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from tests import hybrids
from tests.engine.harness import Harness, greedy, prompt
from tests.engine.tier_rounds import BLOCK_SIZE, PROMPTS, expected, round_of, serve

from stemma.memory.kv_events import KVEvent, KVEventSink
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events.live_blocks import LiveBlocks
from stemma_router.kv_events.names import chain_of
from stemma_router.kv_events.publisher import wire_event
from stemma_router.kv_events.schema import decode, encode

__all__ = ["expected", "serve"]  # fixtures


class Direct(KVEventSink):
    """Translates and follows at once, without sockets."""

    def __init__(self, follower: EventFollower, block_size: int, *, has_checkpoints: bool = False) -> None:
        self._follower = follower
        self._block_size = block_size
        self._has_checkpoints = has_checkpoints
        self._live = LiveBlocks(block_size, has_checkpoints=has_checkpoints)
        self._lock = threading.Lock()

    def put(self, event: KVEvent) -> None:
        with self._lock:
            told = [
                wire_event(one, self._block_size, has_checkpoints=self._has_checkpoints)
                for one in self._live.note(event)
            ]
            self._follower.take(decode(encode(0.0, told)))


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_follower_believes_what_the_cache_holds(harness, index: str) -> None:
    """Prompts that share, overflow and are flushed: after each, the depth is that of the cache."""
    engine = harness(num_blocks=24, block_size=8, index=index)
    holdings = Holdings(secret=1)
    engine.cache.watch(Direct(EventFollower(0, holdings), 8))
    generator = np.random.default_rng(0)
    prompts: list[TokenArray] = []
    for number in range(30):
        earlier = prompts[int(generator.integers(len(prompts)))] if prompts else prompt(0, 0)
        head = earlier[: int(generator.integers(80))] if prompts else earlier
        prompts.append(
            np.concatenate([head, prompt(number, int(generator.integers(1, 60)))]).astype(np.int32)
        )
        engine.serve(prompts[-1], greedy(int(generator.integers(1, 9))))
        for one in prompts:
            longer = np.append(one, 0)  # the last token of a prompt never counts as cached
            cached = min(len(one), engine.cache.match(DEFAULT_NAMESPACE, longer)) // 8
            assert holdings.depths(chain_of(one, 8), 1) == [cached]
    engine.engine.cache.flush()
    assert holdings.num_ids == 0


def told_prompts(number: int) -> list[TokenArray]:
    """Return prompts that share beginnings of different lengths."""
    generator = np.random.default_rng(0)
    prompts = [prompt(0, 200)]
    for one in range(1, number):
        earlier = prompts[int(generator.integers(len(prompts)))]
        head = earlier[: int(generator.integers(240))]
        prompts.append(np.concatenate([head, prompt(one, int(generator.integers(10, 120)))]).astype(np.int32))
    return prompts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "mamba2"])
def test_a_follower_knows_how_deep_prompts_resume(family: str, tmp_path: Path) -> None:
    """Behind the deepest checkpoint of states or windows, not behind the KV."""
    path = hybrids.build(family, tmp_path / "model")
    llm = LLM(path, block_size=16, kv_cache_memory="1MB", max_batch_tokens=64)
    holdings = Holdings(secret=1)
    cache = llm.engine.cache
    cache.watch(Direct(EventFollower(0, holdings), 16, has_checkpoints=True))
    depths = set[int]()
    prompts = told_prompts(30)
    for number, one in enumerate(prompts):
        llm.generate(one.tolist(), greedy(number % 4 + 1))
        for known in prompts:
            [found] = holdings.depths(chain_of(known, 16), 1)
            assert found == cache.match(DEFAULT_NAMESPACE, np.append(known, 0)) // 16
            depths.add(found)
    assert len(depths) > 3
    assert all(depth * 16 % 64 == 0 for depth in depths)
    llm.engine.cache.flush()
    assert holdings.num_ids == 0
    llm.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lower", ["host_cache", "disk_cache_size"])
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_a_follower_believes_no_checkpoint_of_which_a_lower_tier_lost_a_piece(
    family: str, lower: str, tmp_path: Path
) -> None:
    """The tier is small: it evicts pieces by themselves, and prompts with damaged checkpoints come back."""
    path = hybrids.build(family, tmp_path / "model")
    tiers = {lower: "800kB"} | ({} if lower == "host_cache" else {"disk_cache": str(tmp_path / "disk")})
    llm = LLM(path, block_size=16, kv_cache_memory="500kB", max_batch_tokens=64, load_when="always", **tiers)
    holdings = Holdings(secret=1)
    cache = llm.engine.cache
    cache.watch(Direct(EventFollower(0, holdings), 16, has_checkpoints=True))
    prompts = told_prompts(20)
    generator = np.random.default_rng(1)
    num_below = 0
    for number in range(40):
        tokens = np.append(prompts[int(generator.integers(len(prompts)))], 1).astype(np.int32)
        [believed] = holdings.depths(chain_of(tokens, 16), 1)
        on_device = cache.match(DEFAULT_NAMESPACE, tokens) // 16
        [answer] = llm.generate([tokens.tolist()], greedy(number % 3 + 1))
        cache.below.drain(20.0)
        assert believed * 16 == answer.cache.num_cached_tokens
        num_below += believed > on_device
    assert num_below, "prompts went on from checkpoints below the device"
    llm.close()


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_a_router_is_told_of_checkpoints_on_disk(family: str, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path / "model")
    tokens, names, depths = prompt(3, 200), tmp_path / "names", []
    for _ in range(2):
        llm = LLM(path, block_size=16, disk_cache=tmp_path / "disk", disk_cache_size="50MB", num_threads=1)
        live = LiveBlocks(16, names, has_checkpoints=True)
        llm.engine.cache.watch(Kept(live))
        holdings = Holdings(secret=1)
        EventFollower(0, holdings).take(list(live.snapshot()))
        depths.append(holdings.depths(chain_of(tokens, 16), 1)[0])
        llm.generate(tokens.tolist(), greedy(1))
        llm.close()
    assert depths == [0, 12], "192 tokens of 200"


class Kept(KVEventSink):
    """Notes events as a publisher's thread does."""

    def __init__(self, live: LiveBlocks) -> None:
        self._live = live

    def put(self, event: KVEvent) -> None:
        self._live.note(event)


def told_by(one: Harness, names: Path) -> Holdings:
    """Return what a router knows that asks for a snapshot."""
    live = LiveBlocks(BLOCK_SIZE, names)
    one.cache.watch(Kept(live))
    holdings = Holdings(secret=1)
    EventFollower(0, holdings).take(list(live.snapshot()))
    return holdings


def test_a_router_is_told_what_an_engine_found_on_disk(serve, expected, tmp_path: Path) -> None:
    names = tmp_path / "names"
    one = serve(disk_cache=tmp_path / "disk", disk_cache_size="10MB")
    assert told_by(one, names).num_ids == 0
    round_of(one, expected)
    one.engine.close()
    two = serve(disk_cache=tmp_path / "disk", disk_cache_size="10MB")
    holdings = told_by(two, names)
    depths = [holdings.depths(chain_of(tokens, BLOCK_SIZE), 1) for tokens in PROMPTS]
    assert depths == [[6]] * 5
    two.engine.close()
    three = serve(disk_cache=tmp_path / "disk", disk_cache_size="10MB")
    assert told_by(three, names).num_ids == holdings.num_ids, "and once more"
