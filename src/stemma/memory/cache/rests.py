"""Where requests ended that others are likely to continue with one token more, as the beams of a search do.

Their blocks aren't entered in the index and looked up again for each token: until the next step has been
scheduled they stay with their leases, and whoever goes on is handed them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.leased_blocks import LeasedBlocks
from stemma.prefix.explain import LAST_TOKEN_MISS
from stemma.prefix.keys import Namespace
from stemma.types import Tier, TokenArray


@dataclass(slots=True)
class Rest:
    """One of them."""

    lease: Lease
    """The lease that holds its blocks: its own, or that of the first to go on."""
    namespace: Namespace
    tokens: TokenArray
    """Those that have KV."""
    is_taken: bool = False
    """Whether somebody has gone on from here."""


class Rests:
    """All of them; `leased` keeps the leases. Not thread-safe."""

    def __init__(self, leased: LeasedBlocks) -> None:
        self._leased = leased
        self._rests: list[Rest] = []

    def __len__(self) -> int:
        return len(self._rests)

    def add(self, lease: Lease, num_computed: int) -> None:
        """Let the leading `num_computed` tokens of a lease, which have KV, wait for those who go on."""
        self._rests.append(Rest(lease, lease.namespace, lease.tokens[:num_computed]))

    def has(self, namespace: Namespace, tokens: TokenArray) -> bool:
        """Whether `go_on` has a place for `tokens`, if there is room."""
        return self._find(namespace, tokens[:-1]) is not None

    def go_on(
        self, namespace: Namespace, tokens: TokenArray, num_new: int, make: Callable[[], Lease]
    ) -> Lease | None:
        """Lease `tokens` from where a request rests that had all of them but the last; None: there is none.

        The first to go on takes its blocks; others share the full ones and copy the rest, as a fork does.
        Nothing is looked up, and the eviction policy isn't told: for it, all of these are one request.
        """
        known = tokens[:-1]
        rest = self._find(namespace, known)
        if rest is None:
            return None
        num_blocks = -(-(len(tokens) + num_new) // self._leased.block_size)
        if rest.is_taken:
            lease = self._leased.twin(rest.lease, len(known), num_blocks, make)
        else:
            source = rest.lease
            lease = self._leased.heir(source, num_blocks, make)
            if lease is not None:
                self._hand_over(source, lease)
        if lease is not None:
            lease.cached_by_tier = {Tier.DEVICE: len(known)}
            lease.miss = LAST_TOKEN_MISS
        return lease

    def drop(self, lease: Lease) -> None:
        """Let nobody go on from a lease that is freed."""
        self._rests = [rest for rest in self._rests if rest.lease is not lease]

    def pop(self) -> Rest:
        """Take one out."""
        return self._rests.pop()

    def _find(self, namespace: Namespace, tokens: TokenArray) -> Rest | None:
        """Return one with exactly these tokens."""
        for rest in self._rests:
            if rest.namespace == namespace and _equal(rest.tokens, tokens):
                return rest
        return None

    def _hand_over(self, source: Lease, lease: Lease) -> None:
        """Note that `lease` has the blocks of `source` now."""
        for rest in self._rests:
            if rest.lease is source:
                rest.lease, rest.is_taken = lease, True


def _equal(one: TokenArray, other: TokenArray) -> bool:
    return len(one) == len(other) and bool((one == other).all())
