"""What only the radix index has: the shape of its tree, continuations."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.errors import IntegrityError
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import TokenArray


def text(chars: str) -> TokenArray:
    return np.array([ord(char) for char in chars], dtype=np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def shape(index: RadixIndex) -> list[tuple[int, str, list[int]]]:
    """Depth, text and blocks of every node."""
    return [
        (view.depth, "".join(map(chr, view.tokens)), view.block_ids.tolist())
        for view in index.nodes(DEFAULT_NAMESPACE)
    ]


def grown(index: RadixIndex, *chains: tuple[str, tuple[int, ...]]) -> RadixIndex:
    for now, (chars, blocks) in enumerate(chains):
        index.insert(DEFAULT_NAMESPACE, text(chars), ids(*blocks), float(now))
        index.check()
    return index


def test_a_chain_is_one_node_however_it_grew() -> None:
    at_once = grown(RadixIndex(2), ("abcdefg", (0, 1, 2, 3)))
    by_token = RadixIndex(2)
    for length in range(1, 8):
        grown(by_token, ("abcdefg"[:length], tuple(range((length + 1) // 2))))
    expected = [(0, "abcdefg", [0, 1, 2, 3])]
    assert shape(at_once) == shape(by_token) == expected


def test_a_split_inside_a_block_leaves_that_block_below() -> None:
    index = grown(RadixIndex(4), ("abcdefghij", (0, 1, 2)), ("abcdefXY", (0, 3)))
    assert shape(index) == [(0, "abcdef", [0]), (1, "ghij", [1, 2]), (1, "XY", [3])]


def test_a_node_may_own_no_block() -> None:
    index = grown(RadixIndex(4), ("abcd", (0,)), ("abXd", (1,)), ("aYcd", (2,)))
    assert shape(index) == [(0, "a", []), (1, "b", []), (2, "cd", [0]), (2, "Xd", [1]), (1, "Ycd", [2])]


def test_when_one_branch_is_left_the_chain_is_one_node_again() -> None:
    index = grown(RadixIndex(4), ("abcdefghij", (0, 1, 2)), ("abcdefXY", (0, 3)))
    index.pin(ids(0, 3))
    assert index.evict(2, 9.0).tolist() == [2, 1]
    index.check()
    assert shape(index) == [(0, "abcdefXY", [0, 3])]


def test_trailing_tokens_go_with_the_block_that_held_them() -> None:
    index = grown(RadixIndex(4), ("abcdef", (0, 1)))
    assert index.evict(1, 9.0).tolist() == [1]
    assert shape(index) == [(0, "abcd", [0])]


def test_continuation_follows_the_sequence_inserted_last() -> None:
    index = grown(RadixIndex(2), ("abcd12", (0, 1, 2)), ("abcd34", (0, 1, 3)), ("abcd12", (0, 1, 2)))

    def after(chars: str, max_tokens: int, namespace: Namespace = DEFAULT_NAMESPACE) -> str:
        return "".join(map(chr, index.continuation(namespace, text(chars), max_tokens)))

    assert after("ab", 9) == "cd12"
    assert after("ab", 3) == "cd1"
    assert after("abcd3", 9) == "4"
    assert after("abcd12", 9) == ""
    assert after("abX", 9) == ""
    assert after("ab", 9, Namespace(salt="other")) == ""
    index.insert(DEFAULT_NAMESPACE, text("abcd34"), ids(0, 1, 3), 9.0)
    assert after("ab", 9) == "cd34"


def test_continuation_after_the_last_sequence_was_evicted() -> None:
    index = grown(RadixIndex(1), ("ab", (0, 1)), ("ac", (0, 2)), ("ad", (0, 3)))
    index.touch(ids(0, 1), 8.0)
    index.touch(ids(0, 2), 8.0)
    assert index.evict(1, 9.0).tolist() == [3]
    index.check()
    assert chr(index.continuation(DEFAULT_NAMESPACE, text("a"), 1)[0]) in "bc"


def test_check_finds_a_wrong_count() -> None:
    index = grown(RadixIndex(2), ("abcd", (0, 1)))
    index.pin(ids(0, 0))  # distinct blocks were asked for
    with pytest.raises(IntegrityError, match="number of pinned blocks"):
        index.check()


def test_pins_must_start_at_the_root() -> None:
    index = grown(RadixIndex(2), ("abcd", (0, 1)))
    index.pin(ids(1))
    with pytest.raises(IntegrityError, match="below an unpinned"):
        index.check()
