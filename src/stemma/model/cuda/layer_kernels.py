"""What lies between the products of a decoder layer, in Triton: `layers` launches them.

A program has one row, or one head of it, so what it computes depends on no other. Sums of a product's pieces
are added as they are read. Results are rounded where native/layers.h rounds them, which is where the modules
of transformers do.

A kernel is compiled in forms, for few tokens and for many, whose threads may hold other numbers, and a
compiler may fuse a product and a sum in one form and not in another. So sums go by halves (`summed`), and
products that are added to something are `times` or `fma`.

Functions in this file are written in Triton's language, not Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.coded_kernels import codes_of, highest_of, scale_of, store_scale
from stemma.model.cuda.product_kernels import joined, times


@triton.jit
def summed(x, SIZE: tl.constexpr):
    """Return the sum of x [SIZE], a power of 2, in an order that no placing of its numbers changes."""
    for level in tl.static_range(1, 17):
        if SIZE >> level > 0:
            x = tl.sum(tl.reshape(x, [2, SIZE >> level]), 0)
    return tl.sum(x, 0)


@triton.jit
def rounded(x, ROUND: tl.constexpr):
    """Return x as float32 of a number of type ROUND."""
    return x.to(ROUND).to(tl.float32)


@triton.jit
def scaled_by_norm(x, factor, weight, IN_FLOATS: tl.constexpr, ROUND: tl.constexpr):
    """Return the weight times x / rms(x): rounded once, or before the weight too."""
    if IN_FLOATS:
        return rounded(x * factor * weight, ROUND)
    return rounded(rounded(x * factor, ROUND) * weight, ROUND)


@triton.jit
def add_and_norm(
    residual,
    sums,
    bias,
    delta_norm,
    weight,
    normed,
    size,
    width,
    first,
    num_columns,
    eps,
    delta_eps,
    scale,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    SCALES: tl.constexpr,
    IN_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row of a product to the residual's, which is kept, and norm the sum.

    The row is columns ``[first, first + num_columns)`` of `width`. Without a residual it is normed alone,
    without a delta the residual.
    """
    ROUND: tl.constexpr = normed.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    at = row * num_columns + columns
    x = tl.zeros([BLOCK], tl.float32)
    if HAS_DELTA:
        from_at = row * width + first + columns
        x = joined(sums, bias, from_at, first + columns, inside, size, PIECES, HAS_BIAS, ROUND)
        if NORMS_DELTA:
            factor = tl.rsqrt(summed(times(x, x), BLOCK) / num_columns + delta_eps)
            norm = tl.load(delta_norm + columns, mask=inside, other=0.0).to(tl.float32)
            x = scaled_by_norm(x, factor, norm, True, ROUND)
        if SCALES:
            x = rounded(times(x, tl.zeros_like(x) + scale), ROUND)
    if HAS_RESIDUAL:
        x = rounded(tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + x, ROUND)
        if HAS_DELTA:
            tl.store(residual + at, x.to(ROUND), mask=inside)
    factor = tl.rsqrt(summed(times(x, x), BLOCK) / num_columns + eps)
    norm = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled_by_norm(x, factor, norm, IN_FLOATS, ROUND).to(ROUND), mask=inside)


@triton.jit
def cache_row(slot, cache, stride_block, stride_token, BLOCK_SIZE: tl.constexpr):
    """Return where the rows of a slot of a layer lie in the cache."""
    return cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token


