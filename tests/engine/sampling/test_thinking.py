"""A budget of thinking says which tokens are forced, from the output's tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.engine.sampling.thinking import ThinkingLimit, ThinkingTokens

START, END, BREAK = 7, 8, 9
TOKENS = ThinkingTokens((START,), END, (BREAK, END, BREAK), is_open=False)
OPEN = replace(TOKENS, is_open=True)


def written(limit: ThinkingLimit, wanted: list[int]) -> list[int]:
    """Return what a model writes that wants `wanted`, where nothing is forced."""
    output: list[int] = []
    rest = list(wanted)
    while rest or limit.forced() is not None:
        forced = limit.forced()
        token = rest.pop(0) if forced is None else forced
        limit.append(token)
        output.append(token)
    return output


@pytest.mark.parametrize(
    ("tokens", "budget", "wanted", "expected"),
    [
        (OPEN, 2, [1, 2, 3, 4], [1, 2, BREAK, END, BREAK, 3, 4]),
        (OPEN, 0, [1, 2], [BREAK, END, BREAK, 1, 2]),
        (OPEN, 3, [1, END, 2, 3, 4, 5], [1, END, 2, 3, 4, 5]),
        (TOKENS, 1, [START, 1, 2], [START, 1, BREAK, END, BREAK, 2]),
        (TOKENS, 1, [BREAK, START, 1, 2], [BREAK, START, 1, BREAK, END, BREAK, 2]),
        (TOKENS, 0, [START], [START, BREAK, END, BREAK]),
        (TOKENS, 1, [1, 2, 3, 4, 5, START, 1, 2, 3], [1, 2, 3, 4, 5, START, 1, 2, 3]),
        (TOKENS, 1, [START, END, START, 1, 2, 3], [START, END, START, 1, 2, 3]),
        (
            replace(TOKENS, may_return=True),
            2,
            [START, 1, END, 4, 4, 4, 4, 4, 4, START, 1, 2],
            [START, 1, END, 4, 4, 4, 4, 4, 4, START, 1, BREAK, END, BREAK, 2],
        ),
        (replace(TOKENS, start_ids=(5, START)), 1, [5, START, 1, 2], [5, START, 1, BREAK, END, BREAK, 2]),
    ],
)
def test_at_the_budget_the_end_is_forced(
    tokens: ThinkingTokens, budget: int, wanted: list[int], expected: list[int]
):
    assert written(ThinkingLimit(tokens, budget), wanted) == expected


@given(
    output=st.lists(st.integers(1, 9), max_size=12),
    draft=st.lists(st.integers(1, 9), max_size=8),
    budget=st.integers(0, 6),
    is_open=st.booleans(),
    may_return=st.booleans(),
)
def test_a_draft_is_judged_as_if_it_were_written(
    output: list[int], draft: list[int], budget: int, is_open: bool, may_return: bool
):
    tokens = replace(TOKENS, is_open=is_open, may_return=may_return)
    one, other = ThinkingLimit(tokens, budget), ThinkingLimit(tokens, budget)
    for token in output:
        one.append(token)
        other.append(token)
    num_valid = one.num_valid(draft)
    for number, token in enumerate(draft):
        forced = other.forced()
        assert one.forced(draft[:number]) == forced
        assert (forced in (None, token)) == (number < num_valid) or number > num_valid
        other.append(token)
