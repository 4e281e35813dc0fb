"""Products whose rows don't depend on the batch, in Triton; `products` launches them.

W ``[N, K]`` is always the 64-row side of wgmma, tokens are its columns, any number of them. K is cut
into pieces whose number depends on the shape of W alone. With few tokens a program computes a piece and
whoever reads the sums adds them in order (`joined`); with many one program computes all pieces in turn, each
from zero. So a sum has the same instructions in the same order, if a column's result doesn't depend on how
many columns stand beside it: that is for the device to say (`benchmarks/device`).

Functions in this file are written in Triton's language, not Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.coded_kernels import FP8, number_of


@triton.jit
def times(a, b):
    """Return the product, which can't be fused with what it is added to."""
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def decoded(
    w,
    scales,
    zeros,
    minimums,
    rows,
    k,
    stride_w,
    num_groups,
    K,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Return weights of some rows from input k on, [rows, BLOCK_K], as `QuantizedWeight.dequantize` does.

    Codes of 4 BITS lie in pairs, less SHIFT; others are bytes, of E4M3 or integers. Scales, and what goes off
    codes or is added behind them, are [rows, num_groups].
    """
    ks = k + tl.arange(0, BLOCK_K)
    rows = rows[:, None].to(tl.int64)
    if BITS == 4:
        pairs = k // 2 + tl.arange(0, BLOCK_K // 2)
        both = tl.load(w + rows * stride_w + pairs[None, :], mask=(pairs * 2 < K)[None, :], other=0)
        codes = tl.interleave(both & 15, both >> 4).to(tl.float32) - SHIFT
    else:
        codes = tl.load(w + rows * stride_w + ks[None, :], mask=(ks < K)[None, :], other=0)
        codes = number_of(codes, FP8) if IS_FP8 else codes.to(tl.float32)
    if GROUP_SIZE % BLOCK_K == 0:
        at = rows * num_groups + k // GROUP_SIZE
    else:
        at = rows * num_groups + (tl.minimum(ks, K - 1) // GROUP_SIZE)[None, :]
    if HAS_ZEROS:
        codes -= tl.load(zeros + at).to(tl.float32)
    values = times(codes, tl.broadcast_to(tl.load(scales + at), codes.shape))
    if HAS_MINIMUMS:
        values += tl.load(minimums + at)
    return values.to(ROUND)


@triton.jit
def activated(gate, up, sharpness, limit, GATE: tl.constexpr, ROUND: tl.constexpr):
    """Return gate (1: silu, 2: GELU by tanh, 3: GPT-OSS's) times up, both rounded first, [N, T] float32."""
    gate, up = gate.to(ROUND).to(tl.float32), up.to(ROUND).to(tl.float32)
    if GATE == 3:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-gate * sharpness)))
    if GATE == 2:
        inner = tl.fma(0.044715 * gate, gate, tl.zeros_like(gate) + 1.0)
        power = 2.0 * 0.7978845608028654 * gate * inner
        gate = gate / (1.0 + tl.exp(-power))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate.to(ROUND).to(tl.float32) * up


