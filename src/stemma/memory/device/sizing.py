"""How many device blocks fit the memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.kv import num_blocks_for
from stemma.memory.device.layout import KVLayout

HOST_FRACTION = 0.5
"""Share of the free memory that KV takes where none is named."""
CARD_FRACTION = 0.9
"""Of a card, where none is named: the rest is for recordings, and for what libraries ask for later."""


def device_bytes(settings: CacheSettings, device: torch.device) -> int:
    """Return `kv_cache_memory`, or its fraction of the memory free now; call it once weights are loaded.

    `memory_limit`, and what a step takes on a GPU, are measured in `engine/budget/working_memory.py`.
    """
    if settings.kv_cache_memory is not None:
        return settings.kv_cache_memory
    return int(accelerator_of(device).free_bytes() * (settings.kv_cache_fraction or HOST_FRACTION))


_LEAST_STATES = 2
"""A sequence reads one and writes another."""


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """What the device tier has room for."""

    num_blocks: int
    slab: int = 0
    """Blocks of a slab, which may hold states or pages instead; 0: the model has neither."""
    num_reserved: int = 0
    """Blocks that no sequence can have: room for its states and pages, and for padding (`make_states`)."""

    @property
    def longest(self) -> int:
        """Blocks that one sequence can have."""
        return self.num_blocks - self.num_reserved


def device_sizes(layout: KVLayout, num_bytes: int, step: int) -> DeviceSizes:
    """Return what fits; `step`: tokens of the largest step, which need pages.

    Raises ConfigError if not even one block, two states, and the pages of a step fit.
    """
    slab = layout.blocks_per_slab
    if not slab:
        return DeviceSizes(num_blocks_for(layout, num_bytes))
    states, pages = layout.places_per_slab(slab)
    num_reserved = slab * (1 if not states else 1 + -(-_LEAST_STATES // states))
    if layout.windows is not None:
        least = -(-(step + layout.windows.window) // layout.block_size) + 2
        num_reserved += -(-least // pages) * slab
    num_blocks = num_bytes // layout.block_bytes // slab * slab
    if num_blocks <= num_reserved:
        raise ConfigError(
            f"the KV cache has {num_bytes} bytes, too few for this model: blocks take {layout.block_bytes} "
            f"each, and recurrent states or windows of one sequence as much as {num_reserved}; give it "
            "more memory, or choose a smaller max_batch_tokens"
        )
    return DeviceSizes(num_blocks, slab, num_reserved)
