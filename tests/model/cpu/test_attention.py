"""The C++ kernels against plain formulas."""

from __future__ import annotations

import ctypes
import dataclasses
import random

import numpy as np
import pytest
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attention import AttentionCall
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.paged import AttentionStep
from stemma.native.library import Kernels, load_kernels
from stemma.native.structures import GateArgs, NormArgs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
KERNELS = load_kernels()
"""None on a machine without compiler: then torch is compared with torch."""


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


CASES = {
    "one token": ([1], [1], 0),
    "decodes of uneven length": ([700, 3, 65, 1, 33], [1] * 5, 0),
    "long context, split among threads": ([1900], [1], 0),
    "chunks and decodes": ([200, 90, 640, 31], [50, 90, 33, 1], 0),
    "shared prefix": ([330, 300, 340, 310], [1] * 4, 18),
    "shared prefix, chunks too": ([330, 300, 340, 310], [1, 5, 1, 22], 17),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(14, 2, 64),
        Shape(4, 2, 16, block_size=1),
        Shape(8, 8, 128, block_size=8),
        Shape(32, 2, 80, block_size=64),
        Shape(4, 4, 24, block_size=20),
        Shape(40, 1, 32, block_size=33),
    ],
    ids=str,
)
def test_attention_equals_torch(shape: Shape, case: str, dtype: torch.dtype) -> None:
    """All shapes of batch, with and without sliding window, soft cap and sinks."""
    batch, kv = make_batch(shape, *CASES[case], dtype)
    tokens = len(batch.positions)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(tokens, shape.num_heads, shape.head_dim, generator=generator).to(dtype)
    new = torch.randn(2, tokens, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
    sinks = torch.randn(shape.num_heads, generator=generator) * 3
    for options in ((None, None, None), (24, None, sinks), (None, 5.0, None)):
        window, softcap, beside = options
        call = AttentionCall(0, shape.head_dim**-0.5, window, softcap, None, beside)
        expected = AttentionStep(batch, kv).attend(call, query, new[0], new[1])
        assert KERNELS is None or isinstance(KERNELS, Kernels)
        if KERNELS is not None:
            with NativeAttentionStep(batch, kv, KERNELS) as step:
                output = step.attend(call, query, new[0], new[1])
            torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_norm_and_gate(rows: int, dtype: torch.dtype) -> None:
    """Residual sum, RMSNorm and SiLU gate round where transformers' modules do."""
    if KERNELS is None:
        return
    generator = torch.Generator().manual_seed(0)
    dim, eps = 136, 1e-6
    delta, residual, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, dim), (rows, dim), (dim,))
    )
    total = residual + delta
    wide = total.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)
    output = torch.empty_like(total)
    is_bf16 = dtype == torch.bfloat16
    norm = NormArgs(*(t.data_ptr() for t in (delta, residual, weight, output)), rows, dim, is_bf16, 2, eps)
    KERNELS.add_rms_norm(ctypes.addressof(norm))
    assert residual.equal(total)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-2)
    gated = torch.empty(rows, dim // 2, dtype=dtype)
    gate_up = torch.randn(rows, dim, generator=generator).to(dtype) * 20
    args = GateArgs(gate_up.data_ptr(), gated.data_ptr(), rows, dim // 2, is_bf16, 2)
    KERNELS.silu_and_multiply(ctypes.addressof(args))
    gate, up = gate_up.chunk(2, dim=-1)
    # Two roundings to bf16 in turn: a value between two may fall to either.
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1.6e-2)
