"""The cost of recomputing a block by its depth: deep tokens attend to more tokens.

A token at position p takes ``1 + p / attention_equal_at`` times as long as the first one, where
`attention_equal_at` is the position at which attending costs as much as the weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def block_costs(num_blocks: int, block_size: int, attention_equal_at: float) -> npt.NDArray[np.float32]:
    """Return the cost of each of a prompt's first blocks, in units of a first token, shape [num_blocks]."""
    middles = (np.arange(num_blocks) + 0.5) * block_size
    return (block_size * (1.0 + middles / attention_equal_at)).astype(np.float32)
