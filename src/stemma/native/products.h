// Products of rows with packed weights at this instruction-set level, shared by a team of threads.
//
// One kind of instruction multiplies at a level, whatever the number of rows: tiles where there are any, else
// VDPBF16PS, else fused multiply-add in float. Inputs that it wants in another form are laid out once for all
// threads.
#pragma once

#include "dots.h"
#include "team.h"
#include "tile_dots.h"

template <class T>
constexpr bool ON_TILES = STEMMA_AMX && sizeof(T) == 2;
template <class T>
constexpr bool WIDENED = !STEMMA_BF16_DOT && sizeof(T) == 2;

constexpr int BLOCK_ROWS = STEMMA_AMX ? 256 : 64;  // rows whose sums for one strip are kept at a time
constexpr int64_t PASS_ROWS = 256;  // rows that go through a product at a time: their inputs stay in the caches

// Rows as this level multiplies them.
struct Inputs {
    const char* at;
    int64_t stride;  // bytes a row
};

template <class T>
static int64_t bytes_of_input_row(int64_t k) {
    return ON_TILES<T> ? (k + 31) / 32 * 64 : WIDENED<T> ? k * 4 : 0;
}
// Room for the inputs of a pass of up to `rows` rows; 0 where rows are taken as they are.
template <class T>
static int64_t bytes_of_inputs(int64_t rows, int64_t k) {
    return (std::min(rows, PASS_ROWS) + 15) / 16 * 16 * bytes_of_input_row<T>(k);
}

// Lay rows [16 block, 16 block + 16) of x out; row 0's inputs begin at `room`.
template <class T>
static void lay_out_block(const T* x, int64_t stride, int64_t rows, int64_t k, int64_t block, char* room) {
    if constexpr (ON_TILES<T>) {
#if STEMMA_AMX
        lay_in_tiles(x, stride, rows, k, block, room);
#endif
    } else if constexpr (WIDENED<T>) {
        for (int64_t r = 16 * block; r < std::min(rows, 16 * block + 16); r++) {
            float* out = (float*)(room + r * bytes_of_input_row<T>(k));
            const T* in = x + r * stride;
            int64_t d = 0;
            for (; d + LANES <= k; d += LANES) store(out + d, load(in + d));
            for (; d < k; d++) out[d] = to_float(in[d]);
        }
    }
}

// Lay `rows` <= PASS_ROWS rows of x out in `room`. Called by all members of the team.
template <class T>
static Inputs lay_out(Team& team, int member, const T* x, int64_t stride, int64_t rows, int64_t k, char* room) {
    if (!ON_TILES<T> && !WIDENED<T>) return {(const char*)x, stride * int64_t(sizeof(T))};
    team.share(member, (rows + 15) / 16, [&](int64_t i) { lay_out_block(x, stride, rows, k, i, room); });
    return {room, bytes_of_input_row<T>(k)};
}

// Into how many parts a strip is cut, so that `threads` threads all have work.
static inline int parts_of_strip(int64_t strips, int threads) { return strips < 4 * threads ? LINES : 1; }

struct Outputs {
    int64_t begin;
    int width;
};

// Piece `piece` of strips * parts: sums of `rows` <= BLOCK_ROWS rows for its outputs into acc[rows][STRIP], bias
// included. `first` is a multiple of BLOCK_ROWS.
template <class T>
static Outputs dot_piece(const Strips& w, int64_t piece, int parts, const Inputs& x, int64_t first, int rows,
                         float* acc) {
    int64_t strip = piece / parts;
    int lines = LINES / parts, line = int(piece % parts) * lines;
    const char *weights = w.strip<T>(strip) + 64 * line, *inputs = x.at + first * x.stride;
    if constexpr (ON_TILES<T>) {
#if STEMMA_AMX
        dot_lines_on_tiles(weights, lines, w.steps<T>(), inputs, rows, acc);
#endif
    } else if constexpr (sizeof(T) == 4) {
        dot_lines<FloatDot>(weights, lines, w.k, inputs, x.stride, rows, acc);
    } else if constexpr (WIDENED<T>) {
        dot_lines<WideDot>(weights, lines, w.k / 2, inputs, x.stride, rows, acc);
    } else {
#if STEMMA_BF16_DOT
        dot_lines<PairDot>(weights, lines, w.k / 2, inputs, x.stride, rows, acc);
#endif
    }
    int64_t begin = strip * STRIP + 16 * line;
    int width = int(std::max<int64_t>(0, std::min<int64_t>(16 * lines, w.n - begin)));
    if (w.bias)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++) acc[r * STRIP + i] += to_float(((const T*)w.bias)[begin + i]);
    return {begin, width};
}

// Round a row of sums to T.
template <class T>
static inline void put(const float* acc, int width, T* out) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(acc + i));
    for (; i < width; i++) out[i] = from_float<T>(acc[i]);
}

// Outputs of a piece for all rows, out `stride` elements a row.
template <class T>
static void multiply_piece(const Strips& w, int64_t piece, int parts, const Inputs& x, int64_t rows, T* out,
                           int64_t stride) {
    alignas(64) float acc[BLOCK_ROWS * STRIP];
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int count = int(std::min<int64_t>(BLOCK_ROWS, rows - first));
        Outputs o = dot_piece<T>(w, piece, parts, x, first, count, acc);
        for (int r = 0; r < count; r++) put(acc + r * STRIP, o.width, out + (first + r) * stride + o.begin);
    }
}

// out[r] = w x[r] for any number of rows, laid out in `room` (bytes_of_inputs) pass by pass. Called by all members.
template <class T>
static void multiply(Team& team, int member, const Strips& w, const T* x, int64_t x_stride, int64_t rows, T* out,
                     int64_t out_stride, char* room) {
    int parts = parts_of_strip(w.count(), team.size());
    for (int64_t first = 0; first < rows; first += PASS_ROWS) {
        int64_t count = std::min(PASS_ROWS, rows - first);
        Inputs inputs = lay_out(team, member, x + first * x_stride, x_stride, count, w.k, room);
        team.share(member, w.count() * parts, [&](int64_t piece) {
            multiply_piece(w, piece, parts, inputs, count, out + first * out_stride, out_stride);
        });
    }
}

struct MultiplyArgs {
    Strips weight;
    const void* x;  // [rows, weight.k]
    void* output;   // [rows, weight.n]
    int64_t x_stride, output_stride, rows;  // strides in elements
    int32_t is_bf16, threads;
};
