"""The C++ kernels against plain formulas."""

from __future__ import annotations

import ctypes

import pytest
import torch
from tests.model.attention_batches import Shape, make_batch

from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.paged import AttentionStep
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.native.library import Kernels, load_kernels
from stemma.native.structures import GateArgs, NormArgs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
KERNELS = load_kernels()
"""None on a machine without compiler: then torch is compared with torch."""


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
    norm = NormArgs(
        delta=delta.data_ptr(),
        residual=residual.data_ptr(),
        weight=weight.data_ptr(),
        output=output.data_ptr(),
        rows=rows,
        dim=dim,
        is_bf16=is_bf16,
        threads=2,
        eps=eps,
    )
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [136, 141])
def test_what_is_added_is_normed_first(dim: int, dtype: torch.dtype) -> None:
    """As Gemma 3 does: both norms take their weights in floats, and round once."""
    if KERNELS is None:
        return
    generator = torch.Generator().manual_seed(dim)
    rows, eps = 3, 1e-6
    delta, residual = (torch.randn(rows, dim, generator=generator).to(dtype) for _ in range(2))
    inner, outer = (1.0 + torch.randn(dim, generator=generator) for _ in range(2))

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)

    total, output = residual + normed(delta, inner), torch.empty_like(residual)
    norm = NormArgs(
        delta=delta.data_ptr(),
        delta_norm=inner.data_ptr(),
        residual=residual.data_ptr(),
        weight=outer.data_ptr(),
        output=output.data_ptr(),
        rows=rows,
        dim=dim,
        is_bf16=dtype == torch.bfloat16,
        threads=2,
        eps=eps,
        centered=1,
    )
    KERNELS.add_rms_norm(ctypes.addressof(norm))
    torch.testing.assert_close(residual, total, atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(output, normed(residual, outer), atol=1e-5, rtol=1e-2)
