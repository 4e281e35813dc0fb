"""From settings to the parts of the cache: its names, its index, its blocks and its tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.config.settings import CacheSettings, EngineSettings
from stemma.engine.ranks.execution import LeadingKV
from stemma.engine.ranks.leader import Ranks
from stemma.engine.ranks.messages import Open
from stemma.engine.ranks.settings import pool_part, rank_key_space
from stemma.engine.ranks.tiers import RankedTiers
from stemma.errors import ConfigError
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.block_codec import choose_codec
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.device.sizing import DeviceSizes, device_bytes, device_sizes
from stemma.memory.device.slabs import PADDING, SlabAllocator
from stemma.memory.tiers.disk.other_models import OtherModelsOnDisk
from stemma.memory.tiers.lower import LowerTiers
from stemma.memory.tiers.opening import open_tiers
from stemma.memory.tiers.transfer import TierTransfer
from stemma.model.attend.kept_kv import KeptKV
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.copying import copy_function
from stemma.prefix.eviction.cost import block_costs
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.headed import HeadedIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.supervision import Supervisor


@dataclass(frozen=True, slots=True)
class CacheParts:
    """A cache, and what stands below it."""

    cache: PrefixCache
    kv: DeviceKV
    layout: KVLayout
    key_space: KeySpace
    device: DeviceCopy
    tiers: TierTransfer | None
    """This process's tiers below the device."""
    lower: LowerTiers | None
    """The tiers of all ranks."""


def make_cache(
    settings: EngineSettings,
    model: CausalLM,
    num_bytes: int | None,
    supervisor: Supervisor,
    ranks: Ranks | None,
    clock: Callable[[], float],
) -> CacheParts:
    """Return the cache of a model, with `num_bytes` on the device; None: as many as the settings say.

    Raises ConfigError or StorageError.
    """
    asked = settings.cache
    if num_bytes is None:
        num_bytes = device_bytes(asked, model.device)
    layout, sizes = lay_out(
        model.kept, num_bytes, asked, settings.scheduler.max_batch_tokens, frees_windows=ranks is None
    )
    key_space = make_key_space(settings, model, layout, ranks)
    kv = make_kv(layout, sizes, model.device, key_space, ranks)
    codec = choose_codec(settings, layout, model.device.type)
    device = DeviceCopy(kv, copy_function(settings.model.isa), codec)
    own_space = key_space if ranks is None else rank_key_space(key_space, ranks.share)
    tiers = open_own_tiers(settings, device, own_space, supervisor, ranks)
    lower = tiers if tiers is None or ranks is None else RankedTiers(tiers, ranks)
    disk = settings.tiers.disk_cache
    cache = PrefixCache(
        kv,
        make_index(asked, key_space),
        key_space,
        policy_name=asked.eviction,
        lower=lower,
        takes_tails=settings.role == "decode",
        block_costs=device_block_costs(asked, kv.num_blocks),
        other_models=None if disk is None else OtherModelsOnDisk(disk, own_space),
        states=make_states(asked, kv, sizes, lower, clock),
        clock=clock,
    )
    return CacheParts(cache, kv, layout, key_space, device, tiers, lower)


def lay_out(
    kept: KeptKV, num_bytes: int, settings: CacheSettings, step: int, *, frees_windows: bool
) -> tuple[KVLayout, DeviceSizes]:
    """Return the layout of a device tier of `num_bytes` and what it has room for; `step`: its most tokens.

    KV behind windows is freed if `frees_windows`, settings and model allow it, and longer sequences fit so:
    in a small tier the pages of a step may leave too little for blocks. Raises ConfigError if nothing fits.
    """

    def laid_out(*, frees: bool) -> tuple[KVLayout, DeviceSizes]:
        layout = kept.layout(
            settings.block_size, settings.kv_cache_dtype, settings.kv_layout, frees_windows=frees
        )
        return layout, device_sizes(layout, num_bytes, step)

    if not (frees_windows and settings.free_windows):
        return laid_out(frees=False)
    try:
        freed = laid_out(frees=True)
    except ConfigError:
        return laid_out(frees=False)
    if freed[0].windows is None:
        return freed
    whole = laid_out(frees=False)
    return freed if freed[1].longest >= whole[1].longest else whole


