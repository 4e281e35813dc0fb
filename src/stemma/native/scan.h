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
    v16f total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

// Call body(i, i modulo 4) for i below `count`; the second is known to the compiler, so that sums stay in registers.
template <class F>
static inline void by_fours(int64_t count, F&& body) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) body(i, 0), body(i + 1, 1), body(i + 2, 2), body(i + 3, 3);
    for (; i < count; i++) body(i, int(i & 3));
}

constexpr int PANELS = STEMMA_AVX512 ? 4 : 1;  // vectors side by side in a piece of a scan: they share what is read of a row

// One token of one piece, of which rows of the state are P vectors: `kept` are the factors of the rows, one for all or
// (by_key) one for each. `added` becomes what the query finds.
template <bool is_delta, bool by_key, int P>
static inline void advance(v16f (*state)[P], const float* q, const float* k, const float* kept, int64_t dim,
                           v16f* added, float beta) {
    FourSums known[P], found[P];
    const float all = kept[0];
    if (is_delta) {
        by_fours(dim, [&](int64_t i, int j) {
            const v16f factor = splat(by_key ? k[i] * kept[i] : k[i]);
            for (int p = 0; p < P; p++) known[p].part[j] = fma(factor, state[i][p], known[p].part[j]);
        });
        for (int p = 0; p < P; p++) added[p] = (added[p] - known[p].total() * (by_key ? 1.0f : all)) * beta;
    }
    v16f add[P];
    std::copy(added, added + P, add);
    by_fours(dim, [&](int64_t i, int j) {
        const v16f key = splat(k[i]), query = splat(q[i]), factor = splat(by_key ? kept[i] : all);
        for (int p = 0; p < P; p++) {
            const v16f next = fma(key, add[p], state[i][p] * factor);
            state[i][p] = next;
            found[p].part[j] = fma(query, next, found[p].part[j]);
        }
    });
    for (int p = 0; p < P; p++) added[p] = found[p].total();
}

template <bool is_delta, bool by_key, int P>
static void scan_piece_as(const ScanArgs& a, int64_t sequence, int64_t head, int64_t first) {
    v16f state[MAX_KEY_DIM][P];
    float kept[by_key ? MAX_KEY_DIM : LANES];
    const int64_t dim = a.key_dim, stride = a.value_dim, key_head = head / (a.heads / a.key_heads);
    const int64_t offset = head * dim * stride + first, num_kept = by_key ? dim : 1;
    const int width = int(std::min<int64_t>(P * LANES, stride - first));
    const float* initial = a.rows.before(sequence);
    for (int64_t i = 0; i < dim; i++)
        for (int p = 0; p < P; p++)
            state[i][p] =
                initial ? load_few(initial + offset + i * stride + p * LANES, width - p * LANES) : splat(0.0f);
    a.rows.pass(
        sequence,
        [&](int64_t row) {
            const float* decay = a.decay + (row * a.heads + head) * num_kept;
            for (int64_t i = 0; i < num_kept; i += LANES) {
                const int some = int(std::min<int64_t>(LANES, num_kept - i));
                store_few(kept + i, vexp(load_few(decay + i, some)), some);
            }
            const float* value = a.value + row * a.value_stride + head * stride + first;
            const float scale = a.scale ? a.scale[row * a.heads + head] : 1.0f;
            v16f added[P];
            for (int p = 0; p < P; p++) added[p] = load_few(value + p * LANES, width - p * LANES) * scale;
            const float* k = a.key + row * a.key_stride + key_head * dim;
            const float* q = a.query + row * a.key_stride + key_head * dim;
            const float beta = is_delta ? a.beta[row * a.heads + head] : 0.0f;
            advance<is_delta, by_key, P>(state, q, k, kept, dim, added, beta);
            float* output = a.output + (row * a.heads + head) * stride + first;
            for (int p = 0; p < P; p++) store_few(output + p * LANES, added[p], width - p * LANES);
        },
        [&](float* to) {
            for (int64_t i = 0; i < dim; i++)
                for (int p = 0; p < P; p++)
                    store_few(to + offset + i * stride + p * LANES, state[i][p], width - p * LANES);
        });
}

template <int P>
static void scan_panels(const ScanArgs& a, int64_t sequence, int64_t head, int64_t first) {
    if (a.beta)
        a.decays_keys ? scan_piece_as<true, true, P>(a, sequence, head, first)
                      : scan_piece_as<true, false, P>(a, sequence, head, first);
    else
        a.decays_keys ? scan_piece_as<false, true, P>(a, sequence, head, first)
                      : scan_piece_as<false, false, P>(a, sequence, head, first);
}

// Columns from `first` on, PANELS vectors of them or what is left
static void scan_piece(const ScanArgs& a, int64_t sequence, int64_t head, int64_t first) {
    if (a.value_dim - first > LANES)
        scan_panels<PANELS>(a, sequence, head, first);
    else
        scan_panels<1>(a, sequence, head, first);
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
            by_fours(dim, [&](int64_t i, int j) {
                state[i] = fma(state[i], vexp(step * rate[i]), added * a.input[row * dim + i]);
                found.part[j] = fma(splat(a.projection[row * dim + i]), state[i], found.part[j]);
            });
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
