"""Where requests ended that others are likely to continue with one token more, as the beams of a search do.

Their blocks aren't entered in the index and looked up again for each token: until the next step has been
scheduled they stay with their leases, and whoever goes on is handed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemma.memory.cache.lease import Lease
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray


@dataclass(slots=True)
class Rest:
    """One of them."""

    lease: Lease
    """What holds its blocks: its own lease, or that of the first to go on."""
    namespace: Namespace
    tokens: TokenArray
    """Those that have KV."""
    is_taken: bool = False
    """Whether somebody has gone on from here."""


class Rests:
    """All of them; `PrefixCache` keeps the leases."""

    def __init__(self) -> None:
        self._rests: list[Rest] = []

    def __len__(self) -> int:
        return len(self._rests)

    def add(self, lease: Lease, num_computed: int) -> None:
        """Let the leading `num_computed` tokens of a lease, which have KV, wait for those who go on."""
        self._rests.append(Rest(lease, lease.namespace, lease.tokens[:num_computed]))

    def find(self, namespace: Namespace, tokens: TokenArray) -> Rest | None:
        """Return one with exactly these tokens."""
        for rest in self._rests:
            if rest.namespace == namespace and _equal(rest.tokens, tokens):
                return rest
        return None

    def hand_over(self, source: Lease, lease: Lease) -> None:
        """Note that `lease` has the blocks of `source` now."""
        for rest in self._rests:
            if rest.lease is source:
                rest.lease, rest.is_taken = lease, True

    def drop(self, lease: Lease) -> None:
        """Let nobody go on from a lease that is freed."""
        self._rests = [rest for rest in self._rests if rest.lease is not lease]

    def pop(self) -> Rest:
        """Take one out."""
        return self._rests.pop()


def _equal(one: TokenArray, other: TokenArray) -> bool:
    return len(one) == len(other) and bool((one == other).all())
