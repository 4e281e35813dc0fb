"""The tokens of a sequence have one home, whoever reads them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stemma.memory.cache.lease import TokenBuffer


@given(
    st.lists(st.integers(0, 99), max_size=5), st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=60)
)
def test_views_stay_as_they_were_and_the_array_it_began_with_is_not_written(first, added):
    base = np.array([*first, 7, 7, 7], dtype=np.int32)
    buffer = TokenBuffer(base[: len(first)])
    views = []
    whole = [*first]
    for token_ids in added:
        views.append((buffer.view, [*whole]))
        buffer.extend(token_ids)
        whole += token_ids
    assert buffer.view.tolist() == whole
    assert len(buffer) == len(whole)
    assert all(view.tolist() == then for view, then in views)
    assert base.tolist() == [*first, 7, 7, 7]


def test_other_integers_become_int32():
    """Keys are hashes of the tokens' bytes."""
    assert TokenBuffer(cast(Any, np.arange(6, dtype=np.int64)[::2])).view.tobytes() == b"".join(
        i.to_bytes(4, "little") for i in (0, 2, 4)
    )