def make_key_space(
    settings: EngineSettings, model: CausalLM, layout: KVLayout, ranks: Ranks | None
) -> KeySpace:
    """Return the name of everything that the KV of this engine's blocks depends on beside their tokens."""
    kv_layout = layout.describe()
    if not settings.cache.share_across_levels:
        kv_layout += f":{model.numeric_path}"
    if settings.speculation.mode == "mtp":
        kv_layout += ":mtp"  # what the last layer of a block holds
    if ranks is not None:
        kv_layout += f":tp{ranks.share.size}:ep{ranks.share.expert_size}"
        if ranks.share.context_size > 1:
            kv_layout += f":cp{ranks.share.context_size}"
    return KeySpace(model.fingerprint, kv_layout, settings.cache.block_size)


def open_own_tiers(
    settings: EngineSettings,
    device: DeviceCopy,
    key_space: KeySpace,
    supervisor: Supervisor,
    ranks: Ranks | None,
) -> TierTransfer | None:
    """Return this process's tiers below the device; None if nothing is reused. Errors as `open_tiers`."""
    if not settings.cache.enable_prefix_cache and settings.role != "decode":
        return None
    return open_tiers(
        settings.tiers,
        device,
        key_space,
        step_tokens=settings.scheduler.max_batch_tokens,
        eviction=settings.cache.eviction,
        pool=settings.cache.pool,
        part=(0, 1) if ranks is None else pool_part(ranks.share),
        role=settings.role,
        supervisor=supervisor,
    )


def make_kv(
    layout: KVLayout,
    sizes: DeviceSizes,
    device: torch.device,
    key_space: KeySpace,
    ranks: Ranks | None,
) -> DeviceKV:
    """Return the device tier; on several ranks every rank has one of these blocks, and its tiers are open."""
    if ranks is None:
        return DeviceKV(layout, sizes.num_blocks, device, slab=sizes.slab)
    ranks.open(Open(sizes.num_blocks, key_space, sizes.slab, layout.describe()))
    return LeadingKV(layout, sizes.num_blocks, device, ranks, slab=sizes.slab)


def make_states(
    settings: CacheSettings,
    kv: DeviceKV,
    sizes: DeviceSizes,
    lower: LowerTiers | None,
    clock: Callable[[], float],
) -> CachedStates | None:
    """Return what keeps the states of recurrent layers and windows; None: the model has neither."""
    if not sizes.slab:
        return None
    slabs = SlabAllocator(kv.num_blocks, sizes.slab, kv.clear_slab)
    slabs.take_slab(PADDING)  # tables are filled up with block 0, page 0: kernels may read it behind a mask
    states_per_slab, pages_per_slab = kv.layout.places_per_slab(sizes.slab)
    places = Places(
        slabs,
        states_per_slab,
        kv.state_blocks,
        pages_per_slab,
        kv.page_blocks,
        kv.copy_page,
        kv.layout.windows,
        sizes.num_reserved,
    )
    return CachedStates(
        places,
        settings.block_size,
        lower,
        clock,
        interval=settings.state_interval,
        keeps=settings.enable_prefix_cache,
        policy=make_policy(settings.eviction),
    )


def device_block_costs(settings: CacheSettings, num_blocks: int) -> npt.NDArray[np.float32] | None:
    """Return the cost of a block by its depth, for the eviction policy; None if all cost the same."""
    if settings.eviction_cost == "blocks":
        return None
    return block_costs(num_blocks, settings.block_size, settings.attention_equal_at)


def make_index(settings: CacheSettings, key_space: KeySpace) -> PrefixIndex | None:
    """Return the index that the settings ask for; None if the prefix cache is off."""
    if not settings.enable_prefix_cache:
        return None
    policy = make_policy(settings.eviction)
    if settings.index == "hash":
        return HeadedIndex(HashIndex(key_space, policy))
    return HeadedIndex(RadixIndex(key_space.block_size, policy))
