"""Triton kernels over our block layout [block, layer, part, token, head, dim]; see `triton_attention`.

One kernel serves decode, drafts, prefill chunks and absorbed latents, which differ only in shape:

- A tile holds `BLOCK_M` rows of one sequence and one KV head. A row is a query of a query head; rows run over
  the heads that share the KV head first. So each key is read once for all of them, whatever their number.
- Keys are read through the block table, `BLOCK_N` at a time, with a running softmax (FlashAttention-2,
  arXiv:2307.08691).
- Few rows over a long context leave a GPU idle, so the context is cut into `NUM_SPLITS` pieces whose results
  `reduce_kernel` joins (Flash-Decoding). The kernel computes the pieces from each sequence's own length: the
  launch does not depend on lengths, and a CUDA graph of it stays valid as contexts grow.
- A prefix that several decodes share is attended to once for all of them (`IS_PREFIX`): the rows of such a
  tile are queries of the members of a group. Their own keys come in a pass with `IS_SUFFIX`, and
  `reduce_kernel` joins both.
- A head dim that isn't a power of two is cut into a power of two and a padded rest: 576 is 512 + 64.

Softmax and sums are float32. Functions in this file are written in Triton's language, not Python.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    source,
    cache,
    slots,
    stride_source_token,
    stride_source_head,
    stride_cache_block,
    stride_cache_token,
    stride_cache_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Copy one token's rows [NUM_HEADS, HEAD_DIM] into its slot; a negative slot is skipped."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, PADDED)
        head = at // HEAD_DIM
        dim = at % HEAD_DIM
        inside = at < NUM_HEADS * HEAD_DIM
        source_at = token.to(tl.int64) * stride_source_token + head * stride_source_head + dim
        row = tl.load(source + source_at, mask=inside)
        base = (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_token
        tl.store(cache + base + head * stride_cache_head + dim, row, mask=inside)


@triton.jit
def attend_kernel(
    query,
    cache_k,
    cache_v,
    output,
    partial,
    partial_weight,
    tiles,
    query_starts,
    context_lens,
    block_tables,
    first_keys,
    members,
    member_starts,
    num_shared_keys,
    tiles_per_group,
    scale,
    softcap,
    window,
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
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    IS_PREFIX: tl.constexpr,
    IS_SUFFIX: tl.constexpr,
):
    """Attend one tile to one piece of its context. Grid: (tiles, KV heads, NUM_SPLITS).

    IS_PREFIX: a tile is one of the `tiles_per_group` of a group, whose members are one query each; `tiles` is
    not read, and all results go to `partial`, by member. IS_SUFFIX: keys before `first_keys` [S] are left to
    that pass, and all results go to `partial`. For the rest of the groups see `shared_prefix.SharedTensors`.

    `WIDEN` multiplies in float32: Triton's interpreter has no bfloat16 products.
    `tiles` [., 2] int32: sequence and number of the tile in it. `scale` includes log2(e) unless there is a
    softcap. With NUM_SPLITS > 1 weighted sums go to `partial` and their log2 weights to `partial_weight`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_PREFIX:
        group = tile // tiles_per_group
        first_row = (tile % tiles_per_group) * BLOCK_M
        query_start = tl.load(member_starts + group)
        num_queries = tl.load(member_starts + group + 1) - query_start
        context_len = tl.load(num_shared_keys + group)
        seq = tl.load(members + query_start)
    else:
        seq = tl.load(tiles + tile * 2)
        first_row = tl.load(tiles + tile * 2 + 1) * BLOCK_M
        query_start = tl.load(query_starts + seq)
        num_queries = tl.load(query_starts + seq + 1) - query_start
        context_len = tl.load(context_lens + seq)
    first_position = context_len - num_queries

    rows = first_row + tl.arange(0, BLOCK_M)
    valid = rows < num_queries * GROUP
    heads = kv_head * GROUP + rows % GROUP
    if IS_PREFIX:
        row_seqs = tl.load(members + query_start + rows // GROUP, mask=valid, other=0)
        tokens = tl.load(query_starts + row_seqs, mask=valid, other=0).to(tl.int64)
        positions = context_len + rows * 0  # behind all shared keys
    else:
        tokens = (query_start + rows // GROUP).to(tl.int64)
        positions = first_position + rows // GROUP

    dims = tl.arange(0, MAIN)
    in_main = dims < HEAD_DIM  # all true unless the head dim is below 16
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
    value_dims = tl.arange(0, VALUES)
    in_values = value_dims < VALUE_DIM

    # The keys that any row of the tile sees, and of those the piece that is this program's.
    if IS_PREFIX:
        end = tl.where(first_row < num_queries * GROUP, context_len, 0)
    else:
        last_row = tl.minimum(first_row + BLOCK_M, num_queries * GROUP) - 1
        end = first_position + last_row // GROUP + 1
    begin = 0
    if IS_SUFFIX:
        begin = tl.load(first_keys + seq)
    if HAS_WINDOW:
        begin = tl.maximum(first_position + first_row // GROUP - window + 1, 0)
    if NUM_SPLITS > 1:
        piece = tl.cdiv(tl.cdiv(end - begin, NUM_SPLITS), BLOCK_N) * BLOCK_N
        begin = begin + split * piece
        end = tl.minimum(end, begin + piece)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, VALUES], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys_at = start + tl.arange(0, BLOCK_N)
        in_piece = keys_at < end
        block = tl.load(
            block_tables + seq.to(tl.int64) * stride_table + keys_at // BLOCK_SIZE, mask=in_piece, other=0
        )
        block = block.to(tl.int64)
        offset = keys_at % BLOCK_SIZE
        k_rows = cache_k + block * stride_k_block + offset * stride_k_token + kv_head * stride_k_head
        k_main = tl.load(
            k_rows[None, :] + dims[:, None], mask=in_piece[None, :] & in_main[:, None], other=0.0
        )
        if WIDEN:
            k_main = k_main.to(tl.float32)
        scores = tl.dot(q_main, k_main, input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(
                k_rows[None, :] + rest_dims[:, None], mask=in_piece[None, :] & in_rest[:, None], other=0.0
            )
            if WIDEN:
                k_rest = k_rest.to(tl.float32)
            scores += tl.dot(q_rest, k_rest, input_precision="ieee")
        scores = scores * scale
        if HAS_SOFTCAP:
            # tanh by exponents; 1.4427 is log2(e).
            squashed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
            scores = squashed * (softcap * 1.4426950408889634)
        seen = in_piece[None, :] & (keys_at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (keys_at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet would compute inf - inf.
        safe = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(weights, 1)
        if VALUES_ARE_KEYS:
            values = tl.trans(k_main)
        else:
            v_rows = cache_v + block * stride_v_block + offset * stride_v_token + kv_head * stride_v_head
            values = tl.load(
                v_rows[:, None] + value_dims[None, :], mask=in_piece[:, None] & in_values[None, :], other=0.0
            )
        if WIDEN:
            values = values.to(tl.float32)
        summed = summed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = risen

    summed = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    if NUM_SPLITS > 1 or IS_PREFIX or IS_SUFFIX:
        if IS_PREFIX:
            places = (query_start + rows // GROUP) * tl.num_programs(1) + kv_head
            places = (places * GROUP + rows % GROUP).to(tl.int64)
        else:
            places = ((tile * tl.num_programs(1) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        places = places * NUM_SPLITS + split
        weight = tl.where(total == 0.0, float("-inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(partial_weight + places, weight, mask=valid)
        tl.store(
            partial + places[:, None] * VALUE_DIM + value_dims[None, :],
            summed,
            mask=valid[:, None] & in_values[None, :],
        )
    else:
        o_rows = output + tokens * stride_output_token + heads * stride_output_head
        tl.store(
            o_rows[:, None] + value_dims[None, :],
            summed.to(output.dtype.element_ty),
            mask=valid[:, None] & in_values[None, :],
        )


@triton.jit
def reduce_kernel(
    partial,
    partial_weight,
    shared_partial,
    shared_weight,
    member_of,
    output,
    tiles,
    query_starts,
    stride_output_token,
    stride_output_head,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
):
    """Join the pieces of one row of one tile. Grid: (tiles, KV heads, BLOCK_M). NUM_SPLITS: a power of 2.

    NUM_SHARED (0 or a power of 2) pieces more come from the pass over a shared prefix, where `member_of` [S]
    says that there was one.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tiles + tile * 2)
    row = tl.load(tiles + tile * 2 + 1) * BLOCK_M + tl.program_id(2)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    if row < num_queries * GROUP:
        place = ((tile * tl.num_programs(1) + kv_head) * BLOCK_M + tl.program_id(2)).to(tl.int64)
        places = place * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
        weights = tl.load(partial_weight + places)
        highest = tl.max(weights, 0)
        if NUM_SHARED > 0:
            member = tl.load(member_of + seq)
            shared_places = ((member * tl.num_programs(1) + kv_head) * GROUP + row).to(tl.int64)
            shared_places = shared_places * NUM_SHARED + tl.arange(0, NUM_SHARED)
            # Members have one query, so `row` is below GROUP; nothing is read for others.
            is_member = member * NUM_SHARED + tl.arange(0, NUM_SHARED) >= 0
            shared_weights = tl.load(shared_weight + shared_places, mask=is_member, other=float("-inf"))
            highest = tl.maximum(highest, tl.max(shared_weights, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(weights - safe)
        total = tl.sum(weights, 0)
        dims = tl.arange(0, VALUES)
        inside = dims < VALUE_DIM
        sums = tl.load(partial + places[:, None] * VALUE_DIM + dims[None, :], mask=inside[None, :], other=0.0)
        joined = tl.sum(sums * weights[:, None], 0)
        if NUM_SHARED > 0:
            shared_weights = tl.exp2(shared_weights - safe)
            total += tl.sum(shared_weights, 0)
            shared_sums = tl.load(
                shared_partial + shared_places[:, None] * VALUE_DIM + dims[None, :],
                mask=is_member[:, None] & inside[None, :],
                other=0.0,
            )
            joined += tl.sum(shared_sums * shared_weights[:, None], 0)
        joined = joined / tl.where(total == 0.0, 1.0, total)
        token = (query_start + row // GROUP).to(tl.int64)
        target = output + token * stride_output_token + (kv_head * GROUP + row % GROUP) * stride_output_head
        tl.store(target + dims, joined.to(output.dtype.element_ty), mask=inside)
