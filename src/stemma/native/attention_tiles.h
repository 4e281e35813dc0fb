// The two products of attention on tiles: 16 x 16 results of 32 products per instruction.
//
// Everything keeps the layouts of attention_pairs.h: queries and values in pairs are just the order in which a tile
// wants its right operand, keys are read from their block as the left one. Only the weights must be turned
// from [pair][row] to [row][pair]; of few rows, scores are turned instead, and weighed with lanes over keys.
#pragma once

#include <vector>

#include "attention_decode.h"
#include "kv_rows.h"
#include "tiles.h"

#if STEMMA_AMX
// Scores of 16 keys against NB x 16 rows of W; dim is a multiple of 32, strides in elements.
template <int NB>
static inline void score_tile_amx(const float* query, const bf16* keys, int64_t key_stride, int dim,
                                  float* scores) {
    constexpr int W = NB * 16;
    asm volatile("" ::: "memory");
    tile_zero(0);
    if constexpr (NB > 1) tile_zero(1);
    if constexpr (NB > 2) tile_zero(2);
    if constexpr (NB > 3) tile_zero(3);
    for (int d = 0; d < dim; d += 32, query += 16 * W) {
        tile_loadd(4, keys + d, key_stride * 2);
        tile_loadd(5, query, W * 4);
        tile_dpbf16ps(0, 4, 5);
        if constexpr (NB > 1) {
            tile_loadd(6, query + 16, W * 4);
            tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (NB > 2) {
            tile_loadd(7, query + 32, W * 4);
            tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (NB > 3) {
            tile_loadd(5, query + 48, W * 4);
            tile_dpbf16ps(3, 4, 5);
        }
    }
    tile_stored(0, scores, W * 4);
    if constexpr (NB > 1) tile_stored(1, scores + 16, W * 4);
    if constexpr (NB > 2) tile_stored(2, scores + 32, W * 4);
    if constexpr (NB > 3) tile_stored(3, scores + 48, W * 4);
}

// The same of K x 16 keys against 16 rows: several sums at once, or each product waits for the one before.
template <int K>
static inline void score_keys_amx(const float* query, const bf16* keys, int64_t key_stride, int dim, float* scores) {
    asm volatile("" ::: "memory");
    const int64_t stride = key_stride * 2;
    tile_zero(0);
    tile_zero(1);
    if constexpr (K > 2) tile_zero(2);
    if constexpr (K > 2) tile_zero(3);
    for (int d = 0; d < dim; d += 32, query += 256) {
        tile_loadd(4, query, 64);
        tile_loadd(5, keys + d, stride);
        tile_dpbf16ps(0, 5, 4);
        tile_loadd(6, keys + d + 16 * key_stride, stride);
        tile_dpbf16ps(1, 6, 4);
        if constexpr (K > 2) {
            tile_loadd(7, keys + d + 32 * key_stride, stride);
            tile_dpbf16ps(2, 7, 4);
            tile_loadd(5, keys + d + 48 * key_stride, stride);
            tile_dpbf16ps(3, 5, 4);
        }
    }
    tile_stored(0, scores, 64);
    tile_stored(1, scores + 256, 64);
    if constexpr (K > 2) tile_stored(2, scores + 512, 64);
    if constexpr (K > 2) tile_stored(3, scores + 768, 64);
}

// The same of 32 keys against 32 of W rows.
template <int W>
static inline void score_two_amx(const float* query, const bf16* keys, int64_t key_stride, int dim, float* scores) {
    asm volatile("" ::: "memory");
    const int64_t stride = key_stride * 2;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int d = 0; d < dim; d += 32, query += 16 * W) {
        tile_loadd(4, keys + d, stride);
        tile_loadd(6, query, W * 4);
        tile_dpbf16ps(0, 4, 6);
        tile_loadd(7, query + 16, W * 4);
        tile_dpbf16ps(1, 4, 7);
        tile_loadd(5, keys + d + 16 * key_stride, stride);
        tile_dpbf16ps(2, 5, 6);
        tile_dpbf16ps(3, 5, 7);
    }
    tile_stored(0, scores, W * 4);
    tile_stored(1, scores + 16, W * 4);
    tile_stored(2, scores + 16 * W, W * 4);
    tile_stored(3, scores + 16 * W + 16, W * 4);
}

// 16 x 16 dwords from [pair][row], `width` apart, to [row][pair].
static inline void turn_weights(const float* weights, int width, float* turned) {
    __m512i r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(weights + i * width);
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(turned + i * 16, _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88));
        _mm512_storeu_si512(turned + (i + 4) * 16, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88));
        _mm512_storeu_si512(turned + (i + 8) * 16, _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd));
        _mm512_storeu_si512(turned + (i + 12) * 16, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd));
    }
}

constexpr int PAIRS_OF_TILE = 16;
static inline int filled_pairs(int num_pairs) { return (num_pairs + PAIRS_OF_TILE - 1) / PAIRS_OF_TILE * PAIRS_OF_TILE; }

