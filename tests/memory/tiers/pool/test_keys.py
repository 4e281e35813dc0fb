"""Names in a pool never collide."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.block_store_suite import key_of

from stemma.memory.tiers.pool.keys import PoolKeys

spaces = st.builds(
    lambda model, size, rank: PoolKeys(model, rank % size, size),
    st.text(min_size=1, max_size=120) | st.sampled_from(["a_b", "a%5Fb", "a/b", "0_1_a", "~" + "0" * 64]),
    st.integers(1, 32),
    st.integers(0, 31),
)


@given(spaces, spaces, st.integers(0, 3), st.integers(0, 3))
def test_equal_names_mean_equal_blocks(first: PoolKeys, second: PoolKeys, one: int, other: int) -> None:
    same = first == second and one == other
    assert (first.own(key_of(one)) == second.own(key_of(other))) is same


@given(spaces)
def test_names_are_short_and_safe_as_file_names(space: PoolKeys) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._%~-]{1,200}", space.own(key_of("a")).replace("_", ""))
    assert len(space.own(key_of("a"))) <= 200


def test_shape_of_a_name() -> None:
    key = key_of("a")
    assert PoolKeys("org/Qwen_2", 1, 4).own(key) == f"{key.hex()}_1_4_org%2FQwen%5F2"


def test_a_rank_outside_the_group_is_misuse() -> None:
    with pytest.raises(ValueError, match="tp_rank"):
        PoolKeys("m", 2, 2)
