"""What a simulated fleet's caches hold at its start: earlier conversations, where a router leaves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stemma_lab.fleet.caches import RunCache
from stemma_lab.fleet.traffic import Traffic, hash_of
from stemma_router.cluster.rendezvous import rendezvous_order

_HOMES = 2.0
"""Servers that hold a tenant's earlier conversations at first, times its share of all."""
_FULLEST = 1.1
"""Blocks that a server was given, times the mean of all: beyond that a tenant takes a further server."""


def warm(traffic: Traffic, caches: Sequence[RunCache]) -> None:
    """Give each conversation from before to the emptiest of its tenant's servers, oldest first.

    If all of these are full, the tenant takes a further one, in the order of rendezvous hashing (bounded
    loads: Mirrokni, Thorup and Zadimoghaddam, 2018): a router that spreads what is computed over all of the
    memory leaves no server half empty.
    """
    earlier = traffic.earlier.tolist()
    tenants = [traffic.chain(last)[0] for last in earlier]
    counts = Counter(tenants)
    homes: dict[int, list[int]] = {}
    given, num_given = [0] * len(caches), 0
    for tenant, last in zip(tenants, earlier, strict=True):
        if tenant not in homes:
            share = _HOMES * counts[tenant] / len(earlier)
            homes[tenant] = _order_of(tenant, len(caches))[: max(1, round(share * len(caches)))]
        chain = traffic.chain(last)
        sizes = traffic.sizes(chain)
        home = min(homes[tenant], key=given.__getitem__)
        bound = _FULLEST * num_given / len(caches) + sum(sizes)
        if given[home] > bound:
            home = next(one for one in _order_of(tenant, len(caches)) if given[one] <= bound)
            homes[tenant].append(home)
        num_stored = sum(end - first for _, first, end in caches[home].use(chain, sizes).stored)
        given[home] += num_stored
        num_given += num_stored


def _order_of(tenant: int, num_servers: int) -> list[int]:
    return rendezvous_order(hash_of(tenant).to_bytes(8, "little"), range(num_servers))
