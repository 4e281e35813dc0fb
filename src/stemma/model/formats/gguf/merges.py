"""The merges of a SentencePiece vocabulary, whose file has a score for each token instead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Split = tuple[str, str]
"""Two tokens that make a third."""


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[Split]:
    """Return every pair of tokens that make a third, best first.

    As transformers orders them: by the score of what they make, then long left parts, then long right
    ones. But tokens are sorted, not their pairs, of which there are several times as many.
    """
    known = set(tokens)
    order = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    merges: list[Split] = []
    for _, alike in groupby(order, key=scores.__getitem__):
        pairs: list[Split] = []
        num_tokens = 0
        for index in alike:
            num_tokens += 1
            token = tokens[index]
            pairs += [
                (token[:cut], token[cut:])
                for cut in range(len(token) - 1, 0, -1)
                if token[:cut] in known and token[cut:] in known
            ]
        if num_tokens > 1:
            pairs.sort(key=_lengths, reverse=True)
        merges += pairs
    return merges


def _lengths(pair: Split) -> tuple[int, int]:
    return len(pair[0]), len(pair[1])