@triton.jit
def prepare_heads(
    sums,
    bias,
    q_norm,
    k_norm,
    angles,
    axes,
    positions,
    slots,
    query,
    cache,
    size,
    width,
    num_heads,
    num_kv_heads,
    num_positions,
    stride_axis,
    eps,
    stride_block,
    stride_part,
    stride_token,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_AXES: tl.constexpr,
    NORMS: tl.constexpr,
    IN_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    SCALES_AT: tl.constexpr,
):
    """Norm and rotate a head of a token's queries, into `query`, or of its keys, which go to KV like values.

    A negative slot is skipped. ROTARY: leading dims that are rotated, 0 for none. Pairs are
    (d, d + ROTARY / 2): who has a dim computes its partner too. `angles` [2, num_positions, ROTARY / 2]:
    cosines, then sines. HAS_AXES: `axes` [ROTARY / 2] say which of a token's three positions turns a pair.
    STORED: KV's codes, whose scales lie SCALES_AT bytes behind a token's first.
    """
    ROUND: tl.constexpr = query.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    inside = dims < DIM
    first = head * DIM
    base = token * width + first
    x = joined(sums, bias, base + dims, first + dims, inside, size, PIECES, HAS_BIAS, ROUND)
    turned = x
    if head < num_heads + num_kv_heads:
        if NORMS:
            factor = tl.rsqrt(summed(times(x, x), BLOCK) / DIM + eps)
            norm = q_norm if head < num_heads else k_norm
            x = scaled_by_norm(
                x, factor, tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32), IN_FLOATS, ROUND
            )
            turned = x
        if ROTARY > 0:
            HALF: tl.constexpr = ROTARY // 2
            partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
            is_turned = dims < ROTARY
            y = joined(
                sums, bias, base + partners, first + partners, is_turned, size, PIECES, HAS_BIAS, ROUND
            )
            if NORMS:
                norm = q_norm if head < num_heads else k_norm
                weight = tl.load(norm + partners, mask=is_turned, other=0.0).to(tl.float32)
                y = scaled_by_norm(y, factor, weight, IN_FLOATS, ROUND)
            place = positions + token
            if HAS_AXES:
                place += tl.load(axes + dims % HALF) * stride_axis
            at = tl.load(place) * HALF + dims % HALF
            cos = tl.load(angles + at, mask=is_turned, other=1.0).to(tl.float32)
            sin = tl.load(angles + num_positions * HALF + at, mask=is_turned, other=0.0).to(tl.float32)
            turned = tl.where(is_turned, tl.fma(x, cos, times(tl.where(dims < HALF, -y, y), sin)), x)
    if head < num_heads:
        tl.store(query + (token * num_heads + head) * DIM + dims, turned.to(ROUND), mask=inside)
    else:
        slot = tl.load(slots + token)
        part = (head - num_heads) // num_kv_heads
        number = head - num_heads - part * num_kv_heads
        at = cache_row(slot, cache, stride_block, stride_token, BLOCK_SIZE) + part * stride_part
        if slot >= 0:
            if STORED > 0:
                turned = rounded(turned, ROUND)
                scale = scale_of(highest_of(turned, inside), STORED)
                tl.store(at + number * stride_head + dims, codes_of(turned, scale, STORED), mask=inside)
                store_scale(at + SCALES_AT + 2 * number, scale, True)
            else:
                tl.store(at + number * stride_head + dims, turned.to(ROUND), mask=inside)


