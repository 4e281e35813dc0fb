"""The tokens of a sequence have one home, whoever reads them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stemma.memory.cache.lease import TokenBuffer


@given(st.lists(st.integers(0, 99), max_size=5), st.lists(st.integers(0, 99), max_size=200))
def test_views_stay_as_they_were_and_the_array_it_began_with_is_not_written(first, added):
    base = np.array([*first, 7, 7, 7], dtype=np.int32)
    buffer = TokenBuffer(base[: len(first)])
    views = []
    for token_id in added:
        views.append(buffer.view)
        buffer.append(token_id)
    assert buffer.view.tolist() == first + added
    assert len(buffer) == len(first) + len(added)
    assert [view.tolist() for view in views] == [(first + added)[: len(first) + i] for i in range(len(added))]
    assert base.tolist() == [*first, 7, 7, 7]


def test_other_integers_become_int32():
    """Keys are hashes of the tokens' bytes."""
    assert TokenBuffer(cast(Any, np.arange(6, dtype=np.int64)[::2])).view.tobytes() == b"".join(
        i.to_bytes(4, "little") for i in (0, 2, 4)
    )
