"""Runs in SGLang's environment: its factory makes our backend, and its interface is gone through.

The host pool is a stand-in with the three methods that are called: SGLang's own needs a GPU build of
torchvision to be imported. Names of pages are SGLang's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str

PAGE_SIZE = 8
SHAPE = (2, 3, PAGE_SIZE, 2, 16)
"""K and V, layers, tokens, heads, dim: as SGLang's pool in the layout ``layer_first`` gives a page."""


class HostPool:
    page_size = PAGE_SIZE
    layout = "layer_first"

    def __init__(self, num_pages: int) -> None:
        torch.manual_seed(0)
        self.buffer = torch.randn(2, 3, num_pages * PAGE_SIZE, 2, 16, dtype=torch.bfloat16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(SHAPE, dtype=torch.bfloat16).flatten()

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.buffer[:, :, index : index + PAGE_SIZE].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.buffer[:, :, index : index + PAGE_SIZE] = page.reshape(SHAPE)


def open_backend(model: str, disk: str, pool: HostPool) -> Any:
    extra = {
        "backend_name": "stemma",
        "module_path": "stemma.connectors.sglang",
        "class_name": "StemmaStorage",
        "interface_v1": 1,
        "stemma": {"disk_cache": disk, "disk_cache_size": "20MB"},
    }
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name=model, extra_config=extra,
    )  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    assert isinstance(backend, HiCacheStorage)
    backend.register_mem_pool_host(pool)
    return backend


def names_of(num_pages: int, seed: int = 0) -> list[str]:
    tokens = torch.randint(0, 1000, (num_pages * PAGE_SIZE,), generator=torch.Generator().manual_seed(seed))
    names, before = [], None
    for start in range(0, len(tokens), PAGE_SIZE):
        before = get_hash_str(tokens[start : start + PAGE_SIZE].tolist(), before)
        names.append(before)
    return names


def main(model: str, disk: str) -> None:
    pool = HostPool(8)
    original = pool.buffer.clone()
    names = names_of(4)
    first = open_backend(model, disk, pool)
    assert first.batch_exists(names) == 0
    indices = torch.arange(4 * PAGE_SIZE)
    two = 2 * PAGE_SIZE
    assert first.batch_set_v1(names[:2], indices[:two]) == [True, True]
    behind = HiCacheStorageExtraInfo(prefix_keys=names[:2])
    assert first.batch_set_v1(names[2:], indices[two:], behind) == [True, True]
    first.close()

    second = open_backend(model, disk, pool)
    assert second.batch_exists([*names, names_of(1, seed=1)[0]]) == 4
    pool.buffer.zero_()
    into = torch.arange(4 * PAGE_SIZE, 8 * PAGE_SIZE)
    assert second.batch_get_v1(names, into) == [True] * 4
    assert torch.equal(pool.buffer[:, :, 4 * PAGE_SIZE :], original[:, :, : 4 * PAGE_SIZE])

    # The older interface reads the same pages.
    targets = [pool.get_dummy_flat_data_page() for _ in names]
    assert all(one is target for one, target in zip(second.batch_get(names, targets), targets, strict=True))
    assert torch.equal(targets[3], original[:, :, 3 * PAGE_SIZE : 4 * PAGE_SIZE].flatten())
    other = names_of(2, seed=2)
    assert second.batch_set(other, [pool.get_data_page(0), pool.get_data_page(8)])
    assert second.exists(other[1])
    assert second.get(names_of(1, seed=3)[0]) is None

    # Damage is a miss; the pages before it count.
    (slab,) = Path(disk).glob("*/slab-00000")
    with slab.open("r+b") as file:
        file.seek(slab.stat().st_size // 2)
        file.seek(0)
        data = bytearray(file.read())
        at = data.index(targets[2].view(torch.uint8).numpy().tobytes())
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    assert second.batch_get_v1(names, into) == [True, True, False, True]
    assert second.stores.counts()["disk/checksum"] == 1
    second.clear()
    assert second.batch_exists(names) == 0
    second.close()
    print("sglang went through it")


if __name__ == "__main__":
    main(*sys.argv[1:])
