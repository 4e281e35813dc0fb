"""The cost of a pool to each of its many devices, and the number of tokens that it holds.

Every device of the pool keeps a link to every other one, and each link takes device memory for its queues.
That memory is taken from the cache by lowering the fraction of device memory that the server may use. The
figures are MindIE's for its one-sided HCCL transport (its manual, "KV Cache pooling").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stemma.errors import ConfigError

LINK_BYTES = 4 * 10**6
"""Device memory of one link."""
MAX_LINKS = 512
"""Maximum links of one device; beyond it links are constantly closed and opened again."""
FRACTION_STEP = 0.01
STEP_BYTES = 600 * 10**6
"""Device memory that one step of the fraction frees."""
MAX_STEPS = 4
"""The fraction is lowered by at most 0.04, which is enough for the most links there can be."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The answer for one cluster."""

    num_devices: int
    num_links: int
    """Links of each device."""
    fits_link_limit: bool
    link_bytes: int
    """Device memory for links, on each device."""
    fraction_for_links: float
    memory_fraction: float
    """The fraction to set: the old fraction minus `fraction_for_links`."""
    freed_bytes: int
    """Device memory that the lower fraction frees, on each device."""


@dataclass(frozen=True, slots=True)
class PoolTokens:
    """Sizes in bytes, counted as tokens of one model."""

    bytes_per_token: int
    """Over all layers and all tensor-parallel ranks."""
    dram_tokens: int
    ssd_tokens: int
    tokens_for_links: int
    """Context that each tensor-parallel group of devices loses to links."""


def plan_pool(
    num_nodes: int, devices_per_node: int, *, memory_fraction: float = 0.92, will_grow: bool = False
) -> PoolPlan:
    """Return what links cost. With `will_grow`, room is left for as many devices as a pool can have.

    Raises ConfigError unless the cluster has two devices and the fraction lies between 0.04 and 1.
    """
    num_devices = num_nodes * devices_per_node
    if num_nodes < 1 or devices_per_node < 1 or num_devices < 2:
        raise ConfigError("a pool needs at least two devices")
    if not MAX_STEPS * FRACTION_STEP < memory_fraction <= 1:
        raise ConfigError(f"memory fraction {memory_fraction} must lie between 0.04 and 1")
    num_links = num_devices - 1
    link_bytes = num_links * LINK_BYTES
    num_steps = MAX_STEPS if will_grow else min(math.ceil(link_bytes / STEP_BYTES), MAX_STEPS)
    for_links = round(num_steps * FRACTION_STEP, 2)
    return PoolPlan(
        num_devices=num_devices,
        num_links=num_links,
        fits_link_limit=num_devices <= MAX_LINKS,
        link_bytes=link_bytes,
        fraction_for_links=for_links,
        memory_fraction=round(memory_fraction - for_links, 4),
        freed_bytes=num_steps * STEP_BYTES,
    )


def plan_tokens(
    plan: PoolPlan, bytes_per_token: int, *, dram_bytes: int, ssd_bytes: int, tp_size: int = 1
) -> PoolTokens:
    """Return the tokens that all nodes' DRAM and SSD hold, and those that links take from the devices."""
    return PoolTokens(
        bytes_per_token=bytes_per_token,
        dram_tokens=dram_bytes // bytes_per_token,
        ssd_tokens=ssd_bytes // bytes_per_token,
        tokens_for_links=plan.freed_bytes * tp_size // bytes_per_token,
    )
