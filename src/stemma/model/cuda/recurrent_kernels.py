"""Recurrent layers in Triton (Gated DeltaNet, Mamba 2), token by token; `recurrent` launches them.

As in native/scan.h a state changes by one token after the other, in one order of sums. What is computed of a
row alone (`convolve`, `gate_and_norm`) has a program a row and head; what passes a state on (`scan`,
`keep_inputs`) has one for each part of a state whose numbers meet no others, which takes sequences in turn.
`scan` has one form for all steps. Which rows and states there are stands in device memory (`state_list.py`).

Functions in this file are written in Triton's language, not Python.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stemma.model.cuda.layer_kernels import rounded, summed
from stemma.model.cuda.product_kernels import joined, times

SEQUENCE, STOP = tl.constexpr(4), tl.constexpr(2)
"""Numbers of a sequence, and of a stop, in a list of states."""


@triton.jit
def state_at(states, place, block_bytes, offset):
    """Return where a layer's part of the state at a block begins."""
    return states + tl.multiple_of(place.to(tl.int64) * block_bytes // 4, 16) + offset


@triton.jit
def silu(x):
    """Return x times its sigmoid."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), as exact where exp(x) is small."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = power + 1.0
    less = above - 1.0
    small = tl.where(less == 0.0, power, tl.log(above) * tl.div_rn(power, tl.where(less == 0.0, 1.0, less)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["rows_at"])
def convolve(
    sums,
    bias,
    conv_weight,
    conv_bias,
    step_bias,
    rate,
    numbers,
    states,
    mixed,
    factors,
    size,
    width,
    rows_at,
    block_bytes,
    offset,
    least_step,
    most_step,
    query_scale,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_AT: tl.constexpr,
    STEP_AT: tl.constexpr,
    BETA_AT: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """Convolve one head of a row's channels into `mixed` [T, channels]; the delta rule's keys get length 1.

    Heads with keys come first, then those of values. The last program of a row finds for all heads what a
    state keeps, and what values count by: `factors` [T, 2, HEADS].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    index = tl.load(numbers + rows_at + 2 * row)
    before = tl.load(numbers + rows_at + 2 * row + 1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    if slot < 2 * KEY_HEADS + HEADS:
        columns = tl.arange(0, BLOCK)
        is_key = slot < 2 * KEY_HEADS
        KEYS_AT: tl.constexpr = 0 if IS_DELTA else HEADS * VALUE_DIM
        VALUES_AT: tl.constexpr = 2 * KEY_HEADS * KEY_DIM if IS_DELTA else 0
        first = tl.where(is_key, KEYS_AT + slot * KEY_DIM, VALUES_AT + (slot - 2 * KEY_HEADS) * VALUE_DIM)
        channels = first + columns
        count = tl.where(index >= 0, tl.where(is_key, KEY_DIM, VALUE_DIM), 0)
        inside = columns < count
        total = tl.zeros([BLOCK], tl.float32)
        if HAS_CONV_BIAS:
            total = tl.load(conv_bias + channels, mask=inside, other=0.0)
        kept = state_at(states, before, block_bytes, offset)
        for tap in tl.static_range(WIDTH):
            source = index + tap - (WIDTH - 1)
            at = (row + tap - (WIDTH - 1)) * width + CONV_AT + channels
            here = columns < tl.where(source >= 0, count, 0)
            x = joined(sums, bias, at, CONV_AT + channels, here, size, PIECES, HAS_BIAS, ROUND)
            there = columns < tl.where((source < 0) & (before >= 0), count, 0)
            old = tl.load(kept + (WIDTH - 1 + source) * CHANNELS + channels, mask=there, other=0.0)
            x = tl.where(source < 0, old, x)
            weight = tl.load(conv_weight + tap * CHANNELS + channels, mask=inside, other=0.0)
            total = tl.fma(weight, x, total)
        total = silu(total)
        if IS_DELTA:
            factor = tl.rsqrt(summed(times(total, total), BLOCK) + 1e-6)
            factor *= tl.where(slot < KEY_HEADS, query_scale, 1.0)
            total = tl.where(is_key, total * factor, total)
        tl.store(mixed + row * CHANNELS + channels, total, mask=inside)
    else:
        heads = tl.arange(0, HEADS_BLOCK)
        is_head = heads < tl.where(index >= 0, HEADS, 0)
        step_at = STEP_AT + heads
        step = joined(sums, bias, row * width + step_at, step_at, is_head, size, PIECES, HAS_BIAS, ROUND)
        step = softplus(step + tl.load(step_bias + heads, mask=is_head, other=0.0))
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        decay = tl.exp(step * tl.load(rate + heads, mask=is_head, other=0.0))
        if IS_DELTA:
            beta_at = BETA_AT + heads
            beta = joined(sums, bias, row * width + beta_at, beta_at, is_head, size, PIECES, HAS_BIAS, ROUND)
            step = 1.0 / (1.0 + tl.exp(-beta))
        tl.store(factors + row * 2 * HEADS + heads, decay, mask=is_head)
        tl.store(factors + (row * 2 + 1) * HEADS + heads, step, mask=is_head)


@triton.jit(do_not_specialize=["list_at", "sequences_at", "stops_at"])
def scan(
    numbers,
    states,
    mixed,
    factors,
    scanned,
    list_at,
    sequences_at,
    stops_at,
    block_bytes,
    offset,
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Take VALUES columns of a head's state through rows, into `scanned` [T, HEADS, VALUE_DIM].

    States [HEADS, KEY_DIM, VALUE_DIM] go where the stops of a sequence say.
    """
    head = tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    inside = is_key[:, None] & is_value[None, :]
    part = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    KEY_WIDTH: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_WIDTH: tl.constexpr = HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_WIDTH + VALUE_WIDTH
    QUERY_AT: tl.constexpr = 0 if IS_DELTA else VALUE_WIDTH + KEY_WIDTH
    KEY_AT: tl.constexpr = KEY_WIDTH if IS_DELTA else VALUE_WIDTH
    VALUE_AT: tl.constexpr = 2 * KEY_WIDTH if IS_DELTA else 0
    of_head = head // (HEADS // KEY_HEADS) * KEY_DIM + keys
    for sequence in range(tl.program_id(0), tl.load(numbers + list_at), tl.num_programs(0)):
        told = numbers + sequences_at + SEQUENCE * sequence
        first = tl.load(told).to(tl.int64)
        before = tl.load(told + 1)
        from_here = is_key[:, None] & (values < tl.where(before >= 0, VALUE_DIM, 0))[None, :]
        state = tl.load(state_at(states, before, block_bytes, offset) + part, mask=from_here, other=0.0)
        for stop in range(tl.load(told + 2), tl.load(told + 3)):
            end = tl.load(numbers + stops_at + STOP * stop).to(tl.int64)
            for row in tl.range(first, end, num_stages=2):
                x = mixed + row * CHANNELS
                query = tl.load(x + QUERY_AT + of_head, mask=is_key, other=0.0)
                key = tl.load(x + KEY_AT + of_head, mask=is_key, other=0.0)
                value = tl.load(x + VALUE_AT + head * VALUE_DIM + values, mask=is_value, other=0.0)
                kept = tl.load(factors + 2 * row * HEADS + head)
                scale = tl.load(factors + (2 * row + 1) * HEADS + head)
                state = state * kept
                if IS_DELTA:
                    value -= tl.sum(state * key[:, None], 0)
                added = tl.broadcast_to((value * scale)[None, :], state.shape)
                state = tl.fma(tl.broadcast_to(key[:, None], state.shape), added, state)
                found = tl.sum(state * query[:, None], 0)
                at = (row * HEADS + head) * VALUE_DIM + values
                tl.store(scanned + at, found, mask=is_value)
            first = end
            target = tl.load(numbers + stops_at + STOP * stop + 1)
            tl.store(state_at(states, target, block_bytes, offset) + part, state, mask=inside)


@triton.jit(do_not_specialize=["list_at", "sequences_at", "stops_at"])
def keep_inputs(
    sums,
    bias,
    numbers,
    states,
    size,
    width,
    list_at,
    sequences_at,
    stops_at,
    block_bytes,
    offset,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the last WIDTH - 1 inputs of convolutions, some channels of them, where stops of sequences say.

    A thread has its channels alone and goes upwards, so a state may be written where it is read.
    """
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    for sequence in range(tl.program_id(0), tl.load(numbers + list_at), tl.num_programs(0)):
        told = numbers + sequences_at + SEQUENCE * sequence
        first = tl.load(told)
        before = tl.load(told + 1)
        kept = state_at(states, before, block_bytes, offset) + channels
        for stop in range(tl.load(told + 2), tl.load(told + 3)):
            end = tl.load(numbers + stops_at + STOP * stop)
            target = tl.load(numbers + stops_at + STOP * stop + 1)
            into = state_at(states, target, block_bytes, offset) + channels
            for place in tl.static_range(WIDTH - 1):
                row = end - (WIDTH - 1) + place
                at = row.to(tl.int64) * width + CONV_AT + channels
                here = channels < tl.where(row >= first, CHANNELS, 0)
                x = joined(sums, bias, at, CONV_AT + channels, here, size, PIECES, HAS_BIAS, ROUND)
                there = channels < tl.where((row < first) & (before >= 0), CHANNELS, 0)
                old = tl.load(kept + (WIDTH - 1 + row - first) * CHANNELS, mask=there, other=0.0)
                tl.store(into + place * CHANNELS, tl.where(row < first, old, x), mask=inside)


@triton.jit(do_not_specialize=["rows_at"])
def gate_and_norm(
    sums,
    bias,
    scanned,
    mixed,
    skip,
    weight,
    numbers,
    output,
    size,
    width,
    rows_at,
    eps,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
    GATE_AT: tl.constexpr,
    NORM_DIM: tl.constexpr,
    NORM_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm NORM_DIM numbers of what a row's scan found, gated by silu before or behind; padding gets zeros.

    VALUES: numbers of a row. With a skip, values before the scan are added: they begin the channels.
    """
    ROUND: tl.constexpr = output.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * NORM_DIM
    columns = tl.arange(0, BLOCK)
    at = first + columns
    inside = columns < tl.where(tl.load(numbers + rows_at + 2 * row) >= 0, NORM_DIM, 0)
    y = tl.load(scanned + row * VALUES + at, mask=inside, other=0.0)
    if HAS_SKIP:
        value = tl.load(mixed + row * CHANNELS + at, mask=inside, other=0.0)
        y = tl.fma(tl.load(skip + at // VALUE_DIM, mask=inside, other=0.0), value, y)
    gate_at = row * width + GATE_AT + at
    gate = silu(joined(sums, bias, gate_at, GATE_AT + at, inside, size, PIECES, HAS_BIAS, ROUND))
    if GATES_FIRST:
        y = times(y, gate)
    factor = tl.rsqrt(summed(times(y, y), BLOCK) / NORM_DIM + eps)
    y = y * factor * tl.load(weight + at % NORM_SIZE, mask=inside, other=0.0)
    if not GATES_FIRST:
        y = y * gate
    tl.store(output + row * VALUES + at, rounded(y, ROUND).to(ROUND), mask=columns < NORM_DIM)
