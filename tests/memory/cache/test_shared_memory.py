"""Blocks, states and pages out of one small memory: everybody finds what they left, whatever goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.buffers import HashBuffer, expected_kv

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import Retention, RetentionHint

BLOCK, SLAB = 32, 3
WINDOW = WindowGroup((0,), 70, 1, 16)


class Rig:
    """A cache whose states and pages hold, in their first number, what tells whose they are."""

    def __init__(self, kind: str, num_slabs: int, eviction: str) -> None:
        self.buffer = HashBuffer(num_slabs * SLAB, BLOCK)
        slabs = SlabAllocator(self.buffer.num_blocks, SLAB, self.clear)
        windows = None if kind == "states" else WINDOW
        places = Places(
            slabs,
            int(kind != "windows"),
            self.blocks_of,
            int(windows is not None),
            self.blocks_of,
            lambda source, target: self.write(target, self.read(source)),
            windows,
        )
        self.now = 0.0
        states = CachedStates(places, BLOCK, None, self.clock, interval=64, policy=make_policy(eviction))
        self.states = states
        index = RadixIndex(BLOCK, make_policy(eviction))
        space = KeySpace("model", "layout", BLOCK)
        self.cache = PrefixCache(self.buffer, index, space, states=states, clock=self.clock)
        self.leases: list[Lease] = []

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def blocks_of(self, place: int) -> range:
        return range(place * SLAB, (place + 1) * SLAB)

    def clear(self, slab: int) -> None:
        self.buffer.data[slab * SLAB : (slab + 1) * SLAB] = 0

    def write(self, place: int, value: int) -> None:
        self.buffer.data[place * SLAB : (place + 1) * SLAB] = value

    def read(self, place: int) -> int:
        block = self.buffer.data[place * SLAB : (place + 1) * SLAB]
        assert (block == block[0, 0]).all(), "somebody wrote into a state or a page"
        return int(block[0, 0])

    def verify(self, lease: Lease) -> None:
        own = lease.state
        assert own is not None
        self.buffer.verify(lease, own.position)
        values = expected_kv(lease.namespace, lease.tokens[: own.position])
        if own.state is not None:
            assert self.read(own.state) == values[-1]
        for block, page in own.pages.items():
            if (block + 1) * BLOCK <= own.position:
                assert self.read(page) == values[(block + 1) * BLOCK - 1]

    def begin(self, tokens: np.ndarray, priority: int = 50, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        retention = Retention(RetentionHint(priority))
        lease = self.cache.reserve(namespace, tokens, retention=retention)
        if lease is not None:
            assert lease.state is not None
            assert lease.state.position == lease.num_cached_tokens
            self.verify(lease)
            self.leases.append(lease)

    def step(self, lease: Lease, num_tokens: int) -> None:
        assert lease.state is not None
        start = lease.state.position
        if start == lease.num_tokens:
            lease.buffer.extend([7])
        end = min(start + num_tokens, lease.num_tokens)
        if not self.cache.extend(lease, end) or not self.cache.plan_state(lease, start, end):
            return
        self.verify(lease)
        self.buffer.compute(lease, start, end)
        values = expected_kv(lease.namespace, lease.tokens[:end])
        move = lease.state.move
        assert move is not None
        if move.last is not None:
            for position, state in (*move.snapshots, (end, move.last)):
                self.write(state, values[position - 1])
        for block, page in lease.state.pages.items():
            if end >= (block + 1) * BLOCK > start:
                self.write(page, values[(block + 1) * BLOCK - 1])
        assert self.cache.land_state(lease, end, end)
        self.cache.commit(lease, end)

    def end(self, lease: Lease) -> None:
        assert lease.state is not None
        self.leases.remove(lease)
        self.cache.free(lease, lease.state.position)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["states", "windows", "both"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_everybody_finds_what_they_left(kind: str, data: st.DataObject) -> None:
    rig = Rig(
        kind, data.draw(st.sampled_from((8, 14, 40))), data.draw(st.sampled_from(("retention", "hazard")))
    )
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("begin", "begin", "step", "step", "step", "end", "flush")))
        if action == "begin":
            tokens = np.full(data.draw(st.integers(2, 400)), data.draw(st.integers(0, 3)), dtype=np.int32)
            tokens[: data.draw(st.sampled_from((0, 100, 200)))] = 9
            rig.begin(tokens, data.draw(st.sampled_from((10, 50, 90))))
        elif action == "flush":
            rig.cache.flush()
        elif rig.leases:
            lease = rig.leases[data.draw(st.integers(0, len(rig.leases) - 1))]
            if action == "end":
                rig.end(lease)
            else:
                rig.step(lease, data.draw(st.sampled_from((1, 40, 150, 400))))
        rig.cache.check()
    for lease in list(rig.leases):
        rig.verify(lease)
        rig.end(lease)
    rig.cache.flush()
    rig.cache.check()
    assert rig.cache.stats().num_free_blocks == rig.cache.num_blocks


OWNERS = {owner: Namespace(owner, owner=owner) for owner in ("ada", "bob", "eve")}
"""eve has no quota."""


def held_by(rig: Rig, owner: str) -> tuple[set[int], set[int], set[int]]:
    """Return an owner's cached blocks, states and pages."""
    assert rig.cache.index is not None
    blocks = {
        block
        for namespace, _, chain in rig.cache.index.walk()
        if namespace.owner == owner
        for block in chain.tolist()
    }
    return blocks, *rig.states.holdings_of(owner)


