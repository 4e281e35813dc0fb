// What lies between the matrix products of a decoder layer, one token at a time: norm, rotary embedding with
// the write to the cache, gated activation.
#pragma once

#include <cmath>

#include "kv_format.h"
#include "vec.h"

constexpr int MAX_HEAD_DIM = 1024;

// x times a factor, rounded to T as torch does; by 1 nothing changes
template <class T>
static inline v16f scaled(v16f x, float factor) {
    return factor == 1.0f ? x : rounded<T>(x * factor);
}

// 1 / rms(x)
template <class T>
static float rms_factor(const T* x, int64_t dim, float eps) {
    v16f parts = {};
    float sum = 0;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) parts = fma(load(x + d), load(x + d), parts);
    for (; d < dim; d++) sum += to_float(x[d]) * to_float(x[d]);
    sum += sum_lanes(parts);
    return 1.0f / std::sqrt(sum / dim + eps);
}

// out = weight * x / rms(x) in floats, rounded to T once, as models do whose weights are kept less 1
template <class T>
static void centered_norm_row(const T* x, const float* weight, T* out, int64_t dim, float eps) {
    const float factor = rms_factor(x, dim, eps);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store(out + d, load(x + d) * factor * load(weight + d));
    for (; d < dim; d++) out[d] = from_float<T>(to_float(x[d]) * factor * weight[d]);
}

// out = weight * x / rms(x), rounded to T between, as the models of transformers do. With a `delta`, it is added to x
// first.
template <class T>
static void add_and_norm_row(T* x, const T* delta, const T* weight, T* out, int64_t dim, float eps,
                             float delta_scale = 1.0f) {
    v16f parts = {};
    float sum = 0;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        v16f v = load(x + d);
        if (delta) {
            v = rounded<T>(v + scaled<T>(load(delta + d), delta_scale));
            store(x + d, v);
        }
        parts = fma(v, v, parts);
    }
    for (; d < dim; d++) {
        if (delta) x[d] = from_float<T>(to_float(x[d]) + first_lane(scaled<T>(splat(to_float(delta[d])), delta_scale)));
        sum += to_float(x[d]) * to_float(x[d]);
    }
    sum += sum_lanes(parts);
    float factor = 1.0f / std::sqrt(sum / dim + eps);
    for (d = 0; d + LANES <= dim; d += LANES)
        store(out + d, load(weight + d) * rounded<T>(load(x + d) * factor));
    for (; d < dim; d++)
        out[d] = from_float<T>(to_float(weight[d]) * to_float(from_float<T>(to_float(x[d]) * factor)));
}

template <class T>
static void rms_norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
    add_and_norm_row<T>(const_cast<T*>(x), nullptr, weight, out, dim, eps);  // x isn't written without a delta
}

struct NormArgs {
    const void* delta;  // [rows, dim], added to the residual first; null: nothing to add
    const float* delta_norm;  // [dim]: of a norm of delta, as centered_norm_row() does; null: there is none
    void* residual;     // [rows, dim]
    const void* weight;  // floats if `centered`
    void* output;
    int64_t rows, dim;
    int32_t is_bf16, threads;
    float eps;
    float delta_scale;  // of delta; 0: as it is
    int32_t centered;   // see centered_norm_row()
};

template <class T>
static void add_rms_norm_row(const NormArgs& a, int64_t i) {
    const T* delta = a.delta ? (const T*)a.delta + i * a.dim : nullptr;
    T *residual = (T*)a.residual + i * a.dim, *output = (T*)a.output + i * a.dim;
    const float scale = a.delta_scale == 0.0f ? 1.0f : a.delta_scale;
    if (!a.centered) return add_and_norm_row(residual, delta, (const T*)a.weight, output, a.dim, a.eps, scale);
    const float factor = a.delta_norm ? rms_factor(delta, a.dim, a.eps) : 1.0f;
    for (int64_t d = 0; delta && d < a.dim; d += LANES) {
        const int width = int(std::min<int64_t>(LANES, a.dim - d));
        v16f added = load_few(delta + d, width);
        if (a.delta_norm) added = rounded<T>(added * factor * load_few(a.delta_norm + d, width));
        store_few(residual + d, load_few(residual + d, width) + scaled<T>(added, scale), width);
    }
    centered_norm_row(residual, (const float*)a.weight, output, a.dim, a.eps);
}

struct RotateArgs {
    const void* qkv;          // [tokens, (heads + 2 kv_heads) * dim]
    const void *cos, *sin;    // [tokens, dim]; null: nothing is rotated
    const void *local_cos, *local_sin;  // the same, of layers that have angles of their own; null: none has
    const void *q_norm, *k_norm;  // [dim] each, or null; floats if `centered`
    void* query;              // [tokens, heads * dim]
    void *keys, *values;      // the layer's blocks, as in AttendArgs
    const int64_t* slots;     // [tokens]
    int64_t tokens, block_stride, token_stride, head_stride;
    int64_t qkv_stride;  // from a token's qkv to the next one's
    int32_t heads, kv_heads, dim, block_size, is_bf16, threads;
    int32_t rotary_dim;  // leading dims of a head that are rotated; cos and sin are [tokens, rotary_dim]
    int32_t centered;    // see centered_norm_row()
    float eps;
    KVFormat format;
};

