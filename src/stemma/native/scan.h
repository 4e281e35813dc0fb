// Recurrent layers, token by token: linear attention with and without the delta rule (Gated DeltaNet,
// arXiv:2412.06464; Kimi Delta Attention, arXiv:2510.26692; Mamba 2, arXiv:2405.21060), the selective scan of Mamba
// (arXiv:2312.00752), and the short convolution before them.
//
// A state changes by one token after the other, in one order of sums, so a row's result depends on nothing but the
// tokens before it: not on the chunk, the batch or the threads, and a decode is a prefill of one token. Columns of a
// state never meet. A piece is the 16 columns of one sequence and head that lie in vectors; they stay in the first
// cache while the tokens pass.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int MAX_KEY_DIM = 1024;  // rows of a state's piece

// Where a step's sequences begin and end, and where their states come from and go
struct StateRows {
    const int64_t* starts;          // [num_sequences + 1]: rows of the sequences
    const int64_t* initial;         // [num_sequences]: addresses of states before the first row; 0: zeros
    const int64_t* last;            // [num_sequences]: where states behind the last row go
    const int64_t* snapshot_rows;   // [num_snapshots]: rows, ascending, behind which states are copied
    const int64_t* snapshots;       // [num_snapshots]: where to
    int64_t offset;                 // of the part meant, in bytes from all these addresses
    int32_t num_sequences, num_snapshots, threads;

    float* part(int64_t address) const { return address ? (float*)(address + offset) : nullptr; }
    const float* before(int64_t sequence) const { return part(initial[sequence]); }

    // Call body(row) for the rows of a sequence, and copy(to) where a state is wanted.
    template <class F, class C>
    void pass(int64_t sequence, F&& body, C&& copy) const {
        const int64_t* wanted = std::lower_bound(snapshot_rows, snapshot_rows + num_snapshots, starts[sequence]);
        int64_t at = wanted - snapshot_rows;
        for (int64_t row = starts[sequence]; row < starts[sequence + 1]; row++) {
            body(row);
            for (; at < num_snapshots && snapshot_rows[at] == row; at++) copy(part(snapshots[at]));
        }
        copy(part(last[sequence]));
    }
};

struct ScanArgs {  // states [heads, key_dim, value_dim]
    StateRows rows;
    const float *query, *key;  // [T, key_heads, key_dim]; key heads serve heads / key_heads heads each
    const float* value;        // [T, heads, value_dim]
    const float* scale;        // [T, heads]: of values; null: 1
    int64_t key_stride, value_stride;  // from a row to the next, in floats
    const float* decay;        // logarithms [T, heads], or [T, heads, key_dim]
    const float* beta;         // [T, heads]: the delta rule; null: values are added as they are
    float* output;             // [T, heads, value_dim]
    int32_t key_heads, heads, key_dim, value_dim;
    int32_t decays_keys;  // whether decay has key_dim numbers a head
};

struct SelectiveArgs {  // states [state_dim, channels]
    StateRows rows;
    const float *x, *step;             // [T, channels]
    const float* rate;                 // [state_dim, channels], negative
    const float *input, *projection;   // [T, state_dim]
    const float* skip;                 // [channels]; null: none
    float* output;                     // [T, channels]
    int32_t channels, state_dim;
};

struct ConvolveArgs {  // states [width - 1, channels]: the last inputs
    StateRows rows;
    const void* x;        // [T, channels]
    int64_t x_stride;     // from a row to the next, in numbers
    const float* weight;  // [width, channels]
    const float* bias;    // [channels]; null: none
    float* output;        // [T, channels]
    int32_t channels, width, is_activated;  // by silu
};

constexpr int MAX_WIDTH = 16;  // of a convolution

// Rows of `width` numbers at `at`, `stride` apart, to vectors and back; no rows: zeros.
static inline void take_columns(v16f* rows, const float* at, int64_t num_rows, int64_t stride, int width) {
    for (int64_t i = 0; i < num_rows; i++) rows[i] = at ? load_few(at + i * stride, width) : splat(0.0f);
}
static inline void put_columns(const v16f* rows, float* at, int64_t num_rows, int64_t stride, int width) {
    for (int64_t i = 0; i < num_rows; i++) store_few(at + i * stride, rows[i], width);
}