@triton.jit
def product(
    x,
    w,
    scales,
    zeros,
    minimums,
    bias,
    y,
    parts,
    starts,
    order,
    T,
    N,
    K,
    stride_x,
    stride_w,
    stride_y,
    group_x,
    group_w,
    group_y,
    num_groups,
    sharpness,
    limit,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    BULK: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """Compute a tile ``[BLOCK_N, BLOCK_T]`` of the product of w and x ``[T, K]``, or a piece of it.

    APART: a program is one piece, and writes it to `parts` ``[PIECES, T, N]`` if there are several, without
    the bias. BULK: the copy engine brings tiles, zeros beyond T. WIDEN: operands are float32, for the
    interpreter. GATE: w is ``[2 N, K]``, gates above ups; see `activated`; 4: both go to y as they are. The
    third axis of programs counts
    groups with weights, inputs and outputs of their own, e.g. heads.

    EXPERTS (else 0): groups are experts, and tiles are those of their rows. Row r of x and y is the choice
    ``order[r]`` of T, an expert's from ``starts[expert]`` on; it reads row ``order[r] // CHOSEN`` of x.

    BITS (else 0): w are codes, see `decoded`.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    if EXPERTS > 0:
        # The expert is the one whose tiles, behind those of all before it, reach beyond this program's.
        number, tile_n = tile // tiles_n, tile % tiles_n
        experts = tl.arange(0, PADDED)
        first = tl.load(starts + experts, mask=experts < EXPERTS, other=0)
        last = tl.load(starts + experts + 1, mask=experts < EXPERTS, other=0)
        tiles_of = tl.where(experts < EXPERTS, tl.cdiv(last - first, BLOCK_T), 0)
        ends = tl.cumsum(tiles_of, 0)
        group = tl.sum(((ends <= number) & (experts < EXPERTS)).to(tl.int32), 0)
        if group >= EXPERTS:
            return  # there are fewer tiles than there may be
        is_own = experts == group
        before = tl.sum(tl.where(is_own, ends - tiles_of, 0), 0)
        slots = tl.sum(tl.where(is_own, first, 0), 0) + (number - before) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = slots < tl.sum(tl.where(is_own, last, 0), 0)
        columns = tl.load(order + slots, mask=inside, other=0).to(tl.int64)
        sources = columns // CHOSEN
        tile_t = 0
    else:
        tiles_t = tl.cdiv(T, BLOCK_T)
        # Neighbours share tokens: GROUP tiles of tokens are done before the next rows of W.
        width = GROUP * tiles_n
        first_t = (tile // width) * GROUP
        size = tl.minimum(tiles_t - first_t, GROUP)
        tile_t = first_t + (tile % width) % size
        tile_n = (tile % width) // size
        columns = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = columns < T
        sources = columns
        group = tl.program_id(2)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = rows < N
    ks = tl.arange(0, BLOCK_K)
    read_rows = rows if EVEN_N else tl.minimum(rows, N - 1)
    w_group = w + group.to(tl.int64) * group_w
    x_group = x + group.to(tl.int64) * group_x
    w_at = w_group + read_rows[:, None].to(tl.int64) * stride_w + ks[None, :]
    x_at = x_group + sources[None, :] * stride_x + ks[:, None]
    inside_x = inside[None, :]
    begin = 0
    if APART:
        begin = tl.program_id(1) * PIECE
        w_at += begin
        x_at += begin
    if BITS > 0:
        of_group = group.to(tl.int64) * (2 * N if GATE else N) * num_groups
        scales += of_group
        zeros += of_group
        minimums += of_group
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if BULK:
        w_tiles = tl.make_tensor_descriptor(
            w_group, shape=[2 * N if GATE else N, K], strides=[stride_w, 1], block_shape=[BLOCK_N, BLOCK_K]
        )
        x_tiles = tl.make_tensor_descriptor(
            x_group, shape=[T, K], strides=[stride_x, 1], block_shape=[BLOCK_T, BLOCK_K]
        )
    for piece in range(0, 1 if APART else PIECES):
        sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in range(0, PIECE, BLOCK_K):
            if BULK:
                at = begin + piece * PIECE + step
                a = w_tiles.load([tile_n * BLOCK_N, at])
                b = x_tiles.load([tile_t * BLOCK_T, at]).T
                if GATE:
                    c = w_tiles.load([N + tile_n * BLOCK_N, at])
            elif BITS > 0:
                at = begin + piece * PIECE + step
                left = ks < K - at
                b = tl.load(x_at, mask=inside_x & left[:, None], other=0.0)
                x_at += BLOCK_K
                a = decoded(
                    w_group,
                    scales,
                    zeros,
                    minimums,
                    read_rows,
                    at,
                    stride_w,
                    num_groups,
                    K,
                    BLOCK_K,
                    BITS,
                    IS_FP8,
                    SHIFT,
                    GROUP_SIZE,
                    HAS_ZEROS,
                    HAS_MINIMUMS,
                    x.dtype.element_ty,
                )
                if GATE:
                    c = decoded(
                        w_group,
                        scales,
                        zeros,
                        minimums,
                        N + read_rows,
                        at,
                        stride_w,
                        num_groups,
                        K,
                        BLOCK_K,
                        BITS,
                        IS_FP8,
                        SHIFT,
                        GROUP_SIZE,
                        HAS_ZEROS,
                        HAS_MINIMUMS,
                        x.dtype.element_ty,
                    )
            elif EVEN_K:
                a = tl.load(w_at)
                b = tl.load(x_at, mask=inside_x, other=0.0)
                if GATE:
                    c = tl.load(w_at + N.to(tl.int64) * stride_w)
                w_at += BLOCK_K
                x_at += BLOCK_K
            else:
                left = ks < K - (begin + piece * PIECE + step)
                a = tl.load(w_at, mask=left[None, :], other=0.0)
                b = tl.load(x_at, mask=inside_x & left[:, None], other=0.0)
                if GATE:
                    c = tl.load(w_at + N.to(tl.int64) * stride_w, mask=left[None, :], other=0.0)
                w_at += BLOCK_K
                x_at += BLOCK_K
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            b = b.to(a.dtype)  # a router's weights may be wider than states
            sums = tl.dot(a, b, sums, input_precision="ieee")
            if GATE:
                if WIDEN:
                    c = c.to(tl.float32)
                ups = tl.dot(c, b, ups, input_precision="ieee")
        total += sums  # from zero in both ways: the sign of a zero is the same
    if APART and PIECES > 1:
        at = parts + (tl.program_id(1).to(tl.int64) * T + columns[None, :]) * N + rows[:, None]
        tl.store(at, total, mask=inside_x if EVEN_N else inside_x & kept[:, None])
    else:
        if HAS_BIAS:
            biases = bias + group.to(tl.int64) * (2 * N if GATE else N) + read_rows
            total += tl.load(biases).to(tl.float32)[:, None]
            if GATE:
                ups += tl.load(biases + N).to(tl.float32)[:, None]
        if GATE == 4:
            at = y + columns[None, :] * stride_y + (N + rows[:, None])
            tl.store(at, ups.to(y.dtype.element_ty), mask=inside_x if EVEN_N else inside_x & kept[:, None])
        elif GATE:
            total = activated(total, ups, sharpness, limit, GATE, y.dtype.element_ty)
        at = y + group.to(tl.int64) * group_y + columns[None, :] * stride_y + rows[:, None]
        mask = inside_x if EVEN_N else inside_x & kept[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def joined(
    sums, bias, at, columns, inside, size, PIECES: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND: tl.constexpr
):
    """Return numbers that a product left, as float32 that were rounded: at `at` of each of its pieces.

    `size`: numbers of a piece; `columns`: where their biases are. One piece is whole, with its bias.
    """
    if PIECES == 1:
        return tl.load(sums + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(sums + at, mask=inside, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(sums + piece * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return total.to(ROUND).to(tl.float32)


@triton.jit
def join(sums, bias, y, size, N, PIECES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Write all `size` numbers that a product left, rows of N, to y."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = joined(sums, bias, at, at % N, inside, size, PIECES, HAS_BIAS, y.dtype.element_ty)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
