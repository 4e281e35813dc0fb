"""The settings of one rank, from those of the whole engine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from stemma.config.settings import EngineSettings
from stemma.memory.device.accelerator import resolve_device
from stemma.memory.device.sizing import HOST_FRACTION
from stemma.model.parallel.dealing import Dealing
from stemma.model.parallel.share import Share
from stemma.prefix.keys import KeySpace


def shares_of(settings: EngineSettings) -> list[Share]:
    """Return the part of each process, in order."""
    parallel = settings.parallel
    sizes = parallel.tensor_parallel_size, parallel.expert_parallel_size, parallel.context_parallel_size
    return [Share.of_process(number, *sizes) for number in range(parallel.num_ranks)]


def dealing_of(settings: EngineSettings) -> Dealing:
    """Return how the tokens of a block are divided over the ranks."""
    size = settings.parallel.context_parallel_size
    return Dealing(size, settings.cache.block_size // size)


def settings_of_rank(settings: EngineSettings, share: Share) -> EngineSettings:
    """Return what differs by rank: its device or share of the cores, of the free memory, its directory."""
    model: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    device = resolve_device(settings.model.device)
    if device.type != "cpu":
        model["device"] = f"{device.type}:{share.number}"
    else:
        fraction = settings.cache.kv_cache_fraction or HOST_FRACTION
        cache["kv_cache_fraction"] = fraction / share.num_processes
        if settings.model.num_threads is None:
            model["num_threads"] = max(1, len(os.sched_getaffinity(0)) // share.num_processes)
    tiers: dict[str, Any] = {}
    if settings.tiers.disk_cache is not None:
        tiers["disk_cache"] = settings.tiers.disk_cache / f"rank-{share.number}-of-{share.num_processes}"
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update=model),
            "cache": settings.cache.model_copy(update=cache),
            "tiers": settings.tiers.model_copy(update=tiers),
        }
    )


def pool_part(share: Share) -> tuple[int, int]:
    """Return which part of a block a rank keeps in the pool, of how many.

    No two ranks of an engine may have the same one: a pool's keys are the same on all, bytes aren't.
    """
    return share.number, share.num_processes


def rank_key_space(key_space: KeySpace, share: Share) -> KeySpace:
    """Return the name under which a rank's disk tier keeps its blocks.

    Keys are the same on all ranks; bytes aren't. So the directory of another rank must not be taken for ours.
    """
    return replace(key_space, kv_layout=f"{key_space.kv_layout}:rank{share.number}")
