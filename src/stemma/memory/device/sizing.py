"""How many device blocks fit the memory budget."""

from __future__ import annotations

import torch

from stemma.config.settings import CacheSettings
from stemma.errors import ConfigError
from stemma.memory.device.kv import num_blocks_for
from stemma.memory.device.layout import KVLayout
from stemma.native.process_memory import available_bytes


def device_bytes(settings: CacheSettings, device: torch.device) -> int:
    """Return `kv_cache_memory`, or its fraction of the memory free now; call it once weights are loaded.

    `memory_limit` is handled in `engine/budget/working_memory.py`, because it needs a loaded model.
    """
    if settings.kv_cache_memory is not None:
        return settings.kv_cache_memory
    return int(free_bytes(device) * settings.kv_cache_fraction)


def blocks_and_states(layout: KVLayout, num_bytes: int, settings: CacheSettings) -> tuple[int, int]:
    """Return how many blocks, and how many states of recurrent layers, the device tier has.

    Raises ConfigError if not even one of them fits.
    """
    if layout.state is None:
        return num_blocks_for(layout, num_bytes), 0
    state_bytes = layout.blocks_per_state * layout.block_bytes
    num_states = int(num_bytes * settings.state_cache_fraction) // state_bytes
    num_blocks = (num_bytes - num_states * state_bytes) // layout.block_bytes
    while num_blocks and layout.aligned(num_blocks) != num_blocks:
        num_blocks -= 1
    if num_states < 2 or num_blocks < 1:
        raise ConfigError(
            f"the KV cache has {num_bytes} bytes; this model's recurrent layers keep {state_bytes} of a "
            f"sequence, and blocks take {layout.block_bytes} each: give it more memory, or another "
            "state_cache_fraction"
        )
    return num_blocks, num_states


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
