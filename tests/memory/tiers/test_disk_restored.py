"""The index of a restart, worked out in numpy, against a plain loop over the same records."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stemma.memory.tiers.disk.record import RECORD_DTYPE, Record
from stemma.memory.tiers.disk.restored import restored_blocks
from stemma.types import BlockKey

HEADS = [bytes([n]) * 8 for n in range(3)]
KEYS = [BlockKey(head + bytes([n]) * 24) for head in HEADS for n in range(4)]
"""Some share their first 8 bytes, which real digests never do: then whole keys must decide."""
UNLIKE = [BlockKey(bytes([n]) * 32) for n in range(12)]


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(1, 3)), max_size=12),
    st.sampled_from([KEYS, UNLIKE]),
)
def test_like_a_plain_loop(drawn: list[tuple[int, int, int]], names: list[BlockKey]) -> None:
    """`drawn`: key, parent and time of use of the block in each slot; later slots were written later."""
    packed = [
        Record(slot, names[key], names[parent], slot + 1, 0, 64, "", float(used)).pack()
        for slot, (key, parent, used) in enumerate(drawn)
    ]
    records = np.frombuffer(b"".join(packed), dtype=RECORD_DTYPE)
    found = restored_blocks(np.arange(len(drawn), dtype=np.int64), records)

    youngest = {key: slot for slot, (key, _, _) in enumerate(drawn)}
    slots = sorted(youngest.values(), key=lambda slot: (-drawn[slot][2], slot))
    keys = [names[drawn[slot][0]] for slot in slots]
    parents = [names[drawn[slot][1]] for slot in slots]
    assert found.slots.tolist() == slots
    assert found.keys == keys
    assert found.parents == parents
    assert found.parent_at.tolist() == [keys.index(one) if one in keys else -1 for one in parents]
    assert found.records["slot"].tolist() == slots
