"""From settings to the tiers below the device: the one place that knows how the classes fit together."""

from __future__ import annotations

import time
from pathlib import Path

from stemma.config.settings import PoolSettings, Role, TierSettings
from stemma.errors import StemmaError
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.device.copy import BlockCopy
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.copies_down import num_staging_slots
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.opening import open_pool
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import KeySpace
from stemma.supervision import Supervisor
from stemma.types import Tier


def open_tiers(
    settings: TierSettings,
    device: BlockCopy,
    key_space: KeySpace,
    *,
    step_tokens: int,
    blocks_may_wait: bool = True,
    eviction: str = "lru",
    pool: PoolSettings | None = None,
    part: tuple[int, int] = (0, 1),
    role: Role = "both",
    supervisor: Supervisor | None = None,
) -> TierTransfer:
    """Open the tiers that the settings name, each with a policy `eviction` of its own.

    `step_tokens`: the most that a step computes. `blocks_may_wait`: see `TierTransfer`.
    `part`: see `open_pool`; host and disk know it from `key_space`.
    Without any, the transfer does nothing; a pool may be attached later. Errors in the threads of the tiers
    go to `supervisor`. Raises ConfigError if a tier is too small for a block, StorageError (StorageLocked,
    StorageMismatch) if the disk directory can't be used or the pool doesn't answer.
    """
    block_bytes = device.block_bytes
    stores: list[BlockStore] = []
    if settings.disk_cache is not None:
        path, size, ttl_s = settings.disk_cache, settings.disk_cache_size, settings.disk_cache_ttl_s
        stores.append(
            open_disk(path, size, key_space, block_bytes, eviction=eviction, ttl_s=ttl_s, codec=device.codec)
        )
    host = None
    if settings.host_cache is not None:
        policy, size, pins = make_policy(eviction), settings.host_cache, device.pins_memory
        host = HostStore(block_bytes, size, policy, time.monotonic, pin_memory=pins, codec=device.codec)
    transfer = TierTransfer(
        device,
        host,
        stores,
        transfer_policy(settings, role),
        time.monotonic,
        block_size=key_space.block_size,
        num_staging_slots=num_staging_slots(
            settings.transfer_buffer, block_bytes, key_space.block_size, step_tokens
        ),
        blocks_may_wait=blocks_may_wait,
        supervisor=supervisor,
    )
    if pool is not None:
        try:
            store = open_pool(
                pool, key_space, block_bytes, pin_memory=transfer.pins_memory, part=part, codec=device.codec
            )
        except StemmaError:
            transfer.close()
            raise
        transfer.introduce(store)
        transfer.attach(store, pool.write)
    return transfer


def open_disk(
    path: Path,
    size_bytes: int,
    key_space: KeySpace,
    block_bytes: int,
    *,
    eviction: str,
    ttl_s: float | None,
    codec: BlockCodec | None = None,
) -> DiskStore:
    """Open a disk directory with a policy `eviction`; raises what `DiskStore` raises."""
    policy = make_policy(eviction)
    return DiskStore(
        path, key_space, block_bytes, size_bytes, policy, time.time, default_ttl_s=ttl_s, codec=codec
    )


def transfer_policy(settings: TierSettings, role: Role = "both") -> TransferPolicy:
    """Return the transfer policy of these settings."""
    return TransferPolicy(
        writes={Tier.HOST: settings.host_write, Tier.DISK: settings.disk_write},
        selective_uses=settings.write_through_uses,
        exclusive=settings.host_exclusive,
        prefetch=settings.prefetch,
        ask_always=settings.load_when == "always",
        # A decode server must not compute prompts, so it loads whatever the estimates say.
        load_always=settings.load_when == "always" or role == "decode",
        load_timeout_s=settings.load_timeout_s,
        publish_tails=role == "prefill",
        fail_on_load_failure=settings.load_failure == "fail",
    )
