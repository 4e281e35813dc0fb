"""Codes of one byte in Triton: KV as `attend/kv_format.py` stores it, byte for byte, and numbers of E4M3.

Plain arithmetic: cards before sm_89 convert no FP8. Functions in this file are written in Triton's language.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8, FP8 = tl.constexpr(1), tl.constexpr(2)
"""STORED: 0 for plain numbers, 1 for int8, 2 for fp8."""


@triton.jit
def number_of(codes, STORED: tl.constexpr):
    """Return what uint8 codes stand for, float32, before their scale."""
    if STORED == INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    # Moved to where a half float has exponent and mantissa, whose exponents are 8 less.
    wide = codes.to(tl.int16)
    half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def load_scale(at, mask):
    """Return the bfloat16 scales behind codes, as float32; `at` points to bytes."""
    return tl.load(at.to(tl.pointer_type(tl.bfloat16), bitcast=True), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decoded_rows(
    codes, dims, scale_at, inside, STORED: tl.constexpr, RANK: tl.constexpr, ROUND: tl.constexpr
):
    """Return numbers of rows' codes, rounded as the model's: `dims` and `scale_at` broadcast to them.

    RANK (else 0): dims from there on have the second scale.
    """
    scales = load_scale(scale_at, inside)
    if RANK > 0:
        scales = tl.where(dims < RANK, scales, load_scale(scale_at + 2, inside))
    return (number_of(codes, STORED) * scales).to(ROUND)


@triton.jit
def highest_of(x, inside):
    """Return the largest magnitude of a row, infinity if a number isn't finite."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(inside, tl.where(magnitude < float("inf"), magnitude, float("inf")), 0.0), 0)


@triton.jit
def scale_of(highest, STORED: tl.constexpr):
    """Return the scale of numbers up to `highest`, float32 that bfloat16 holds; NaN if that is infinite."""
    exact = tl.maximum(tl.div_rn(highest, 127.0 if STORED == INT8 else 448.0), 1e-30)
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return (tl.where(highest < float("inf"), bits, 0x7FC0) << 16).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x, scale, STORED: tl.constexpr):
    """Return the uint8 codes of numbers over their scale, to the nearest, ties to even; 0 if it is NaN."""
    inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
    share = x * inverse
    if STORED == INT8:
        codes = (share + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: rounds to an integer
    else:
        bits = share.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        small = (tl.abs(share) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
        codes = tl.where(tl.abs(share) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(scale == scale, codes & 0xFF, 0).to(tl.uint8)


@triton.jit
def store_scale(at, scale, mask):
    """Write a scale behind a row's codes."""
    tl.store(at.to(tl.pointer_type(tl.bfloat16), bitcast=True), scale.to(tl.bfloat16), mask=mask)
