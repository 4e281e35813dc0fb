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
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
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


class StatePool:
    """A kind of pages that isn't KV: one index, one vector."""

    page_size = 1

    def __init__(self, num_pages: int, dim: int) -> None:
        self.buffer = torch.randn(num_pages, dim)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.buffer.shape[1])

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.buffer[index]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.buffer[index] = page


def open_backend(model: str, disk: str, pool: HostPool, others: dict[PoolName, Any] | None = None) -> Any:
    extra = {
        "backend_name": "stemma",
        "module_path": "stemma_connect.sglang",
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
    for name, other in (others or {}).items():
        backend.register_mem_host_pool_v2(other, name)
    backend.on_host_pools_registered()
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
    (slab,) = Path(disk).glob("kv/*/slab-00000")
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
    several_kinds(model, disk)
    print("sglang went through it")


def several_kinds(model: str, disk: str) -> None:
    """Interface v2: KV, an index of every page, and a state that only some prefixes have."""
    pool, index, state = HostPool(8), HostPool(8), StatePool(8, 20)
    others = {PoolName.INDEXER: index, PoolName.MAMBA: state}
    backend = open_backend(model, disk, pool, others)
    names = names_of(6, seed=7)
    everything = torch.arange(6 * PAGE_SIZE)
    assert backend.batch_set_v1(names, everything) == [True] * 6
    behind = HiCacheStorageExtraInfo(prefix_keys=names[:1])
    written = [PoolTransfer(PoolName.INDEXER, host_indices=everything[: 5 * PAGE_SIZE], keys=names[:5])]
    written += [PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1]), keys=names[1:2])]
    assert backend.batch_set_v2(written[:1]) == {PoolName.INDEXER: [True] * 5}
    assert backend.batch_set_v2(written[1:], behind) == {PoolName.MAMBA: [True]}
    last = [PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([3]), keys=names[3:4])]
    assert backend.batch_set_v2(last) == {PoolName.MAMBA: [True]}
    wrong = [PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([3, 4]), keys=names[3:4])]
    assert backend.batch_set_v2(wrong) == backend.batch_get_v2(wrong) == {PoolName.MAMBA: [False]}
    unknown = [PoolTransfer(PoolName.SWA, host_indices=torch.tensor([3]), keys=names[3:4])]
    assert backend.batch_get_v2(unknown) == {PoolName.SWA: [False]}

    asked = [PoolTransfer(PoolName.INDEXER)]
    found = backend.batch_exists_v2(names, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [1, 2, 3, 4, 5])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 5}
    asked += [PoolTransfer(PoolName.MAMBA, keys=["one"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    found = backend.batch_exists_v2(names, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert backend.batch_exists_v2(names_of(2, seed=8), asked).kv_hit_pages == 0

    expected = index.buffer.clone(), state.buffer.clone()
    index.buffer.zero_()
    state.buffer.zero_()
    backend.close()
    again = open_backend(model, disk, pool, others)
    assert again.batch_get_v2([*written, *last]) == {PoolName.INDEXER: [True] * 5, PoolName.MAMBA: [True]}
    assert torch.equal(index.buffer[:, :, : 5 * PAGE_SIZE], expected[0][:, :, : 5 * PAGE_SIZE])
    assert torch.equal(state.buffer[3], expected[1][3])
    assert again.batch_get_v2(written[1:]) == {PoolName.MAMBA: [True]}
    assert torch.equal(state.buffer[1], expected[1][1])
    again.clear()
    assert again.batch_exists_v2(names, asked).kv_hit_pages == 0
    again.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
