"""The class that SGLang loads: HiCache's storage interface over `PageStores`.

Written for SGLang 0.5.23, its interface v1 (``batch_get_v1``, ``batch_set_v1``) and the older one. The
interface v2, for models that keep more than one kind of cache, isn't there: SGLang's own error says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from stemma.connectors.settings import StorageSettings
from stemma.connectors.sglang.pages import PageStores
from stemma.errors import ConfigError
from stemma.model.fingerprint import model_fingerprint
from stemma.prefix.keys import KeySpace

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
        self._stores: PageStores | None = None
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(
                "with tensor parallelism SGLang writes an MLA model's pages on one rank only; the others "
                "couldn't read them from a disk of that rank: use tp_size 1"
            )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for pages of this host pool. Raises what `PageStores` raises."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        self._page_elements, self._dtype = page.numel(), page.dtype
        self._page_size = int(mem_pool_host.page_size)
        config = self._config
        model = self._settings.model or Path(config.model_name or "")
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"{config.model_name!r} is no checkpoint directory; name it in the settings: "
                '"stemma": {"model": "DIRECTORY", ...}'
            )
        layout = (
            f"sglang {version('sglang')}:{getattr(mem_pool_host, 'layout', '')}:{page.dtype}:{page.numel()}"
            f":{type(mem_pool_host).__name__}:torch {torch.__version__}"
            f":tp {config.tp_rank} of {config.tp_size}:pp {config.pp_rank} of {config.pp_size}"
            f":cp {config.attn_cp_rank} of {config.attn_cp_size}:dp {config.dp_rank}"
        )
        space = KeySpace(model_fingerprint(model), layout, self._page_size)
        self._stores = PageStores(self._settings, space, page.numel() * page.element_size())

    @property
    def stores(self) -> PageStores:
        """The tiers; RuntimeError before `register_mem_pool_host`."""
        if self._stores is None:
            raise RuntimeError("no host pool is registered yet")
        return self._stores

    # -- interface v1 ---------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; return which were read."""
        pages = [self._empty_page() for _ in keys]
        results = self.stores.read(keys, [_view(page) for page in pages])
        for number, (page, is_read) in enumerate(zip(pages, results, strict=True)):
            if is_read:
                index = int(host_indices[number * self._page_size])
                self.mem_pool_host.set_from_flat_data_page(index, page)
        return results

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages of the host pool; return which are held now."""
        indices = [int(host_indices[number * self._page_size]) for number in range(len(keys))]
        pages = [self.mem_pool_host.get_data_page(index).contiguous() for index in indices]
        before = extra_info.prefix_keys if extra_info is not None else None
        return self.stores.write(keys, before[-1] if before else None, [_view(page) for page in pages])

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
        targets: Sequence[torch.Tensor] = target_locations or [self._empty_page() for _ in keys]
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
        self.stores.clear()

    def close(self) -> None:
        """Close the tiers, and log what they did."""
        if self._stores is not None:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self._stores.counts().items()))
            logger.info("Stemma's tiers: %s", counts)
            self._stores.close()

    def _empty_page(self) -> torch.Tensor:
        return torch.empty(self._page_elements, dtype=self._dtype)


def _view(page: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous page in host memory."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = page.view(torch.uint8).reshape(-1).numpy()
    return array.data
