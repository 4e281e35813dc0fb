// Kernels of a decoder layer on CPU, called from Python through ctypes (native/library.py).
// What lies between the matrix products: norm, rotary embedding, KV write, paged attention, gated activation.
#include <cmath>
#include <omp.h>

#include "attention.h"
#include "copy.h"

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // less work than this isn't worth waking threads
constexpr int64_t SERIAL_COST = 1 << 10;      // keys x blocks of 16 rows, likewise

template <class F>
static void for_rows(int64_t rows, int64_t elements, int threads, F&& body) {
    if (threads < 2 || elements < SERIAL_ELEMENTS) {
        for (int64_t i = 0; i < rows; i++) body(i);
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < rows; i++) body(i);
    }
}

// out = weight * x / rms(x), rounded to T between, as the models of transformers do
template <class T>
static void rms_norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
    v16f parts = {};
    float sum = 0;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        v16f v = load(x + d);
        parts += v * v;
    }
    for (; d < dim; d++) sum += to_float(x[d]) * to_float(x[d]);
    for (int i = 0; i < LANES; i++) sum += parts[i];
    float factor = 1.0f / std::sqrt(sum / dim + eps);
    for (d = 0; d + LANES <= dim; d += LANES)
        store(out + d, load(weight + d) * rounded<T>(load(x + d) * factor));
    for (; d < dim; d++)
        out[d] = from_float<T>(to_float(weight[d]) * to_float(from_float<T>(to_float(x[d]) * factor)));
}

struct NormArgs {
    const void* delta;  // [rows, dim], added to the residual first; null: nothing to add
    void* residual;     // [rows, dim]
    const void* weight;
    void* output;
    int64_t rows, dim;
    int32_t is_bf16, threads;
    float eps;
};

template <class T>
static void add_rms_norm(const NormArgs& a) {
    for_rows(a.rows, a.rows * a.dim, a.threads, [&](int64_t i) {
        T* residual = (T*)a.residual + i * a.dim;
        if (a.delta) {
            const T* delta = (const T*)a.delta + i * a.dim;
            int64_t d = 0;
            for (; d + LANES <= a.dim; d += LANES) store(residual + d, load(residual + d) + load(delta + d));
            for (; d < a.dim; d++)
                residual[d] = from_float<T>(to_float(residual[d]) + to_float(delta[d]));
        }
        rms_norm_row(residual, (const T*)a.weight, (T*)a.output + i * a.dim, a.dim, a.eps);
    });
}

struct RotateArgs {
    const void* qkv;          // [tokens, (heads + 2 kv_heads) * dim]
    const void *cos, *sin;    // [tokens, dim]
    const void *q_norm, *k_norm;  // [dim] each, or null
    void* query;              // [tokens, heads * dim]
    void *keys, *values;      // the layer's blocks, as in AttendArgs
    const int64_t* slots;     // [tokens]
    int64_t tokens, block_stride, token_stride, head_stride;
    int32_t heads, kv_heads, dim, block_size, is_bf16, threads;
    float eps;
};

// Norm (if any) and rotate one head: pairs are (d, d + dim / 2).
template <class T>
static void rotate_head(const RotateArgs& a, const T* x, const T* norm, const T* cos, const T* sin, T* out) {
    T normed[1024];
    if (norm) {
        rms_norm_row(x, norm, normed, a.dim, a.eps);
        x = normed;
    }
    int half = a.dim / 2, d = 0;
    for (; d + LANES <= half; d += LANES) {
        v16f x1 = load(x + d), x2 = load(x + d + half);
        store(out + d, x1 * load(cos + d) - x2 * load(sin + d));
        store(out + d + half, x2 * load(cos + d + half) + x1 * load(sin + d + half));
    }
    for (; d < half; d++) {
        float x1 = to_float(x[d]), x2 = to_float(x[d + half]);
        out[d] = from_float<T>(x1 * to_float(cos[d]) - x2 * to_float(sin[d]));
        out[d + half] = from_float<T>(x2 * to_float(cos[d + half]) + x1 * to_float(sin[d + half]));
    }
}

