// Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, 2.1.2), absorbed: a token keeps one latent and one
// rotary key for all heads. A head's query is folded into the space of latents, there attention reads them as keys and
// as values, and what comes out is projected to the head's values. No context is ever expanded, for a prompt neither:
// both ways round differently, so a choice by the number of rows would show in the result.
#pragma once

#include "kv_rows.h"
#include "layers.h"
#include "products.h"

struct LatentWeights {
    const Strips* fold;     // [heads]: [rank, nope]; null: the layer has keys and values
    const Strips* project;  // [heads]: [value, rank]
    Strips expand;          // [heads * (nope + rope), query rank]; n = 0: the query has no latent of its own
    const void *query_norm, *latent_norm;  // [query rank], [rank]
    float query_eps, latent_eps;
};

// How a rotary part is paired, and how it is written: halves (d, d + rope / 2) or neighbours (2d, 2d + 1).
enum Rotation : int32_t { HALVES = 0, PAIRS_TO_HALVES = 1, PAIRS = 2 };

struct LatentArgs {          // heads = 0: layers have keys and values
    const float *cos, *sin;  // [tokens, rope / 2]
    void* latents;           // layer 0's blocks, as in AttendArgs
    const int64_t* slots;    // [tokens]; below 0: the token is in the cache already, and isn't written
    int64_t block_stride, token_stride;
    int32_t heads, rank, nope, rope, value, block_size, rotation;
    KVFormat format;

    int32_t width() const { return rank + rope; }  // of a latent with its rotary key
    int32_t head_width() const { return nope + rope; }
};

template <class T>
static void rotate_part(const LatentArgs& a, const T* x, int64_t token, T* out) {
    const int half = a.rope / 2;
    const float *cos = a.cos + token * half, *sin = a.sin + token * half;
    float first[MAX_HEAD_DIM / 2], second[MAX_HEAD_DIM / 2];
    for (int d = 0; d < half; d++) {
        const int at = a.rotation == HALVES ? d : 2 * d, beside = a.rotation == HALVES ? d + half : 2 * d + 1;
        const float x1 = to_float(x[at]), x2 = to_float(x[beside]);
        first[d] = fma_one(x1, cos[d], -(x2 * sin[d]));
        second[d] = fma_one(x2, cos[d], x1 * sin[d]);
    }
    for (int d = 0; d < half; d++) {
        const int at = a.rotation == PAIRS ? 2 * d : d, beside = a.rotation == PAIRS ? 2 * d + 1 : d + half;
        out[at] = from_float<T>(first[d]), out[beside] = from_float<T>(second[d]);
    }
}

// Norm token i's latent, rotate its key, and write both as one row to its slot; x [rank + rope].
template <class T>
static void write_latent(const LatentArgs& a, const LatentWeights& w, void* blocks, const T* x, int64_t i) {
    if (a.slots[i] < 0) return;
    T row[MAX_HEAD_DIM];
    rms_norm_row(x, (const T*)w.latent_norm, row, a.rank, w.latent_eps);
    rotate_part(a, x + a.rank, i, row + a.rank);
    WriteArgs written{};
    written.source = row, written.target = blocks, written.slots = a.slots + i;
    written.block_stride = a.block_stride, written.token_stride = a.token_stride;
    written.heads = 1, written.dim = a.width(), written.block_size = a.block_size, written.format = a.format;
    write_token<T>(written, 0);
}

// A product of each head with its own weight: x [rows][head][x_width] to out [rows][head][out_width], rows x_stride and
// out_stride elements apart.
template <class T>
struct HeadProducts {
    const Strips* weights;
    int heads;
    const T* x;
    int64_t x_stride, x_width;
    T* out;
    int64_t out_stride, out_width, rows;
    int parts;

    HeadProducts(const Strips* weights, int heads, int threads, int64_t rows, const T* x, int64_t x_stride,
                 int64_t x_width, T* out, int64_t out_stride, int64_t out_width)
        : weights(weights), heads(heads), x(x), x_stride(x_stride), x_width(x_width), out(out),
          out_stride(out_stride), out_width(out_width), rows(rows),
          parts(parts_of_strip(heads * weights[0].count(), threads)) {}

    int64_t pieces() const { return heads * weights[0].count() * parts; }
    void run(int64_t piece) const {
        const int64_t of_head = weights[0].count() * parts, head = piece / of_head;
        multiply_piece_alone<T>(weights[head], piece % of_head, parts, x + head * x_width, x_stride, rows,
                                out + head * out_width, out_stride);
    }
};
