"""From settings to an open pool tier."""

from __future__ import annotations

from stemma.config.settings import PoolSettings
from stemma.errors import StemmaError
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.registry import open_pool_backend, read_pool_config
from stemma.prefix.keys import KeySpace


def open_pool(
    settings: PoolSettings,
    key_space: KeySpace,
    block_bytes: int,
    *,
    pin_memory: bool,
    part: tuple[int, int] = (0, 1),
    codec: BlockCodec | None = None,
) -> PoolStore:
    """Open the backend that `settings` name; may block for seconds. `pin_memory`: blocks are for CUDA.

    `part`: which of how many processes, each with its part of every block, this one is. `codec` packs blocks.

    Values are named by the model's content, not its directory: servers that load the same weights from
    different directories share blocks. Raises ConfigError, or StorageError if the pool can't be reached.
    """
    backend = open_pool_backend(settings.name, read_pool_config(settings.config))
    try:
        names = PoolKeys(key_space.model_fingerprint, *part)
        return PoolStore(backend, names, block_bytes, settings, pin_memory=pin_memory, codec=codec)
    except StemmaError:  # it refuses our staging memory, or that can't be pinned
        backend.close()
        raise


def check_pool(settings: PoolSettings) -> None:
    """Open the backend that `settings` name and close it; may block for seconds. Errors as `open_pool`."""
    open_pool_backend(settings.name, read_pool_config(settings.config)).close()
