"""The class that SGLang loads: HiCache's storage interface over `PageStores`.

Written for SGLang 0.5.23: its interface v2, for models that keep more than one kind of page (an index beside
KV, states of a window), v1 (``batch_get_v1``, ``batch_set_v1``), and the older one. Each kind of page has
tiers of its own, since its pages have a size of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from stemma.errors import ConfigError, StemmaError
from stemma.model.files.fingerprint import model_fingerprint
from stemma.prefix.keys import KeySpace
from stemma_connect.settings import StorageSettings
from stemma_connect.sglang.pages import PageStores

logger = logging.getLogger(__name__)


class StemmaStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's third tier. Any thread."""

    def __init__(self, storage_config: HiCacheStorageConfig, options: Any = None) -> None:
        """Check the settings, which are under ``stemma`` in SGLang's extra config. Raises ConfigError."""
        given = (storage_config.extra_config or {}).get("stemma")
        if not isinstance(given, dict):
            raise ConfigError('the extra config of the storage backend needs "stemma": {...} with the tiers')
        self._settings = StorageSettings.parse(given, where="hicache-storage-backend-extra-config: stemma")
        self._config = storage_config
        self._kinds: dict[str, _Kind] = {}
        """By the name of the host pool."""
        self._opened: dict[str, PageStores] | None = None
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(
                "with tensor parallelism SGLang writes an MLA model's pages on one rank only; the others "
                "couldn't read them from a disk of that rank: use tp_size 1"
            )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn of the host pool of KV. Raises ConfigError if the checkpoint isn't where the settings say."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV.value, mem_pool_host)
        model = self._model
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"{self._config.model_name!r} is no checkpoint directory; name it in the settings: "
                '"stemma": {"model": "DIRECTORY", ...}'
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Learn of the host pool of another kind of pages. One that comes after the others isn't served."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_name(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the tiers for all kinds of pages. Raises what `PageStores` raises."""
        self._open()

    @property
    def stores(self) -> PageStores:
        """The tiers of KV; RuntimeError before `register_mem_pool_host`."""
        return self._open()[PoolName.KV.value]

    def _register(self, name: str, host_pool: Any) -> None:
        if self._opened is not None and name not in self._opened:
            logger.warning("Stemma's tiers are open already: pages of %s aren't kept", name)
            return
        page = host_pool.get_dummy_flat_data_page()
        page_size = int(getattr(host_pool, "page_size", 1) or 1)
        self._kinds[name] = _Kind(host_pool, page.numel(), page.dtype, page_size)

    def _open(self) -> dict[str, PageStores]:
        """Open the tiers once; the disk's size is divided among the kinds as the sizes of their pages are."""
        if self._opened is not None:
            return self._opened
        if PoolName.KV.value not in self._kinds:
            raise RuntimeError("no host pool is registered yet")
        fingerprint = model_fingerprint(self._model)
        total = sum(kind.page_bytes for kind in self._kinds.values())
        opened: dict[str, PageStores] = {}
        try:
            for name, kind in self._kinds.items():
                settings = self._settings
                if settings.disk_cache is not None:
                    part = {
                        "disk_cache": settings.disk_cache / name,
                        "disk_cache_size": settings.disk_cache_size * kind.page_bytes // total,
                    }
                    settings = settings.model_copy(update=part)
                space = KeySpace(fingerprint, self._layout(name, kind), kind.page_size)
                opened[name] = PageStores(settings, space, kind.page_bytes)
        except StemmaError:
            for stores in opened.values():
                stores.close()
            raise
        self._opened = opened
        return opened

    @property
    def _model(self) -> Path:
        return self._settings.model or Path(self._config.model_name or "")

    def _layout(self, name: str, kind: _Kind) -> str:
        """Return a text that differs between any two pages whose bytes aren't interchangeable."""
        config = self._config
        return (
            f"sglang {version('sglang')}:{name}:{getattr(kind.host_pool, 'layout', '')}:{kind.dtype}"
            f":{kind.num_elements}:{type(kind.host_pool).__name__}:torch {torch.__version__}"
            f":tp {config.tp_rank} of {config.tp_size}:pp {config.pp_rank} of {config.pp_size}"
            f":cp {config.attn_cp_rank} of {config.attn_cp_size}:dp {config.dp_rank}"
        )

    # -- interface v2 ---------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix for which each kind has what its policy asks for.

        A kind with the policy BLOCK_GROUPS gets no verdict: it doesn't decide.
        """
        num_kv = self.stores.num_leading(keys)
        hits: dict[Any, int] = {PoolName.KV: num_kv} if num_kv else {}
        restorable = set(range(1, num_kv + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            stores = self._open().get(_name(transfer.name))
            held = [False] * num_kv if stores is None else stores.held(keys[:num_kv])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                boundary = held.index(False) if False in held else num_kv
                its = set(range(1, boundary + 1))
            else:
                its = _ends_of_runs(held, max(1, len(transfer.keys or ())))
            if its:
                hits[transfer.name] = max(its)
            restorable &= its
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several kinds into their host pools; return, by kind, which were read."""
        return {one.name: self._get(one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of several kinds; return, by kind, which are held now."""
        return {
            one.name: self._set(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers
        }

    def _get(self, pool: Any, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        stores, kind = self._open().get(_name(pool)), self._kinds.get(_name(pool))
        if stores is None or kind is None or not kind.fits(keys, indices):
            return [False] * len(keys)
        assert indices is not None
        pages = [kind.empty_page() for _ in keys]
        results = stores.read(keys, [_view(page) for page in pages])
        for number, (page, is_read) in enumerate(zip(pages, results, strict=True)):
            if is_read:
                kind.host_pool.set_from_flat_data_page(int(indices[number * kind.page_size]), page)
        return results

    def _set(
        self,
        pool: Any,
        keys: list[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        stores, kind = self._open().get(_name(pool)), self._kinds.get(_name(pool))
        if stores is None or kind is None or not kind.fits(keys, indices):
            return [False] * len(keys)
        assert indices is not None
        at = [int(indices[number * kind.page_size]) for number in range(len(keys))]
        pages = [kind.host_pool.get_data_page(index).contiguous() for index in at]
        before = extra_info.prefix_keys if extra_info is not None else None
        return stores.write(keys, before[-1] if before else None, [_view(page) for page in pages])

    # -- interface v1 ---------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; return which were read."""
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages of the host pool; return which are held now."""
        return self._set(PoolName.KV, keys, host_indices, extra_info)

    # -- the older interface --------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Return a page, in `target_location` if that is given; None: it isn't held."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Return pages, each in its target if targets are given."""
        targets: Sequence[torch.Tensor] = target_locations or [
            self._kinds[PoolName.KV.value].empty_page() for _ in keys
        ]
        results = self.stores.read(keys, [_view(target) for target in targets])
        return [target if is_read else None for target, is_read in zip(targets, results, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write a page; return whether it is held now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write pages that follow each other; return whether all are held now."""
        if values is None:
            return False
        return all(self.stores.write(keys, None, [_view(value.contiguous()) for value in values]))

    def exists(self, key: str) -> bool:
        """Return whether a tier probably has a page."""
        return self.stores.num_leading([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages the tiers probably have."""
        return self.stores.num_leading(keys)

    def clear(self) -> None:
        """Drop what the disk holds; a shared pool is kept."""
        for stores in self._open().values():
            stores.clear()

    def close(self) -> None:
        """Close the tiers, and log what they did."""
        for name, stores in (self._opened or {}).items():
            counts = ", ".join(f"{what} {count}" for what, count in sorted(stores.counts().items()))
            logger.info("Stemma's tiers of %s: %s", name, counts)
            stores.close()


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of pages and SGLang's host pool of them."""

    host_pool: Any
    num_elements: int
    dtype: torch.dtype
    page_size: int
    """Indices per page."""

    @property
    def page_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def empty_page(self) -> torch.Tensor:
        return torch.empty(self.num_elements, dtype=self.dtype)

    def fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether there are as many indices as pages need; SGLang's own backends refuse others too."""
        return indices is not None and indices.numel() == len(keys) * self.page_size


def _ends_of_runs(held: Sequence[bool], length: int) -> set[int]:
    """Return the prefixes whose last `length` pages are held, all of them where a prefix is shorter."""
    ends, run = set(), 0
    for number, is_held in enumerate(held, 1):
        run = run + 1 if is_held else 0
        if run >= min(length, number):
            ends.add(number)
    return ends


def _name(pool: Any) -> str:
    """Return the name of a host pool as text; SGLang's names are members of an enumeration."""
    return str(getattr(pool, "value", pool))


def _view(page: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous page in host memory."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = page.view(torch.uint8).reshape(-1).numpy()
    return array.data
