// The two products of attention on tiles: 16 x 16 results of 32 products per instruction.
//
// Everything keeps the layouts of attention_pairs.h: queries and values in pairs are just the order in which a tile
// wants its right operand, keys are read from their block as the left one. Only the weights must be turned
// from [pair][row] to [row][pair].
#pragma once

#include <vector>

#include "kv_rows.h"
#include "tiles.h"

#if STEMMA_AMX
// Scores of 16 keys against NB x 16 rows; dim is a multiple of 32, strides in elements.
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

// acc [16 rows][dim] += weights [pair][16 of width rows] x values [pair][dim]; pairs filled up to a multiple of 16.
static inline void weigh_tile_amx(const float* weights, int width, const float* paired, int num_pairs, int dim,
                                  float* acc) {
    alignas(64) float turned[2][256];
    int groups = num_pairs / 16;
    for (int g = 0; g < groups; g++) turn_weights(weights + g * 16 * width, width, turned[g]);
    asm volatile("" ::: "memory");  // tile loads don't tell the compiler that they read memory
    int64_t stride = int64_t(dim) * 4;
    int d = 0;
    for (; d + 64 <= dim; d += 64) {
        tile_loadd(0, acc + d, stride);
        tile_loadd(1, acc + d + 16, stride);
        tile_loadd(2, acc + d + 32, stride);
        tile_loadd(3, acc + d + 48, stride);
        for (int g = 0; g < groups; g++) {
            const float* v = paired + int64_t(g) * 16 * dim + d;
            tile_loadd(4, turned[g], 64);
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
        tile_loadd(0, acc + d, stride);
        for (int g = 0; g < groups; g++) {
            tile_loadd(4, turned[g], 64);
            tile_loadd(5, paired + int64_t(g) * 16 * dim + d, stride);
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
    for (int t = 0; t < num_keys; t += 16) {
        if (keys.whole() && t + 16 <= num_keys && block_size % 16 == 0) {
            score_tile_amx<NB>(query, keys[t], stride, dim, scores + t * NB * LANES);
            continue;
        }
        gathered.assign(size_t(16) * dim, bf16{0});
        for (int i = 0; i < 16 && t + i < num_keys; i++)
            keys.copy(t + i, dim, &gathered[size_t(i) * dim]);
        score_tile_amx<NB>(query, gathered.data(), dim, dim, scores + t * NB * LANES);
    }
}

// Fills weights and values with zeros up to a multiple of 16 pairs first.
static void weigh_tiles(float* weights, int width, int rows, float* paired, int num_pairs, int dim, float* acc) {
    int padded = (num_pairs + 15) / 16 * 16;
    std::memset(weights + num_pairs * width, 0, sizeof(float) * (padded - num_pairs) * width);
    std::memset(paired + int64_t(num_pairs) * dim, 0, sizeof(float) * (padded - num_pairs) * dim);
    for (int r = 0; r < rows; r += LANES)
        weigh_tile_amx(weights + r, width, paired, padded, dim, acc + int64_t(r) * dim);
}
#endif
