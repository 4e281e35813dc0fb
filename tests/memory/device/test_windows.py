"""Which layers lie in pages, and how far back a sequence keeps them."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.memory.device.layout import WindowGroup
from stemma.model.attend.attention import Sight

SHAPE = (2, 16)


@pytest.mark.parametrize(
    ("sights", "layers", "window", "is_chunked"),
    [
        ([(None, 32), (None, None), (None, 32)], (0, 2), 32, True),
        ([(24, None), (None, None)], (0,), 24, False),
        ([(24, None), (None, 32), (None, None)], (0, 1), 32, False),
        ([(None, 32), (None, 32)], (1,), 32, True),
    ],
    ids=["chunks", "windows", "both", "all in chunks: the first stays in blocks"],
)
def test_group_of(sights, layers, window, is_chunked) -> None:
    group = WindowGroup.of(sights, [SHAPE] * len(sights))
    assert group == WindowGroup(layers, window, *SHAPE, is_chunked=is_chunked)


@pytest.mark.parametrize("sight", [Sight(window=24), Sight(chunk=24), Sight(chunk=1)])
def test_all_that_is_seen_is_kept_and_little_more(sight: Sight) -> None:
    group = WindowGroup.of([(sight.window, sight.chunk), (None, None)], [SHAPE] * 2)
    assert group is not None
    for position in range(1, 100):
        seen = int(sight.first(np.arange(position, 100)).min())
        assert seen - 1 <= group.first_seen(position) <= seen
        assert group.first_seen(position) < position, "a checkpoint without a page"


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("first_key", [0, 1, 9])
def test_sight_by_its_definition(window: int | None, chunk: int | None, first_key: int) -> None:
    sight, positions = Sight(window, chunk, first_key), np.arange(40)

    def sees(query: int, key: int) -> bool:
        in_window = window is None or query - key < window
        in_chunk = chunk is None or query // chunk == key // chunk
        return query == key or (in_window and in_chunk and key >= first_key)

    expected = [min(key for key in range(query + 1) if sees(query, key)) for query in positions.tolist()]
    assert sight.first(positions).tolist() == expected
    assert sight.is_whole == (not any(expected) and (window, chunk, first_key) == (None, None, 0))
