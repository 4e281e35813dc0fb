"""How many device blocks fit the memory budget."""

from __future__ import annotations

import os

import torch

from stemma.config.settings import CacheSettings
from stemma.memory.device import num_blocks_for
from stemma.memory.layout import KVLayout


def num_device_blocks(settings: CacheSettings, layout: KVLayout, device: torch.device) -> int:
    """Return the number of blocks for `kv_cache_memory`, or for its fraction of the memory free now.

    Call it once the weights are loaded. Raises ConfigError if not even one block fits.
    """
    budget_bytes = settings.kv_cache_memory
    if budget_bytes is None:
        budget_bytes = int(free_bytes(device) * settings.kv_cache_fraction)
    return num_blocks_for(layout, budget_bytes)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
