"""Triton kernels that attend by a list in device memory; see `listed_attention`.

- `attend_listed` is a fixed number of resident programs. Each takes every n-th item of the list, and each
  head unit of it: a tile of queries, and a range of pieces of their context. A piece is `PIECE` keys from an
  absolute multiple of `PIECE` on.
- Each piece has a running softmax of its own, from zero. A tile that is cut leaves its pieces in memory, and
  `join_listed` folds them; any other is folded by its program. Both call `_fold`, in ascending order.

So a row's sums are the same instructions in the same order wherever the row is computed: keys that it doesn't
see have weight zero, and a piece without any leaves the fold as it is. This file is in Triton's language.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.coded_kernels import decoded_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(highest, total, summed, piece_highest, piece_total, piece_summed):
    """Add a piece to a fold: highest log2 scores [R], sums of weights [R], weighted values [R, D].

    Explicit `fma`: a compiler would be free to contract one product here and the other there.
    """
    risen = tl.maximum(highest, piece_highest)
    safe = tl.where(risen == float("-inf"), 0.0, risen)
    kept = tl.exp2(highest - safe)
    added = tl.exp2(piece_highest - safe)
    total = tl.fma(piece_total, added, total * kept)
    summed = tl.fma(piece_summed, tl.broadcast_to(added[:, None], summed.shape), summed * kept[:, None])
    return risen, total, summed


@triton.jit
def _finish(highest, total, summed, sinks, heads, valid, HAS_SINKS: tl.constexpr):
    """Return the weighted means [R, D]; a row that saw nothing is zeros."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0) * LOG2_E
        zeros = tl.zeros(summed.shape, tl.float32)
        highest, total, summed = _fold(highest, total, summed, sink, tl.zeros_like(sink) + 1.0, zeros)
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attend_listed(
    query,
    cache_k,
    cache_v,
    output,
    partial,
    partial_weight,
    sinks,
    numbers,
    header_at,
    seen_at,
    scratch_at,
    scale,
    softcap,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_output_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_FIRSTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    STORED: tl.constexpr,
    SCALES_AT: tl.constexpr,
    RANK: tl.constexpr,
):
    """Attend all items of the list whose header is at `header_at` of `numbers` int32. Grid: (programs,).

    An item times `UNITS` head units of `HEADS` query heads of one KV head. For the layout of `numbers` see
    `step_inputs`. `scale` includes log2(e) unless there is a softcap. `WIDEN` multiplies in float32, for
    the interpreter. STORED: keys and values are codes, see `decoded_rows`, with scales SCALES_AT bytes
    behind a token's first.
    """
    ROUND: tl.constexpr = query.dtype.element_ty
    header = numbers + header_at
    items_at = tl.load(header)
    num_items = tl.load(header + 1)
    firsts_at = tl.load(header + 4)
    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, MAIN)
    in_main = dims < HEAD_DIM
    value_dims = tl.arange(0, VALUES)
    in_values = value_dims < VALUE_DIM
    for index in range(tl.program_id(0), num_items * UNITS, tl.num_programs(0)):
        item = numbers + items_at + (index // UNITS) * 6
        unit = index % UNITS
        first_query = tl.load(item)
        count = tl.load(item + 1)
        table = numbers + tl.load(item + 2)
        first_piece = tl.load(item + 3)
        end_piece = tl.load(item + 4)
        place = tl.load(item + 5)
        kv_head = unit // (UNITS // (NUM_HEADS // GROUP))
        valid = row < count * HEADS
        heads = unit * HEADS + row % HEADS
        tokens = tl.load(numbers + first_query + row // HEADS, mask=valid, other=0)
        seen = tl.load(numbers + seen_at + tokens, mask=valid, other=0)
        end_key = tl.max(seen, 0)
        begin_key = 0
        if HAS_FIRSTS:
            firsts = tl.load(numbers + firsts_at + tokens, mask=valid, other=2147483647)
            begin_key = tl.min(firsts, 0) // BLOCK_N * BLOCK_N
        tokens = tokens.to(tl.int64)
        q_rows = query + tokens * stride_query_token + heads * stride_query_head
        q_main = tl.load(q_rows[:, None] + dims[None, :], mask=valid[:, None] & in_main[None, :], other=0.0)
        if REST > 0:
            rest_dims = MAIN + tl.arange(0, REST)
            in_rest = rest_dims < HEAD_DIM
            q_rest = tl.load(
                q_rows[:, None] + rest_dims[None, :], mask=valid[:, None] & in_rest[None, :], other=0.0
            )
        if WIDEN:
            q_main = q_main.to(tl.float32)
            if REST > 0:
                q_rest = q_rest.to(tl.float32)
        # A tile that isn't cut keeps its fold in memory, since registers hold one sum, not two.
        base = scratch_at + tl.program_id(0).to(tl.int64) * BLOCK_M
        if place >= 0:
            base = place.to(tl.int64) + unit * (count * HEADS)
        weights_at = partial_weight + base * 2 + row * 2
        sums_at = partial + base * VALUE_DIM + (row * VALUE_DIM)[:, None] + value_dims[None, :]
        stored = valid[:, None] & in_values[None, :]
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        summed = tl.zeros([BLOCK_M, VALUES], tl.float32)
        for piece in range(first_piece, end_piece):
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            summed = tl.zeros([BLOCK_M, VALUES], tl.float32)
            begin = tl.maximum(piece * PIECE, begin_key)
            end = tl.minimum(piece * PIECE + PIECE, end_key)
            for start in range(begin, end, BLOCK_N):
                keys_at = start + tl.arange(0, BLOCK_N)
                inside = keys_at < end
                if BLOCK_SIZE % BLOCK_N == 0:
                    # All keys lie in one block: few registers hold addresses.
                    block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
                    offset = start % BLOCK_SIZE
                    k_rows = cache_k + block * stride_k_block + offset * stride_k_token
                    k_rows += kv_head * stride_k_head + tl.arange(0, BLOCK_N) * stride_k_token
                    v_rows = cache_v + block * stride_v_block + offset * stride_v_token
                    v_rows += kv_head * stride_v_head + tl.arange(0, BLOCK_N) * stride_v_token
                else:
                    blocks = tl.load(table + keys_at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                    offsets = keys_at % BLOCK_SIZE
                    k_rows = cache_k + blocks * stride_k_block + offsets * stride_k_token
                    k_rows += kv_head * stride_k_head
                    v_rows = cache_v + blocks * stride_v_block + offsets * stride_v_token
                    v_rows += kv_head * stride_v_head
                k_main = tl.load(
                    k_rows[None, :] + dims[:, None], mask=inside[None, :] & in_main[:, None], other=0.0
                )
                if STORED > 0:
                    k_at = (k_rows + (SCALES_AT + kv_head * ((4 if RANK else 2) - stride_k_head)))[None, :]
                    in_k = inside[None, :]
                    k_main = decoded_rows(k_main, dims[:, None], k_at, in_k, STORED, RANK, ROUND)
                if WIDEN:
                    k_main = k_main.to(tl.float32)
                scores = tl.dot(q_main, k_main, input_precision="ieee")
                if REST > 0:
                    k_rest = tl.load(
                        k_rows[None, :] + rest_dims[:, None],
                        mask=inside[None, :] & in_rest[:, None],
                        other=0.0,
                    )
                    if STORED > 0:
                        k_rest = decoded_rows(k_rest, rest_dims[:, None], k_at, in_k, STORED, RANK, ROUND)
                    if WIDEN:
                        k_rest = k_rest.to(tl.float32)
                    scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
                scores = scores * scale
                if HAS_SOFTCAP:
                    # tanh by exponents.
                    squashed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
                    scores = squashed * (softcap * LOG2_E)
                is_seen = keys_at[None, :] < tl.minimum(seen, end)[:, None]
                if HAS_FIRSTS:
                    is_seen = is_seen & (keys_at[None, :] >= firsts[:, None])
                scores = tl.where(is_seen, scores, float("-inf"))
                risen = tl.maximum(highest, tl.max(scores, 1))
                # A row that has seen no key yet would compute inf - inf.
                safe = tl.where(risen == float("-inf"), 0.0, risen)
                weights = tl.exp2(scores - safe[:, None])
                shrink = tl.exp2(highest - safe)
                total = tl.fma(total, shrink, tl.sum(weights, 1))
                if VALUES_ARE_KEYS:
                    values = tl.trans(k_main)
                else:
                    values = tl.load(
                        v_rows[:, None] + value_dims[None, :],
                        mask=inside[:, None] & in_values[None, :],
                        other=0.0,
                    )
                    if STORED > 0:
                        v_at = v_rows + (SCALES_AT + kv_head * ((4 if RANK else 2) - stride_v_head))
                        v_at, in_v = v_at[:, None], inside[:, None]
                        values = decoded_rows(values, value_dims[None, :], v_at, in_v, STORED, RANK, ROUND)
                if WIDEN:
                    values = values.to(tl.float32)
                summed = tl.dot(
                    weights.to(values.dtype), values, summed * shrink[:, None], input_precision="ieee"
                )
                highest = risen
            if piece > first_piece:
                tl.debug_barrier()
                before_highest = tl.load(weights_at, mask=valid, other=float("-inf"))
                before_total = tl.load(weights_at + 1, mask=valid, other=0.0)
                before = tl.load(sums_at, mask=stored, other=0.0)
                highest, total, summed = _fold(before_highest, before_total, before, highest, total, summed)
            if (place >= 0) | (piece + 1 < end_piece):
                tl.store(weights_at, highest, mask=valid)
                tl.store(weights_at + 1, total, mask=valid)
                tl.store(sums_at, summed, mask=stored)
        if place < 0:
            means = _finish(highest, total, summed, sinks, heads, valid, HAS_SINKS)
            o_rows = output + tokens * stride_output_token + heads * stride_output_head
            tl.store(o_rows[:, None] + value_dims[None, :], means.to(output.dtype.element_ty), mask=stored)


@triton.jit
def join_listed(
    partial,
    partial_weight,
    output,
    sinks,
    numbers,
    header_at,
    stride_output_token,
    stride_output_head,
    NUM_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Fold the pieces of each listed token, `HEADS` heads at a time. Grid: (programs,).

    Its first pieces may come from tiles of a group, the others from its own. `UNIT`: heads of a tile's row.
    A token without pieces, which is padding, gets zeros.
    """
    joins_at = tl.load(numbers + header_at + 2)
    num_joins = tl.load(numbers + header_at + 3)
    value_dims = tl.arange(0, VALUES)
    in_values = value_dims < VALUE_DIM
    units: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    for index in range(tl.program_id(0), num_joins * units, tl.num_programs(0)):
        entry = numbers + joins_at + (index // units) * 7
        token = tl.load(entry).to(tl.int64)
        heads = (index % units) * HEADS + tl.arange(0, HEADS)
        valid = heads < NUM_HEADS
        inside = valid[:, None] & in_values[None, :]
        highest = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        summed = tl.zeros([HEADS, VALUES], tl.float32)
        for part in tl.static_range(0, 2):
            place = tl.load(entry + 1 + 3 * part).to(tl.int64)
            num_pieces = tl.load(entry + 2 + 3 * part)
            count = tl.load(entry + 3 + 3 * part)
            for piece in range(0, num_pieces):
                at = place + piece * (count * NUM_HEADS) + heads // UNIT * (count * UNIT) + heads % UNIT
                piece_highest = tl.load(partial_weight + at * 2, mask=valid, other=float("-inf"))
                piece_total = tl.load(partial_weight + at * 2 + 1, mask=valid, other=0.0)
                sums_at = partial + at[:, None] * VALUE_DIM + value_dims[None, :]
                piece_summed = tl.load(sums_at, mask=inside, other=0.0)
                highest, total, summed = _fold(
                    highest, total, summed, piece_highest, piece_total, piece_summed
                )
        means = _finish(highest, total, summed, sinks, heads, valid, HAS_SINKS)
        target = output + token * stride_output_token + heads * stride_output_head
        tl.store(target[:, None] + value_dims[None, :], means.to(output.dtype.element_ty), mask=inside)
