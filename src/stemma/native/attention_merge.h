// Partial results of attention put together in order of keys, and rows written as results.
#pragma once

#include <vector>

#include "softmax.h"

// acc = acc * before + next_acc * now
static inline void add_scaled(float* acc, float before, const float* next_acc, float now, int dim) {
    int d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(acc + d, fma(load(next_acc + d), splat(now), load(acc + d) * splat(before)));
    for (; d < dim; d++) acc[d] = fma_one(next_acc[d], now, acc[d] * before);
}

// Merge one row's next partial result into what was merged before; one without weights doesn't count.
static inline void merge(float& max, float& sum, float* acc, float next_max, float next_sum, const float* next_acc,
                         int dim) {
    if (next_sum == 0) return;
    if (sum == 0) {
        max = next_max, sum = next_sum;
        std::memcpy(acc, next_acc, sizeof(float) * dim);
        return;
    }
    float top = std::max(max, next_max), factors[2 * LANES];
    store(factors, vexp2(splat(max - top)));
    store(factors + LANES, vexp2(splat(next_max - top)));
    const float before = factors[0], now = factors[LANES];
    max = top;
    sum = fma_one(next_sum, now, sum * before);
    add_scaled(acc, before, next_acc, now, dim);
}

// Divide one row's merged sum and write it as token `token` of query head `head`; or write it as it is.
template <class T>
static void put_row(const AttendArgs& args, int num_heads, int64_t token, int head, float max, float sum,
                    const float* acc) {
    if (args.partials) {
        float* partial = args.partials + (token * num_heads + head) * (args.value_dim + 2);
        partial[0] = max, partial[1] = sum;
        if (sum != 0) std::memcpy(partial + 2, acc, sizeof(float) * args.value_dim);
        return;
    }
    float factor = 1.0f;
    if (args.sinks) {
        float sink = args.sinks[head] * LOG2_E, top = std::max(max, sink), both[2 * LANES];
        store(both, vexp2(splat(max - top)));
        store(both + LANES, vexp2(splat(sink - top)));
        factor = both[0];
        sum = fma_one(sum, factor, both[LANES]);
    }
    factor /= sum;
    T* out = (T*)args.output + (token * num_heads + head) * args.value_dim;
    int d = 0;
    for (; d + LANES <= args.value_dim; d += LANES) store(out + d, load(acc + d) * splat(factor));
    for (; d < args.value_dim; d++) out[d] = from_float<T>(acc[d] * factor);
}

// Merge the partial results of one token's heads.
template <class T>
void merge_token(const AttendArgs& args, const Plan& plan, int index) {
    const int heads = plan.num_heads(), dim = args.value_dim;
    std::vector<float> acc(dim);
    for (int h = 0; h < heads; h++) {
        float max = MASKED, sum = 0;
        for (int i = plan.merged_begin[index]; i < plan.merged_begin[index + 1]; i++) {
            const float* slot = plan.partials.data() + (plan.slots[i] + h) * (dim + 2);
            merge(max, sum, acc.data(), slot[0], slot[1], slot + 2, dim);
        }
        put_row<T>(args, heads, plan.merged[index], h, max, sum, acc.data());
    }
}

// Partial results of rows over several runs of keys, which ranks computed.
struct MergeArgs {
    const float* parts;  // [num_parts, rows, heads, value_dim + 2], as AttendArgs::partials
    void* output;        // [rows, heads, value_dim]
    const float* sinks;
    int64_t rows;
    int32_t num_parts, heads, value_dim, is_bf16, threads;
};

// Merge one row's parts in their order.
template <class T>
void merge_parts_of(const MergeArgs& a, int64_t row) {
    AttendArgs whole{};
    whole.output = a.output, whole.sinks = a.sinks, whole.value_dim = a.value_dim;
    std::vector<float> acc(a.value_dim);
    for (int h = 0; h < a.heads; h++) {
        float max = MASKED, sum = 0;
        for (int p = 0; p < a.num_parts; p++) {
            const float* part = a.parts + ((p * a.rows + row) * a.heads + h) * (a.value_dim + 2);
            merge(max, sum, acc.data(), part[0], part[1], part + 2, a.value_dim);
        }
        put_row<T>(whole, a.heads, row, h, max, sum, acc.data());
    }
}
