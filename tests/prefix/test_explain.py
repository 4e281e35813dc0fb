"""Ghosts are bounded, and each fact leads to its reason."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.prefix.explain import Ghost, Ghosts, MissFacts, MissReason, explain_miss
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, partial_key

ROOT = KeySpace("model", "layout", 4).root(DEFAULT_NAMESPACE)


def ghost(num_tokens: int, gone_at: float = 0.0) -> Ghost:
    return Ghost(gone_at, MissReason.EVICTED, "lru", num_tokens)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_ghosts_are_bounded_and_the_oldest_go_first():
    ghosts = Ghosts(capacity=2)
    for i in range(3):
        ghosts.add(partial_key(ROOT, tokens(i)), ghost(1))
    assert len(ghosts) == 2
    assert ghosts.find(ROOT, tokens(0)) is None
    assert ghosts.find(ROOT, tokens(2)) is not None


def test_the_longest_ghost_is_found():
    ghosts = Ghosts(capacity=9)
    ghosts.add(partial_key(ROOT, tokens(1, 2)), ghost(2))
    ghosts.add(partial_key(ROOT, tokens(1, 2, 3)), ghost(3))
    for asked, num_tokens in ((tokens(1, 2, 3, 4), 3), (tokens(1, 2), 2)):
        found = ghosts.find(ROOT, asked)
        assert found is not None
        assert found.num_tokens == num_tokens
    assert ghosts.find(ROOT, tokens(1, 9)) is None


def test_a_block_that_comes_back_is_no_ghost():
    ghosts = Ghosts(capacity=9)
    key = partial_key(ROOT, tokens(1))
    ghosts.add(key, ghost(1))
    ghosts.remove(key)
    ghosts.remove(key)
    assert len(ghosts) == 0
    assert ghosts.find(ROOT, tokens(1)) is None


@pytest.mark.parametrize(
    ("facts", "reason", "part"),
    [
        (MissFacts(10, 9, True), MissReason.LAST_TOKEN, "last prompt token"),
        (MissFacts(1, 0, False), MissReason.LAST_TOKEN, "last prompt token"),
        (MissFacts(10, 0, False), MissReason.COLD, "begins like this"),
        (MissFacts(10, 0, False, ghost(4, 2.0)), MissReason.EVICTED, "by policy lru 3.0 s ago"),
        (MissFacts(10, 4, True, ghost(4)), MissReason.EVICTED, "after position 4"),
        (MissFacts(10, 4, True), MissReason.DIVERGED, "position 4"),
        (MissFacts(10, 4, False), MissReason.EXTENDS, "4 of 10"),
        (MissFacts(10, 4, False, None, 3), MissReason.NO_ROOM, "3 more tokens"),
        (
            MissFacts(10, 0, False, Ghost(1.0, MissReason.FLUSHED, "lru", 4)),
            MissReason.FLUSHED,
            "was flushed 4.0 s ago",
        ),
    ],
)
def test_reason_and_sentence(facts, reason, part):
    miss = explain_miss(facts, now=5.0)
    assert miss.reason is reason
    assert part in miss.detail
