"""How many device blocks fit the memory budget."""

from __future__ import annotations

import torch

from stemma.config.settings import CacheSettings
from stemma.memory.device.kv import num_blocks_for
from stemma.memory.device.layout import KVLayout
from stemma.native.process_memory import available_bytes


def num_device_blocks(settings: CacheSettings, layout: KVLayout, device: torch.device) -> int:
    """Return the number of blocks for `kv_cache_memory`, or for its fraction of the memory free now.

    `memory_limit` is handled in `engine/budget/working_memory.py`, because it needs a loaded model.

    Call this after the weights are loaded. Raises ConfigError if not even one block fits.
    """
    budget_bytes = settings.kv_cache_memory
    if budget_bytes is None:
        budget_bytes = int(free_bytes(device) * settings.kv_cache_fraction)
    return num_blocks_for(layout, budget_bytes)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
