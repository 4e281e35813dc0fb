// The two products of attention on pairs of bf16 (VDPBF16PS).
#pragma once

#include "kv_rows.h"

#if STEMMA_AVX512_BF16
static inline __m512i broadcast_pair(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}

// Keys whose sums fill the registers beside the queries and a key, or as many as there are registers for pointers
template <int NB>
constexpr int KEYS_AT_ONCE = NB <= 2 ? 12 : NB == 3 ? 8 : 6;

// Scores of K keys from key t on against NB x 16 rows [dim / 2][row]. A function of its own: inlined, its pointers don't
// stay in registers.
template <int NB, int K, bool whole>
__attribute__((noinline)) static void score_tile(const float* query, const Rows<bf16>& keys, int t, int dim,
                                                 float* scores) {
    constexpr int W = NB * LANES;
    __m512 acc[K][NB];
    const bf16* base[K];
#pragma GCC unroll 16
    for (int i = 0; i < K; i++) base[i] = keys[t + i];
#pragma GCC unroll 16
    for (int i = 0; i < K; i++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) acc[i][b] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 2, query += W) {
        const int64_t at = whole ? d : keys.at(d);
        __m512i q[NB];
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) q[b] = _mm512_loadu_si512(query + b * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < K; i++) {
            const __m512i k = broadcast_pair(base[i] + at);
#pragma GCC unroll 4
            for (int b = 0; b < NB; b++) acc[i][b] = _mm512_dpbf16_ps(acc[i][b], (__m512bh)q[b], (__m512bh)k);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < K; i++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) _mm512_storeu_ps(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB, bool whole>
static void score_some(int count, const float* query, const Rows<bf16>& keys, int t, int dim, float* scores) {
#define CASE(K) \
    case K:     \
        if constexpr (K <= KEYS_AT_ONCE<NB>) return score_tile<NB, K, whole>(query, keys, t, dim, scores);
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

// `ask(begin, end)` is called before keys [begin, end) are taken, to ask for what is read later.
template <int NB, class Ask>
static void scores_of_pairs(const float* query, const Rows<bf16>& keys, int num_keys, int dim, float* scores,
                            Ask&& ask) {
    const int groups = (num_keys + KEYS_AT_ONCE<NB> - 1) / KEYS_AT_ONCE<NB>;
    const auto score = keys.whole() ? score_some<NB, true> : score_some<NB, false>;
    for (int g = 0, t = 0; g < groups; g++) {
        const int count = (num_keys - t) / (groups - g);
        ask(t, t + count);
        score(count, query, keys, t, dim, scores + t * NB * LANES);
        t += count;
    }
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
// paired with itself, and its pair has no weight. `ask(end)` is called before keys up to `end` are taken.
template <class Ask>
static void pair_values(Rows<bf16> rows, int num_keys, int dim, float* paired, Ask&& ask) {
    for (int t = 0; t < num_keys; t += 2, paired += dim) {
        ask(t + 2);
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
template <int32_t stored, class Ask>
static void pair_codes(const KVFormat& format, const void* const* tokens, int head, int64_t head_stride, int num_keys,
                       int dim, float* paired, Ask&& ask) {
    for (int t = 0; t < num_keys; t += 2, paired += dim) {
        ask(t + 2);
        const CodedRow a(format, tokens[t], head, head_stride, dim);
        const CodedRow b(format, tokens[t + 1 < num_keys ? t + 1 : t], head, head_stride, dim);
        for (int d = 0; d < dim; d += LANES)
            _mm512_storeu_si512(paired + d, pair_up((__m512)a.at<stored>(d), (__m512)b.at<stored>(d)));
    }
}

template <int R, int V>
static void weigh_pairs_tile(const float* weights, int width, const float* paired, int num_pairs, int dim,
                             const float* alpha, float* acc) {
    __m512 sum[R][V];  // unrolled throughout, or the compiler keeps a copy in memory
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            sum[r][v] = _mm512_setzero_ps();
            if (alpha) sum[r][v] = _mm512_loadu_ps(acc + r * dim + v * LANES) * _mm512_set1_ps(alpha[r]);
        }
    for (int p = 0; p < num_pairs; p++, paired += dim, weights += width) {
        __m512i value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = _mm512_loadu_si512(paired + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i w = broadcast_pair(weights + r);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)value[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc + r * dim + v * LANES, sum[r][v]);
}

template <int V, class Ask>
static void weigh_pairs_rows(const float* weights, int width, int rows, const float* paired, int num_pairs,
                             int dim, const float* alpha, float* acc, Ask&& ask) {
    constexpr int R = V == 1 ? 8 : 6;
    const int groups = (rows + R - 1) / R;
    for (int g = 0; g < groups; g++) {
        const int r = rows * g / groups, n = rows * (g + 1) / groups - r;
        ask(r + n);
        const float *w = weights + r, *shrinks = alpha ? alpha + r : nullptr;
        float* a = acc + int64_t(r) * dim;
#define CASE(N) \
    case N:     \
        if constexpr (N <= R) weigh_pairs_tile<N, V>(w, width, paired, num_pairs, dim, shrinks, a); \
        break;
        switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
    }
}

// acc [row][dim] = acc * alpha [row] + weights [pair][row] x values [pair][dim]; without alpha there was nothing before.
// `ask(done, all)` is called now and then, to ask for what is read later.
template <class Ask>
static void weigh_pairs(const float* weights, int width, int rows, const float* paired, int num_pairs, int dim,
                        const float* alpha, float* acc, Ask&& ask) {
    const auto weigh = [&](auto vectors, int d) {
        constexpr int V = vectors.value;
        weigh_pairs_rows<V>(weights, width, rows, paired + d, num_pairs, dim, alpha, acc + d,
                            [&](int end) { ask(d * rows + V * LANES * end, dim * rows); });
    };
    int d = 0;
    for (; d + 64 <= dim; d += 64) weigh(std::integral_constant<int, 4>{}, d);
    for (; d < dim; d += 16) weigh(std::integral_constant<int, 1>{}, d);
}
#endif