@triton.jit
def gate_attended(
    attended,
    sums,
    bias,
    gated,
    size,
    width,
    gates_at,
    num_columns,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply what a row attends to, `num_columns` numbers, by the sigmoids of its gates."""
    ROUND: tl.constexpr = gated.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gate_at = row * width + gates_at + columns
    gate = joined(sums, bias, gate_at, gates_at + columns, inside, size, PIECES, HAS_BIAS, ROUND)
    x = tl.load(attended + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated + row * num_columns + columns, (x / (1.0 + tl.exp(-gate))).to(ROUND), mask=inside)


@triton.jit
def prepare_latents(
    query,
    latent,
    norm,
    angles,
    positions,
    slots,
    folded,
    cache,
    stride_query,
    stride_latent,
    num_heads,
    num_positions,
    eps,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRED: tl.constexpr,
    LEAVES_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    STORED: tl.constexpr,
    SCALES_AT: tl.constexpr,
):
    """Rotate one head of a token's queries into `folded` [T, heads, RANK + ROPE], behind what is folded.

    The last program of a token norms its latent and rotates its key, into the cache; a negative slot is
    skipped. PAIRED: pairs are neighbours, which LEAVES_PAIRS leaves so.
    """
    ROUND: tl.constexpr = folded.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = latent + token * stride_latent + RANK
    if head < num_heads:
        source = query + token * stride_query + head * (NOPE + ROPE) + NOPE
    pairs = tl.arange(0, HALF)
    is_pair = pairs < ROPE // 2
    one = 2 * pairs if PAIRED else pairs
    other = 2 * pairs + 1 if PAIRED else pairs + ROPE // 2
    a = tl.load(source + one, mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(source + other, mask=is_pair, other=0.0).to(tl.float32)
    at = tl.load(positions + token) * (ROPE // 2) + pairs
    cos = tl.load(angles + at, mask=is_pair, other=1.0).to(tl.float32)
    sin = tl.load(angles + num_positions * (ROPE // 2) + at, mask=is_pair, other=0.0).to(tl.float32)
    first = rounded(tl.fma(a, cos, -times(b, sin)), ROUND)
    second = rounded(tl.fma(b, cos, times(a, sin)), ROUND)
    one = 2 * pairs if LEAVES_PAIRS else pairs
    other = 2 * pairs + 1 if LEAVES_PAIRS else pairs + ROPE // 2
    if head < num_heads:
        target = folded + (token * num_heads + head) * (RANK + ROPE) + RANK
        tl.store(target + one, first.to(ROUND), mask=is_pair)
        tl.store(target + other, second.to(ROUND), mask=is_pair)
    else:
        slot = tl.load(slots + token)
        row = cache_row(slot, cache, stride_block, stride_token, BLOCK_SIZE)
        columns = tl.arange(0, BLOCK)
        inside = columns < RANK
        x = tl.load(latent + token * stride_latent + columns, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(summed(times(x, x), BLOCK) / RANK + eps)
        weight = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
        x = scaled_by_norm(x, factor, weight, False, ROUND)
        if slot >= 0:
            if STORED > 0:
                scale = scale_of(highest_of(x, inside), STORED)
                tl.store(row + columns, codes_of(x, scale, STORED), mask=inside)
                store_scale(row + SCALES_AT, scale, True)
                highest = tl.maximum(highest_of(first, is_pair), highest_of(second, is_pair))
                scale = scale_of(highest, STORED)
                tl.store(row + RANK + one, codes_of(first, scale, STORED), mask=is_pair)
                tl.store(row + RANK + other, codes_of(second, scale, STORED), mask=is_pair)
                store_scale(row + SCALES_AT + 2, scale, True)
            else:
                tl.store(row + columns, x.to(ROUND), mask=inside)
                tl.store(row + RANK + one, first.to(ROUND), mask=is_pair)
                tl.store(row + RANK + other, second.to(ROUND), mask=is_pair)


@triton.jit
def route(
    sums,
    bias,
    correction,
    ids,
    weights,
    size,
    scale,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BY: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUND_WEIGHTS: tl.constexpr,
):
    """Choose TOP_K experts of a token by their logits, the first of equals: `Router` of native/mixture.h.

    BY: `RoutedBy`. PADDED, CHOICES and GROUPS: powers of 2 that cover experts, choices and groups.
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PADDED)
    inside = experts < EXPERTS
    at = token * EXPERTS + experts
    logits = joined(sums, bias, at, experts, inside, size, PIECES, HAS_BIAS, ROUND)
    if BY == 2:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / summed(scores, PADDED)
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + experts, mask=inside, other=0.0)
    if NUM_GROUPS > 0:
        group_of = experts // (EXPERTS // NUM_GROUPS)
        groups = tl.arange(0, GROUPS)
        best = tl.full([GROUPS], float("-inf"), tl.float32)
        for group in range(NUM_GROUPS):  # a group's best expert counts, of a sigmoid its best two
            among = tl.where(inside & (group_of == group), choice, float("-inf"))
            highest = tl.max(among, 0)
            if BY == 2 and EXPERTS > NUM_GROUPS:
                first = tl.argmax(among, 0, tie_break_left=True)
                highest += tl.max(tl.where(experts == first, float("-inf"), among), 0)
            best = tl.where(groups == group, highest, best)
        is_open = experts < 0
        for _ in range(TOP_GROUPS):
            group = tl.argmax(best, 0, tie_break_left=True)
            is_open = is_open | (group_of == group)
            best = tl.where(groups == group, float("-inf"), best)
        choice = tl.where(is_open, choice, 0.0 if BY == 1 else -3.0e38)
        if BY == 1:
            scores = tl.where(is_open, scores, 0.0)
    choice = tl.where(inside, choice, float("-inf"))
    places = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    kept = tl.zeros([CHOICES], tl.float32)
    total = 0.0
    for place in range(TOP_K):
        expert = tl.minimum(tl.argmax(choice, 0, tie_break_left=True), EXPERTS - 1)
        weight = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        chosen = tl.where(places == place, expert, chosen)
        kept = tl.where(places == place, weight, kept)
        total += weight
        choice = tl.where(experts == expert, float("-inf"), choice)
    if BY == 0:
        kept = rounded(kept / total if NORMALIZES else kept, ROUND_WEIGHTS)
    else:
        kept = (kept / (total + 1e-20) if NORMALIZES else kept) * scale
    tl.store(ids + token * TOP_K + places, chosen, mask=places < TOP_K)
    tl.store(weights + token * TOP_K + places, kept, mask=places < TOP_K)


@triton.jit
def combine(
    outputs,
    weights,
    states,
    sums,
    bias,
    gate,
    mixed,
    size,
    width,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add what its experts give a token, in the order of its choices, and what shared ones do.

    `outputs` [T * TOP_K, width]; `sums`: the shared experts'; `gate` [width] float32: these count by the
    sigmoid of its product with the token's `states`.
    """
    ROUND: tl.constexpr = mixed.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = token * width + columns
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        choice = token * TOP_K + place
        part = tl.load(outputs + choice * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += rounded(times(part, tl.zeros_like(part) + tl.load(weights + choice)), ROUND)
    if HAS_SHARED:
        shared = joined(sums, bias, at, columns, inside, size, PIECES, HAS_BIAS, ROUND)
        if HAS_GATE:
            x = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
            score = summed(times(x, tl.load(gate + columns, mask=inside, other=0.0)), BLOCK)
            shared = rounded(shared / (1.0 + tl.exp(-score)), ROUND)
        total = rounded(total, ROUND) + shared
    tl.store(mixed + at, total.to(ROUND), mask=inside)
