"""How many device blocks fit the memory budget."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Numbers of blocks, states and pages that the device tier has room for."""

    num_blocks: int
    num_states: int = 0
    """States of recurrent layers."""
    num_pages: int = 0
    """Pages of layers with windows."""


_BLOCKS_PER_PAGE = 4
"""Blocks for each page: sequences have pages for their windows alone. Pages of layers that compress hold what
many blocks do: there are as many blocks for each as it holds, or pages would take nearly all memory."""


def device_sizes(layout: KVLayout, num_bytes: int, settings: CacheSettings, step: int) -> DeviceSizes:
    """Return what fits; `step`: tokens of the largest step, which need pages.

    Raises ConfigError if not even one block, two states, or the pages of a step fit.
    """
    if layout.state is None and layout.windows is None:
        return DeviceSizes(num_blocks_for(layout, num_bytes))
    state_bytes = layout.blocks_per_state * layout.block_bytes
    num_states = 0 if layout.state is None else int(num_bytes * settings.state_cache_fraction) // state_bytes
    left = num_bytes - num_states * state_bytes
    num_pages = 0
    if layout.windows is not None:
        page_bytes = layout.blocks_per_page * layout.block_bytes
        least = -(-(step + layout.windows.window) // layout.block_size) + 2
        blocks = (
            _BLOCKS_PER_PAGE if layout.compressed is None else max(_BLOCKS_PER_PAGE, layout.blocks_per_page)
        )
        num_pages = max(least, left // (page_bytes + blocks * layout.block_bytes))
        left -= num_pages * page_bytes
    num_blocks = max(0, left // layout.block_bytes)
    while num_blocks and layout.aligned(num_blocks) != num_blocks:
        num_blocks -= 1
    if (layout.state is not None and num_states < 2) or num_blocks < 1:
        raise ConfigError(
            f"the KV cache has {num_bytes} bytes, too few for this model: blocks take {layout.block_bytes} "
            f"each, recurrent states {state_bytes} a sequence, and windows {num_pages} pages of "
            f"{layout.blocks_per_page} blocks; give it more memory, or choose another state_cache_fraction "
            "or a smaller max_batch_tokens"
        )
    return DeviceSizes(num_blocks, num_states, num_pages)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on a device, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
