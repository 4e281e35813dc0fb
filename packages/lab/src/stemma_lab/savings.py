"""The value of a hit: prefill time and money, from stated or measured speeds and prices.

Computing the KV of a token costs a constant (its weights) plus a part that grows with its position (it
attends to everything before it)::

    seconds(token at position p) = (1 + p / attention_equal_at) / prefill_tokens_per_s

`attention_equal_at` is the position at which attention costs as much as the rest; infinite means that only
the count of tokens matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.cost import block_costs

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Speed of prefill. The default attention position is that of an 8B dense model with 4K hidden size."""

    tokens_per_s: float = 10_000.0
    attention_equal_at: float = 32_768.0

    def seconds(self, start: npt.ArrayLike, end: npt.ArrayLike) -> Float64:
        """Return the time to compute tokens [start, end), element by element."""
        low, high = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
        quadratic = 0.0 if math.isinf(self.attention_equal_at) else 0.5 / self.attention_equal_at
        return np.asarray((high - low) * (1.0 + quadratic * (low + high)) / self.tokens_per_s)

    def block_seconds(self, num_blocks: int, block_size: int) -> npt.NDArray[np.float32]:
        """Return the time to recompute each of the first `num_blocks` blocks of a prompt."""
        return block_costs(num_blocks, block_size, self.attention_equal_at) / np.float32(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """Money per million prompt tokens. The default ratio, 0.1 to 1, is DeepSeek's."""

    miss: float = 1.0
    hit: float = 0.1

    def saved(self, num_hit_tokens: int) -> float:
        """Return what the hits save against computing everything."""
        return num_hit_tokens * (self.miss - self.hit) / 1e6

    def bill(self, num_tokens: int, num_hit_tokens: int) -> float:
        """Return what the prompts cost."""
        return ((num_tokens - num_hit_tokens) * self.miss + num_hit_tokens * self.hit) / 1e6
