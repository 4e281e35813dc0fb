"""What the router knows of replicas equals a brute-force model, whatever order events come in."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stemma.told import adapter_root
from stemma_router.cluster.block_table import BlockTable
from stemma_router.cluster.holdings import Holdings
from stemma_router.kv_events.names import CHECKPOINT, chain_of, told_words

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "copy", "remove", "clear", "keep"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 12), max_size=6),
        st.sampled_from(["GPU", "CPU", "STORAGE"]),
    ),
    max_size=40,
)


def told(ids: list[int]) -> np.ndarray:
    """The replicas' own hashes of blocks."""
    return np.array([one + 1000 for one in ids], dtype=np.uint64)


@given(EVENTS, st.lists(st.integers(0, 12), max_size=8, unique=True))
def test_depths_equal_a_brute_force_model(events, chain) -> None:
    holdings = Holdings(secret=7)
    model: set[tuple[int, str, int]] = set()
    for kind, replica, ids, tier in events:
        known = {one for owner, _, one in model if owner == replica}
        if kind == "store":
            holdings.store(replica, ids, tier, told(ids))
            model |= {(replica, tier, one) for one in ids}
        elif kind == "copy":
            unknown = holdings.copy(replica, told(ids), tier)
            assert unknown == sum(one not in known for one in ids)
            model |= {(replica, tier, one) for one in ids if one in known}
        elif kind == "remove":
            holdings.remove(replica, told(ids), tier)
            model -= {(replica, tier, one) for one in ids}
        else:
            holdings.clear(replica, keep=tier if kind == "keep" else None)
            model = {entry for entry in model if entry[0] != replica or (kind == "keep" and entry[1] == tier)}
        holdings.check()
    expected = []
    for replica in range(5):
        held = [any((replica, tier, one) in model for tier in ("GPU", "CPU", "STORAGE")) for one in chain]
        expected.append(held.index(False) if False in held else len(chain))
        mine = {one for owner, _, one in model if owner == replica}
        names = holdings.names(replica, told(list(range(13)))).tolist()
        assert names == [one if one in mine else 0 for one in range(13)]
        assert holdings.num_blocks(replica) == len(mine)
    assert holdings.depths(chain, 5) == expected
    assert holdings.num_ids == len({(owner, one) for owner, _, one in model})


CHAIN = [11, 12, 13, 14, 15, 16]


@given(st.sets(st.sampled_from(CHAIN)), st.sets(st.sampled_from(CHAIN)))
def test_a_replica_with_checkpoints_goes_on_behind_the_deepest_one(blocks, checkpoints) -> None:
    """It holds all blocks before it, and what another one holds makes no difference."""
    holdings = Holdings(secret=3)
    holdings.require_checkpoints(1)
    for replica in range(2):
        holdings.store(replica, sorted(blocks))
        holdings.store(replica, [one ^ CHECKPOINT for one in sorted(checkpoints)])
    depth = next((n for n, one in enumerate(CHAIN) if one not in blocks), len(CHAIN))
    deepest = max((n + 1 for n, one in enumerate(CHAIN[:depth]) if one in checkpoints), default=0)
    assert holdings.depths(CHAIN, 2) == [depth, deepest]
    holdings.clear(1, keep="GPU")
    assert holdings.depths(CHAIN, 2) == [depth, deepest]
    holdings.clear(1)
    holdings.store(1, CHAIN)
    assert holdings.depths(CHAIN, 2)[1] == len(CHAIN), "another server may need none"


def test_many_blocks_of_many_replicas_are_all_found() -> None:
    """Through every growth of the table, none is lost while there is room."""
    holdings = Holdings(secret=1)
    rng = np.random.default_rng(0)
    chains = [rng.integers(1, 2**63, 400, dtype=np.uint64) for _ in range(200)]
    for number, chain in enumerate(chains):
        holdings.store(number % 16, chain)
    holdings.check()
    lost = sum(
        len(chain) - holdings.depths(chain.tolist(), 16)[number % 16] for number, chain in enumerate(chains)
    )
    assert (holdings.num_ids, holdings.num_evicted, lost) == (200 * 400, 0, 0)
    assert holdings.num_bytes <= 32 * holdings.num_ids
    for number, chain in enumerate(chains):
        holdings.remove(number % 16, chain)
    assert holdings.num_ids == 0
    holdings.check()


def test_a_full_table_drops_what_was_used_longest_ago() -> None:
    """And never what is new: a hot prefix is known however many others come."""
    holdings = Holdings(20_000, secret=1)
    rng = np.random.default_rng(0)
    hot, first = (rng.integers(1, 2**63, 200, dtype=np.uint64).tolist() for _ in range(2))
    holdings.store(0, hot)
    holdings.store(0, first)
    for _ in range(300):
        cold = rng.integers(1, 2**63, 500, dtype=np.uint64)
        holdings.store(1, cold)
        assert holdings.depths(cold.tolist(), 2)[1] == 500
        assert holdings.depths(hot, 2)[0] == 200
    assert holdings.depths(first, 2)[0] == 0
    assert holdings.num_evicted > 100_000
    assert holdings.num_bytes < 20_000 * 30
    holdings.check()


def test_clearing_a_replica_takes_no_time_and_its_room_is_used_again() -> None:
    holdings = Holdings(secret=1)
    rng = np.random.default_rng(0)
    for _ in range(40):
        chain = rng.integers(1, 2**63, 5000, dtype=np.uint64)
        holdings.store(0, chain)
        holdings.store(1, chain[:10])
        assert holdings.depths(chain.tolist(), 2) == [5000, 10]
        holdings.clear(0)
        assert holdings.depths(chain.tolist(), 2) == [0, 10]
    assert holdings.num_ids == 400
    assert holdings.num_bytes < 32 * 20_000
    holdings.check()


def test_a_table_finds_blocks_whose_windows_are_full() -> None:
    """Keys that share windows crowd each other out, and nothing else."""
    table = BlockTable(1000)
    keys = np.arange(1, 3001, dtype=np.uint64)
    table.put(keys, keys, 3, 1)
    table.check()
    held = table.holds(keys)
    assert int(held.sum()) == table.counts[3] == 3000 - table.num_evicted
    assert table.counts[3] > 2800
    assert held[-100:].mean() > 0.9


def test_names_stand_for_whole_prefixes() -> None:
    tokens = np.arange(40, dtype=np.int32)
    chain = chain_of(tokens, 16)
    assert len(chain) == 2
    assert chain_of(tokens[:16], 16) == chain[:1]
    assert chain_of(tokens[16:32], 16, chain[0]) == chain[1:]
    tokens[0] = 7
    assert not set(chain_of(tokens, 16)) & set(chain)
    assert adapter_root(None) == 0 != adapter_root("a")
    assert len(set(told_words([b"a", b"b", 5, -5, 2**200 + 6]).tolist())) == 5


@pytest.mark.parametrize("secret", [None, 5])
def test_no_replicas_and_no_blocks(secret) -> None:
    holdings = Holdings(secret=secret)
    assert holdings.depths([1, 2], 0) == []
    assert holdings.depths([], 3) == [0, 0, 0]
    holdings.store(0, [])
    holdings.remove(5, [1])
