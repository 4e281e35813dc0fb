"""Hits of models with recurrent layers: KV of a prompt's tokens, and a state behind them.

A hit ends at the deepest position at which both are there, on the device or below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    num_spared: int = 0
    """Tokens that needn't be computed because of the load."""
    passed_over: tuple[int, Tier] | None = None
    """Blocks of KV and state that would lead further and take longer than computing, and where one of them
    is; None: there are none, or some are loaded."""


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

    def find(
        self,
        lease: Lease,
        found: Match,
        tiers: tuple[Tier, ...],
        keys: Sequence[BlockKey],
        *,
        may_load: bool = True,
    ) -> StateHit:
        """Return the hit that saves most time, of a prompt whose tokens in `found` have KV on the device.

        `tiers` and `keys` are those of the blocks behind, as far as lower tiers have them. Without `may_load`
        it is the deepest on the device.
        """
        size, num_full = self._block_size, found.num_full_blocks(self._block_size)
        position = self.on_device(found)
        num_with_kv = (num_full + len(tiers)) * size if tiers else found.num_tokens
        best, best_gain_s, left = StateHit(position, self._trimmed(found, position)), 0.0, None
        last = self._last(num_full + len(tiers)) if may_load else position
        for deeper in range(last, position, -self._states.unit):
            pieces, piece_tiers = self._below(lease, deeper)
            if pieces is None:
                continue
            loaded = max(0, deeper // size - num_full)
            to_load = [*tiers[:loaded], *piece_tiers]
            gain_s = 0.0 if self._lower is None else self._lower.gain_s(to_load, deeper - position)
            if gain_s > best_gain_s:
                best_gain_s = gain_s
                best = StateHit(
                    deeper,
                    self._trimmed(found, deeper),
                    tiers[:loaded],
                    list(keys[:loaded]),
                    pieces,
                    num_spared=deeper - position,
                )
            elif left is None and to_load:
                left = len(to_load), to_load[0]
        best = replace(best, num_with_kv=max(num_with_kv, best.position))
        if best.position > position:
            return self._chosen(best)
        return replace(best, passed_over=left)

    def earlier(self, lease: Lease, num_with_kv: int) -> StateHit | None:
        """Return the deepest state below that is worth loading, where a load brought only this much KV."""
        assert self._lower is not None
        num_blocks = num_with_kv // self._block_size
        least = self._states.deepest(lease.keys(num_blocks), num_with_kv)
        for position in range(self._last(num_blocks), least, -self._states.unit):
            pieces, tiers = self._below(lease, position)
            if pieces and self._lower.gain_s(tiers, position - least) > 0.0:
                none = Match(0, np.empty(0, dtype=np.int32))
                return self._chosen(StateHit(position, none, pieces=pieces, num_spared=position - least))
        return None

    def _last(self, num_blocks: int) -> int:
        """Return the last position within so many blocks that a state may stand at."""
        return num_blocks * self._block_size // self._states.unit * self._states.unit

    def _below(self, lease: Lease, position: int) -> tuple[Sequence[BlockKey] | None, Sequence[Tier]]:
        """Return the keys and tiers of the blocks to load for the state there; None: it is nowhere whole."""
        if self._states.has(lease.key(position // self._block_size - 1)):
            return (), ()
        if self._lower is None:
            return None, ()
        first, *others = self._states.piece_keys(lease, position)
        if not self._lower.held([first]):
            return None, ()
        pieces = [first, *others]
        tiers = self._lower.held(pieces)
        return (pieces, tiers) if len(tiers) == len(pieces) else (None, ())

    def _chosen(self, hit: StateHit) -> StateHit:
        """Tell the tiers below what is loaded; return the hit with where the KV came from."""
        assert self._lower is not None
        origins = self._lower.choose([*hit.keys, *hit.pieces])
        return replace(hit, tiers=tuple(origins[: len(hit.tiers)]))

    def _trimmed(self, found: Match, num_tokens: int) -> Match:
        num_tokens = min(num_tokens, found.num_full_blocks(self._block_size) * self._block_size)
        return Match(num_tokens, found.block_ids[: num_tokens // self._block_size])