def in_use(rig: Rig, owner: str) -> tuple[set[int], set[int], set[int]]:
    """Return the blocks, states and pages that an owner's requests hold."""
    own = [lease for lease in rig.leases if lease.namespace.owner == owner]
    states = [lease.state for lease in own if lease.state is not None]
    return (
        {block for lease in own for block in lease.block_table.tolist()},
        {one.state for one in states if one.state is not None},
        {page for one in states for page in one.pages.values()},
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["states", "windows", "both"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_quota_holds_for_kv_and_checkpoints_together(kind: str, data: st.DataObject) -> None:
    """What requests hold alone may exceed it. With room for all, no other owner loses anything."""
    rig = Rig(kind, num_slabs := data.draw(st.sampled_from((20, 400))), "hazard")
    quotas = {"ada": 9, "bob": 24}
    rig.cache.set_quotas(quotas)
    for _ in range(data.draw(st.integers(1, 40))):
        before = {owner: held_by(rig, owner) for owner in OWNERS}
        action = data.draw(st.sampled_from(("begin", "begin", "step", "step", "step", "end", "quota")))
        acting = data.draw(st.sampled_from(sorted(OWNERS)))
        own = [lease for lease in rig.leases if lease.namespace.owner == acting]
        if action == "begin":
            tokens = np.full(data.draw(st.integers(2, 400)), data.draw(st.integers(0, 3)), dtype=np.int32)
            tokens[: data.draw(st.sampled_from((0, 100, 200)))] = 9
            rig.begin(tokens, namespace=OWNERS[acting])
        elif action == "quota" and acting in quotas:
            quotas[acting] = data.draw(st.integers(0, 40))
            rig.cache.set_quotas(quotas)
        elif own and action == "end":
            rig.end(own[0])
        elif own:
            rig.step(own[-1], data.draw(st.sampled_from((1, 40, 150, 400))))
        rig.cache.check()
        for owner, quota in quotas.items():
            blocks, states, pages = held_by(rig, owner)
            used_blocks, used_states, used_pages = in_use(rig, owner)
            if len(blocks) + SLAB * (len(states) + len(pages)) > quota:
                assert blocks <= used_blocks
                assert states <= used_states
                assert not pages or pages & used_pages
        if num_slabs == 400:
            for owner in OWNERS:
                assert owner == acting or held_by(rig, owner) == before[owner]
