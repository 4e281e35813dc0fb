// Products with weights in oneDNN's packed order: with few rows at the speed of memory, with many at that of
// arithmetic.
//
// The order (BA16a64b2a in oneDNN's words; weights.py checks that it is this one): strips of 64 outputs, padded
// with zeros; within a strip, pairs of inputs follow each other, each with the pair's two weights of all 64
// outputs. So a strip is one run of memory, and a 64-byte line holds what VDPBF16PS wants: 16 outputs' pairs.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int STRIP = 64;
constexpr int LINES = 4;          // 64-byte lines that a pair of inputs takes in a strip
constexpr int BLOCK_ROWS = 64;    // rows whose sums for one strip are kept at a time (16 kB)
constexpr int GROUP = 6;          // rows x LINES accumulators, the weights and an input fit in 32 registers
constexpr int AHEAD = 4096;       // bytes: how far ahead a single group asks for weights
constexpr int SOME_ROWS = 32;     // up to here memory is the limit, beyond it arithmetic
constexpr int SOME_PAIRS = 64, MANY_PAIRS = 128;  // 16 and 32 kB that stay in L1 while several groups pass

struct Strips {
    const char* data;
    const bf16* bias;  // [n], or null
    int64_t n, k;      // k is even

    int64_t bytes_of_strip() const { return (k + 31) / 32 * 32 * STRIP * int64_t(sizeof(bf16)); }
    int64_t count() const { return (n + STRIP - 1) / STRIP; }
};

#if STEMMA_BF16_DOT
// acc[r][16 j ..] (+)= x[r] . w for R rows, J lines of 16 outputs and `pairs` pairs of inputs. Beside each pair it
// asks for the next A lines from `ahead` on, J of every LINES.
template <int R, int J, int A>
static inline void dot_tile(const char* w, const bf16* x, int64_t x_stride, int64_t pairs, float* acc, bool first,
                            const char* ahead) {
    __m512 sum[R][J];  // unrolled throughout, or the compiler keeps a copy in memory
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++)
            sum[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * STRIP + 16 * j);
    }
    for (int64_t i = 0; i < pairs; i++, w += 64 * LINES) {
#pragma GCC unroll 4
        for (int64_t l = i * A; l < i * A + A; l++)
            _mm_prefetch(ahead + l / J * (64 * LINES) + l % J * 64, _MM_HINT_T0);
        __m512bh weights[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) weights[j] = (__m512bh)_mm512_loadu_si512(w + 64 * j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * x_stride + 2 * i, sizeof pair);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], weights[j], inputs);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) _mm512_storeu_ps(acc + r * STRIP + 16 * j, sum[r][j]);
    }
}

template <int J, int A>
static void dot_group(int rows, const char* w, const bf16* x, int64_t x_stride, int64_t pairs, float* acc,
                      bool first, const char* ahead) {
#define CASE(R) \
    case R: return dot_tile<R, J, A>(w, x, x_stride, pairs, acc, first, ahead);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

// How many of the J lines of each pair group `group` asks for: together they ask for all.
template <int J>
static inline int lines_to_ask(int group, int groups) {
    if (groups < J) return group == 0 ? J / groups + J % groups : J / groups;
    return group < J;
}

// acc[rows][STRIP]: the products of `rows` <= BLOCK_ROWS rows with J lines of a strip, from line `line` on.
// Weights are asked for in the order in which they lie, a chunk ahead, evenly while the groups compute.
template <int J>
static void dot_lines(const Strips& w, int64_t strip, int line, const bf16* x, int64_t x_stride, int rows,
                      float* acc) {
    const char* data = w.data + strip * w.bytes_of_strip() + 64 * line;
    int64_t pairs = w.k / 2;
    if (rows <= GROUP) return dot_group<J, J>(rows, data, x, x_stride, pairs, acc, true, data + AHEAD);
    int groups = (rows + GROUP - 1) / GROUP;
    int64_t chunk = rows <= SOME_ROWS ? SOME_PAIRS : MANY_PAIRS;
    for (int64_t done = 0; done < pairs; done += chunk) {
        int64_t now = std::min(chunk, pairs - done);
        const char *here = data + done * 64 * LINES, *ahead = here + now * 64 * LINES;
        for (int g = 0; g < groups; g++) {
            int begin = rows * g / groups, end = rows * (g + 1) / groups, asks = lines_to_ask<J>(g, groups);
            const bf16* inputs = x + begin * x_stride + 2 * done;
            auto pass = asks == 4   ? dot_group<J, 4>
                       : asks == 2 ? dot_group<J, 2>
                       : asks == 1 ? dot_group<J, 1>
                                   : dot_group<J, 0>;
            pass(end - begin, here, inputs, x_stride, now, acc + begin * STRIP, done == 0, ahead);
            ahead += now * asks * (64 * LINES / J);
        }
    }
}

// Into how many parts a strip is cut, so that `threads` threads all have work.
static inline int parts_of_strip(int64_t strips, int threads) {
    int parts = 1;
    while (parts < LINES && strips * parts < 4 * threads) parts *= 2;
    return parts;
}

// Piece `piece` of strips * parts: sums for outputs [begin, begin + width) into acc[rows][STRIP].
struct Outputs {
    int64_t begin;
    int width;
};
static inline Outputs dot_piece(const Strips& w, int64_t piece, int parts, const bf16* x, int64_t x_stride,
                                int rows, float* acc) {
    int64_t strip = piece / parts;
    int lines = LINES / parts, line = int(piece % parts) * lines;
    if (lines == 4) dot_lines<4>(w, strip, line, x, x_stride, rows, acc);
    if (lines == 2) dot_lines<2>(w, strip, line, x, x_stride, rows, acc);
    if (lines == 1) dot_lines<1>(w, strip, line, x, x_stride, rows, acc);
    int64_t begin = strip * STRIP + 16 * line;
    int width = int(std::max<int64_t>(0, std::min<int64_t>(16 * lines, w.n - begin)));
    if (w.bias)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++) acc[r * STRIP + i] += to_float(w.bias[begin + i]);
    return {begin, width};
}

// Round a row of sums to bf16.
static inline void put(const float* acc, int width, bf16* out) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(acc + i));
    for (; i < width; i++) out[i] = from_float<bf16>(acc[i]);
}

// Row `id` of a packed weight, taken out again into out[k].
static void take_row(const Strips& w, int64_t id, bf16* out) {
    const char* at = w.data + id / STRIP * w.bytes_of_strip() + id % STRIP * 4;
    for (int64_t pair = 0; pair < w.k / 2; pair++) std::memcpy(out + 2 * pair, at + pair * 64 * LINES, 4);
}
#endif
