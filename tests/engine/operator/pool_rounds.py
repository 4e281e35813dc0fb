"""Rounds of prompts against engines over one pool; every answer equals the cache-off run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.harness import Answer, Harness, greedy, prompt

from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.types import Tier

BLOCK_SIZE = 16
TIMEOUT_S = 30.0
Serve = Callable[..., Harness]
Expected = Callable[[np.ndarray], list[int]]
PROMPTS = [prompt(seed, 100) for seed in range(4)]


@pytest.fixture
def serve(harness: Callable[..., Harness], config: Path) -> Iterator[Serve]:
    """Return a maker of engines over one directory pool; all are closed at the end."""
    made: list[Harness] = []

    def make(*, num_blocks: int = 12, **fields: object) -> Harness:
        settings = {"pool": "directory", "pool_config": config, "block_size": BLOCK_SIZE} | fields
        # The tiny model computes faster than a pool delivers.
        made.append(harness(num_blocks=num_blocks, **{"load_when": "always"} | settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(scope="module")
def expected(harness: Callable[..., Harness]) -> Expected:
    """Return what an engine without any cache answers."""
    off = harness(num_blocks=64, block_size=BLOCK_SIZE, enable_prefix_cache=False)
    return lambda tokens: off.serve(tokens, greedy(6)).token_ids[0]


def pool(one: Harness) -> PoolStore:
    return next(store for store in one.cache.below.stores if isinstance(store, PoolStore))


def round_of(one: Harness, expected: Expected) -> list[Answer]:
    answers = []
    for tokens in PROMPTS:
        answer = one.serve(tokens, greedy(6))
        assert answer.token_ids[0] == expected(tokens)
        answers.append(answer)
    assert one.cache.below.drain(TIMEOUT_S)
    return answers


def from_pool(answers: list[Answer]) -> list[int]:
    return [answer.cache.cached_by_tier.get(Tier.POOL, 0) for answer in answers if answer.cache is not None]
