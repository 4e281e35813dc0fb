// The two products of attention in float: for float KV, and for bf16 where the processor has no product of pairs.
#pragma once

#include "kv_rows.h"

// Scores of K keys [key][dim] against NB x 16 rows [dim][row].
template <int NB, int K>
static inline void score_floats(const float* query, const float* keys, int dim, float* scores) {
    constexpr int W = NB * LANES;
    v16f acc[K][NB] = {};
    for (int d = 0; d < dim; d++)
        for (int b = 0; b < NB; b++) {
            v16f q = load(query + d * W + b * LANES);
            for (int i = 0; i < K; i++) acc[i][b] = fma(q, splat(keys[i * dim + d]), acc[i][b]);
        }
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) store(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB>
static void scores_of_floats(const float* query, const float* keys, int num_keys, int dim, float* scores) {
    constexpr int K = ACCUMULATORS / NB > 8 ? 8 : ACCUMULATORS / NB > 1 ? ACCUMULATORS / NB : 1;
    int t = 0;
    for (; t + K <= num_keys; t += K)
        score_floats<NB, K>(query, keys + int64_t(t) * dim, dim, scores + t * NB * LANES);
    for (; t < num_keys; t++) score_floats<NB, 1>(query, keys + int64_t(t) * dim, dim, scores + t * NB * LANES);
}

template <int R, int V>
static inline void weigh_floats_tile(const float* weights, int width, const float* values, int num_keys, int dim,
                                     float* acc) {
    v16f sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load(acc + r * dim + v * LANES);
    for (int t = 0; t < num_keys; t++)
        for (int v = 0; v < V; v++) {
            v16f value = load(values + int64_t(t) * dim + v * LANES);
            for (int r = 0; r < R; r++) sum[r][v] = fma(value, splat(weights[t * width + r]), sum[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(acc + r * dim + v * LANES, sum[r][v]);
}

// acc [row][dim] += weights [key][row] x values [key][dim]
static void weigh_floats(const float* weights, int width, int rows, const float* values, int num_keys, int dim,
                         float* acc) {
    constexpr int R = ACCUMULATORS >= 8 ? 4 : 2, V = ACCUMULATORS / R > 1 ? ACCUMULATORS / R : 1;
    for (int r = 0; r < rows;) {
        int n = rows - r >= R ? R : 1, d = 0;
        const float* w = weights + r;
        float* a = acc + int64_t(r) * dim;
        if (n == R) {
            for (; d + V * LANES <= dim; d += V * LANES)
                weigh_floats_tile<R, V>(w, width, values + d, num_keys, dim, a + d);
            for (; d + LANES <= dim; d += LANES)
                weigh_floats_tile<R, 1>(w, width, values + d, num_keys, dim, a + d);
        } else {
            for (; d + V * LANES <= dim; d += V * LANES)
                weigh_floats_tile<1, V>(w, width, values + d, num_keys, dim, a + d);
            for (; d + LANES <= dim; d += LANES)
                weigh_floats_tile<1, 1>(w, width, values + d, num_keys, dim, a + d);
        }
        for (; d < dim; d++)
            for (int i = 0; i < n; i++)
                for (int t = 0; t < num_keys; t++)
                    a[i * dim + d] = fma_one(w[t * width + i], values[int64_t(t) * dim + d], a[i * dim + d]);
        r += n;
    }
}

template <class T>
static void to_floats(Rows<T> rows, int num_rows, int dim, float* out) {
    const int step = rows.whole() ? dim : COLUMNS;
    for (int t = 0; t < num_rows; t++, out += dim) {
        for (int first = 0; first < dim; first += step) {
            const T* piece = rows[t] + rows.at(first);
            const int end = std::min(step, dim - first);
            for (int d = 0; d < end; d++) out[first + d] = to_float(piece[d]);
        }
    }
}
