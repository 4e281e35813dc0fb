"""Which decodes are grouped: shared blocks are equal, whole, before the queries, and the grouping pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemma.model.attend import shared_prefix
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.shared_prefix import MAX_GROUPS, PrefixGroup, SharedTensors, find_groups

BLOCK_SIZE = 16


def make(tables: list[list[int]], lens: list[int], queries: list[int] | None = None) -> ForwardBatch:
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(queries or [1] * len(tables))]).tolist()
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(nothing, nothing, nothing, starts, lens, torch.from_numpy(padded), nothing)


@pytest.fixture(autouse=True)
def every_saving_counts(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_KEYS", 1)


def test_decodes_over_one_prefix_are_a_group():
    prefix = list(range(1, 9))
    batch = make([[*prefix, 20], [*prefix, 21], [30, 31], [*prefix, 22, 23]], [130, 140, 20, 150])
    assert find_groups(batch, BLOCK_SIZE) == [PrefixGroup((0, 1, 3), 8)]


def test_little_savings_are_left_alone(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_KEYS", 129)
    prefix = list(range(1, 9))
    assert find_groups(make([prefix] * 2, [129] * 2), BLOCK_SIZE) == []
    assert find_groups(make([prefix] * 3, [129] * 3), BLOCK_SIZE) == [PrefixGroup((0, 1, 2), 8)]


def test_the_block_with_the_query_is_not_shared():
    """A block may be shared to its end only where the query lies behind it."""
    assert find_groups(make([[1, 2, 3]] * 2, [33, 48]), BLOCK_SIZE) == [PrefixGroup((0, 1), 2)]
    assert find_groups(make([[1, 2], [1, 2]], [16, 16]), BLOCK_SIZE) == []


def test_chunks_and_drafts_take_no_part():
    assert find_groups(make([[1, 2, 3]] * 3, [48] * 3, [2, 1, 1]), BLOCK_SIZE) == [PrefixGroup((1, 2), 2)]


def test_branches_are_taken_where_they_save_more():
    """Two pairs share 5 blocks each but only one with the other pair; three of five share all but one."""
    one, other = [1, 2, 3, 4, 5], [1, 6, 7, 8, 9]
    pairs = make([one, one, other, other], [81] * 4)
    assert find_groups(pairs, BLOCK_SIZE) == [PrefixGroup((0, 1), 5), PrefixGroup((2, 3), 5)]
    long = make([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 5]], [50] * 4)
    assert find_groups(long, BLOCK_SIZE) == [PrefixGroup((0, 1, 2, 3), 2)]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=5), st.integers(1, 16)),
        min_size=1,
        max_size=20,
    )
)
def test_groups_are_sound(sequences):
    tables = [table for table, _ in sequences]
    lens = [(len(table) - 1) * BLOCK_SIZE + last for table, last in sequences]
    batch = make(tables, lens)
    groups = find_groups(batch, BLOCK_SIZE)
    assert len(groups) <= MAX_GROUPS
    members = [member for group in groups for member in group.members]
    assert len(set(members)) == len(members)
    for group in groups:
        assert len(group.members) > 1
        assert group.num_blocks > 0
        assert len({tuple(tables[member][: group.num_blocks]) for member in group.members}) == 1
        assert all(group.num_blocks * BLOCK_SIZE < lens[member] for member in group.members)
    pairs = [
        (a, b)
        for a in range(len(tables))
        for b in range(a)
        if tables[a][0] == tables[b][0] and min(lens[a], lens[b]) > BLOCK_SIZE
    ]
    assert bool(groups) == bool(pairs)


def test_tensors_say_the_same():
    groups = [PrefixGroup((3, 1), 2), PrefixGroup((0, 4, 5), 1)]
    tensors = SharedTensors.of(groups, 7, BLOCK_SIZE, torch.device("cpu"))
    assert tensors.first_keys.tolist() == [16, 32, 0, 32, 16, 16, 0]
    assert tensors.member_of.tolist() == [2, 1, -1, 0, 3, 4, -1]
    assert tensors.members.tolist()[:5] == [3, 1, 0, 4, 5]
    assert tensors.member_starts.tolist() == [0, 2, 5]
    assert tensors.num_keys.tolist() == [32, 16]
    assert (tensors.max_members, tensors.num_groups) == (3, 2)