template <class T>
static void rotate_and_write(const RotateArgs& a) {
    int64_t width = int64_t(a.heads + 2 * a.kv_heads) * a.dim;
    for_rows(a.tokens, a.tokens * width, a.threads, [&](int64_t i) {
        const T* x = (const T*)a.qkv + i * width;
        const T *cos = (const T*)a.cos + i * a.dim, *sin = (const T*)a.sin + i * a.dim;
        for (int h = 0; h < a.heads; h++, x += a.dim)
            rotate_head(a, x, (const T*)a.q_norm, cos, sin, (T*)a.query + (i * a.heads + h) * a.dim);
        int64_t at = a.slots[i] / a.block_size * a.block_stride + a.slots[i] % a.block_size * a.token_stride;
        for (int h = 0; h < a.kv_heads; h++, x += a.dim)
            rotate_head(a, x, (const T*)a.k_norm, cos, sin, (T*)a.keys + at + h * a.head_stride);
        for (int h = 0; h < a.kv_heads; h++, x += a.dim)
            std::memcpy((T*)a.values + at + h * a.head_stride, x, sizeof(T) * a.dim);
    });
}

struct GateArgs {
    const void* gate_up;  // [rows, 2 * dim]: gate, then up
    void* output;         // [rows, dim]
    int64_t rows, dim;
    int32_t is_bf16, threads;
};

template <class T>
static inline v16f silu(v16f x) {
#if STEMMA_BF16_DOT
    if (sizeof(T) == 2) {  // a reciprocal of 14 bits and one step of Newton's, instead of a division
        __m512 e = exp2_fast<false>(_mm512_min_ps((__m512)(x * -LOG2_E), _mm512_set1_ps(126.0f)));
        __m512 d = e + _mm512_set1_ps(1.0f), y = _mm512_rcp14_ps(d);
        return x * (v16f)(y * _mm512_fnmadd_ps(d, y, _mm512_set1_ps(2.0f)));
    }
#endif
    v16f negated = -x < 80.0f ? -x : splat(80.0f);  // e^80 is finite
    return x / (1.0f + vexp(negated));
}

template <class T>
static void silu_and_multiply(const GateArgs& a) {
    for_rows(a.rows, a.rows * a.dim * 2, a.threads, [&](int64_t i) {
        const T* gate = (const T*)a.gate_up + i * 2 * a.dim;
        const T* up = gate + a.dim;
        T* out = (T*)a.output + i * a.dim;
        int64_t d = 0;
        for (; d + LANES <= a.dim; d += LANES)
            store(out + d, rounded<T>(silu<T>(load(gate + d))) * load(up + d));
        for (; d < a.dim; d++) {
            float silent = silu<T>(splat(to_float(gate[d])))[0];
            out[d] = from_float<T>(to_float(from_float<T>(silent)) * to_float(up[d]));
        }
    });
}

template <class T>
static void attend(Plan& plan, const AttendArgs& args) {
    plan.partials.resize(plan.num_slots * (args.value_dim + 2));
    int threads = plan.total_cost < SERIAL_COST ? 1 : plan.num_threads;
    int num_items = int(plan.items.size()), num_merged = int(plan.merged.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_items; i++) run_item_any<T>(args, plan, plan.items[i], scratch);
#pragma omp for schedule(static)
        for (int i = 0; i < num_merged; i++) merge_token<T>(args, plan, i);
    }
}

extern "C" {

int32_t stemma_abi() { return 1; }
void stemma_copy(char* target, const char* source, int64_t num_bytes) { stream_copy(target, source, num_bytes); }

int32_t stemma_has_bf16_dot() { return STEMMA_BF16_DOT; }

Plan* stemma_plan_new(const Batch* batch, int32_t num_kv_heads, int32_t group_size, int32_t num_threads) {
    Plan* plan = new Plan;
    plan->block_size = batch->block_size;
    plan->num_kv_heads = num_kv_heads;
    plan->group_size = group_size;
    plan->num_threads = num_threads;
    Planner(*batch, *plan);
    return plan;
}

void stemma_plan_free(Plan* plan) { delete plan; }
int64_t stemma_plan_cost(const Plan* plan) { return plan->total_cost; }

void stemma_attend(Plan* plan, const AttendArgs* args) {
    args->is_bf16 ? attend<bf16>(*plan, *args) : attend<float>(*plan, *args);
}
void stemma_add_rms_norm(const NormArgs* args) {
    args->is_bf16 ? add_rms_norm<bf16>(*args) : add_rms_norm<float>(*args);
}
void stemma_rotate_and_write(const RotateArgs* args) {
    args->is_bf16 ? rotate_and_write<bf16>(*args) : rotate_and_write<float>(*args);
}
void stemma_silu_and_multiply(const GateArgs* args) {
    args->is_bf16 ? silu_and_multiply<bf16>(*args) : silu_and_multiply<float>(*args);
}
}
