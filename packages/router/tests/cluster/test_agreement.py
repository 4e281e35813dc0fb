"""Servers behind one router that don't serve the same are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.told import ToldModel
from stemma_router.cluster.agreement import disagreements

SAME: dict[str, Any] = {
    "block_size": 16,
    "model": "m",
    "kv": "k",
    "template": "t",
    "adapters": ((1, 10), (2, 20)),
}


def told(**other) -> ToldModel:
    return ToldModel(**(SAME | other))


def test_equal_servers_and_those_that_tell_nothing_agree() -> None:
    assert list(disagreements({"a": told(), "b": told(), "c": None})) == []
    assert list(disagreements({"a": told(), "b": told(adapters=((3, 30),))})) == []
    assert list(disagreements({})) == []


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"model": "other"}, "revision"),
        ({"kv": "other"}, "dtype"),
        ({"template": "other"}, "template"),
        ({"block_size": 32}, "block size"),
        ({"adapters": ((2, 21),)}, "adapter of the same name"),
    ],
)
def test_who_differs_from_the_most_is_named(other, word) -> None:
    [sentence] = disagreements({"a": told(), "b": told(**other), "c": told()})
    assert word in sentence
    assert sentence.startswith("b: ")
    assert sentence.endswith("a, c")
