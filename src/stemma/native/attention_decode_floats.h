// A tile of attention for few rows in floats: float KV, and bf16 where the processor has no product of pairs. Lanes are
// keys, where attention_floats.h has rows in them; every sum has the same order. See attention_decode.h.
#pragma once

#include "attention_decode.h"

#if STEMMA_AVX512 || defined(__AVX2__) || STEMMA_NEON
#define STEMMA_FLOAT_DECODE 1

template <class T>
static inline bool decodes_floats(const AttendArgs& args) {
    return args.key_dim % (4 / int(sizeof(T))) == 0 && args.value_dim % LANES == 0;
}

static inline native_f load_native(const float* p) { return Memory<native_f>::load(p); }
static inline native_f load_native(const bf16* p) { return as_float(Memory<native_u>::widen((const uint16_t*)p) << 16); }
static inline native_f splat_native(float x) { return x - native_f{}; }

// NATIVE dwords of each of NATIVE rows, turned: [dword][row]
static inline void turn_dwords(const native_u* rows, native_u* turned) {
#if STEMMA_AVX512
    turn_keys((const __m512i*)rows, (__m512i*)turned);
#elif STEMMA_NEON
    const auto row = [&](int i) { return (uint32x4_t)rows[i]; };
    const auto wide = [](uint32x4_t x) { return vreinterpretq_u64_u32(x); };
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {  // dwords i and i + 2
        const auto pair = [&](int r) { return wide(i ? vtrn2q_u32(row(r), row(r + 1)) : vtrn1q_u32(row(r), row(r + 1))); };
        turned[i] = (native_u)vtrn1q_u64(pair(0), pair(2));
        turned[i + 2] = (native_u)vtrn2q_u64(pair(0), pair(2));
    }
#else
    __m256i s[8], t[8];
    const auto row = [&](int i) { return (__m256i)rows[i]; };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_epi32(row(i), row(i + 1));
        s[i + 1] = _mm256_unpackhi_epi32(row(i), row(i + 1));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        t[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
        t[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
        t[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
        t[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        turned[i] = (native_u)_mm256_permute2x128_si256(t[i], t[i + 4], 0x20);
        turned[i + 4] = (native_u)_mm256_permute2x128_si256(t[i], t[i + 4], 0x31);
    }
#endif
}

// The first `count` dwords of a key, zeros behind
static inline native_u load_dwords(const void* p, int count) {
#if STEMMA_AVX512
    return (native_u)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), p);
#elif STEMMA_NEON
    native_u dwords = {};
    std::memcpy(&dwords, p, 4 * count);
    return dwords;
#else
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (native_u)_mm256_maskload_epi32((const int*)p, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
#endif
}

// Add to the scores of NATIVE keys the products of `count` dwords, from `keys` on; all NATIVE if `whole`.
template <class T, int R, bool whole>
__attribute__((always_inline)) static inline void add_dwords(const T* const* keys, int first, int count,
                                                             const float* q, native_f* sum) {
    native_u rows[NATIVE], turned[NATIVE];
#pragma GCC unroll 16
    for (int i = 0; i < NATIVE; i++) {
        const T* key = keys[i] + first;
        rows[i] = whole ? Memory<native_u>::load((const uint32_t*)key) : load_dwords(key, count);
    }
    turn_dwords(rows, turned);
#pragma GCC unroll 16
    for (int p = 0; p < NATIVE; p++) {
        if (!whole && p >= count) break;
        if constexpr (sizeof(T) == 2) {
            const native_f even = as_float(turned[p] << 16), odd = as_float(turned[p] & 0xFFFF0000u);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = fma(even, splat_native(q[2 * p * LANES + r]), sum[r]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = fma(odd, splat_native(q[(2 * p + 1) * LANES + r]), sum[r]);
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = fma(as_float(turned[p]), splat_native(q[p * LANES + r]), sum[r]);
        }
    }
}

// Scores [row][TILE] of R rows with `n` keys; query [dim][LANES]. Those of keys from n on are undefined.
template <class T, int R>
static inline void score_keys_floats(const float* query, Rows<T> rows, int n, int dim, NextRows& next, float* scores) {
    constexpr int STEP = NATIVE * 4 / sizeof(T);  // elements of a key that are turned at a time
    for (int t = 0; t < n; t += NATIVE) {
        next.ask(t + NATIVE, n);
        const T* keys[NATIVE];
        for (int i = 0; i < NATIVE; i++) keys[i] = rows[std::min(t + i, n - 1)];
        native_f sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = splat_native(0.0f);
        int d = 0;
        for (; d + STEP <= dim; d += STEP) add_dwords<T, R, true>(keys, d, NATIVE, query + d * LANES, sum);
        if (d < dim) add_dwords<T, R, false>(keys, d, (dim - d) * int(sizeof(T)) / 4, query + d * LANES, sum);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) Memory<native_f>::store(scores + r * TILE + t, sum[r]);
    }
}

// What soften() of softmax.h does with scores [key][row], for scores [row][TILE], which become weights in place.
template <int R>
static inline void soften_keys_floats(const RowLimits& limits, RowState& state, float* alpha, float* scores,
                                      int first_key, int num_keys, float factor) {
    float tops[LANES], totals[LANES];
    store(tops, splat(MASKED)), store(totals, splat(0.0f));
    const int padded = (num_keys + LANES - 1) / LANES * LANES;
    for (int r = 0; r < R; r++) {
        float* row = scores + r * TILE;
        const int low = std::min(num_keys, std::max(0, limits.low[r] - first_key));
        const int high = std::max(low, std::min(num_keys, limits.high[r] - first_key));
        std::fill(row, row + low, MASKED);
        std::fill(row + high, row + padded, MASKED);
        v16f top = load(row);
        for (int t = LANES; t < padded; t += LANES) top = vmax(top, load(row + t));
        float lanes[LANES];
        store(lanes, top);
        tops[r] = *std::max_element(lanes, lanes + LANES);
    }
    const v16f old = load(state.max), top = vmax(old, load(tops) * splat(factor));
    store(alpha, vexp2(old - top));
    store(state.max, top);
    store(tops, top);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * TILE;
        v16f sum = splat(0.0f);
        for (int t = 0; t < padded; t += LANES) {
            const v16f x = load(row + t), p = vexp2(fma(x, splat(factor), splat(-tops[r])));
            const v16f weight = select(x > MASKED, p, splat(0.0f));
            sum = sum + weight;
            store(row + t, weight);
        }
        float part[LANES];
        store(part, sum);
        for (int half = LANES / 2; half > 0; half /= 2)  // as tree_sum()
            for (int i = 0; i < half; i++) part[i] = part[i] + part[i + half];
        totals[r] = part[0];
    }
    store(state.sum, fma(load(state.sum), load(alpha), load(totals)));
}

// acc [row][stride] = acc * alpha + weights [row][TILE] x values, for R rows and V registers of dimensions from `d` on
template <class T, int R, int V>
static inline void weigh_keys_floats_tile(const float* weights, Rows<T> values, int n, int d, NextRows& next,
                                          const float* alpha, int64_t stride, float* acc) {
    native_f sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            sum[r][v] = load_native(acc + r * stride + v * NATIVE) * splat_native(alpha[r]);
    for (int t = 0; t < n; t++) {
        if (t % 8 == 0) next.ask(t + 8, n);
        native_f value[V];
        const T* row = values[t] + d;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) value[v] = load_native(row + v * NATIVE);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const native_f w = splat_native(weights[r * TILE + t]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = fma(value[v], w, sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) Memory<native_f>::store(acc + r * stride + v * NATIVE, sum[r][v]);
}

// dim is a multiple of 16
template <class T, int R>
static inline void weigh_keys_floats(const float* weights, Rows<T> values, int n, int dim, NextRows& next,
                                     const float* alpha, float* acc) {
    if constexpr (NATIVE == 8 && R > 6) {  // more than the registers hold
        weigh_keys_floats<T, 6>(weights, values, n, dim, next, alpha, acc);
        NextRows none;
        return weigh_keys_floats<T, R - 6>(weights + 6 * TILE, values, n, dim, none, alpha + 6, acc + 6 * dim);
    } else {
        constexpr int FEW = NATIVE == 4 ? (R <= 2 ? 8 : R <= 6 ? 4 : 2) : R == 1 ? 8 : R == 2 ? 4 : 2;
        constexpr int V = NATIVE == 16 ? (R <= 6 ? 4 : 2) : FEW;  // sums, values and a weight fit
        NextRows none;
        int d = 0;
        for (; d + V * NATIVE <= dim; d += V * NATIVE)
            weigh_keys_floats_tile<T, R, V>(weights, values, n, d, d == 0 ? next : none, alpha, dim, acc + d);
        for (; d < dim; d += NATIVE)
            weigh_keys_floats_tile<T, R, 1>(weights, values, n, d, d == 0 ? next : none, alpha, dim, acc + d);
    }
}

template <class T, int R>
static void decode_tile_floats(const AttendArgs& args, DecodeTile& tile, Rows<T> keys, Rows<T> values, int n) {
    alignas(64) float scores[R * TILE], alpha[LANES];
    score_keys_floats<T, R>(tile.query, keys, n, args.key_dim, tile.next_keys, scores);
    float factor = args.scale * LOG2_E;
    if (args.softcap > 0) {
        for (int r = 0; r < R; r++) cap(args, scores + r * TILE, (n + LANES - 1) / LANES * LANES);
        factor = 1.0f;
    }
    soften_keys_floats<R>(tile.limits, tile.state, alpha, scores, tile.first_key, n, factor);
    weigh_keys_floats<T, R>(scores, values, n, args.value_dim, tile.next_values, alpha, tile.acc);
}

template <class T>
void decode_tile_floats_any(const AttendArgs& args, int rows, DecodeTile& tile, Rows<T> keys, Rows<T> values,
                                   int n) {
    switch (rows) {
        case 1: return decode_tile_floats<T, 1>(args, tile, keys, values, n);
        case 2: return decode_tile_floats<T, 2>(args, tile, keys, values, n);
        case 3: return decode_tile_floats<T, 3>(args, tile, keys, values, n);
        case 4: return decode_tile_floats<T, 4>(args, tile, keys, values, n);
        case 5: return decode_tile_floats<T, 5>(args, tile, keys, values, n);
        case 6: return decode_tile_floats<T, 6>(args, tile, keys, values, n);
        case 7: return decode_tile_floats<T, 7>(args, tile, keys, values, n);
        default: return decode_tile_floats<T, 8>(args, tile, keys, values, n);
    }
}
// Codes of bf16 KV are decoded to floats: that is compiled with the attention over floats.
#define STEMMA_DECODE_OF_FLOATS \
    template void decode_tile_floats_any(const AttendArgs&, int, DecodeTile&, Rows<float>, Rows<float>, int)
#else
#define STEMMA_FLOAT_DECODE 0
template <class T>
static inline bool decodes_floats(const AttendArgs&) {
    return false;
}
#endif
