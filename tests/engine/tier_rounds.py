"""Rounds of prompts that don't fit on the device; every answer equals the cache-off run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stemma.config.settings import TierSettings
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.types import Tier
from tests.engine.harness import Answer, Harness, greedy, prompt

BLOCK_SIZE = 16
TIMEOUT_S = 30.0
Serve = Callable[..., Harness]


@pytest.fixture
def serve(harness: Callable[..., Harness]) -> Iterator[Serve]:
    """Return a maker of engines with tiers; all are closed at the end."""
    made: list[Harness] = []

    def make(*, num_blocks: int = 12, max_num_seqs: int = 8, **tiers: object) -> Harness:
        # Computing these tiny blocks may well beat loading them, depending on what else the machine does.
        settings = TierSettings.model_validate({"load_when": "always", **tiers})
        one = harness(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, tiers=settings)
        made.append(one)
        return one

    yield make
    for one in made:
        one.engine.close()


def disk(one: Harness) -> DiskStore:
    return next(store for store in one.cache.below.stores if isinstance(store, DiskStore))


@pytest.fixture(scope="module")
def expected(harness: Callable[..., Harness]) -> Callable[[np.ndarray], list[int]]:
    """Return what an engine without any cache answers."""
    off = harness(num_blocks=64, block_size=BLOCK_SIZE, enable_prefix_cache=False)
    memory: dict[bytes, list[int]] = {}

    def answer(tokens: np.ndarray) -> list[int]:
        if tokens.tobytes() not in memory:
            memory[tokens.tobytes()] = off.serve(tokens, greedy(4)).token_ids[0]
        return memory[tokens.tobytes()]

    return answer


PROMPTS = [prompt(seed, 100) for seed in range(5)]
"""Six full blocks each; the device holds twelve blocks, so at most one of them survives the next."""


def round_of(one: Harness, expected: Callable[[np.ndarray], list[int]]) -> list[Answer]:
    answers = []
    for tokens in PROMPTS:
        answer = one.serve(tokens, greedy(4))
        assert answer.token_ids[0] == expected(tokens)
        answers.append(answer)
    one.cache.below.drain(TIMEOUT_S)
    one.cache.check()
    return answers


def cached(answers: list[Answer], tier: Tier) -> list[int]:
    return [answer.cache.cached_by_tier.get(tier, 0) for answer in answers if answer.cache is not None]
