"""The store of responses against its bounds, with a clock that the test moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.server.apis.responses.store import OwnedStore, StoredResponse
from stemma.types import as_tokens

ENTRY = StoredResponse(b"x" * 100, b"[]", as_tokens([1, 2, 3]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_starts_anew_with_each_use() -> None:
    clock = Clock()
    store = OwnedStore[StoredResponse](10, 1 << 20, 60.0, clock)
    store.put("me", "a", ENTRY)
    store.put("me", "b", ENTRY)
    clock.now = 50.0
    assert store.get("me", "a") is ENTRY
    clock.now = 70.0
    assert store.get("me", "b") is None
    assert store.get("me", "a") is ENTRY
    clock.now = 130.0
    assert store.get("me", "a") is None
    assert (store.num_entries, store.num_bytes) == (0, 0)


def test_owners_never_see_or_push_out_each_other() -> None:
    store = OwnedStore[StoredResponse](4, 1 << 20, 60.0)
    store.put("small", "mine", ENTRY)
    for number in range(20):
        store.put("large", str(number), ENTRY)

    assert store.get("small", "mine") is ENTRY
    assert store.get("large", "mine") is None
    assert not store.delete("large", "mine")
    assert store.num_entries == 4
    assert [store.get("large", str(n)) is not None for n in (16, 17, 18, 19)] == [False, True, True, True]


def test_what_is_too_large_is_not_kept() -> None:
    store = OwnedStore[StoredResponse](4, 2000, 60.0)
    assert store.put("me", "a", ENTRY)
    assert not store.put("me", "b", StoredResponse(b"x" * 2000, b"[]", as_tokens([])))
    assert store.get("me", "a") is ENTRY


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "delete", "wait"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 5),
            st.integers(0, 900),
        ),
        max_size=60,
    )
)
def test_bounds_hold_and_counts_are_true(steps: list[tuple[str, str, int, int]]) -> None:
    clock = Clock()
    store = OwnedStore[StoredResponse](4, 5000, 10.0, clock)
    for action, owner, number, size in steps:
        if action == "put":
            store.put(owner, str(number), StoredResponse(b"x" * size, b"[]", np.zeros(0, np.int32)))
            assert store.get(owner, str(number)) is not None
        elif action == "get":
            store.get(owner, str(number))
        elif action == "delete":
            store.delete(owner, str(number))
            assert store.get(owner, str(number)) is None
        else:
            clock.now += size / 100
        kept = [store.get(name, str(n)) for name in "ab" for n in range(6)]
        assert store.num_entries == sum(entry is not None for entry in kept) <= 4
        assert store.num_bytes == sum(entry.num_bytes for entry in kept if entry is not None) <= 5000
