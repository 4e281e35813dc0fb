"""A budget of thinking says which tokens are forced, from the output's tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.engine.sampling.thinking import ThinkingLimit, ThinkingMarks, ThinkingTokens

START, END, BREAK = 7, 8, 9
SPELLED = {
    **{token: str(token).encode() for token in range(7)},
    START: b"<t>",
    END: b"</t>",
    BREAK: b"\n",
    10: b"</",
    11: b"t",
    12: b">",
    13: b">\n",
    14: b" <",
    15: b"/t",
    16: b"<",
    17: b"t>a",
}
AT_BUDGET = (BREAK, END, BREAK)
TOKENS = ThinkingTokens(ThinkingMarks(b"<t>", b"</t>", is_open=False), (AT_BUDGET,) * 4, SPELLED)
OPEN = replace(TOKENS, marks=replace(TOKENS.marks, is_open=True))
IN_PIECES = replace(OPEN, forced=((BREAK, 10, 11, 13), (15, 13), (11, 13), (13,)))
CHANNELS = replace(
    OPEN, marks=replace(OPEN.marks, may_return=True), forced=((END, 1),) * 4, forced_again=(END, 2)
)


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
        (TOKENS, 1, [1, START, 2, 3], [1, START, 2, 3]),
        (IN_PIECES, 2, [1, 2, 3, 4], [1, 2, BREAK, 10, 11, 13, 3, 4]),
        (IN_PIECES, 2, [1, 14, 3], [1, 14, 15, 13, 3]),
        (IN_PIECES, 2, [1, 10, 3], [1, 10, 11, 13, 3]),
        (IN_PIECES, 3, [1, 10, 11, 3], [1, 10, 11, 13, 3]),
        (IN_PIECES, 3, [1, 10, 1, 3], [1, 10, 1, BREAK, 10, 11, 13, 3]),
        (IN_PIECES, 9, [1, 16, 15, 13, *[2] * 9], [1, 16, 15, 13, *[2] * 9]),
        (IN_PIECES, 3, [1, 10, 17, 1, 2, 3, 4], [1, 10, 17, 1, 2, 3, 4]),
        (IN_PIECES, 3, [1, 16, 16, 3], [1, 16, 16, 15, 13, 3]),
        (
            replace(IN_PIECES, marks=TOKENS.marks),
            1,
            [BREAK, 16, 17, 1, 2],
            [BREAK, 16, 17, 1, BREAK, 10, 11, 13, 2],
        ),
        (CHANNELS, 1, [1, 2], [1, END, 1, 2]),
        (CHANNELS, 1, [1, 3, START, 4, START, 5], [1, END, 1, 3, START, END, 2, 4, START, 5]),
        (replace(CHANNELS, forced_again=()), 1, [1, 3, START, 4], [1, END, 1, 3, START, 4]),
        (
            replace(TOKENS, marks=replace(TOKENS.marks, may_return=True)),
            2,
            [START, 1, END, 4, 4, 4, 4, 4, 4, START, 1, 2],
            [START, 1, END, 4, 4, 4, 4, 4, 4, START, 1, BREAK, END, BREAK, 2],
        ),
        (
            replace(TOKENS, marks=replace(TOKENS.marks, start=b"5<t>")),
            1,
            [5, START, 1, 2],
            [5, START, 1, BREAK, END, BREAK, 2],
        ),
    ],
)
def test_at_the_budget_the_end_is_forced(
    tokens: ThinkingTokens, budget: int, wanted: list[int], expected: list[int]
):
    assert written(ThinkingLimit(tokens, budget), wanted) == expected


@given(
    output=st.lists(st.integers(1, 17), max_size=12),
    draft=st.lists(st.integers(1, 17), max_size=8),
    budget=st.integers(0, 6),
    is_open=st.booleans(),
    may_return=st.booleans(),
)
def test_a_draft_is_judged_as_if_it_were_written(
    output: list[int], draft: list[int], budget: int, is_open: bool, may_return: bool
):
    marks = replace(TOKENS.marks, is_open=is_open, may_return=may_return)
    tokens = replace(IN_PIECES, marks=marks, forced_again=(END,) * may_return)
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
