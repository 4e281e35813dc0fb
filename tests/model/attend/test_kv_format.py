"""KV as codes with scales: what torch and the kernels of every level write, and what is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.isa import level_params

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import LARGEST_CODE, KVRows, decode, encode
from stemma.model.attend.latent import LatentProjection
from stemma.model.attend.paged import AttentionStep
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.native.library import load_kernels

CODES = [stored for stored in get_args(StoredAs) if stored != "plain"]
DTYPES = (torch.bfloat16, torch.float32)


def naive_e4m3() -> np.ndarray:
    """All numbers of e4m3 that aren't negative, from its definition."""
    exponents, mantissas = np.divmod(np.arange(127), 8)
    return np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))


def nearest(x: float, stored: str) -> float:
    """The code nearest to x, as a number; of two as near, the one whose last bit is 0."""
    numbers = np.arange(128.0) if stored == "int8" else naive_e4m3()
    distance = np.abs(numbers - abs(x))
    best = np.flatnonzero(distance == distance.min())
    return float(np.copysign(numbers[best[best % 2 == 0][0] if len(best) > 1 else best[0]], x))


@pytest.mark.parametrize("stored", CODES)
@given(seed=st.integers(0, 1 << 16), spread=st.sampled_from([0.0, 1.0, 3.0, 12.0]))
@settings(max_examples=15, deadline=None)
def test_codes_are_the_nearest_ones(stored: StoredAs, seed: int, spread: float) -> None:
    """Brute force over all codes; the row's largest number is never clipped."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(32, generator=generator) * torch.exp(torch.randn(32, generator=generator) * spread)
    codes, scales = encode(row[None], stored, (32,))
    scale = float(scales)
    exact = float(row.abs().max()) / LARGEST_CODE[stored]
    assert exact * 0.9999999 <= scale <= exact * 1.01
    inverse = torch.tensor(1.0) / scale
    expected = [nearest(float(x * inverse), stored) * scale for x in row]
    found = decode(codes, scales, stored, (32,), torch.float32)[0]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("stored", CODES)
def test_rows_of_zeros_and_rows_that_are_not_finite(stored: StoredAs) -> None:
    rows = torch.zeros(4, 8)
    rows[1, 3], rows[2, 0], rows[3, 5] = float("nan"), float("-inf"), 1e-42
    found = decode(*encode(rows, stored, (8,)), stored, (8,), torch.float32)
    assert not found[0].any()
    assert found[1].isnan().all()
    assert found[2].isnan().all()
    assert not found[3].any()


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    head_dim: int
    rank: int = 0
    tiled: bool = False

    def layout(self, stored: StoredAs, dtype: torch.dtype) -> KVLayout:
        return KVLayout(
            num_layers=2,
            num_parts=1 if self.rank else 2,
            block_size=4,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            stored=stored,
            latent_rank=self.rank,
            tiled=self.tiled,
        )


SHAPES = (
    *(Shape(3, 64), Shape(1, 576, rank=512), Shape(2, 24), Shape(1, 13), Shape(1, 40, rank=25)),
    *(Shape(1, 576, rank=512, tiled=True), Shape(1, 40, rank=32, tiled=True)),
)


def rows_of(shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows [T, heads, dim] of many magnitudes; some have zeros, one isn't finite."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(11, shape.num_kv_heads, shape.head_dim, generator=generator)
    rows *= torch.exp(5 * torch.randn(11, 1, 1, generator=generator))
    rows[:, :, shape.rank :] *= 30.0
    rows[3], rows[4, 0, 0], rows[5, 0, -1] = 0.0, float("inf"), 1e-35
    rows[6] *= 1e-36
    return rows.to(dtype)


def own_batch(num_tokens: int, block_size: int) -> ForwardBatch:
    """Each token a sequence of its own, at the beginning of its own block."""
    blocks = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slots=blocks * block_size,
        query_starts=list(range(num_tokens + 1)),
        context_lens=[1] * num_tokens,
        block_tables=blocks[:, None].to(torch.int32),
        logits_rows=torch.tensor([0]),
    )


def check_rows(isa: str, stored: StoredAs, dtype: torch.dtype, shape: Shape, seed: int) -> None:
    """Kernels write the bytes that torch writes, and attention over a single token returns what they say."""
    kernels = load_kernels(isa)
    assert kernels is not None
    layout = shape.layout(stored, dtype)
    key, value = rows_of(shape, dtype, seed), rows_of(shape, dtype, seed + 1)
    batch = own_batch(len(key), layout.block_size)
    native, plain = DeviceKV(layout, len(key)), DeviceKV(layout, len(key))
    latent = None
    if shape.rank:
        value = key[..., : shape.rank]
        latent = LatentProjection(
            torch.zeros(16, shape.rank), nope_dim=8, rope_dim=shape.head_dim - shape.rank, value_dim=8
        )
    call = AttentionCall(1, 0.1, None, None, latent)
    AttentionStep(batch, plain).write(call, key, value)
    with NativeAttentionStep(batch, native, kernels) as step:
        step.write(call, key, value)
        assert native.data.equal(plain.data)
        if shape.rank or stored == "plain":  # products of bf16 take the smallest of these numbers for zero
            return
        output = step.attend(call, torch.zeros_like(value).repeat(1, 2, 1), key, value)
    read = KVRows(native, 1, 1, shape.head_dim).gather(batch.block_tables[:, 0].long())[:, 0]
    expected = read.repeat_interleave(2, dim=1)
    finite = (expected.isfinite() & key.isfinite().repeat_interleave(2, dim=1)).all(-1)
    assert finite.sum() > 8
    assert output[finite].equal(expected[finite])


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", get_args(StoredAs))
def test_kernels_write_and_read_what_torch_does(isa: str, stored: StoredAs, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for seed in range(4):
            check_rows(isa, stored, dtype, shape, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", get_args(StoredAs))
@pytest.mark.parametrize(("dim", "rank"), [(576, 512), (40, 32)])
def test_torch_reads_the_same_rows_from_pieces(
    stored: StoredAs, dtype: torch.dtype, dim: int, rank: int
) -> None:
    """Also laid out alike, so that what is computed with them is the same to the bit."""
    rows = rows_of(Shape(1, dim, rank), dtype, 0)
    read = []
    for tiled in (False, True):
        kv = DeviceKV(Shape(1, dim, rank, tiled).layout(stored, dtype), 4)
        part = KVRows(kv, 1, 0, dim)
        tokens = torch.randperm(16, generator=torch.Generator().manual_seed(0))[: len(rows)]
        part.write(tokens // 4, tokens % 4, rows)
        read.append(part.gather(torch.tensor([[3, 1], [0, 2]])))
        assert not kv.layer(0).any()
    assert read[0].view(torch.uint8).equal(read[1].view(torch.uint8))
    assert read[0].stride() == read[1].stride()
