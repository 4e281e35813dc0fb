"""Checks of an engine before its weights are read: those of `stemma serve` and of `stemma config check`."""

from __future__ import annotations

from collections.abc import Sequence

from stemma.config.settings import EngineSettings
from stemma.config.sizes import format_size
from stemma.engine.cache_parts import lay_out
from stemma.engine.combinations import check_combinations
from stemma.engine.ranks.settings import shares_of
from stemma.errors import ConfigError, StorageError
from stemma.memory.device.accelerator import resolve_device
from stemma.memory.tiers.copies_down import num_staging_slots
from stemma.memory.tiers.disk.disk_store import num_disk_blocks
from stemma.memory.tiers.disk.folder import examine_folder
from stemma.memory.tiers.host_store import num_host_blocks
from stemma.memory.tiers.pool.opening import check_pool
from stemma.model.files.directory import StoredTensor, stored_tensors
from stemma.model.files.progress import Progress
from stemma.model.load.loading import stated_kv
from stemma.model.load.located import located_model, present_path
from stemma.model.load.prediction import check_prediction
from stemma.model.lora.adapter import LinearShape
from stemma.model.lora.reading import check_adapter
from stemma.model.opened.checkpoint_config import describe_checkpoint
from stemma.model.parallel.cutting import check_cut
from stemma.native.process_memory import available_bytes
from stemma.prefix.keys import KeySpace

_PLAIN = ("F32", "F16", "BF16")
"""Types of weights that are stored with the shape of their layer."""


def check_engine(settings: EngineSettings, progress: Progress | None = None) -> EngineSettings:
    """Return the settings with a checkpoint of this machine in place of a name, if an engine can be built.

    A model of the hub is fetched first. Headers are read, weights aren't; a pool is opened and closed again.

    Raises ModelError, UnsupportedModel or ConfigError, and StorageError if the pool doesn't answer.
    """
    check_surroundings(settings)
    settings = with_checkpoint(settings, progress)
    check_checkpoint(settings)
    return settings


def check_surroundings(settings: EngineSettings) -> None:
    """Check all that needs no checkpoint: the settings, memory and the pool. Errors as `check_engine`."""
    device = resolve_device(settings.model.device).type
    check_combinations(settings, device)
    _check_memory(settings, device)
    _check_disk(settings)
    if settings.cache.pool is not None:
        check_pool(settings.cache.pool)


def check_checkpoint(settings: EngineSettings) -> None:
    """Check a checkpoint of this machine by its config and its headers. Errors as `check_engine`."""
    described = describe_checkpoint(settings.model)
    if settings.parallel.num_ranks > 1:
        check_cut(settings.model, described.config, shares_of(settings)[0])
    stored = stored_tensors(settings.model.path)
    if settings.speculation.mode == "mtp":
        check_prediction(settings.model, described.config, {tensor.name for tensor in stored})
    shapes = _shapes_of(stored)
    _check_blocks(settings)
    for path in settings.lora.adapters.values():
        check_adapter(path, shapes, max_rank=settings.lora.max_lora_rank)


def _check_blocks(settings: EngineSettings) -> None:
    """Raise ConfigError if a tier has no room for a block of this model, or the device tier for its states.

    On several ranks, with `memory_limit`, and for models that only their modules know, it is found once they
    are loaded.
    """
    cache, parallel = settings.cache, settings.parallel
    if parallel.num_ranks > 1 or cache.memory_limit is not None:
        return
    kept = stated_kv(settings.model, predicts=settings.speculation.mode == "mtp")
    if kept is None:
        return
    # Without kv_cache_memory it takes its share of the memory that is free after the load.
    num_bytes = available_bytes() if cache.kv_cache_memory is None else cache.kv_cache_memory
    layout, _ = lay_out(kept, num_bytes, cache, settings.scheduler.max_batch_tokens, frees_windows=True)
    if not _has_tiers(settings):
        return
    if settings.tiers.host_cache is not None:
        num_host_blocks(settings.tiers.host_cache, layout.block_bytes)
    if settings.tiers.disk_cache is not None:
        space = KeySpace("", layout.describe(), cache.block_size)
        num_disk_blocks(space, layout.block_bytes, settings.tiers.disk_cache_size)


