"""Seats: how many sequences run at once follows memory and measured step times, unless a setting fixes it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.core.seats import (
    FIRST_STEP_TOKENS,
    IDLE_STEP_S,
    MAX_STEP_S,
    MIN_IDLE_TOKENS,
    MIN_PROMPT_TOKENS,
    MIN_SEATS,
    Seats,
    StepTokens,
)


def measured(seats: Seats, base_s: float, row_s: float, most_rows: int = 32) -> Seats:
    generator = np.random.default_rng(0)
    for _ in range(100):
        num_rows = int(generator.integers(1, most_rows))
        seats.note_step(num_rows, 200 * num_rows, base_s + row_s * num_rows)
    return seats


def test_a_number_that_is_set_never_changes() -> None:
    seats = measured(Seats(5), 1.0, 1.0)
    seats.note_preemption(1)
    assert seats.limit == 5


def test_before_anything_is_measured_the_most_may_run() -> None:
    assert Seats(None, 100).limit == 100


@pytest.mark.parametrize(
    ("base_s", "row_s", "expected"), [(0.02, 0.002, 240), (0.1, 0.01, 40), (0.01, 0.1, 0)]
)
def test_a_step_stays_below_its_limit(base_s: float, row_s: float, expected: int) -> None:
    limit = measured(Seats(None), base_s, row_s).limit
    assert limit == pytest.approx(max(MIN_SEATS, expected), rel=0.05)
    assert expected < MIN_SEATS or base_s + row_s * limit <= 1.05 * MAX_STEP_S


def test_a_preemption_takes_seats_and_sequences_that_end_give_them_back() -> None:
    seats = Seats(None, 64)
    seats.note_preemption(10)
    assert seats.limit == 10
    for _ in range(9):
        seats.note_end()
    assert seats.limit == 10
    for _ in range(2):
        seats.note_end()
    assert seats.limit == 11
    for _ in range(4000):
        seats.note_end()
    assert seats.limit == 64
    seats.note_preemption(0)
    assert seats.limit == 1


@pytest.mark.parametrize(
    ("token_s", "expected"), [(0.0001, 2048), (0.0007, 768), (0.00199, 251), (0.01, MIN_PROMPT_TOKENS)]
)
def test_a_step_with_prompts_takes_as_many_tokens_as_fit_its_time(token_s: float, expected: int) -> None:
    tokens = StepTokens(2048)
    assert tokens.limit(0) == FIRST_STEP_TOKENS
    for num_tokens in (200, 2048, 500):
        tokens.note_step(num_tokens, token_s * num_tokens)
    tokens.note_step(MIN_PROMPT_TOKENS - 1, 10.0)  # reading the weights: says nothing
    assert tokens.limit(0) == expected


def test_a_step_in_idle_time_is_short() -> None:
    tokens = StepTokens(2048)
    assert tokens.idle_limit == MIN_PROMPT_TOKENS
    tokens.note_step(1000, 1.0)
    assert tokens.idle_limit == 1000 * IDLE_STEP_S
    for _ in range(20):
        tokens.note_step(200, 200.0)
    assert tokens.idle_limit == MIN_IDLE_TOKENS
    assert StepTokens(8).idle_limit == 8


def test_prompts_have_room_beside_decodes_however_slow_a_step_is() -> None:
    tokens = StepTokens(512)
    tokens.note_step(512, 100.0)
    assert tokens.limit(100) == 100 + MIN_PROMPT_TOKENS
    assert tokens.limit(500) == 512
    assert StepTokens(16).limit(3) == 16


def test_fewer_preemptions_where_memory_is_short(harness) -> None:
    """40 answers of 60 tokens over a cache that holds about 8: the same tokens, less computed twice."""

    def run(**fields) -> tuple[list, int]:
        engine = harness(num_blocks=40, block_size=16, **fields)
        names = [engine.add(prompt(i, 20), greedy(60, ignore_eos=True)) for i in range(40)]
        engine.run()
        return [engine.answers[name].token_ids for name in names], engine.engine.stats().num_preemptions

    tokens, preemptions = run()
    same, many = run(max_num_seqs=64)
    assert tokens == same
    assert 0 < preemptions < many / 2
