"""Load is decoding and seats: a hot prefix, queues, and a slow server, before the real router."""

from __future__ import annotations

import numpy as np
import pytest

from stemma_lab.fleet.decoding import DecodeModel, Decoding
from stemma_lab.fleet.simulation import FleetRun, FleetSettings, one_cache_hits, simulate
from stemma_lab.fleet.traffic import Traffic
from stemma_lab.fleet.virtual_time import run_in_virtual_time
from stemma_lab.savings import PrefillModel

PREFILL = PrefillModel(2000.0)
DECODE = DecodeModel(0.02, 0.004)
BLOCK, PREFIX, QUESTION, ANSWER = 16, 38, 2, 60
"""A prefix of 608 tokens, questions of 32, answers of 60."""
ANSWERS_PER_S = 3 * 4 / (ANSWER * (DECODE.step_s + 3 * DECODE.row_s))
"""What three servers of four seats can do."""


def hot_prefix(num_requests: int, per_s: float, share: float = 0.9) -> Traffic:
    """Return requests of which `share` begin with the same prefix; each of the others has its own."""
    rng = np.random.default_rng(0)
    sizes, before, prompts = [PREFIX], [-1], []
    for _ in range(num_requests):
        stem = 0
        if rng.random() >= share:
            stem = len(sizes)
            sizes.append(PREFIX)
            before.append(-1)
        prompts.append(len(sizes))
        sizes.append(QUESTION)
        before.append(stem)

    def filled(value: int) -> np.ndarray:
        return np.full(num_requests, value, dtype=np.int64)

    return Traffic(
        "one prefix",
        BLOCK,
        np.array(sizes),
        np.array(before),
        np.cumsum(rng.exponential(1 / per_s, num_requests)),
        np.array(prompts),
        filled(-1),
        filled((PREFIX + QUESTION) * BLOCK),
        filled(ANSWER),
        np.zeros(0, dtype=np.int64),
    )


def ran(traffic: Traffic, router: str = "cache-aware", **fields) -> FleetRun:
    return simulate(traffic, FleetSettings(3, 10_000, router, PREFILL, DECODE, num_seats=4, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.8, 1.4])
def test_a_hot_prefix_takes_all_servers_and_hits_as_one_cache(load: float) -> None:
    traffic = hot_prefix(400, load * ANSWERS_PER_S)
    ours, balanced = ran(traffic), ran(traffic, "round-robin")
    assert ours.end_s.max() < 1.15 * balanced.end_s.max()
    assert (ours.end_s - traffic.arrivals_s).mean() < 1.15 * (balanced.end_s - traffic.arrivals_s).mean()
    whole = one_cache_hits(traffic, 30_000).sum() / ours.num_prompt_blocks.sum()
    assert ours.hit_ratio > whole - 0.02
    assert max(ours.num_by_server.values()) < 1.15 * 400 / 3
    assert ours.num_ejections == 0, "queues aren't sickness"
    assert ours.outcomes == {"right": 400}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_server_ten_times_slower_gets_next_to_nothing(is_streamed: bool) -> None:
    traffic = hot_prefix(400, 0.5 * ANSWERS_PER_S)
    run = ran(traffic, is_streamed=is_streamed, crawl_from_s=0.001)
    assert run.num_by_server["server-0"] < 0.05 * 400
    assert run.outcomes == {"right": 400}


@pytest.mark.slow
def test_a_server_that_was_slow_comes_back() -> None:
    traffic = hot_prefix(600, 0.5 * ANSWERS_PER_S)
    half_s = float(traffic.arrivals_s[300])
    sick = ran(traffic, crawl_from_s=0.001).num_by_server["server-0"]
    back = ran(traffic, crawl_from_s=0.001, crawl_to_s=half_s).num_by_server["server-0"]
    assert back > sick + 40, "of the 300 requests after it a third is a hundred"


def test_answers_share_steps() -> None:
    import asyncio

    ends: list[float] = []

    async def answer(decoding: Decoding, num_tokens: int) -> None:
        await decoding.run(num_tokens)
        ends.append(round(asyncio.get_running_loop().time(), 6))

    async def work() -> None:
        decoding = Decoding(DecodeModel(1.0, 0.5))
        left = asyncio.create_task(answer(decoding, 100))
        both = asyncio.gather(answer(decoding, 2), answer(decoding, 4))
        await asyncio.sleep(2.0)  # a step of three answers takes 2 s
        left.cancel()
        await both

    run_in_virtual_time(work())
    assert ends == [3.5, 5.5]  # one more step of two, then two of one