def remarks(settings: EngineSettings) -> list[str]:
    """Return what may keep an engine of a checkpoint of this machine from being built, though it is tried."""
    device = resolve_device(settings.model.device).type
    num_bytes = sum(tensor.num_bytes for tensor in stored_tensors(settings.model.path))
    wanted = num_bytes + _wanted_bytes(settings, device)
    found = _buffer_remarks(settings)
    if device != "cpu" or wanted <= (available := available_bytes()):
        return found
    return [
        *found,
        f"the weights are {format_size(num_bytes)} as they are stored, with the caches "
        f"{format_size(wanted)}, but {format_size(available)} of memory are available",
    ]


def _buffer_remarks(settings: EngineSettings) -> list[str]:
    """Say so if the transfer buffer that was asked for is less than a step commits."""
    tiers, cache = settings.tiers, settings.cache
    has_slow = tiers.disk_cache is not None or cache.pool is not None
    kept = stated_kv(settings.model, predicts=settings.speculation.mode == "mtp") if has_slow else None
    if tiers.transfer_buffer is None or kept is None:
        return []
    block_bytes = kept.layout(cache.block_size, cache.kv_cache_dtype, cache.kv_layout).block_bytes
    step = settings.scheduler.max_batch_tokens
    slots = num_staging_slots(tiers.transfer_buffer, block_bytes, cache.block_size, step)
    committed = -(-step // cache.block_size)
    if slots >= committed:
        return []
    size = format_size(tiers.transfer_buffer)
    return [
        f"transfer_buffer {size} holds {slots} blocks of this model, and a step "
        f"commits up to {committed}: the others wait on the device; leave it out, and it holds two steps"
    ]


def with_checkpoint(settings: EngineSettings, progress: Progress | None = None) -> EngineSettings:
    """Return the settings with a path of this machine in place of a model's name. Raises ModelError."""
    if progress is not None and present_path(settings.model) is None:
        progress("preparing the model", 0.0)
    return settings.model_copy(update={"model": located_model(settings.model)})


def _check_memory(settings: EngineSettings, device: str) -> None:
    """Raise ConfigError if the sizes that the settings name are more than this machine can give."""
    wanted = _wanted_bytes(settings, device)
    if wanted > (available := available_bytes()):
        raise ConfigError(
            f"kv_cache_memory and host_cache of all ranks are {wanted} bytes, but {available} are available; "
            "make them smaller"
        )


def _wanted_bytes(settings: EngineSettings, device: str) -> int:
    """Return the memory of this machine that the settings name for caches, of all ranks."""
    cache, tiers = settings.cache, settings.tiers
    wanted = 0 if cache.kv_cache_memory is None or device != "cpu" else cache.kv_cache_memory
    if tiers.host_cache is not None and _has_tiers(settings):
        wanted += tiers.host_cache
    return wanted * settings.parallel.num_ranks


def _check_disk(settings: EngineSettings) -> None:
    """Raise StorageError if the disk tier's directory can't be written into."""
    directory = settings.tiers.disk_cache
    if directory is not None and _has_tiers(settings):
        problem = examine_folder(directory).problem
        if problem is not None:
            raise StorageError(f"disk_cache: {problem}")


def _has_tiers(settings: EngineSettings) -> bool:
    return settings.cache.enable_prefix_cache or settings.role == "decode"


def _shapes_of(stored: Sequence[StoredTensor]) -> dict[str, LinearShape]:
    """Return the shapes of layers by name, of those that are stored as plain matrices."""
    return {
        tensor.name.removesuffix(".weight"): LinearShape(*tensor.shape)
        for tensor in stored
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in _PLAIN
    }