// Norm and rotate one head, if it is to be: pairs are (d, d + dim / 2).
template <class T>
static void rotate_head(const RotateArgs& a, const T* x, const T* norm, const T* cos, const T* sin, T* out) {
    T normed[MAX_HEAD_DIM];
    if (norm) {
        if (a.centered)
            centered_norm_row(x, (const float*)(const void*)norm, normed, a.dim, a.eps);
        else
            rms_norm_row(x, norm, normed, a.dim, a.eps);
        x = normed;
    }
    if (!cos) {
        std::memcpy(out, x, sizeof(T) * a.dim);
        return;
    }
    int half = a.rotary_dim / 2, d = 0;
    std::memcpy(out + a.rotary_dim, x + a.rotary_dim, sizeof(T) * (a.dim - a.rotary_dim));
    for (; d + LANES <= half; d += LANES) {
        v16f x1 = load(x + d), x2 = load(x + d + half);
        store(out + d, fma(x1, load(cos + d), -(x2 * load(sin + d))));
        store(out + d + half, fma(x2, load(cos + d + half), x1 * load(sin + d + half)));
    }
    for (; d < half; d++) {
        float x1 = to_float(x[d]), x2 = to_float(x[d + half]);
        out[d] = from_float<T>(x1 * to_float(cos[d]) - x2 * to_float(sin[d]));
        out[d + half] = from_float<T>(x2 * to_float(cos[d + half]) + x1 * to_float(sin[d + half]));
    }
}

template <class T>
static void rotate_and_write_token(const RotateArgs& a, int64_t i) {
    const T* x = (const T*)a.qkv + i * a.qkv_stride;
    const T *cos = nullptr, *sin = nullptr;
    if (a.cos) cos = (const T*)a.cos + i * a.rotary_dim, sin = (const T*)a.sin + i * a.rotary_dim;
    for (int h = 0; h < a.heads; h++, x += a.dim)
        rotate_head(a, x, (const T*)a.q_norm, cos, sin, (T*)a.query + (i * a.heads + h) * a.dim);
    int64_t at = a.slots[i] / a.block_size * a.block_stride + a.slots[i] % a.block_size * a.token_stride;
    if (a.format.stored != PLAIN) {
        T key[MAX_HEAD_DIM];
        for (int h = 0; h < a.kv_heads; h++, x += a.dim) {
            rotate_head(a, x, (const T*)a.k_norm, cos, sin, key);
            encode_row(a.format, key, a.dim, h, a.head_stride, (uint8_t*)a.keys + at);
        }
        for (int h = 0; h < a.kv_heads; h++, x += a.dim)
            encode_row(a.format, x, a.dim, h, a.head_stride, (uint8_t*)a.values + at);
        return;
    }
    for (int h = 0; h < a.kv_heads; h++, x += a.dim)
        rotate_head(a, x, (const T*)a.k_norm, cos, sin, (T*)a.keys + at + h * a.head_stride);
    for (int h = 0; h < a.kv_heads; h++, x += a.dim)
        std::memcpy((T*)a.values + at + h * a.head_stride, x, sizeof(T) * a.dim);
}

template <class T>
static inline v16f silu(v16f x) {
#if STEMMA_AVX512_BF16
    if (sizeof(T) == 2) {  // a reciprocal of 14 bits and one step of Newton's, instead of a division
        __m512 e = exp2_fast<false>(_mm512_min_ps((__m512)(x * -LOG2_E), _mm512_set1_ps(126.0f)));
        __m512 d = e + _mm512_set1_ps(1.0f), y = _mm512_rcp14_ps(d);
        return x * (v16f)(y * _mm512_fnmadd_ps(d, y, _mm512_set1_ps(2.0f)));
    }
#endif
    v16f negated = vmin(-x, splat(80.0f));  // e^80 is finite
    return x / (1.0f + vexp(negated));
}

// GELU by its approximation with tanh: x (1 + tanh u) / 2 is x / (1 + e^-2u)
static inline v16f gelu(v16f x) {
    const v16f u = x * (1.0f + 0.044715f * x * x) * 0.7978845608f;
    return x / (1.0f + vexp(vmin(u * -2.0f, splat(80.0f))));
}

struct GateArgs {
    const void* gate_up;  // [rows, 2 * dim]: gate, then up
    void* output;         // [rows, dim]
    int64_t rows, dim;
    int32_t is_bf16, threads;
};

// out[dim] from gates, through `activation`, and ups, all of which are rounded to T first
template <class T, class X, class F>
static inline void activate_and_multiply(const X* gate, const X* up, T* out, int64_t dim, F activation) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(out + d, rounded<T>(activation(rounded<T>(load(gate + d)))) * rounded<T>(load(up + d)));
    for (; d < dim; d++) {
        float activated = first_lane(activation(rounded<T>(splat(to_float(gate[d])))));
        out[d] = from_float<T>(to_float(from_float<T>(activated)) * to_float(from_float<T>(to_float(up[d]))));
    }
}

template <class T, class X>
static inline void silu_and_multiply(const X* gate, const X* up, T* out, int64_t dim) {
    activate_and_multiply(gate, up, out, dim, [](v16f x) { return silu<T>(x); });
}

// GPT-OSS's gate: (up + 1) * gate * sigmoid(sharpness * gate), of gates up to `limit` and ups within it, rounded to T
// first and once at the end
template <class T, class X>
static inline void clamped_and_multiply(const X* gate, const X* up, T* out, int64_t dim, float sharpness, float limit) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const int some = int(std::min<int64_t>(LANES, dim - d));
        const v16f g = vmin(rounded<T>(load_few(gate + d, some)), splat(limit));
        const v16f u = -vmin(-vmin(rounded<T>(load_few(up + d, some)), splat(limit)), splat(limit));
        store_few(out + d, (u + 1.0f) * silu<T>(g * sharpness) / splat(sharpness), some);
    }
}

// out[dim] from a gate and, behind it, an up of dim
template <class T>
static void silu_and_multiply_row(const T* gate, T* out, int64_t dim) {
    silu_and_multiply(gate, gate + dim, out, dim);
}
