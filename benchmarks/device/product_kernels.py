"""A product whose rows don't depend on the batch, in Triton.

W ``[N, K]`` is always the 64-row side of wgmma, tokens are its columns, any number of them. K is cut
into pieces whose number depends on the shape of W alone. With few tokens a program computes a piece and
`join` adds them in order; with many one program computes all pieces in turn, each from zero. So a sum
has the same instructions in the same order, if a column's result doesn't depend on how many columns
stand beside it: that is for the device to say (`product_probe --check`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x,
    w,
    y,
    parts,
    T,
    N,
    K,
    stride_x,
    stride_w,
    stride_y,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    BULK: tl.constexpr,
):
    """Compute a tile ``[BLOCK_N, BLOCK_T]`` of the product of w and x ``[T, K]``, or a piece of it.

    APART: a program is one piece, and writes it to `parts` ``[PIECES, T, N]`` if there are several. BULK: the
    copy engine brings tiles, zeros beyond T. WIDEN: operands are float32, for the interpreter.
    """
    tiles_n = N // BLOCK_N
    tiles_t = tl.cdiv(T, BLOCK_T)
    tile = tl.program_id(0)
    # Neighbours share tokens: GROUP tiles of tokens are done before the next rows of W.
    width = GROUP * tiles_n
    first_t = (tile // width) * GROUP
    size = tl.minimum(tiles_t - first_t, GROUP)
    tile_t = first_t + (tile % width) % size
    tile_n = (tile % width) // size
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    ks = tl.arange(0, BLOCK_K)
    w_at = w + rows[:, None].to(tl.int64) * stride_w + ks[None, :]
    x_at = x + columns[None, :].to(tl.int64) * stride_x + ks[:, None]
    inside = (columns < T)[None, :]
    begin = 0
    if APART:
        begin = tl.program_id(1) * PIECE
        w_at += begin
        x_at += begin
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if BULK:
        w_tiles = tl.make_tensor_descriptor(
            w, shape=[N, K], strides=[stride_w, 1], block_shape=[BLOCK_N, BLOCK_K]
        )
        x_tiles = tl.make_tensor_descriptor(
            x, shape=[T, K], strides=[stride_x, 1], block_shape=[BLOCK_T, BLOCK_K]
        )
    for piece in range(0, 1 if APART else PIECES):
        sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in range(0, PIECE, BLOCK_K):
            if BULK:
                a = w_tiles.load([tile_n * BLOCK_N, begin + piece * PIECE + step])
                b = x_tiles.load([tile_t * BLOCK_T, begin + piece * PIECE + step]).T
            else:
                a = tl.load(w_at)
                b = tl.load(x_at, mask=inside, other=0.0)
                w_at += BLOCK_K
                x_at += BLOCK_K
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        total += sums  # from zero in both ways: the sign of a zero is the same
    if APART and PIECES > 1:
        at = parts + (tl.program_id(1).to(tl.int64) * T + columns[None, :]) * N + rows[:, None]
        tl.store(at, total, mask=inside)
    else:
        at = y + columns[None, :].to(tl.int64) * stride_y + rows[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def join(parts, y, size, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Add the pieces of each of `size` numbers, in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(0, PIECES):
        total += tl.load(parts + piece * size + at, mask=inside)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
