"""Public heads: shared by all namespaces, and nothing behind them is. Both indexes, brute force as oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.prefix.hashed import HashIndex
from stemma.prefix.headed import HeadedIndex
from stemma.prefix.keys import KeySpace, Namespace, PublicHead
from stemma.prefix.radix import RadixIndex

SIZE = 2
SPACE = KeySpace("model", "layout", SIZE)
HEADS = ((0, 1), (0, 1, 1, 0), (0, 0))
INDEXES = {"radix": lambda: RadixIndex(SIZE), "hash": lambda: HashIndex(SPACE)}


def array(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def behind(head: tuple[int, ...], salt: str, owner: str = "") -> Namespace:
    return Namespace(salt=salt, owner=owner, head=PublicHead.of(array(head)))


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> HeadedIndex:
    return HeadedIndex(INDEXES[request.param]())


def test_the_head_is_shared_and_nothing_behind_it(index: HeadedIndex) -> None:
    ada, bob = behind(HEADS[0], "ada"), behind(HEADS[0], "bob")
    index.insert(ada, array([0, 1, 5, 6, 7]), array([10, 11, 12]), 0.0)
    index.check()
    assert index.match(ada, array([0, 1, 5, 6, 7, 8])).block_ids.tolist() == [10, 11, 12]
    found = index.match(bob, array([0, 1, 5, 6, 7]))
    assert (found.num_tokens, found.block_ids.tolist()) == (2, [10])
    assert found.following.tolist() == []
    inserted = index.insert(bob, array([0, 1, 5, 6]), array([13, 14]), 1.0)
    assert (inserted.canonical.tolist(), inserted.added.tolist()) == ([10, 14], [14])
    assert index.match(Namespace(salt="ada"), array([0, 1, 5, 6])).num_tokens == 0
    assert index.match(Namespace(), array([0, 1])).num_tokens == 0
    index.check()


def test_an_evicted_head_hides_what_follows_until_it_is_back(index: HeadedIndex) -> None:
    ada = behind(HEADS[0], "ada")
    index.insert(ada, array([0, 1, 5, 6]), array([3, 4]), 0.0)
    index.touch(array([4]), 5.0)
    assert index.evict(1, 6.0).tolist() == [3]
    index.check()
    assert index.match(ada, array([0, 1, 5, 6])).num_tokens == 0
    index.insert(behind(HEADS[0], "bob"), array([0, 1]), array([9]), 7.0)
    assert index.match(ada, array([0, 1, 5, 6])).block_ids.tolist() == [9, 4]
    index.check()


def test_pins_and_quotas_know_the_owner(index: HeadedIndex) -> None:
    ada = behind(HEADS[0], "ada", owner="ada")
    index.insert(ada, array([0, 1, 5, 6, 7, 8]), array([1, 2, 3]), 0.0)
    index.pin(array([1, 2, 3]))
    assert index.evict(9, 1.0).tolist() == []
    index.unpin(array([1, 2, 3]))
    index.set_quotas({"ada": 1})
    assert index.num_over_quota == 1  # the head isn't ada's
    index.touch(array([1, 2, 3]), 2.0)
    assert index.evict(index.num_over_quota, 3.0).tolist() == [3]
    index.check()


def test_keys_of_heads_are_equal_and_those_behind_are_not() -> None:
    tokens = array([0, 1, 1, 0, 7, 7, 9])
    ada, bob = (SPACE.roots(behind(HEADS[1], who)).chain(tokens) for who in ("ada", "bob"))
    assert ada[:2] == bob[:2]
    assert ada[2] != bob[2]
    other = SPACE.roots(behind((0, 1, 1, 1), "ada")).chain(tokens)
    assert other[2] not in ada
    assert SPACE.roots(Namespace(salt="ada")).chain(tokens)[0] != ada[0]
    roots = SPACE.roots(behind(HEADS[1], "ada"))
    in_parts = roots.extend(0, roots.first, tokens[:2])
    in_parts += roots.extend(1, in_parts[-1], tokens[2:])
    assert in_parts == ada
    assert roots.before(2, ada[1]) == roots.own == SPACE.root(behind(HEADS[1], "ada"))


prompts = st.tuples(
    st.sampled_from(["", "ada", "bob"]),
    st.sampled_from([None, *HEADS]),
    st.lists(st.integers(0, 1), max_size=6).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=12))
def test_both_indexes_agree_with_brute_force(steps: list) -> None:
    """What is found is the longest prefix that the same namespace, or for a head anybody, has inserted."""
    pair = [HeadedIndex(make()) for make in INDEXES.values()]
    cached: dict[object, set[tuple[int, ...]]] = {}
    free = list(range(200))
    for now, ((salt, head, tail), _) in enumerate(steps):
        namespace = Namespace(salt=salt) if head is None else behind(head, salt)
        tokens = (head or ()) + tail
        if not tokens:
            continue
        head_store = cached.setdefault("public", set()) if head else set()
        store = cached.setdefault(namespace, set())
        expected = _longest(store, tokens)
        if head:
            in_head = _longest(head_store, head)
            expected = in_head if in_head < len(head) else len(head) + _longest(store, tail)
        ids = array([free.pop() for _ in range(-(-len(tokens) // SIZE))])
        for index in pair:
            assert index.match(namespace, array(tokens)).num_tokens == expected
            index.insert(namespace, array(tokens), ids, float(now))
            index.check()
        if head:
            head_store.add(head)
        if head is None or tail:
            store.add(tail if head else tokens)


def _longest(store: set[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    return max((_common(one, tokens) for one in store), default=0)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
