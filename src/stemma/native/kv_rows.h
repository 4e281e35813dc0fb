// Keys and values as the kernels of attention read them: rows of one KV head for the tokens of a tile. How they lie
// in paged blocks is known here alone.
#pragma once

#include <vector>

#include "kv_format.h"
#include "plan.h"
#include "vec.h"

constexpr int TILE = 64;  // keys; half of it for long values

struct AttendArgs {  // strides in elements; of codes, in bytes
    const void* query;  // [tokens, heads, key_dim]
    const void* keys;   // first block of the layer: [blocks, block_size, kv_heads, key_dim], rows as `format` says
    const void* values;
    void* output;       // [tokens, heads, value_dim], contiguous
    int64_t query_token_stride, query_head_stride;
    int64_t block_stride, token_stride, head_stride;
    int32_t key_dim, value_dim;
    int32_t window;     // tokens a query sees, itself included; 0: all
    int32_t first_key;  // tokens before it are seen by no query but their own
    int32_t is_bf16;
    float scale, softcap;  // softcap 0: none
    const float* sinks;    // [heads]: a score beside those of the keys, with no value; null: none
    KVFormat format;
    const int32_t* lows;  // [tokens]: the first key that a query sees, in place of window and first_key; null: those
    float* partials;      // [tokens, heads, value_dim + 2]: maximum, sum and weighted values, instead of output
};

// Rows of a tile's tokens, for one KV head.
template <class T>
struct Rows {
    const void* const* tokens;
    int64_t offset;  // of the KV head
    int64_t column_stride = COLUMNS;  // as in KVFormat

    const T* operator[](int i) const { return (const T*)tokens[i] + offset; }
    bool whole() const { return column_stride == COLUMNS; }
    // Where column d of a row lies, from its first one on; up to the next multiple of COLUMNS the row is in one run.
    int64_t at(unsigned d) const { return d / COLUMNS * column_stride + d % COLUMNS; }
    Rows from(int i) const { return {tokens + i, offset, column_stride}; }

    void copy(int i, int dim, T* out) const {
        const int step = whole() ? dim : COLUMNS;
        for (int d = 0; d < dim; d += step)
            std::memcpy(out + d, (*this)[i] + at(d), sizeof(T) * std::min(step, dim - d));
    }
};

// A tile's tokens in the blocks of a segment, for KV head 0.
struct TileTokens {
    const void *keys[TILE], *values[TILE];
};

template <class T>
static void locate(const AttendArgs& args, const Plan& plan, const Segment& segment, int key, int n, TileTokens& out) {
    const int64_t size = args.format.stored == PLAIN ? sizeof(T) : 1;
    for (int t = 0; t < n;) {
        int inside = (key + t) % plan.block_size, end = std::min(n, t + plan.block_size - inside);
        int64_t offset = segment.table[(key + t) / plan.block_size] * args.block_stride + inside * args.token_stride;
        for (; t < end; t++, offset += args.token_stride) {
            out.keys[t] = (const char*)args.keys + offset * size;
            out.values[t] = (const char*)args.values + offset * size;
        }
    }
}

template <class T>
static inline Rows<T> keys_of(const AttendArgs& args, const TileTokens& tokens, int kv_head) {
    return {tokens.keys, kv_head * args.head_stride, args.format.column_stride};
}
template <class T>
static inline Rows<T> values_of(const AttendArgs& args, const TileTokens& tokens, int kv_head) {
    return {tokens.values, kv_head * args.head_stride, args.format.column_stride};
}

// Numbers of `n` tokens' rows, stored as codes, to `out` [token][dim].
template <class T, class Out>
static void decode(const AttendArgs& args, const void* const* tokens, int kv_head, int n, int dim, Out* out) {
    const auto decode = args.format.stored == INT8 ? decode_rows<T, INT8, Out> : decode_rows<T, FP8, Out>;
    decode(args.format, tokens, kv_head, args.head_stride, n, dim, out);
}

// The few decoded keys at hand, so that they stay in the first cache.
constexpr int DECODED_KEYS = 16;

template <class T>
struct Decoded {
    const void* rows[DECODED_KEYS];

    Rows<T> of(const AttendArgs& args, const void* const* tokens, int kv_head, int n, int dim, T* room) {
        decode<T>(args, tokens, kv_head, n, dim, room);
        for (int t = 0; t < n; t++) rows[t] = room + int64_t(t) * dim;
        return {rows, 0};
    }
};
