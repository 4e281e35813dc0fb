"""How many device blocks fit the memory budget."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from stemma.config.settings import CacheSettings
from stemma.memory.device.kv import num_blocks_for
from stemma.memory.device.layout import KVLayout


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
    return min(_available_bytes(), _cgroup_bytes())


def _available_bytes() -> int:
    """Return the bytes that the kernel can provide without swapping; page cache counts as free."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left of the container's memory limit (cgroup v2); a huge number if there is none."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(used))