// acc [16 rows][dim] (+)= weights [row][pair] x values [pair][dim]. Groups of 16 pairs: of weights `group_stride` apart,
// their rows `row_stride` bytes; without `adds` there was nothing before.
static inline void weigh_turned(const char* weights, int64_t row_stride, int64_t group_stride, int groups,
                                const float* paired, int dim, bool adds, float* acc) {
    asm volatile("" ::: "memory");  // tile loads don't tell the compiler that they read memory
    const int64_t stride = int64_t(dim) * 4;
    int d = 0;
    for (; d + 64 <= dim; d += 64) {
        if (adds) {
            tile_loadd(0, acc + d, stride);
            tile_loadd(1, acc + d + 16, stride);
            tile_loadd(2, acc + d + 32, stride);
            tile_loadd(3, acc + d + 48, stride);
        } else {
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
        }
        for (int g = 0; g < groups; g++) {
            const float* v = paired + int64_t(g) * PAIRS_OF_TILE * dim + d;
            tile_loadd(4, weights + g * group_stride, row_stride);
            tile_loadd(5, v, stride);
            tile_dpbf16ps(0, 4, 5);
            tile_loadd(6, v + 16, stride);
            tile_dpbf16ps(1, 4, 6);
            tile_loadd(7, v + 32, stride);
            tile_dpbf16ps(2, 4, 7);
            tile_loadd(5, v + 48, stride);
            tile_dpbf16ps(3, 4, 5);
        }
        tile_stored(0, acc + d, stride);
        tile_stored(1, acc + d + 16, stride);
        tile_stored(2, acc + d + 32, stride);
        tile_stored(3, acc + d + 48, stride);
    }
    for (; d < dim; d += 16) {
        tile_zero(0);
        if (adds) tile_loadd(0, acc + d, stride);
        for (int g = 0; g < groups; g++) {
            tile_loadd(4, weights + g * group_stride, row_stride);
            tile_loadd(5, paired + int64_t(g) * PAIRS_OF_TILE * dim + d, stride);
            tile_dpbf16ps(0, 4, 5);
        }
        tile_stored(0, acc + d, stride);
    }
}

// Scores of up to 16 keys a time; what is no full group of one block, or has rows in pieces (an instruction wants 32
// columns of a key side by side), is gathered and filled with zeros.
template <int NB>
static void scores_of_tiles(const float* query, Rows<bf16> keys, int num_keys, int block_size, int64_t stride, int dim,
                            std::vector<bf16>& gathered, float* scores) {
    constexpr int W = NB * LANES;
    const int in_line = keys.whole() ? block_size : 0;  // keys `stride` apart
    for (int t = 0, n; t < num_keys; t += n) {
        const auto together = [&](int count) { return t + count <= num_keys && in_line >= count && in_line % count == 0; };
        n = NB == 1 && together(64) ? 64 : NB != 3 && together(32) ? 32 : 16;
        float* out = scores + t * W;
        if constexpr (NB == 1) {
            if (n > 16) {
                (n > 32 ? score_keys_amx<4> : score_keys_amx<2>)(query, keys[t], stride, dim, out);
                continue;
            }
        } else if constexpr (NB % 2 == 0) {
            if (n > 16) {
                for (int r = 0; r < W; r += 32) score_two_amx<W>(query + r, keys[t], stride, dim, out + r);
                continue;
            }
        }
        if (together(16)) {
            score_tile_amx<NB>(query, keys[t], stride, dim, out);
            continue;
        }
        gathered.assign(size_t(16) * dim, bf16{0});
        for (int i = 0; i < 16 && t + i < num_keys; i++)
            keys.copy(t + i, dim, &gathered[size_t(i) * dim]);
        score_tile_amx<NB>(query, gathered.data(), dim, dim, out);
    }
}

// Values in pairs, filled up with zeros to what a tile takes.
static void fill_pairs(float* paired, int num_pairs, int dim) {
    std::memset(paired + int64_t(num_pairs) * dim, 0, sizeof(float) * (filled_pairs(num_pairs) - num_pairs) * dim);
}

// acc [row][dim] = acc * alpha [row] + weights [pair][row] x values [pair][dim], which fill_pairs() filled; without
// alpha there was nothing before. Weights are filled with zeros first.
static void weigh_tiles(float* weights, int width, int rows, const float* paired, int num_pairs, int dim,
                        const float* alpha, float* acc) {
    const int filled = filled_pairs(num_pairs), groups = filled / PAIRS_OF_TILE;
    std::memset(weights + num_pairs * width, 0, sizeof(float) * (filled - num_pairs) * width);
    alignas(64) float turned[ROWS / LANES][TILE / 2 / PAIRS_OF_TILE][256];
    for (int r = 0; r < rows; r += LANES)  // all of them first: a tile that was just written is waited for
        for (int g = 0; g < groups; g++)
            turn_weights(weights + r + g * PAIRS_OF_TILE * width, width, turned[r / LANES][g]);
    if (alpha) shrink(alpha, rows, dim, acc);
    for (int r = 0; r < rows; r += LANES)
        weigh_turned((const char*)turned[r / LANES], 64, sizeof turned[0][0], groups, paired, dim, alpha != nullptr,
                     acc + int64_t(r) * dim);
}

// A tile of at most DECODE_ROWS rows: scores [key][16] and values in pairs, filled, to acc [16 rows][dim]. `ask(end)` is
// called before scores of keys up to `end` are taken.
template <int R, class Ask>
static void decode_tile_amx(const AttendArgs& args, DecodeTile& tile, int num_keys, const float* columns,
                            const float* paired, Ask&& ask) {
    alignas(64) float scores[R * TILE], alpha[LANES];
    alignas(64) bf16 weights[LANES * TILE] = {};  // rows that there aren't weigh nothing
    for (int t = 0; t < num_keys; t += LANES) {
        ask(std::min(t + LANES, num_keys));
        __m512i keys[LANES], turned[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) keys[i] = _mm512_loadu_si512(columns + (t + i) * LANES);
        turn_keys(keys, turned);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) _mm512_storeu_si512(scores + r * TILE + t, turned[r]);
    }
    soften_scores<R>(args, tile, num_keys, scores, alpha, weights);
    shrink(alpha, R, args.value_dim, tile.acc);
    weigh_turned((const char*)weights, TILE * sizeof(bf16), PAIRS_OF_TILE * 4,
                 filled_pairs((num_keys + 1) / 2) / PAIRS_OF_TILE, paired, args.value_dim, true, tile.acc);
}
#endif
