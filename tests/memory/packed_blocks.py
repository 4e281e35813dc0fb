"""Blocks that shrink as real KV does, others that don't, and what packs them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from stemma.memory.device.block_codec import BlockCodec, make_codec
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import BlockPut, BlockStore, ReadResult
from stemma.types import BlockKey

LAYOUT = KVLayout(4, 2, 32, 2, 64, "bfloat16")
BLOCK_BYTES = LAYOUT.block_bytes
ROOT = BlockKey(hashlib.sha256(b"root").digest())


def codec(layout: KVLayout = LAYOUT, isa: str = "auto") -> BlockCodec:
    found = make_codec(layout, isa)
    assert found is not None
    return found


def numbers(seed: int, layout: KVLayout = LAYOUT) -> bytes:
    """Channels of different sizes, as in keys and values."""
    draw = torch.Generator().manual_seed(seed)
    shape = layout.block_shape
    channels = torch.randn(*shape[:2], 1, *shape[3:], generator=draw).exp()
    block = (torch.randn(shape, generator=draw) * channels).to(torch.bfloat16)
    return block.view(torch.uint8).numpy().tobytes()


def noise(seed: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def blocks(name: str, count: int, *, noisy: Sequence[int] = ()) -> list[BlockPut]:
    """A chain; those at `noisy` positions don't shrink."""
    parent, chain = ROOT, []
    for n in range(count):
        key = BlockKey(hashlib.sha256(f"{name}/{n}".encode()).digest())
        chain.append(BlockPut(key, parent, memoryview(content(key, noisy=n in noisy))))
        parent = key
    return chain


def content(key: BlockKey, *, noisy: bool = False) -> bytes:
    seed = int.from_bytes(key[:4], "little")
    return noise(seed) if noisy else numbers(seed)


def read(store: BlockStore, wanted: Sequence[BlockPut]) -> list[ReadResult]:
    """Read, and prove that each hit is what was put."""
    buffers = [bytearray(BLOCK_BYTES) for _ in wanted]
    results = store.get_many([block.key for block in wanted], [memoryview(buffer) for buffer in buffers])
    for block, buffer, result in zip(wanted, buffers, results, strict=True):
        assert result is not ReadResult.HIT or buffer == block.data
    return results
