"""Whose turn it is where KV and checkpoints share a memory: hints first, KV alone, then each its own kind."""

from __future__ import annotations

import pytest

from stemma.memory.cache.turns import Turn, checkpoint_goes, turn_of
from stemma.types import RetentionHint

NOW = 10_000.0


def turns(own: Turn, kv: Turn, *, serves: bool = True) -> tuple[bool, bool]:
    """Return whether the checkpoint goes before the KV, where a state and where blocks are wanted."""
    return (
        checkpoint_goes(own, kv, NOW, serves=serves, for_blocks=False),
        checkpoint_goes(own, kv, NOW, serves=serves, for_blocks=True),
    )


@pytest.mark.parametrize(
    ("unused_s", "expected"),
    [(1000.0, (True, False)), (3000.0, (True, True)), (300.0, (False, False))],
)
def test_the_kind_that_is_wanted_goes_unless_the_other_was_unused_much_longer(
    unused_s: float, expected: tuple[bool, bool]
) -> None:
    assert turns((50, NOW - unused_s), (50, NOW - 1000.0)) == expected


def test_kv_without_a_checkpoint_behind_it_goes_first() -> None:
    assert turns((50, 0.0), (50, NOW), serves=False) == (False, False)


def test_hints_count_for_more() -> None:
    assert turns((10, NOW), (90, 0.0)) == (True, True)
    assert turns((90, 0.0), (10, NOW)) == (False, False)
    assert turns((10, NOW), (90, 0.0), serves=False) == (True, True)


def test_what_has_expired_goes_first_of_all() -> None:
    expired = turn_of(RetentionHint(99, ttl_s=5.0), NOW - 6.0, NOW)
    assert turns(expired, (0, 0.0)) == (True, True)
    assert turn_of(RetentionHint(99, ttl_s=7.0), NOW - 6.0, NOW)[0] == 99
