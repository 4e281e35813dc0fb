"""Which replica holds which blocks, as their KV events say.

A block is named by a 64-bit number that stands for its whole prefix (`chain_of` for tokens, the ids of a
trace in the lab). Events come late and may be lost, so this is an approximation: it decides where a request
goes, never what is reused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from stemma.types import TokenArray

DEVICE = "GPU"
"""The nearest tier, as vLLM's events call it."""
MAX_IDS = 16_000_000
"""Blocks of all replicas together; further ones are dropped, so that no peer fills this process's memory."""


def chain_of(tokens: TokenArray, block_size: int, parent: int = 0) -> list[int]:
    """Return the names of the full blocks of `tokens` [n] int32, each hashed over its predecessor."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_size
    chain = []
    for start in range(0, len(data) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(data[start : start + width], seed=parent)
        chain.append(parent)
    return chain


class Holdings:
    """Blocks by replica and tier. A replica is a small number. Not thread-safe."""

    def __init__(self) -> None:
        self._masks: dict[str, dict[int, int]] = {}
        """By tier: block -> bit r is set if replica r holds it there."""
        self._num_ids = 0
        self.num_refused = 0
        """Blocks that were dropped because there are too many."""

    @property
    def num_ids(self) -> int:
        """Different blocks that are known, each counted once for each tier."""
        return self._num_ids

    def store(self, replica: int, ids: Iterable[int], tier: str = DEVICE) -> None:
        """Note blocks that a replica now holds."""
        masks, bit = self._masks.setdefault(tier, {}), 1 << replica
        for one in ids:
            mask = masks.get(one)
            if mask is None:
                if self._num_ids >= MAX_IDS:
                    self.num_refused += 1
                    continue
                self._num_ids += 1
                mask = 0
            masks[one] = mask | bit

    def remove(self, replica: int, ids: Iterable[int], tier: str = DEVICE) -> None:
        """Note blocks that a replica no longer holds in that tier; unknown ones are ignored."""
        masks, bit = self._masks.get(tier, {}), 1 << replica
        for one in ids:
            if one in masks:
                masks[one] &= ~bit
                if not masks[one]:
                    del masks[one]
                    self._num_ids -= 1

    def clear(self, replica: int, keep: str | None = None) -> None:
        """Note that a replica holds nothing, except in the tier `keep`."""
        bit = 1 << replica
        for tier, masks in self._masks.items():
            if tier == keep:
                continue
            held = [one for one, mask in masks.items() if mask & bit]
            for one in held:
                masks[one] &= ~bit
                if not masks[one]:
                    del masks[one]
                    self._num_ids -= 1

    def depths(self, chain: Sequence[int], num_replicas: int) -> list[int]:
        """Return how many leading blocks of `chain` each replica holds, in any tier."""
        depths = [0] * num_replicas
        alive = (1 << num_replicas) - 1
        for depth, one in enumerate(chain):
            held = 0
            for masks in self._masks.values():
                held |= masks.get(one, 0)
            ended = alive & ~held
            while ended:
                low = ended & -ended
                depths[low.bit_length() - 1] = depth
                ended ^= low
            alive &= held
            if not alive:
                return depths
        while alive:
            low = alive & -alive
            depths[low.bit_length() - 1] = len(chain)
            alive ^= low
        return depths
