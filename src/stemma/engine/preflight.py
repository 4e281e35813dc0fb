"""Checks of an engine before its weights are read: those of `stemma serve` and of `stemma config check`."""

from __future__ import annotations

from stemma.config.settings import EngineSettings
from stemma.engine.combinations import check_combinations
from stemma.engine.ranks.settings import shares_of
from stemma.errors import ConfigError
from stemma.memory.tiers.pool.opening import check_pool
from stemma.model.checkpoint_config import describe_checkpoint
from stemma.model.directory import stored_tensors
from stemma.model.loading import resolve_device
from stemma.model.located import located_model, present_path
from stemma.model.parallel.cutting import check_cut
from stemma.model.prediction import check_prediction
from stemma.model.progress import Progress
from stemma.native.process_memory import available_bytes


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


def with_checkpoint(settings: EngineSettings, progress: Progress | None = None) -> EngineSettings:
    """Return the settings with a path of this machine in place of a model's name. Raises ModelError."""
    if progress is not None and present_path(settings.model) is None:
        progress("preparing the model", 0.0)
    return settings.model_copy(update={"model": located_model(settings.model)})


def _check_memory(settings: EngineSettings, device: str) -> None:
    """Raise ConfigError if the sizes that the settings name are more than this machine can give."""
    cache, tiers = settings.cache, settings.tiers
    wanted = 0 if cache.kv_cache_memory is None or device != "cpu" else cache.kv_cache_memory
    if tiers.host_cache is not None and (cache.enable_prefix_cache or settings.role == "decode"):
        wanted += tiers.host_cache
    wanted *= settings.parallel.num_ranks
    if wanted > (available := available_bytes()):
        raise ConfigError(
            f"kv_cache_memory and host_cache of all ranks are {wanted} bytes, but {available} are available; "
            "make them smaller"
        )
