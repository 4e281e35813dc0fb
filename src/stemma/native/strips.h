// How weights lie in memory, and how they get there.
//
// A weight [n outputs, k inputs] is cut into strips of 64 outputs, padded with zeros. Within a strip, steps follow
// each other: a step holds 4 bytes of inputs (a pair of bf16, or one float) for all 64 outputs. So a strip is one
// run of memory, a step is four lines of 64 bytes, and a line holds 16 outputs: what VDPBF16PS wants. 16 steps of
// one line are a tile as TDPBF16PS wants its right operand; bf16 strips are padded to whole tiles.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int STRIP = 64;
constexpr int LINES = 4;         // 64-byte lines of a step
constexpr int STEP_BYTES = 256;
constexpr int STEPS_OF_TILE = 16;

template <class T>
constexpr int INPUTS_OF_STEP = 4 / sizeof(T);

struct Codes {             // of a quantized weight (quantized.h)
    const int8_t* levels;  // 16: what codes of 4 bits stand for; null: for themselves
    int32_t bits;          // 8, 6, 5 or 4; 0: the weight is plain
    int32_t middle;        // what is added to a code, or to a level, so that it isn't negative
    int32_t group;         // inputs of an output that share a scale
    int32_t scale_bytes;   // of a scale and of an offset: 4, 2 (half precision), or 1: an integer that takes a unit
    int32_t groups_of_unit;  // how many share a unit: a power of two
    int32_t has_offsets;
    int32_t activations;  // inputs: 0 as they are; int8 with 1 a scale a row, 2 the scale below, 3 a scale a group
    float input_scale;
    int32_t input_zero;
};

struct Strips {
    const char* data;  // 64-byte aligned
    const void* bias;  // [n] of the weight's type, of floats if the weight is quantized; or null
    int64_t n, k;      // bf16: k is even
    Codes codes;
    const void* patches;  // of a compressed weight (compressed.h); null: it isn't compressed

    int64_t count() const { return (n + STRIP - 1) / STRIP; }
    template <class T>
    int64_t steps() const {
        return sizeof(T) == 2 ? (k + 31) / 32 * STEPS_OF_TILE : k;
    }
    template <class T>
    const char* strip(int64_t i) const {
        return data + i * steps<T>() * STEP_BYTES;
    }
};

struct PackArgs {
    const void* weight;    // [rows, k], rows `stride` elements apart
    int64_t stride, rows;
    int64_t first;         // output of the strips that row 0 becomes
    Strips target;         // memory that was zeroed
    int32_t is_bf16, threads;
};

// Row `row` of a packed weight begins here; its inputs are STEP_BYTES apart.
template <class T>
static inline const char* packed_row(const Strips& w, int64_t row) {
    return w.strip<T>(row / STRIP) + row % STRIP * 4;
}

// Copy the rows that fall into strip `strip` of the target.
template <class T>
static void pack_strip(const PackArgs& a, int64_t strip) {
    int64_t begin = std::max(a.first, strip * STRIP), end = std::min(a.first + a.rows, (strip + 1) * STRIP);
    const int64_t k = a.target.k, steps = k / INPUTS_OF_STEP<T>;
    const T* source = (const T*)a.weight;
    for (int64_t step = 0; step < steps; step += STEPS_OF_TILE) {
        int64_t count = std::min<int64_t>(STEPS_OF_TILE, steps - step);
        for (int64_t i = step; i < step + count; i++) {  // whole lines of the target after each other
            const T* from = source + (begin - a.first) * a.stride + i * INPUTS_OF_STEP<T>;
            char* to = (char*)packed_row<T>(a.target, begin) + i * STEP_BYTES;
            for (int64_t row = begin; row < end; row++, from += a.stride, to += 4) std::memcpy(to, from, 4);
        }
    }
}

// The inverse for one row: into out[k].
template <class T>
static void take_row(const Strips& w, int64_t row, T* out) {
    const char* at = packed_row<T>(w, row);
    for (int64_t step = 0; step < w.k / INPUTS_OF_STEP<T>; step++)
        std::memcpy(out + step * INPUTS_OF_STEP<T>, at + step * STEP_BYTES, 4);
}
