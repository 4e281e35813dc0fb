"""What adapters add to a product, in Triton; `low_rank` launches it.

A tile is up to 16 rows of one adapter, whose matrices a table in device memory names: one recording serves
any adapters. Inputs are cut into pieces by the product's shape alone, whose sums are added in order, so a
row's addition doesn't depend on what stands beside it. This file is in Triton's language.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.product_kernels import activated, times


@triton.jit
def low_rank_down(
    x, middle, tiles, number, K, stride_x, size, PIECE: tl.constexpr, ROOM: tl.constexpr, WIDEN: tl.constexpr
):
    """Multiply a piece of a tile's inputs with its adapter's first matrix. Grid: (tiles, pieces).

    `tiles` int64: first row, rows, address of the adapter's table, whose entry `number` has the addresses of
    both matrices (0: it leaves this product alone), their rank and the scale's bits. `middle` float32
    [pieces, tiles * 16, ROOM], `size` numbers a piece.
    """
    tile = tl.program_id(0).to(tl.int64)
    count = tl.load(tiles + tile * 3 + 1)
    if count == 0:
        return
    entry = tl.load(tiles + tile * 3 + 2).to(tl.pointer_type(tl.int64)) + number * 4
    address = tl.load(entry)
    if address == 0:
        return
    w = address.to(tl.pointer_type(x.dtype.element_ty))
    rank = tl.load(entry + 2)
    row = tl.arange(0, 16)
    rows = tl.load(tiles + tile * 3) + row
    inside = (row < count)[None, :]
    first = tl.program_id(1) * PIECE
    target = middle + tl.program_id(1).to(tl.int64) * size + (tile * 16 + row)[None, :] * ROOM + row[:, None]
    for r in range(0, rank, 16):
        sums = tl.zeros([16, 16], tl.float32)
        for k in range(first, first + PIECE, 64):
            ks = k + tl.arange(0, 64)
            left = ks < K
            a = tl.load(w + (r + row)[:, None] * K + ks[None, :], mask=left[None, :], other=0.0)
            b = tl.load(x + rows[None, :] * stride_x + ks[:, None], mask=left[:, None] & inside, other=0.0)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        tl.store(target + r, sums)


@triton.jit
def low_rank_up(
    y,
    middle,
    tiles,
    number,
    N,
    stride_y,
    size,
    PIECES: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add the second matrix's product, times the scale, to rows of y. Grid: (tiles, blocks of N)."""
    ROUND: tl.constexpr = y.dtype.element_ty
    tile = tl.program_id(0).to(tl.int64)
    count = tl.load(tiles + tile * 3 + 1)
    if count == 0:
        return
    entry = tl.load(tiles + tile * 3 + 2).to(tl.pointer_type(tl.int64)) + number * 4
    address = tl.load(entry + 1)
    if address == 0:
        return
    w = address.to(tl.pointer_type(ROUND))
    rank = tl.load(entry + 2)
    scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
    row = tl.arange(0, 16)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = (columns < N)[:, None]
    source = middle + (tile * 16 + row)[None, :] * ROOM + row[:, None]
    sums = tl.zeros([BLOCK_N, 16], tl.float32)
    for r in range(0, rank, 16):
        b = tl.load(source + r)
        for piece in range(1, PIECES):
            b += tl.load(source + piece * size + r)
        a = tl.load(w + columns[:, None] * rank + r + row[None, :], mask=kept, other=0.0)
        b = b.to(ROUND)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    at = y + (tl.load(tiles + tile * 3) + row)[None, :] * stride_y + columns[:, None]
    mask = kept & (row < count)[None, :]
    base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (base + times(sums, tl.zeros_like(sums) + scale)).to(ROUND), mask=mask)


@triton.jit
def activate(both, y, size, N, sharpness, limit, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `activated` of gates and ups [T, 2 N] to y [T, N], `size` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = both + at // N * (2 * N) + at % N
    gates, ups = tl.load(gate, mask=inside, other=0.0), tl.load(gate + N, mask=inside, other=0.0)
    total = activated(gates.to(tl.float32), ups.to(tl.float32), sharpness, limit, GATE, y.dtype.element_ty)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
