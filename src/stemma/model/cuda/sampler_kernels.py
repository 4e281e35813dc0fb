"""One draw a row of logits, in two launches: `sampler` makes them, `filters.py` says what is drawn.

`adjust_logits` has a program for a piece of a row: penalties, bias, temperature, and the largest score of
each block of 128 ids, among those that a mask of bits allows and among all. `choose_tokens` has a program for
a row. It looks for the lowest weight that top_k and top_p keep by halving, and reads only blocks whose
largest weight reaches what it tries: first all of them, soon a few. Sums go by blocks in order of ids, so a
row's token depends on no other row.

Numbers of a row are those of `ROW`, by words of four bytes; `floats` and `doubles` are the same memory.

Functions in this file are written in Triton's language, not Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.product_kernels import times

BLOCK = tl.constexpr(128)
WORDS = tl.constexpr(16)
LOWEST = tl.constexpr(0x1F800000)
"""Bits of 2^-64: what is less likely than that, beside the likeliest token, no random number reaches."""
ONE = tl.constexpr(0x3F800000)


@triton.jit
def is_allowed(numbers, mask_at, ids, inside):
    """Return whether a row's mask has the bits of ids; a negative `mask_at`: all are allowed."""
    at = mask_at + ids // 32
    words = tl.load(numbers + at, mask=inside & (at >= ids // 32), other=-1)
    return inside & ((words >> (ids % 32)) & 1 != 0)


@triton.jit
def adjust_logits(
    logits,
    numbers,
    floats,
    scores,
    highest,
    stride_logits,
    stride_scores,
    vocab_size,
    num_blocks,
    PIECE: tl.constexpr,
    EDITS: tl.constexpr,
):
    """Write a piece of `scores` [R, W], and its part of `highest` [R, 2, num_blocks]: allowed, and all."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    inside = ids < vocab_size
    own, score = row * WORDS, scores + row * stride_scores
    x = tl.load(logits + row * stride_logits + ids, mask=inside, other=float("-inf"))
    num_seen, num_added = tl.load(numbers + own + 2), tl.load(numbers + own + 4)
    if num_seen + num_added > 0:
        tl.store(score + ids, x, mask=inside)
        repetition, frequency = tl.load(floats + own + 9), tl.load(floats + own + 10)
        presence, seen = tl.load(floats + own + 11), tl.load(numbers + own + 1)
        tl.debug_barrier()
        for first in range(0, num_seen, EDITS):
            edits = first + tl.arange(0, EDITS)
            token = tl.load(numbers + seen + edits, mask=edits < num_seen, other=-1)
            is_here = (token >= piece * PIECE) & (token < (piece + 1) * PIECE)
            count = tl.load(floats + seen + num_seen + edits, mask=is_here, other=0.0)
            value = tl.load(score + token, mask=is_here, other=0.0)
            divisor = tl.zeros_like(value) + repetition
            value = tl.where(value > 0, tl.div_rn(value, divisor), times(value, divisor))
            value -= times(count, tl.zeros_like(count) + frequency)
            value -= tl.where(count > 0, presence, 0.0)
            tl.store(score + token, value, mask=is_here)
        tl.debug_barrier()
        added = tl.load(numbers + own + 3)
        for first in range(0, num_added, EDITS):
            edits = first + tl.arange(0, EDITS)
            token = tl.load(numbers + added + edits, mask=edits < num_added, other=-1)
            is_here = (token >= piece * PIECE) & (token < (piece + 1) * PIECE)
            bias = tl.load(floats + added + num_added + edits, mask=is_here, other=0.0)
            tl.store(score + token, tl.load(score + token, mask=is_here, other=0.0) + bias, mask=is_here)
        tl.debug_barrier()
        x = tl.load(score + ids, mask=inside, other=float("-inf"))
    x = tl.div_rn(x, tl.zeros_like(x) + tl.load(floats + own + 7))
    tl.store(score + ids, x, mask=inside)
    allowed = tl.where(is_allowed(numbers, tl.load(numbers + own), ids, inside), x, float("-inf"))
    blocks = piece * (PIECE // BLOCK) + tl.arange(0, PIECE // BLOCK)
    target, is_block = highest + 2 * row * num_blocks + blocks, blocks < num_blocks
    tl.store(target, tl.max(tl.reshape(allowed, [PIECE // BLOCK, BLOCK]), 1), mask=is_block)
    tl.store(target + num_blocks, tl.max(tl.reshape(x, [PIECE // BLOCK, BLOCK]), 1), mask=is_block)


@triton.jit
def kept_weights(score, numbers, mask_at, ids, inside, top, lowest):
    """Return exp(score - top) of ids; 0 for what isn't allowed, or below `lowest`."""
    inside = is_allowed(numbers, mask_at, ids, inside & (ids >= 0))
    weights = tl.exp(tl.load(score + ids, mask=inside, other=float("-inf")) - top)
    return tl.where(inside & (weights >= lowest), weights, 0.0)


@triton.jit
def reached(score, numbers, mask_at, top, vocab_size, best, listed, sums, lowest, BLOCKS: tl.constexpr):
    """Return how many weights reach `lowest`, and their sum, and leave those of blocks in `sums`.

    Read are the blocks whose `best` weight reaches it, by way of `listed`; sums of others are left as they
    are.
    """
    ROWS: tl.constexpr = 64 if BLOCKS > 64 else BLOCKS
    is_read = best >= lowest
    num_read = tl.sum(is_read.to(tl.int32), 0)
    places = tl.cumsum(is_read.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(listed + places, tl.arange(0, BLOCKS), mask=is_read)
    tl.debug_barrier()
    count, total = num_read * 0, num_read.to(tl.float64) * 0.0
    for first in range(0, num_read, ROWS):
        which = first + tl.arange(0, ROWS)
        block = tl.load(listed + which, mask=which < num_read, other=0)
        ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (which < num_read)[:, None] & (ids < vocab_size)
        weights = kept_weights(score, numbers, mask_at, ids, inside, top, lowest)
        count += tl.sum(tl.sum((weights > 0.0).to(tl.int32), 1), 0)
        parts = tl.sum(weights, 1)
        tl.store(sums + block, parts, mask=which < num_read)
        total += tl.sum(parts.to(tl.float64), 0)
    return count, total


@triton.jit
def lowest_kept(
    score,
    numbers,
    mask_at,
    top,
    vocab_size,
    best,
    listed,
    sums,
    lowest,
    num_low,
    least_count,
    least_total,
    BLOCKS: tl.constexpr,
):
    """Return the highest bound from `lowest` on that leaves `least_count` weights, or a sum of `least_total`.

    `num_low` weights reach `lowest`, which leaves enough. Between two bounds no weight is told from one.
    """
    low, high = lowest.to(tl.int32, bitcast=True), num_low * 0 + ONE + 1
    num_high = num_low * 0
    while (high - low > 1) & (num_low - num_high > 1):
        middle = (low + high) // 2
        bound = middle.to(tl.float32, bitcast=True)
        count, total = reached(
            score, numbers, mask_at, top, vocab_size, best, listed, sums, bound, BLOCKS=BLOCKS
        )
        is_enough = (count >= least_count) & (total >= least_total)
        low, num_low = tl.where(is_enough, middle, low), tl.where(is_enough, count, num_low)
        high, num_high = tl.where(is_enough, high, middle), tl.where(is_enough, num_high, count)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def first_above(weights, target, SIZE: tl.constexpr):
    """Return the first place where the running sum of `weights` [SIZE] exceeds `target`, and what is left.

    A place of weight zero is never it: where rounding puts the target at the total, the last other one is.
    """
    weights = weights.to(tl.float64)
    places, sums = tl.arange(0, SIZE), tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, places, 0), 0)
    place = tl.min(tl.where((weights > 0.0) & (sums > target), places, last), 0)
    before = tl.sum(tl.where(places == place, sums - weights, 0.0), 0)
    return place, tl.maximum(target - before, 0.0)


@triton.jit
def choose_tokens(
    scores,
    highest,
    numbers,
    floats,
    doubles,
    lists,
    block_sums,
    tokens,
    stride_scores,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """Write a row's token. `lists` and `block_sums` [R, BLOCKS] are room; BLOCKS: a power of 2, of blocks."""
    row = tl.program_id(0).to(tl.int64)
    own, score = row * WORDS, scores + row * stride_scores
    listed, sums = lists + row * BLOCKS, block_sums + row * BLOCKS
    blocks = tl.arange(0, BLOCKS)
    best = highest + 2 * row * num_blocks + blocks
    is_block = blocks < num_blocks
    # Rules that leave no token are none.
    is_left = tl.max(tl.load(best, mask=is_block, other=float("-inf")), 0) > float("-inf")
    best = tl.load(best + tl.where(is_left, 0, num_blocks), mask=is_block, other=float("-inf"))
    top, mask_at = tl.max(best, 0), tl.where(is_left, tl.load(numbers + own), -1)
    if tl.load(numbers + own + 5) != 0:
        block = tl.argmax(best, 0, tie_break_left=True)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = is_allowed(numbers, mask_at, ids, ids < vocab_size)
        values = tl.load(score + ids, mask=inside, other=float("-inf"))
        tl.store(tokens + row, (block * BLOCK + tl.argmax(values, 0, tie_break_left=True)).to(tl.int64))
    else:
        weights = tl.exp(best - top)
        top_k, top_p = tl.load(numbers + own + 6), tl.load(doubles + own // 2 + 7)
        lowest = tl.maximum(tl.load(floats + own + 8), (top_k * 0 + LOWEST).to(tl.float32, bitcast=True))
        count, total = reached(
            score, numbers, mask_at, top, vocab_size, weights, listed, sums, lowest, BLOCKS=BLOCKS
        )
        if (top_k > 0) & (top_k < count):
            lowest = lowest_kept(
                score, numbers, mask_at, top, vocab_size, weights, listed, sums, lowest, count, top_k, 0.0,
                BLOCKS=BLOCKS,
            )  # fmt: skip
            count, total = reached(
                score, numbers, mask_at, top, vocab_size, weights, listed, sums, lowest, BLOCKS=BLOCKS
            )
        if top_p < 1.0:
            lowest = lowest_kept(
                score, numbers, mask_at, top, vocab_size, weights, listed, sums, lowest, count, 0,
                top_p * total,
                BLOCKS=BLOCKS,
            )  # fmt: skip
            count, total = reached(
                score, numbers, mask_at, top, vocab_size, weights, listed, sums, lowest, BLOCKS=BLOCKS
            )
        tl.debug_barrier()
        parts = tl.load(sums + blocks, mask=weights >= lowest, other=0.0)
        whole = tl.sum(parts.to(tl.float64), 0)
        target = tl.load(doubles + own // 2 + 6) * whole
        block, rest = first_above(parts, target, BLOCKS)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        own_weights = kept_weights(score, numbers, mask_at, ids, ids < vocab_size, top, lowest)
        place, _ = first_above(own_weights, rest, BLOCK)
        tl.store(tokens + row, (block * BLOCK + place).to(tl.int64))
