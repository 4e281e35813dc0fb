"""Merges out of scores equal those that transformers makes."""

from __future__ import annotations

import random

import pytest
from transformers.tokenization_utils_base import generate_merges

from stemma.model.formats.gguf.merges import merges_of


@pytest.mark.parametrize("num_scores", [10, 5000])
def test_merges_equal_those_of_transformers(num_scores: int) -> None:
    """With few scores many tokens have the same."""
    draw = random.Random(num_scores)
    tokens = [*"abcdefg", *{"".join(draw.choices("abcdefg", k=draw.randint(2, 7))) for _ in range(1500)}]
    scores = [-float(draw.randrange(num_scores)) for _ in tokens]
    vocab = {token: place for place, token in enumerate(tokens)}
    expected = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    assert merges_of(tokens, scores) == [(left, right) for left, right in expected]
    assert len(expected) > 1000
