"""Whether what is configured below the device tier can be used: directories and the pool."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from stemma.cli.doctor.listening import ports_open_to_all
from stemma.config.settings import PoolSettings, TierSettings
from stemma.config.sizes import format_size
from stemma.errors import StemmaError
from stemma.memory.tiers.disk.existing import HeldBlocks, held_blocks
from stemma.memory.tiers.disk.folder import Folder, examine_folder
from stemma.memory.tiers.disk.spaces import list_spaces

_POOL_TIMEOUT_S = 10.0
_PROBE_KEY = "stemma-doctor"


@dataclass(frozen=True, slots=True)
class DiskTier:
    """The disk tier's directory."""

    folder: Folder
    limit_bytes: int
    num_caches: int
    """Sub-directories, one per model, KV dtype and block size."""
    cache_bytes: int
    num_in_use: int
    """Caches that a running server holds."""
    held: HeldBlocks
    """In all of them."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool that is configured."""

    name: str
    problem: str | None
    ports_open_to_all: tuple[int, ...] = ()
    """Ports that its client opened on all interfaces, whatever its configuration names; of this call."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers below the device; None: not configured."""

    host_bytes: int | None
    disk: DiskTier | None
    pool: Pool | None

    def problems(self, free_bytes: int) -> list[str]:
        """Return what keeps the tiers from working; `free_bytes` is the memory that can be allocated."""
        found = []
        if self.host_bytes is not None and self.host_bytes > free_bytes:
            free, wanted = format_size(free_bytes), format_size(self.host_bytes)
            found.append(f"host tier: {wanted} asked for, but only {free} of memory are free")
        if self.disk is not None and self.disk.folder.problem is not None:
            found.append(f"disk tier: {self.disk.folder.problem}")
        elif self.disk is not None and self.disk.folder.free_bytes is not None:
            room = self.disk.folder.free_bytes + self.disk.cache_bytes
            if room < self.disk.limit_bytes:
                limit = format_size(self.disk.limit_bytes)
                found.append(
                    f"disk tier: the limit is {limit}, but the disk has room for {format_size(room)}"
                )
        if self.pool is not None and self.pool.problem is not None:
            found.append(f"pool {self.pool.name}: {self.pool.problem}")
        return found


def examine_tiers(settings: TierSettings, pool: PoolSettings | None) -> Tiers:
    """Look at the tiers that the settings name; the pool is asked for a key that it doesn't have."""
    disk = None
    if settings.disk_cache is not None:
        folder = examine_folder(settings.disk_cache)
        spaces = list_spaces(settings.disk_cache) if settings.disk_cache.is_dir() else []
        disk = DiskTier(
            folder,
            settings.disk_cache_size,
            len(spaces),
            sum(space.allocated_bytes for space in spaces),
            sum(space.in_use for space in spaces),
            held_blocks(*spaces),
        )
    return Tiers(settings.host_cache, disk, None if pool is None else _examine_pool(pool))


def _examine_pool(settings: PoolSettings) -> Pool:
    """Open the pool and ask it for a key, on a thread: a backend may never answer."""
    problems = [f"no answer within {_POOL_TIMEOUT_S:.0f} s"]
    before, ports = ports_open_to_all(), set[int]()

    def ask() -> None:
        from stemma.memory.tiers.pool.registry import open_pool_backend, read_pool_config

        try:
            backend = open_pool_backend(settings.name, read_pool_config(settings.config))
            try:
                backend.exists_many([_PROBE_KEY])
                ports.update(ports_open_to_all() - before)
            finally:
                backend.close()
            problems.clear()
        except StemmaError as error:
            problems[:] = [str(error).removeprefix(f"pool {settings.name}: ")]
        except Exception as error:  # noqa: BLE001 (a third party's backend may raise anything)
            problems[:] = [f"{type(error).__name__}: {error}"]

    asking = threading.Thread(target=ask, daemon=True, name="stemma-doctor-pool")
    asking.start()
    asking.join(_POOL_TIMEOUT_S)
    return Pool(settings.name, problems[0] if problems else None, tuple(sorted(ports)))
