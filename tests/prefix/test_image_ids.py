"""Ids that stand for images."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.prefix.image_ids import (
    FIRST_IMAGE_ID,
    MIN_IMAGE_TOKENS,
    are_images,
    before_images,
    image_ids,
    told_apart,
)
from stemma.types import as_tokens


def test_ids_are_of_no_vocabulary_and_differ() -> None:
    first, second = image_ids(b"a" * 32, 1000), image_ids(b"b" * 32, 1000)
    assert first.dtype == np.int32
    assert are_images(first).all()
    assert first.min() >= FIRST_IMAGE_ID
    assert (first != second).all()
    assert len(set(first.tolist())) > 998
    assert np.array_equal(image_ids(b"a" * 32, 7), first[:7])
    assert first[:3].tolist() == [1133761346, 1413715353, 1105697566]  # keys on disks depend on them


@pytest.mark.parametrize(
    ("num_matched", "expected"),
    [
        (0, 0),
        (2, 2),
        (3, 2),
        (5, 2),
        (6, 6),
        (9, 9),
        (12, 12),
        (13, 13),
        (14, 14),
        (15, 14),
        (17, 14),
        (18, 18),
    ],
)
def test_a_match_ends_behind_enough_of_an_image(num_matched: int, expected: int) -> None:
    tokens = np.concatenate(
        (as_tokens([1, 2]), image_ids(b"a", 10), as_tokens([3, 4]), image_ids(b"b", MIN_IMAGE_TOKENS))
    )
    assert told_apart(tokens, num_matched) == expected


def test_what_comes_before_an_image() -> None:
    tokens = np.concatenate((as_tokens([1, 2]), image_ids(b"a", 4), as_tokens([3])))
    assert before_images(tokens).tolist() == [1, 2]
    assert before_images(tokens[:2]).tolist() == [1, 2]
