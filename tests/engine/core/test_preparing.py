"""Idle time prepares a prompt in short steps, alone; a request that comes ends it at once."""

from __future__ import annotations

from functools import partial

import pytest
from tests.engine.harness import Harness, greedy, prompt

from stemma.engine.api import GenerationRequest, Prepared
from stemma.types import FinishReason


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def harness(harness, request):
    return partial(harness, num_blocks=64, max_batch_tokens=64, overlaps=request.param)


KNOWN = 40
"""Tokens that are cached before each test."""


def prepare(made: Harness, tokens, max_tokens: int = 1000) -> list[Prepared]:
    """Return a list that gets the end of it."""
    ends: list[Prepared] = []
    request = GenerationRequest("next", tokens)
    made.engine.prepare(made.engine.checked(request), max_tokens, ends.append)
    return ends


def begun(harness) -> tuple[Harness, list[Prepared]]:
    """Return an engine that has prepared some of a prompt, and isn't done."""
    made = harness()
    made.serve(prompt(1, KNOWN))
    ends = prepare(made, prompt(1, 400))
    for _ in range(2):
        made.step()
    assert not ends
    return made, ends


def test_a_prepared_prompt_is_cached(harness):
    made, fresh = harness(), harness()
    made.serve(prompt(1, KNOWN))
    before = made.engine.stats()
    ends = prepare(made, prompt(1, 200))
    made.run(check=True)
    [end] = ends
    assert end.num_cached_tokens >= KNOWN - 1
    assert (end.num_tokens, end.was_cut) == (200, False)
    after = made.engine.stats()
    assert after.num_prompt_tokens == before.num_prompt_tokens
    assert after.misses_by_reason == before.misses_by_reason
    assert after.num_generated_tokens == before.num_generated_tokens
    answer = made.serve(prompt(1, 220))
    assert answer.cache.num_cached_tokens == 200
    assert answer.token_ids == fresh.serve(prompt(1, 220)).token_ids


def test_a_request_ends_it(harness):
    made, ends = begun(harness)
    assert (made.engine.stats().num_running, made.engine.stats().num_waiting) == (0, 0)
    num_plans = len(made.runner.plans)
    made.add(prompt(2, 30), request_id="asked")
    [end] = ends
    assert end.was_cut
    assert KNOWN < end.num_tokens < 400
    made.run(check=True)
    names = {name for plan in made.runner.plans[num_plans:] for name, _, _ in plan}
    assert names == {"asked"}
    answer = made.serve(prompt(1, 410))
    assert answer.cache is not None
    assert answer.cache.num_cached_tokens >= end.num_tokens  # a step under way may have computed more


def test_the_turn_itself_goes_on_from_what_is_there(harness):
    made, ends = begun(harness)
    answer = made.serve(prompt(1, 410), greedy(6))
    assert ends[0].was_cut
    assert answer.cache is not None
    assert answer.cache.num_cached_tokens >= ends[0].num_tokens
    assert answer.token_ids == harness().serve(prompt(1, 410), greedy(6)).token_ids


def test_a_busy_engine_prepares_nothing(harness):
    made = harness()
    made.serve(prompt(1, KNOWN))
    made.add(prompt(2, 30), greedy(8))
    made.step()
    assert prepare(made, prompt(1, 200)) == [Prepared(was_cut=True)]
    made.run()
    assert all(name != "next" for plan in made.runner.plans for name, _, _ in plan)


@pytest.mark.parametrize(("length", "known"), [(KNOWN + 8, KNOWN), (200, 0)])
def test_little_is_not_worth_a_step_and_nothing_begins_from_nothing(harness, length, known):
    made = harness()
    if known:
        made.serve(prompt(1, known))
    assert prepare(made, prompt(1, length)) == [Prepared()]
    assert not made.engine.has_work


def test_its_budget_bounds_it(harness):
    made = harness()
    made.serve(prompt(1, KNOWN))
    ends = prepare(made, prompt(1, 400), 50)
    made.run()
    [end] = ends
    assert end.num_computed_tokens == 50
    assert not end.was_cut


def test_it_ends_with_an_error_and_on_demand(harness):
    made, ends = begun(harness)
    made.engine.end_preparation()
    assert ends[0].was_cut
    made.run(check=True)
    made, ends = begun(harness)
    made.runner.fail_next = True
    made.step()
    made.run(check=True)
    assert ends[0].was_cut
    assert made.serve(prompt(3, 20)).finish == {0: FinishReason.LENGTH}


def test_the_last_resort_ends_it_too(harness):
    made, ends = begun(harness)
    made.fail_all("over")
    assert ends[0].was_cut
    assert not made.engine.has_work
    made.engine.check()