// Four sums by i modulo 4, so that one product doesn't wait for the one before; added up in one order
struct FourSums {
    v16f part[4];
    FourSums() { std::fill(part, part + 4, splat(0.0f)); }
    void add(int i, float a, v16f b) { part[i & 3] = fma(splat(a), b, part[i & 3]); }
    v16f total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

static void scan_piece(const ScanArgs& a, int64_t sequence, int64_t head, int64_t first) {
    v16f state[MAX_KEY_DIM];
    const int64_t dim = a.key_dim, stride = a.value_dim, key_head = head / (a.heads / a.key_heads);
    const int64_t offset = head * dim * stride + first;
    const int width = int(std::min<int64_t>(LANES, stride - first));
    const float* initial = a.rows.before(sequence);
    take_columns(state, initial ? initial + offset : nullptr, dim, stride, width);
    a.rows.pass(
        sequence,
        [&](int64_t row) {
            const float* k = a.key + row * a.key_stride + key_head * dim;
            const float* q = a.query + row * a.key_stride + key_head * dim;
            const float* g = a.decay + (row * a.heads + head) * (a.decays_keys ? dim : 1);
            v16f added = load_few(a.value + row * a.value_stride + head * stride + first, width);
            if (a.scale) added = added * a.scale[row * a.heads + head];
            FourSums known, found;
            const v16f decay = a.decays_keys ? splat(0.0f) : vexp(splat(g[0]));
            for (int64_t i = 0; i < dim; i++) {
                state[i] = state[i] * (a.decays_keys ? vexp(splat(g[i])) : decay);
                if (a.beta) known.add(i, k[i], state[i]);
            }
            if (a.beta) added = (added - known.total()) * a.beta[row * a.heads + head];
            for (int64_t i = 0; i < dim; i++) {
                state[i] = fma(splat(k[i]), added, state[i]);
                found.add(i, q[i], state[i]);
            }
            store_few(a.output + (row * a.heads + head) * stride + first, found.total(), width);
        },
        [&](float* to) { put_columns(state, to + offset, dim, stride, width); });
}

static void select_piece(const SelectiveArgs& a, int64_t sequence, int64_t first) {
    v16f state[MAX_KEY_DIM], rate[MAX_KEY_DIM];
    const int64_t dim = a.state_dim, stride = a.channels;
    const int width = int(std::min<int64_t>(LANES, stride - first));
    const float* initial = a.rows.before(sequence);
    take_columns(state, initial ? initial + first : nullptr, dim, stride, width);
    take_columns(rate, a.rate + first, dim, stride, width);
    const v16f skip = a.skip ? load_few(a.skip + first, width) : splat(0.0f);
    a.rows.pass(
        sequence,
        [&](int64_t row) {
            const v16f x = load_few(a.x + row * stride + first, width);
            const v16f step = load_few(a.step + row * stride + first, width), added = step * x;
            FourSums found;
            for (int64_t i = 0; i < dim; i++) {
                state[i] = fma(state[i], vexp(step * rate[i]), added * a.input[row * dim + i]);
                found.add(i, a.projection[row * dim + i], state[i]);
            }
            store_few(a.output + row * stride + first, fma(skip, x, found.total()), width);
        },
        [&](float* to) { put_columns(state, to + first, dim, stride, width); });
}

template <class T>
static void convolve_piece(const ConvolveArgs& a, int64_t sequence, int64_t first) {
    v16f last[MAX_WIDTH], weight[MAX_WIDTH];  // `last`: the inputs before the row's, then the row's
    const int64_t before = a.width - 1, stride = a.channels;
    const int width = int(std::min<int64_t>(LANES, stride - first));
    const float* initial = a.rows.before(sequence);
    take_columns(last, initial ? initial + first : nullptr, before, stride, width);
    take_columns(weight, a.weight + first, a.width, stride, width);
    const v16f bias = a.bias ? load_few(a.bias + first, width) : splat(0.0f);
    a.rows.pass(
        sequence,
        [&](int64_t row) {
            last[before] = load_few((const T*)a.x + row * a.x_stride + first, width);
            v16f sum = bias;
            for (int64_t j = 0; j < a.width; j++) sum = fma(weight[j], last[j], sum);
            if (a.is_activated) sum = sum / (vexp(-sum) + 1.0f);
            store_few(a.output + row * stride + first, sum, width);
            std::copy(last + 1, last + a.width, last);
        },
        [&](float* to) { put_columns(last, to + first, before, stride, width); });
}
