"""Batches of sequences with random KV, as an attention kernel gets them."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


def make_batch(
    shape: Shape, lens: list[int], queries: list[int], shared_blocks: int, dtype: torch.dtype
) -> tuple[ForwardBatch, DeviceKV]:
    """Sequences with random KV in shuffled blocks; all but the first share its first blocks."""
    size = shape.block_size
    need = [-(-n // size) for n in lens]
    kv = DeviceKV(
        KVLayout(1, 2, size, shape.num_kv_heads, shape.head_dim, str(dtype).removeprefix("torch.")),
        sum(need) + 1,
    )
    generator = torch.Generator().manual_seed(0)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    free = list(range(kv.num_blocks))
    random.Random(0).shuffle(free)
    tables = np.zeros((len(lens), max(need)), dtype=np.int32)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, (length, num_queries) in enumerate(zip(lens, queries, strict=True)):
        for index in range(need[row]):
            tables[row, index] = tables[0, index] if row and index < shared_blocks else free.pop()
        for position in range(length - num_queries, length):
            positions.append(position)
            slots.append(int(tables[row, position // size]) * size + position % size)
        starts.append(len(positions))
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=lens,
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.tensor([0]),
    )
    return batch, kv
