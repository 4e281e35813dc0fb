"""Hits of models with recurrent layers: KV of a prompt's tokens, and a state behind them.

A hit ends at the deepest position at which both are there, on the device or below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stemma.memory.cache.cached_blocks import CachedBlocks
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.states import CachedStates
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.index import Match
from stemma.types import BlockKey, Tier


@dataclass(frozen=True, slots=True)
class StateHit:
    """The tokens, blocks and state that a prompt goes on from."""

    position: int
    """Leading tokens that need no computing once all is loaded; a multiple of `CachedStates.unit`."""
    found: Match
    """Those of them with KV on the device."""
    tiers: tuple[Tier, ...] = ()
    """Where the KV blocks behind those come from."""
    keys: Sequence[BlockKey] = ()
    """Keys of these blocks."""
    pieces: Sequence[BlockKey] = ()
    """Keys of the state's blocks below the device; empty: the state is on the device, or zeros."""
    num_with_kv: int = 0
    """Leading tokens whose KV is cached, with or without a state behind them."""


class StateHits:
    """Looks for states. Not thread-safe."""

    def __init__(
        self, states: CachedStates, cached: CachedBlocks | None, lower: LowerTiers | None, block_size: int
    ) -> None:
        """`cached` None: nothing is reused on the device."""
        self._states, self._cached, self._lower = states, cached, lower
        self._block_size = block_size

    def on_device(self, found: Match) -> int:
        """Return how many of the matched tokens a state on the device stands for."""
        if self._cached is None:
            return 0
        num_full = found.num_full_blocks(self._block_size)
        keys = self._cached.keys(found.block_ids[:num_full])
        return self._states.deepest(keys, num_full * self._block_size)

    def find(self, lease: Lease, found: Match, tiers: tuple[Tier, ...], keys: Sequence[BlockKey]) -> StateHit:
        """Return the deepest hit of a prompt whose tokens in `found` have KV on the device.

        `tiers` and `keys` are those of the blocks behind, as far as lower tiers have them.
        """
        size, num_full = self._block_size, found.num_full_blocks(self._block_size)
        position = self.on_device(found)
        num_with_kv = (num_full + len(tiers)) * size if tiers else found.num_tokens
        deepest = (num_full + len(tiers)) * size // self._states.unit * self._states.unit
        for deeper in range(deepest, position, -self._states.unit):
            key = lease.key(deeper // size - 1)
            pieces: Sequence[BlockKey] = ()
            if not self._states.has(key):
                pieces = self._states.piece_keys(lease, deeper)
                if self._lower is None or len(self._lower.match(pieces)) < len(pieces):
                    continue
            loaded = max(0, deeper // size - num_full)
            return StateHit(
                deeper,
                self._trimmed(found, deeper),
                tiers[:loaded],
                list(keys[:loaded]),
                pieces,
                max(num_with_kv, deeper),
            )
        return StateHit(position, self._trimmed(found, position), num_with_kv=num_with_kv)

    def _trimmed(self, found: Match, num_tokens: int) -> Match:
        num_tokens = min(num_tokens, found.num_full_blocks(self._block_size) * self._block_size)
        return Match(num_tokens, found.block_ids[: num_tokens // self._block_size])
