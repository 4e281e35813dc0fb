"""The events of a cache tell all that is in it."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.memory.kv_events import KVEventSink
from stemma.types import TokenArray

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from stemma.cluster.holdings import Holdings
from stemma.kv_events.follower import Follower
from stemma.kv_events.names import chain_of
from stemma.kv_events.publisher import wire_event
from stemma.prefix.keys import DEFAULT_NAMESPACE
from tests.engine.harness import greedy, prompt


class Direct(KVEventSink):
    """Translates and follows at once, without sockets."""

    def __init__(self, follower: Follower, block_size: int) -> None:
        self._follower = follower
        self._block_size = block_size

    def put(self, event) -> None:
        self._follower.take([wire_event(event, self._block_size)])


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_follower_believes_what_the_cache_holds(harness, index: str) -> None:
    """Prompts that share, overflow and are flushed: after each, the depth is that of the cache."""
    engine = harness(num_blocks=24, block_size=8, index=index)
    holdings = Holdings()
    engine.cache.watch(Direct(Follower(0, holdings), 8))
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
    engine.engine.flush_cache()
    assert holdings.num_ids == 0
