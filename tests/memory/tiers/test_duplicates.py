"""A device above a host tier, held to a model of sets. Which duplicate goes first: test_index.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.memory.cache.served_prompts import tokens
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.transfer_rig import BLOCK, LAYOUT

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockKey, Tier, TokenArray

BLOCK_TOKENS = 16
NAMESPACES = (Namespace(), Namespace(salt="tenant"))
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
"""Blocks of a prompt by kind: prompts part and meet again often."""


class TwoTiers:
    """A cache of 6 device blocks above a host tier of 4, whose loads always pay."""

    def __init__(self) -> None:
        self.host = HostStore(BLOCK, 4 * BLOCK, LRUPolicy(), ManualClock())
        kv = DeviceKV(LAYOUT, 6)
        self.transfer = TierTransfer(
            DeviceCopy(kv),
            self.host,
            [],
            TransferPolicy({Tier.HOST: "write_back"}, load_always=True, prefetch="wait_complete"),
            ManualClock(),
            block_size=BLOCK_TOKENS,
            num_staging_slots=4,
        )
        self.space = KeySpace("model", "layout", BLOCK_TOKENS)
        self.cache = PrefixCache(kv, RadixIndex(BLOCK_TOKENS), self.space, lower=self.transfer)

    def serve(self, namespace: Namespace, prompt: TokenArray) -> None:
        lease = self.cache.reserve(namespace, prompt)
        assert lease is not None
        if lease.pending is not None:
            lease.pending.num_loaded.result(20.0)
            self.cache.finish_load(lease)
        self.cache.commit(lease, lease.num_tokens)
        self.cache.free(lease, lease.num_tokens)
        self.cache.check()

    def held(self, namespace: Namespace, prompt: TokenArray) -> tuple[set[BlockKey], set[BlockKey]]:
        """Return which blocks of a prompt the device and the host hold."""
        keys = self.space.roots(namespace).chain(prompt)
        on_device = keys[: self.cache.match(namespace, np.append(prompt, np.int32(7))) // BLOCK_TOKENS]
        in_host = [key for key, is_there in zip(keys, self.host.exists_many(keys), strict=True) if is_there]
        return set(on_device), set(in_host)


@given(st.lists(st.tuples(st.sampled_from(NAMESPACES), PROMPTS, st.booleans()), max_size=24))
def test_the_host_knows_what_the_device_holds(
    traffic: list[tuple[Namespace, list[int], bool]],
) -> None:
    tiers = TwoTiers()
    seen: list[tuple[Namespace, TokenArray]] = []
    for namespace, kinds, flushes in traffic:
        prompt = tokens(*(range(16 * kind, 16 * kind + 16) for kind in kinds))
        if flushes and len(seen) % 5 == 4:
            tiers.cache.flush()
        tiers.serve(namespace, prompt)
        seen.append((namespace, prompt))
        pairs = [tiers.held(*one) for one in seen]
        on_device = set().union(*(device for device, _ in pairs))
        in_host = set().union(*(host for _, host in pairs))
        assert tiers.host.num_duplicates == len(on_device & in_host)
        assert len(in_host) == tiers.host.num_blocks <= 4
    tiers.transfer.close()
