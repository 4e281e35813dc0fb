"""Words of our own are as long as the texts that they stand for, and part from each other where those do."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.agents.filler import Texts, expand


def common(left: str, right: str) -> int:
    pairs = [one == other for one, other in zip(left, right, strict=False)]
    return pairs.index(False) if False in pairs else len(pairs)


@given(st.lists(st.text("ab ", max_size=30), min_size=2, max_size=12))
def test_lengths_and_prefixes_are_kept(texts: list[str]) -> None:
    kept = Texts()
    numbers = [kept.add(text) for text in texts]
    made = expand([list(row) for row in kept.table])

    for text, number in zip(texts, numbers, strict=True):
        assert len(made[number]) == len(text)
    for (left, here), (right, there) in combinations(zip(texts, numbers, strict=True), 2):
        assert (here == there) == (left == right)
        assert common(made[here], made[there]) >= common(left, right)


def test_long_texts_part_where_they_parted() -> None:
    kept = Texts()
    texts = ["x" * 100 + "y" * 100, "x" * 100 + "z" * 100, "x" * 50 + "z" * 100]
    numbers = [kept.add(text) for text in texts]
    first, second, third = (expand([list(row) for row in kept.table])[number] for number in numbers)

    assert 100 <= common(first, second) < 108
    assert 50 <= common(first, third) < 58
