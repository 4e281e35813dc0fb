// Scores of a tile of keys to weights: scaled, capped, masked, and the online softmax of FlashAttention
// (arXiv:2205.14135). The order of its sums is part of the numeric path: see attention.h.
#pragma once

#include "kv_rows.h"

// Softmax so far: weights and values are relative to 2^max.
struct RowState {
    float max[ROWS], sum[ROWS];

    void clear() {
        std::fill(max, max + ROWS, MASKED);
        std::fill(sum, sum + ROWS, 0.0f);
    }
};

// Keys that each row of an item sees: [low, high).
struct RowLimits {
    int32_t low[ROWS], high[ROWS];
};

// Cap scores [key][row] in place. From here on they are exponents of 2.
static void cap(const AttendArgs& args, float* scores, int count) {
    for (int i = 0; i < count; i += LANES) {
        v16f e = vexp(load(scores + i) * (args.scale * 2.0f / args.softcap));
        v16f x = splat(args.softcap) - splat(2.0f * args.softcap) / (e + 1.0f);
        store(scores + i, x * LOG2_E);  // tanh(y) = 1 - 2 / (exp(2y) + 1)
    }
}

// Scores [key][row] of keys that rows don't see become MASKED.
template <int NB>
static void mask(const RowLimits& limits, int first_key, int num_keys, float* scores) {
    for (int b = 0; b < NB; b++) {
        const v16i low = load(limits.low + b * LANES), high = load(limits.high + b * LANES);
        float* at = scores + b * LANES;
        for (int key = first_key; key < first_key + num_keys; key++, at += NB * LANES) {
            const v16i position = splat(int32_t(key));
            store(at, select(low <= position, select(position < high, load(at), splat(MASKED)), splat(MASKED)));
        }
    }
}

// Sums by key modulo 16, in a tree
static inline v16f tree_sum(v16f* part) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) part[i] = part[i] + part[i + 8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) part[i] = part[i] + part[i + 4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) part[i] = part[i] + part[i + 2];
    part[0] = part[0] + part[1];
    return part[0];
}

// Begin a tile of 16 rows: raise their running maximum to that of `num_keys` scores [key][row] times `factor`,
// and note by how much that shrinks what was summed so far. Returns the maximum.
template <int NB>
static inline v16f raise_max(RowState& state, float* alpha, int b, const float* column, int num_keys, float factor) {
    v16f old = load(state.max + b * LANES), tops[4];  // four, or each comparison waits for the one before
    for (int i = 0; i < 4; i++) tops[i] = load(column + std::min(i, num_keys - 1) * NB * LANES);
    int t = 4;
    for (; t + 4 <= num_keys; t += 4)
        for (int i = 0; i < 4; i++) tops[i] = vmax(tops[i], load(column + (t + i) * NB * LANES));
    for (; t < num_keys; t++) tops[0] = vmax(tops[0], load(column + t * NB * LANES));
    v16f top = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
    top = vmax(old, top * splat(factor));
    store(alpha + b * LANES, vexp2(old - top));
    store(state.max + b * LANES, top);
    return top;
}

static inline void add_sum(RowState& state, const float* alpha, int b, v16f total) {
    store(state.sum + b * LANES, fma(load(state.sum + b * LANES), load(alpha + b * LANES), total));
}

// Turn scores [key][row] into weights (in place), and update the running maximum and sum of each row.
template <int NB>
static void soften(RowState& state, float* alpha, float* scores, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float* column = scores + b * LANES;
        v16f top = raise_max<NB>(state, alpha, b, column, num_keys, factor), part[16] = {};
        for (int t = 0; t < num_keys; t++, column += NB * LANES) {
            v16f x = load(column), p = vexp2(fma(x, splat(factor), -top));
            p = select(x > MASKED, p, splat(0.0f));
            part[t % 16] = part[t % 16] + p;
            store(column, p);
        }
        add_sum(state, alpha, b, tree_sum(part));
    }
}

#if STEMMA_AVX512_BF16
// The same, but weights become bf16 pairs of consecutive keys, [key / 2][row]; what an odd last key lacks is 0.
template <int NB, bool masked>
static void soften_pairs(RowState& state, float* alpha, float* scores, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float *column = scores + b * LANES, *paired = column;
        const __m512 top = (__m512)raise_max<NB>(state, alpha, b, column, num_keys, factor);
        const __m512 scale = _mm512_set1_ps(factor);
        auto weight = [&](const float* at) {
            __m512 x = _mm512_loadu_ps(at), p = exp2_fast<true>(_mm512_fmsub_ps(x, scale, top));
            if (!masked) return p;
            return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(MASKED), _CMP_GT_OQ), p);
        };
        v16f part[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) part[i] = splat(0.0f);
        int t = 0;
        for (; t + 16 <= num_keys; t += 16)
#pragma GCC unroll 8
            for (int i = 0; i < 16; i += 2, column += 2 * NB * LANES, paired += NB * LANES) {
                __m512 p = weight(column), q = weight(column + NB * LANES);
                part[i] += (v16f)p, part[i + 1] += (v16f)q;
                _mm512_storeu_si512(paired, pair_up(p, q));
            }
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2, column += 2 * NB * LANES, paired += NB * LANES) {
            if (t + i >= num_keys) break;
            __m512 p = weight(column), q = _mm512_setzero_ps();
            if (t + i + 1 < num_keys) q = weight(column + NB * LANES);
            part[i] += (v16f)p, part[i + 1] += (v16f)q;
            _mm512_storeu_si512(paired, pair_up(p, q));
        }
        add_sum(state, alpha, b, tree_sum(part));
    }
}
#endif

// Scores to weights: scaled, capped, masked and softened, as pairs if `paired`.
template <int NB>
static void weigh(const AttendArgs& args, const RowLimits& limits, RowState& state, float* alpha, float* scores,
                  int num_keys, int first_key, bool masked, bool paired) {
    constexpr int W = NB * LANES;
    float factor = args.scale * LOG2_E;
    if (args.softcap > 0) {
        cap(args, scores, num_keys * W);
        factor = 1.0f;
    }
    if (masked) mask<NB>(limits, first_key, num_keys, scores);
#if STEMMA_AVX512_BF16
    if (paired && masked) return soften_pairs<NB, true>(state, alpha, scores, num_keys, factor);
    if (paired) return soften_pairs<NB, false>(state, alpha, scores, num_keys, factor);
#endif
    soften<NB>(state, alpha, scores, num_keys, factor);
}

// acc [row][dim] *= alpha [row]
static void shrink(const float* alpha, int num_rows, int dim, float* acc) {
    for (int r = 0; r < num_rows; r++, acc += dim) {
        if (alpha[r] == 1.0f) continue;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) store(acc + d, load(acc + d) * splat(alpha[r]));
        for (; d < dim; d++) acc[d] *= alpha[r];
    }
}
