"""What the router knows of replicas equals a brute-force model, whatever order events come in."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

import stemma.cluster.holdings as holdings_module
from stemma.cluster.holdings import Holdings, chain_of

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear"]),
        st.integers(0, 4),
        st.lists(st.integers(1, 12), max_size=6),
        st.sampled_from(["GPU", "CPU"]),
    ),
    max_size=40,
)


@given(EVENTS, st.lists(st.integers(1, 12), max_size=8, unique=True))
def test_depths_equal_a_brute_force_model(events, chain) -> None:
    holdings, model = Holdings(), set()
    for kind, replica, ids, tier in events:
        if kind == "store":
            holdings.store(replica, ids, tier)
            model |= {(replica, tier, one) for one in ids}
        elif kind == "remove":
            holdings.remove(replica, ids, tier)
            model -= {(replica, tier, one) for one in ids}
        else:
            holdings.clear(replica)
            model = {entry for entry in model if entry[0] != replica}
    expected = []
    for replica in range(5):
        held = [any((replica, tier, one) in model for tier in ("GPU", "CPU")) for one in chain]
        expected.append(held.index(False) if False in held else len(chain))
    assert holdings.depths(chain, 5) == expected
    assert holdings.num_ids == len({(tier, one) for _, tier, one in model})


def test_names_stand_for_whole_prefixes() -> None:
    tokens = np.arange(40, dtype=np.int32)
    chain = chain_of(tokens, 16)
    assert len(chain) == 2
    assert chain_of(tokens[:16], 16) == chain[:1]
    assert chain_of(tokens[16:32], 16, chain[0]) == chain[1:]
    tokens[0] = 7
    assert not set(chain_of(tokens, 16)) & set(chain)


def test_a_peer_cannot_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(holdings_module, "MAX_IDS", 10)
    holdings = Holdings()
    holdings.store(0, range(25))
    assert (holdings.num_ids, holdings.num_refused) == (10, 15)
    holdings.store(1, range(10))
    assert holdings.depths(list(range(10)), 2) == [10, 10]
