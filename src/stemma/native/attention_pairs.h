// The two products of attention on pairs of bf16 (VDPBF16PS).
#pragma once

#include "kv_rows.h"

#if STEMMA_BF16_DOT
static inline __m512i broadcast_pair(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}

// Scores of K keys against NB x 16 rows [dim / 2][row].
template <int NB, int K>
static inline void score_tile(const float* query, Rows<bf16> keys, int dim, float* scores) {
    constexpr int W = NB * LANES;
    __m512 acc[K][NB];
    const bf16* base[K];
    for (int i = 0; i < K; i++) base[i] = keys[i];
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) acc[i][b] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 2, query += W) {
        __m512i q[NB];
        for (int b = 0; b < NB; b++) q[b] = _mm512_loadu_si512(query + b * LANES);
        for (int i = 0; i < K; i++) {
            __m512i k = broadcast_pair(base[i] + keys.at(d));
            for (int b = 0; b < NB; b++) acc[i][b] = _mm512_dpbf16_ps(acc[i][b], (__m512bh)q[b], (__m512bh)k);
        }
    }
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) _mm512_storeu_ps(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB>
static void scores_of_pairs(const float* query, Rows<bf16> keys, int num_keys, int dim, float* scores) {
    constexpr int K = NB <= 2 ? 8 : 4;
    int t = 0;
    for (; t + K <= num_keys; t += K) score_tile<NB, K>(query, keys.from(t), dim, scores + t * NB * LANES);
    for (; t < num_keys; t++) score_tile<NB, 1>(query, keys.from(t), dim, scores + t * NB * LANES);
}

// 32 elements of two rows as 32 pairs: the lower and the upper 16.
static inline void interleave(const bf16* a, const bf16* b, __m512i& lower, __m512i& upper) {
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    lower = _mm512_permutex2var_epi16(x, _mm512_load_si512(order[0]), y);
    upper = _mm512_permutex2var_epi16(x, _mm512_load_si512(order[1]), y);
}

static inline __m512i interleave(const bf16* a, const bf16* b) {
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

// Values as pairs of consecutive keys, [key / 2][dim]: the order that the pair product wants. An odd last key is
// paired with itself, and its pair has no weight.
static void pair_values(Rows<bf16> rows, int num_keys, int dim, float* paired) {
    for (int t = 0; t < num_keys; t += 2, paired += dim) {
        const bf16 *a = rows[t], *b = rows[t + 1 < num_keys ? t + 1 : t];
        int d = 0;
        for (; rows.whole() && d + 32 <= dim; d += 32) {
            __m512i lower, upper;
            interleave(a + d, b + d, lower, upper);
            _mm512_storeu_si512(paired + d, lower);
            _mm512_storeu_si512(paired + d + 16, upper);
        }
        for (; d < dim; d += 16) _mm512_storeu_si512(paired + d, interleave(a + rows.at(d), b + rows.at(d)));
    }
}

// The same of rows that are stored as codes.
template <int32_t stored>
static void pair_codes(const KVFormat& format, const void* const* tokens, int head, int64_t head_stride, int num_keys,
                       int dim, float* paired) {
    for (int t = 0; t < num_keys; t += 2, paired += dim) {
        const CodedRow a(format, tokens[t], head, head_stride, dim);
        const CodedRow b(format, tokens[t + 1 < num_keys ? t + 1 : t], head, head_stride, dim);
        for (int d = 0; d < dim; d += LANES)
            _mm512_storeu_si512(paired + d, pair_up((__m512)a.at<stored>(d), (__m512)b.at<stored>(d)));
    }
}

template <int R, int V>
static inline void weigh_pairs_tile(const float* weights, int width, const float* paired, int num_pairs, int dim,
                                    float* acc) {
    __m512 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_loadu_ps(acc + r * dim + v * LANES);
    for (int p = 0; p < num_pairs; p++) {
        __m512i value[V];
        for (int v = 0; v < V; v++) value[v] = _mm512_loadu_si512(paired + p * dim + v * LANES);
        for (int r = 0; r < R; r++) {
            __m512i w = broadcast_pair(weights + p * width + r);
            for (int v = 0; v < V; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc + r * dim + v * LANES, sum[r][v]);
}

template <int V>
static void weigh_pairs_rows(const float* weights, int width, int rows, const float* paired, int num_pairs,
                             int dim, float* acc) {
    for (int r = 0; r < rows;) {
        int left = rows - r, n = left <= 6 ? left : left <= 12 ? (left + 1) / 2 : 6;
        const float* w = weights + r;
        float* a = acc + int64_t(r) * dim;
        switch (n) {
            case 1: weigh_pairs_tile<1, V>(w, width, paired, num_pairs, dim, a); break;
            case 2: weigh_pairs_tile<2, V>(w, width, paired, num_pairs, dim, a); break;
            case 3: weigh_pairs_tile<3, V>(w, width, paired, num_pairs, dim, a); break;
            case 4: weigh_pairs_tile<4, V>(w, width, paired, num_pairs, dim, a); break;
            case 5: weigh_pairs_tile<5, V>(w, width, paired, num_pairs, dim, a); break;
            default: weigh_pairs_tile<6, V>(w, width, paired, num_pairs, dim, a); break;
        }
        r += n;
    }
}

// acc [row][dim] += weights [pair][row] x values [pair][dim]
static void weigh_pairs(const float* weights, int width, int rows, const float* paired, int num_pairs, int dim,
                        float* acc) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) weigh_pairs_rows<4>(weights, width, rows, paired + d, num_pairs, dim, acc + d);
    for (; d < dim; d += 16) weigh_pairs_rows<1>(weights, width, rows, paired + d, num_pairs, dim, acc + d);
}
#endif
