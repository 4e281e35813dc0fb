"""Attention of the native kernels, bit for bit: a row's result depends on its own tokens alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import KVRows
from stemma.model.attend.latent import LatentProjection
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.native.library import load_kernels
from tests.native.isa import level_params

LENGTH = 600
DTYPES = (torch.bfloat16, torch.float32)
BLOCK_SIZES = (1, 5, 8, 16, 24, 64, 256)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    stored: StoredAs = "plain"
    rank: int = 0
    """Of a latent: keys and values are the same rows, of which values are the first `rank` dims."""
    tiled: bool = False

    def layout(self, block_size: int, dtype: torch.dtype) -> KVLayout:
        name = str(dtype).removeprefix("torch.")
        parts = 1 if self.rank else 2
        heads, dim = self.num_kv_heads, self.head_dim
        return KVLayout(1, parts, block_size, heads, dim, name, self.stored, self.rank, self.tiled)


class Absorbed(LatentProjection):
    """A projection whose queries are absorbed already."""

    def __init__(self, rank: int) -> None:
        self.rank = self.value_dim = rank

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        return query

    def project(self, output: torch.Tensor) -> torch.Tensor:
        return output


SHAPES = (
    Shape(14, 2, 64),
    Shape(9, 3, 64, window=300),
    Shape(4, 4, 24, softcap=5.0),
    Shape(40, 1, 32, window=17),
    Shape(8, 1, 320),
    Shape(10, 2, 80, softcap=5.0),
    Shape(2, 2, 48, window=100),
)
CODED_SHAPES = (Shape(9, 3, 64, window=300, stored="int8"), Shape(4, 4, 24, softcap=5.0, stored="fp8"))
LATENT_SHAPES = tuple(
    replace(shape, stored=stored)
    for shape in (Shape(12, 1, 96, rank=64), Shape(3, 1, 40, rank=32), Shape(5, 1, 304, rank=288))
    for stored in get_args(StoredAs)
)


@dataclass(frozen=True)
class Tokens:
    """Query, key and value of LENGTH tokens that any number of sequences begin with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@cache
def tokens_of(shape: Shape, dtype: torch.dtype) -> Tokens:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(LENGTH, heads, shape.head_dim, generator=generator).to(dtype)

    return Tokens(draw(shape.num_heads) * 3, draw(shape.num_kv_heads), draw(shape.num_kv_heads))


@dataclass(frozen=True)
class Chunk:
    """The last `num_queries` of the first `length` tokens; those who `share` read the same first blocks."""

    length: int
    num_queries: int
    share: bool


def attend(
    isa: str, shape: Shape, dtype: torch.dtype, chunks: list[Chunk], block_size: int, threads: int
) -> list[torch.Tensor]:
    """Outputs of a batch of chunks, each [num_queries, heads, dim]."""
    tokens = tokens_of(shape, dtype)
    needs = [-(-chunk.length // block_size) for chunk in chunks]
    kv = DeviceKV(shape.layout(block_size, dtype), sum(needs) + 1)
    # Whatever lies beyond a sequence must not be read; of codes, these are scales that are NaN.
    kv.data.fill_(float("nan") if shape.stored == "plain" else 0xFF)
    parts = [KVRows(kv, 0, part, shape.head_dim) for part in range(kv.layout.num_parts)]
    free = list(range(kv.num_blocks))
    random.Random(len(chunks)).shuffle(free)
    tables = np.zeros((len(chunks), max(needs)), dtype=np.int32)
    shared: list[int] = []
    starts = [0]
    slots: list[int] = []
    rows: list[int] = []
    for number, (chunk, need) in enumerate(zip(chunks, needs, strict=True)):
        num_full = (chunk.length - chunk.num_queries) // block_size if chunk.share else 0
        for index in range(need):
            if index >= num_full:
                tables[number, index] = free.pop()
                continue
            if index == len(shared):
                shared.append(free.pop())
            tables[number, index] = shared[index]
        positions = torch.arange(chunk.length)
        blocks = torch.from_numpy(tables[number]).long()[positions // block_size]
        for part, written in zip(parts, (tokens.key, tokens.value), strict=False):
            part.write(blocks, positions % block_size, written[: chunk.length])
        for position in range(chunk.length - chunk.num_queries, chunk.length):
            rows.append(position)
            slots.append(int(tables[number, position // block_size]) * block_size + position % block_size)
        starts.append(len(rows))
    batch = ForwardBatch(
        token_ids=torch.zeros(len(rows), dtype=torch.int64),
        positions=torch.tensor(rows),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=[chunk.length for chunk in chunks],
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.tensor([0]),
    )
    latent = Absorbed(shape.rank) if shape.rank else None
    call = AttentionCall(0, 0.1, shape.window, shape.softcap, latent)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels = load_kernels(isa)
        assert kernels is not None
        with NativeAttentionStep(batch, kv, kernels) as step:
            output = step.attend(call, tokens.query[rows], tokens.key[rows], tokens.value[rows])
    finally:
        torch.set_num_threads(before)
    return [output[start:stop] for start, stop in itertools.pairwise(starts)]


@cache
def whole_prompt(isa: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """All tokens in one chunk, nothing cached: [LENGTH, heads, dim]."""
    return attend(isa, shape, dtype, [Chunk(LENGTH, LENGTH, False)], 16, 1)[0]


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[Chunk]:
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, LENGTH) | st.sampled_from((64, 255, 256, 257, 513, LENGTH)))
        most = draw(st.sampled_from((1, 1, 9, LENGTH)))
        chunks.append(Chunk(length, draw(st.integers(1, min(most, length))), draw(st.booleans())))
    return chunks


def check_rows(isa: str, shape: Shape, dtype: torch.dtype, num_examples: int) -> None:
    """A whole prompt == chunks == decodes == beside any others == over shared blocks of any size.

    Tiled rows give the same as whole ones.
    """
    expected = whole_prompt(isa, replace(shape, tiled=False), dtype)
    assert expected.isfinite().all()

    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(chunks=chunk_lists(), block_size=st.sampled_from(BLOCK_SIZES), threads=st.integers(1, 9))
    def check(chunks: list[Chunk], block_size: int, threads: int) -> None:
        outputs = attend(isa, shape, dtype, chunks, block_size, threads)
        for chunk, output in zip(chunks, outputs, strict=True):
            assert output.equal(expected[chunk.length - chunk.num_queries : chunk.length]), chunk

    check()


@pytest.mark.one_in(3)
@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_depend_on_their_tokens_alone(shape: Shape, dtype: torch.dtype) -> None:
    check_rows("auto", shape, dtype, 10)


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], *CODED_SHAPES], ids=str)
def test_at_every_level(shape: Shape, dtype: torch.dtype, isa: str) -> None:
    check_rows(isa, shape, dtype, 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LATENT_SHAPES, ids=str)
def test_tiled_latents_at_every_level(shape: Shape, dtype: torch.dtype, isa: str) -> None:
    check_rows(isa, replace(shape, tiled=True), dtype, 5)


@pytest.mark.slow
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *CODED_SHAPES, *LATENT_SHAPES, *(replace(shape, tiled=True) for shape in LATENT_SHAPES)],
    ids=str,
)
def test_at_every_level_at_length(shape: Shape, dtype: torch.dtype, isa: str) -> None:
    check_rows(isa, shape, dtype, 60)
