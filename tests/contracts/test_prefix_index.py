"""What every prefix index does; each test runs on every implementation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.hashed import HashIndex
from stemma.prefix.headed import HeadedIndex
from stemma.prefix.index import MAX_FOLLOWING, Inserted, PrefixIndex
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

INDEXES: dict[str, Callable[[int], PrefixIndex]] = {
    "radix": RadixIndex,
    "hash": lambda block_size: HashIndex(KeySpace("model", "layout", block_size)),
    "headed": lambda block_size: HeadedIndex(RadixIndex(block_size)),
}


def array(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def text(chars: str) -> np.ndarray:
    return array([ord(char) for char in chars])


class Driver:
    """An index of block size 4 with a short notation; `check` runs after every change."""

    def __init__(self, make: Callable[[int], PrefixIndex], block_size: int = 4) -> None:
        self.index = make(block_size)
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def insert(self, chars: str, ids: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> Inserted:
        inserted = self.index.insert(namespace, text(chars), array(ids), self.tick())
        self.index.check()
        return inserted

    def match(self, chars: str, namespace: Namespace = DEFAULT_NAMESPACE) -> tuple[int, list[int]]:
        match = self.index.match(namespace, text(chars))
        return match.num_tokens, match.block_ids.tolist()

    def evict(self, num_blocks: int) -> list[int]:
        evicted = self.index.evict(num_blocks, self.tick()).tolist()
        self.index.check()
        return evicted


@pytest.fixture(params=INDEXES)
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(INDEXES[request.param])


def test_empty(driver: Driver) -> None:
    assert driver.match("abcd") == (0, [])
    assert driver.match("") == (0, [])
    assert driver.evict(3) == []
    assert driver.insert("", []).canonical.tolist() == []
    assert (driver.index.num_blocks, driver.index.num_evictable) == (0, 0)


def test_match_ends_where_the_prompt_parts(driver: Driver) -> None:
    driver.insert("abcdefghij", [0, 1, 2])
    assert driver.match("abcdefghij") == (10, [0, 1, 2])
    assert driver.match("abcdefghijkl") == (10, [0, 1, 2])
    assert driver.match("abcdefgh") == (8, [0, 1])
    assert driver.match("abcdefghX") == (8, [0, 1])
    assert driver.match("abcdeX") == (5, [0, 1])
    assert driver.match("aX") == (1, [0])
    assert driver.match("X") == (0, [])


def test_insert_reports_duplicates(driver: Driver) -> None:
    first = driver.insert("abcdefgh", [0, 1])
    assert (first.canonical.tolist(), first.added.tolist()) == ([0, 1], [0, 1])
    again = driver.insert("abcdefghij", [5, 6, 7])
    assert (again.canonical.tolist(), again.added.tolist(), again.dropped.tolist()) == ([0, 1, 7], [7], [])
    assert driver.index.num_blocks == 3


def test_fuller_block_supersedes_a_partial_one(driver: Driver) -> None:
    driver.insert("abcdef", [0, 1])
    longer = driver.insert("abcdefghi", [0, 2, 3])
    assert (longer.canonical.tolist(), longer.added.tolist(), longer.dropped.tolist()) == (
        [0, 2, 3],
        [2, 3],
        [1],
    )
    assert driver.match("abcdefghi") == (9, [0, 2, 3])


def test_partial_block_grows_under_its_own_id(driver: Driver) -> None:
    driver.insert("ab", [0])
    for length in range(3, 11):
        ids = list(range(-(-length // 4)))
        grown = driver.insert("abcdefghij"[:length], ids)
        assert grown.canonical.tolist() == ids
        assert grown.added.tolist() == (ids[-1:] if length % 4 == 1 else [])
        assert grown.dropped.tolist() == []
    assert driver.index.num_blocks == 3


def test_partial_block_is_a_duplicate_of_a_fuller_one(driver: Driver) -> None:
    driver.insert("abcdefgh", [0, 1])
    inserted = driver.insert("abcdef", [0, 7])
    assert (inserted.canonical.tolist(), inserted.added.tolist()) == ([0, 1], [])


def test_prompts_that_part_inside_a_block_have_a_block_each(driver: Driver) -> None:
    driver.insert("abcdefgh", [0, 1])
    assert driver.insert("abcdefXY", [0, 2]).added.tolist() == [2]
    assert driver.insert("aZ", [3]).added.tolist() == [3]
    assert driver.match("abcdefgh") == (8, [0, 1])
    assert driver.match("abcdefXY") == (8, [0, 2])
    assert driver.match("aZ") == (2, [3])
    num_tokens, (first, second) = driver.match("abcdefQ")
    assert (num_tokens, first) == (6, 0)
    assert second in (1, 2)


def test_namespaces_share_nothing(driver: Driver) -> None:
    tenant, adapter = Namespace(salt="t"), Namespace(adapter="t")
    driver.insert("abcdefgh", [0, 1])
    assert driver.match("abcd", tenant) == (0, [])
    driver.insert("abcdefgh", [2, 3], tenant)
    driver.insert("abcdefgh", [4, 5], adapter)
    assert driver.match("abcdefgh") == (8, [0, 1])
    assert driver.match("abcdefgh", tenant) == (8, [2, 3])
    assert driver.match("abcdefgh", adapter) == (8, [4, 5])
    assert driver.evict(99) == [1, 0, 3, 2, 5, 4]
    assert driver.match("abcdefgh", adapter) == (0, [])


def test_eviction_takes_tails_first_and_the_longest_unused(driver: Driver) -> None:
    driver.insert("abcdefghijkl", [0, 1, 2])
    driver.insert("abcdefghXY", [0, 1, 3])
    driver.insert("wxyz", [4])
    driver.index.touch(array([0, 1, 2]), driver.tick())
    assert driver.evict(2) == [3, 4]
    assert driver.evict(2) == [2, 1]
    assert driver.match("abcdefgh") == (4, [0])
    assert driver.evict(9) == [0]
    assert driver.index.num_blocks == 0


def test_a_grown_chain_loses_its_tail_first(driver: Driver) -> None:
    driver.insert("abcdef", [0, 1])
    driver.insert("abcdefgh", [0, 1])
    driver.insert("abcdefghi", [0, 1, 2])
    assert driver.evict(1) == [2]
    assert driver.match("abcdefghi") == (8, [0, 1])
    driver.insert("abcdefghZ", [0, 1, 5])
    assert driver.match("abcdefghZ") == (9, [0, 1, 5])


def test_pinned_blocks_stay(driver: Driver) -> None:
    driver.insert("abcdefghijkl", [0, 1, 2])
    driver.index.pin(array([0, 1]))
    driver.index.pin(array([0]))
    assert driver.index.num_evictable == 1
    assert driver.evict(9) == [2]
    driver.index.unpin(array([0, 1]))
    assert driver.index.num_evictable == 1
    assert driver.evict(9) == [1]
    driver.index.unpin(array([0]))
    assert driver.evict(9) == [0]


def test_growing_below_a_pinned_tail(driver: Driver) -> None:
    driver.insert("abcd", [0])
    driver.index.pin(array([0]))
    driver.insert("abcdefgh", [0, 1])
    driver.index.pin(array([1]))
    assert driver.evict(9) == []
    driver.index.unpin(array([0, 1]))
    assert driver.evict(9) == [1, 0]


def test_misuse_is_refused_and_changes_nothing(driver: Driver) -> None:
    driver.insert("abcdef", [0, 1])
    index = driver.index
    for ids in ([0], [0, 1, 2]):
        with pytest.raises(ValueError, match="blocks"):
            driver.insert("abcdefgh", ids)
    for chars, ids in (("wxyz", [0]), ("wxyzw", [5, 5]), ("wxyz", [-1]), ("abcdefghi", [0, 7, 1])):
        with pytest.raises(ValueError, match="block"):
            driver.insert(chars, ids)
    traits = BlockTraits(fingerprints=np.zeros(3, dtype=np.uint64))
    with pytest.raises(ValueError, match="traits"):
        index.insert(DEFAULT_NAMESPACE, text("wxyz"), array([9]), 0.0, traits)
    with pytest.raises(ValueError, match="partial"):
        index.pin(array([0, 1]))
    with pytest.raises(ValueError, match="isn't pinned"):
        index.unpin(array([0]))
    for call in (index.pin, index.unpin, lambda ids: index.touch(ids, 0.0)):
        for absent in (5, 10**6, -1):
            with pytest.raises(ValueError, match="isn't in the index"):
                call(array([absent]))
    index.check()
    assert driver.match("abcdefgh") == (6, [0, 1])
    assert (index.num_blocks, index.num_evictable) == (2, 2)


def test_ids_may_be_large_and_are_reused(driver: Driver) -> None:
    driver.insert("abcdefgh", [100_000, 5])
    assert driver.evict(9) == [5, 100_000]
    driver.insert("wxyzab", [5, 100_000])
    assert driver.match("wxyzab") == (6, [5, 100_000])


def test_an_id_keeps_nothing_of_its_former_block(driver: Driver) -> None:
    driver.insert("abcd", [5])
    assert driver.evict(1) == [5]
    driver.insert("xy", [5])
    driver.insert("abcd", [6])
    assert driver.evict(1) == [5]
    assert driver.match("abcd") == (4, [6])


def test_matches_do_not_change_the_order_of_eviction(driver: Driver) -> None:
    driver.insert("abcd", [0])
    driver.insert("wxyz", [1])
    driver.match("abcd")
    assert driver.evict(1) == [0]


def test_any_int32_is_a_token(driver: Driver) -> None:
    low, high = -(2**31), 2**31 - 1
    chains = ([low, high, 0, -1], [low, high, -1, 0], [high], [-1, -1, -1, -1, -1])
    ids = ([0], [1], [2], [3, 4])
    for tokens, blocks in zip(chains, ids, strict=True):
        driver.index.insert(DEFAULT_NAMESPACE, array(tokens), array(blocks), driver.tick())
        driver.index.check()
    for tokens, blocks in zip(chains, ids, strict=True):
        assert driver.index.match(DEFAULT_NAMESPACE, array(tokens)).block_ids.tolist() == blocks


def test_block_size_must_be_positive() -> None:
    for make in INDEXES.values():
        with pytest.raises(ValueError, match="block_size"):
            make(0)


def following(driver: Driver, chars: str, namespace: Namespace = DEFAULT_NAMESPACE) -> str:
    return "".join(map(chr, driver.index.match(namespace, text(chars)).following.tolist()))


def test_a_match_says_how_the_cached_sequence_goes_on(driver: Driver) -> None:
    driver.insert("abcdefghij", [0, 1, 2])
    assert following(driver, "abcdeX") == "fghij"
    assert following(driver, "abcdefghX") == "ij"
    assert following(driver, "abcdX") == "efghij"
    assert following(driver, "abcdefghijX") == ""
    assert following(driver, "abcde") == ""
    assert following(driver, "X") == ""
    assert following(driver, "") == ""
    driver.evict(1)
    assert following(driver, "abcdefX") == "gh"


def test_what_follows_is_bounded_and_of_the_same_namespace(driver: Driver) -> None:
    long = "abcd" + "efgh" * 20
    driver.insert(long, list(range(21)), Namespace(salt="other"))
    assert following(driver, "abcX", Namespace(salt="other")) == long[3 : 3 + MAX_FOLLOWING]
    assert following(driver, "abcX") == ""
    driver.insert("abcz", [30])
    assert following(driver, "abcX") == "z"
