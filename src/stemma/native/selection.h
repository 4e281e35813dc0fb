// Sparse attention: which tokens a query sees (model/selection.py).
//
// A score is the sum over heads of weight * relu(query . key). A product is a sum over the dimensions in order, and
// heads lie in lanes, so a score depends on its query and key alone. Tokens with the highest scores are taken, of equal
// ones those of lower position; they are listed by rising position.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "vec.h"

struct SelectionArgs {
    const float* query;    // [rows, dim, heads], heads a multiple of LANES
    const float* weights;  // [rows, heads]
    const void* keys;      // index keys of a layer's first block; strides in elements
    int32_t* places;       // [rows, top_k]
    int32_t* counts;       // [rows]
    const int32_t *starts, *num_keys, *tables;  // [num_sequences + 1], [num_sequences], [num_sequences, table_stride]
    int64_t table_stride, block_stride, token_stride;
    int32_t num_sequences, block_size, heads, dim, top_k, is_bf16, threads;
};

constexpr int SCORED = 4;              // keys side by side, so that one product doesn't wait for the one before
constexpr int KEYS_OF_A_PIECE = 512;
constexpr int64_t ROWS_AT_ONCE = 32;   // whose scores are held

// A query of a step, and the tokens before it
struct Chooser {
    const int32_t* table;
    int64_t row, num_keys;
};

static inline std::vector<Chooser> choosers(const SelectionArgs& a) {
    std::vector<Chooser> all;
    for (int64_t s = 0; s < a.num_sequences; s++)
        for (int64_t row = a.starts[s]; row < a.starts[s + 1]; row++)
            all.push_back({a.tables + s * a.table_stride, row, a.num_keys[s] - a.starts[s + 1] + row + 1});
    return all;
}

// Scores of N keys, [dim] floats each
template <int N>
static void score_keys(const SelectionArgs& a, int64_t row, const float* keys, float* scores) {
    v16f total[N];
    for (int n = 0; n < N; n++) total[n] = splat(0.0f);
    for (int64_t head = 0; head < a.heads; head += LANES) {
        const float* query = a.query + row * a.dim * a.heads + head;
        v16f sum[N];
        for (int n = 0; n < N; n++) sum[n] = splat(0.0f);
        for (int64_t d = 0; d < a.dim; d++) {
            const v16f lanes = load(query + d * a.heads);
            for (int n = 0; n < N; n++) sum[n] = fma(splat(keys[n * a.dim + d]), lanes, sum[n]);
        }
        const v16f weights = load(a.weights + row * a.heads + head);
        for (int n = 0; n < N; n++) total[n] = fma(vmax(sum[n], splat(0.0f)), weights, total[n]);
    }
    for (int n = 0; n < N; n++) {
        const float score = sum_lanes(total[n]);
        scores[n] = score == score ? score : -std::numeric_limits<float>::infinity();
    }
}

template <class T>
static void score_piece(const SelectionArgs& a, const Chooser& c, int64_t begin, int64_t end, float* scores) {
    static thread_local std::vector<float> room;
    room.resize(size_t(SCORED) * a.dim);
    for (int64_t key = begin; key < end; key += SCORED) {
        const int64_t count = std::min<int64_t>(SCORED, end - key);
        for (int64_t n = 0; n < count; n++) {
            const int64_t at = c.table[(key + n) / a.block_size] * a.block_stride + (key + n) % a.block_size * a.token_stride;
            for (int64_t d = 0; d < a.dim; d++) room[n * a.dim + d] = to_float(((const T*)a.keys)[at + d]);
        }
        if (count == SCORED) score_keys<SCORED>(a, c.row, room.data(), scores + key);
        else
            for (int64_t n = 0; n < count; n++) score_keys<1>(a, c.row, room.data() + n * a.dim, scores + key + n);
    }
}

static inline void take_highest(const SelectionArgs& a, const Chooser& c, const float* scores) {
    static thread_local std::vector<float> sorted;
    float least = -std::numeric_limits<float>::infinity();
    int64_t num_equal = c.num_keys;  // that may still be taken
    if (c.num_keys > a.top_k) {
        sorted.assign(scores, scores + c.num_keys);
        std::nth_element(sorted.begin(), sorted.begin() + (a.top_k - 1), sorted.end(), std::greater<float>());
        least = sorted[a.top_k - 1];
        num_equal = a.top_k - std::count_if(scores, scores + c.num_keys, [&](float s) { return s > least; });
    }
    const int64_t rows_of_a_block = a.block_stride / a.token_stride;
    int32_t* place = a.places + c.row * a.top_k;
    for (int64_t key = 0; key < c.num_keys; key++) {
        const bool is_equal = !(scores[key] > least);
        if (is_equal && (scores[key] < least || num_equal-- <= 0)) continue;
        *place++ = int32_t(c.table[key / a.block_size] * rows_of_a_block + key % a.block_size);
    }
    a.counts[c.row] = int32_t(place - (a.places + c.row * a.top_k));
}

template <class T>
static void select_tokens(const SelectionArgs& a) {
    const std::vector<Chooser> all = choosers(a);
    int64_t most = 0;
    for (const Chooser& c : all) most = std::max(most, c.num_keys);
    std::vector<float> scores(size_t(std::min<int64_t>(ROWS_AT_ONCE, all.size()) * most));
    const int64_t pieces = (most + KEYS_OF_A_PIECE - 1) / KEYS_OF_A_PIECE;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    for (int64_t first = 0; first < int64_t(all.size()); first += ROWS_AT_ONCE) {
        const int64_t count = std::min<int64_t>(ROWS_AT_ONCE, all.size() - first);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count * pieces; i++) {
            const Chooser& c = all[first + i / pieces];
            const int64_t begin = i % pieces * KEYS_OF_A_PIECE, end = std::min(c.num_keys, begin + KEYS_OF_A_PIECE);
            if (begin < end) score_piece<T>(a, c, begin, end, &scores[i / pieces * most]);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) take_highest(a, all[first + i], &scores[i * most]);
    }
}
