"""Whose turn it is where KV and checkpoints share a memory: hints first, KV alone, then each its own kind."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory.cache.test_shared_memory import Rig

from stemma.types import BlockKey


def served(rig: Rig, first: int, num_tokens: int, priority: int = 50) -> BlockKey:
    """Serve a prompt; return the key of the block that its last checkpoint stands behind."""
    rig.begin(np.arange(first, first + num_tokens, dtype=np.int32), priority)
    lease = rig.leases[-1]
    rig.step(lease, num_tokens)
    key = lease.key(num_tokens // rig.states.unit * rig.states.unit // rig.cache.block_size - 1)
    rig.end(lease)
    return key


def turns(rig: Rig, key: BlockKey) -> tuple[bool, bool]:
    """Return whether this checkpoint goes before the first KV, where a state and where blocks are wanted."""
    kept = rig.states._kept  # noqa: SLF001 - what goes first depends on all else that lies there
    assert kept.kv is not None
    first = kept.kv.first()
    assert first is not None
    one = kept[key]
    return (
        kept._goes_before(one, *first, for_blocks=False),  # noqa: SLF001
        kept._goes_before(one, *first, for_blocks=True),  # noqa: SLF001
    )


@pytest.mark.parametrize(
    ("unused_s", "expected"),
    [(1000.0, (True, False)), (3000.0, (True, True)), (300.0, (False, False))],
)
def test_the_kind_that_is_wanted_goes_unless_the_other_was_unused_much_longer(
    unused_s: float, expected: tuple[bool, bool]
) -> None:
    rig = Rig("states", 60, "retention")
    key = served(rig, 0, 128)
    rig.now += 1000.0
    rig.states._kept[key].used_at = rig.now - unused_s  # noqa: SLF001
    assert turns(rig, key) == expected


def test_kv_without_a_checkpoint_behind_it_goes_first() -> None:
    rig = Rig("states", 60, "retention")
    alone, other = served(rig, 0, 128), served(rig, 5000, 128)
    rig.states._kept.drop(alone)  # noqa: SLF001
    rig.now += 1000.0
    rig.states._kept[other].used_at = 0.0  # noqa: SLF001
    assert turns(rig, other) == (False, False)


def test_priorities_count_for_more() -> None:
    rig = Rig("states", 60, "retention")
    alone, low = served(rig, 0, 128, priority=90), served(rig, 5000, 128, priority=10)
    kept = rig.states._kept  # noqa: SLF001
    kept.drop(alone)
    assert kept._goes_before(kept[low], alone, (90, 0.0), for_blocks=True)  # noqa: SLF001
    assert not kept._goes_before(kept[low], low, (0, rig.now), for_blocks=False)  # noqa: SLF001
