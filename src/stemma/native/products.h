// Products of rows with packed weights at this instruction-set level, shared by a team of threads.
//
// One kind of instruction multiplies at a level, whatever the number of rows: tiles where there are any, else
// VDPBF16PS, else fused multiply-add in float. Inputs that it wants in another form are laid out once for all
// threads.
#pragma once

#include <vector>

#include "code_products.h"
#include "compressed.h"
#include "dots.h"
#include "int8_products.h"
#include "team.h"
#include "tile_dots.h"

template <class T>
constexpr bool ON_TILES = STEMMA_AMX && sizeof(T) == 2;
template <class T>
constexpr bool WIDENED = !STEMMA_BF16_DOT && sizeof(T) == 2;

constexpr int64_t PASS_ROWS = 256;  // rows that go through a product at a time: their inputs stay in the caches
constexpr int64_t CUT_ROWS = 64;    // of a block where a piece is cut by rows

// Rows as this level multiplies them.
struct Inputs {
    const char* at;
    int64_t stride;  // bytes a row

    Inputs from(int64_t row) const { return {at + row * stride, stride}; }
};

template <class T>
static int64_t bytes_of_input_row(int64_t k) {
    return ON_TILES<T> ? (k + 31) / 32 * 64 : WIDENED<T> ? k * 4 : 0;
}
template <class T>
static int64_t bytes_of_input_row(const Strips& w) {
    if (w.codes.bits == 0) return bytes_of_input_row<T>(w.k);
    return wants_int8(w) ? Int8Layout(w).bytes : CodeInputs<T>(w).bytes;
}
// Room for the inputs of a pass of up to `rows` rows; 0 where rows are taken as they are.
template <class T>
static int64_t bytes_of_inputs(int64_t rows, const Strips& w) {
    return (std::min(rows, PASS_ROWS) + 15) / 16 * 16 * bytes_of_input_row<T>(w);
}

template <class T>
static void widen_row(const T* x, int64_t k, float* out) {
    int64_t d = 0;
    for (; d + LANES <= k; d += LANES) store(out + d, load(x + d));
    for (; d < k; d++) out[d] = to_float(x[d]);
}

// Lay rows [16 block, 16 block + 16) of x out for a product with w; row 0's inputs begin at `room`.
template <class T>
void lay_out_block(const Strips& w, const T* x, int64_t stride, int64_t rows, int64_t block, char* room) {
    const int64_t k = w.k;
    if (wants_int8(w)) {
        const int64_t bytes = Int8Layout(w).bytes;
        for (int64_t r = 16 * block; r < std::min(rows, 16 * block + 16); r++)
            quantize_row(x + r * stride, w, room + r * bytes);
    } else if (w.codes.bits) {
        const int64_t bytes = CodeInputs<T>(w).bytes;
        for (int64_t r = 16 * block; r < std::min(rows, 16 * block + 16); r++)
            lay_out_for_codes(x + r * stride, w, room + r * bytes);
    } else if constexpr (ON_TILES<T>) {
#if STEMMA_AMX
        lay_in_tiles(x, stride, rows, k, block, room);
#endif
    } else if constexpr (WIDENED<T>) {
        for (int64_t r = 16 * block; r < std::min(rows, 16 * block + 16); r++)
            widen_row(x + r * stride, k, (float*)(room + r * bytes_of_input_row<T>(k)));
    }
}

// Lay `rows` <= PASS_ROWS rows of x out in `room`. Called by all members of the team.
template <class T>
static Inputs lay_out(Team& team, int member, const Strips& w, const T* x, int64_t stride, int64_t rows, char* room) {
    const int64_t bytes = bytes_of_input_row<T>(w);
    if (bytes == 0) return {(const char*)x, stride * int64_t(sizeof(T))};
    team.share(member, (rows + 15) / 16, [&](int64_t i) { lay_out_block(w, x, stride, rows, i, room); });
    return {room, bytes};
}

// The same by one thread, for itself.
template <class T>
static Inputs lay_out_alone(const Strips& w, const T* x, int64_t stride, int64_t rows, char* room) {
    const int64_t bytes = bytes_of_input_row<T>(w);
    if (bytes == 0) return {(const char*)x, stride * int64_t(sizeof(T))};
    for (int64_t block = 0; block < (rows + 15) / 16; block++) lay_out_block(w, x, stride, rows, block, room);
    return {room, bytes};
}

// Into how many parts a strip is cut, so that `threads` threads all have work.
static inline int parts_of_strip(int64_t strips, int threads) { return strips < 4 * threads ? LINES : 1; }

// body(piece, begin, count): all pieces of a product for rows [begin, begin + count) of a pass. Pieces are for all rows,
// but those that are left when each thread has as many as the others are cut into blocks of rows.
template <class F>
static void share_pass(Team& team, int member, int64_t pieces, int64_t rows, F&& body) {
    const int64_t threads = team.size(), each = pieces / threads, left = pieces % threads;
    if (left == 0 || 32 * (threads - left) < pieces + threads - left)  // a thread that rests costs less than cutting
        return team.share(member, pieces, [&](int64_t i) { body(i, 0, rows); });
    const int64_t blocks = (rows + CUT_ROWS - 1) / CUT_ROWS, some = left * blocks;
    team.share(member, each * threads + some, [&](int64_t i) {
        // A thread's run (Team::share) begins with its whole pieces; others that are done take from its end.
        const int64_t all = each * threads + some;
        int64_t thread = 0;
        while (all * (thread + 1) / threads <= i) thread++;
        const int64_t at = i - all * thread / threads;
        if (at < each) return body(thread * each + at, 0, rows);
        const int64_t block = some * thread / threads + at - each, begin = block % blocks * CUT_ROWS;
        body(each * threads + block / blocks, begin, std::min(CUT_ROWS, rows - begin));
    });
}

struct Outputs {
    int64_t begin;
    int width;
};

template <class B>
static inline void add_bias(const B* bias, int width, int rows, float* acc) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) acc[r * STRIP + i] += to_float(bias[i]);
}

// Inputs [begin, end) of `lines` lines of a plain strip, from `weights` on, for `rows` rows whose inputs begin at
// `x.at`; acc holds nothing yet if begin is 0. On tiles, `begin` is a multiple of 32.
template <class T>
static void dot_plain(const char* weights, int lines, int64_t k, int64_t begin, int64_t end, const Inputs& x, int rows,
                      float* acc) {
    if constexpr (ON_TILES<T>) {
#if STEMMA_AMX
        const int64_t tiles = (end - begin + 31) / 32, next_rows = (k + 31) / 32 * TILE_BYTES;
        dot_lines_on_tiles(weights, lines, tiles, x.at + begin / 32 * TILE_BYTES, next_rows, rows, acc, begin == 0);
#endif
    } else if constexpr (sizeof(T) == 4) {
        dot_lines<FloatDot>(weights, lines, end - begin, x.at + 4 * begin, x.stride, rows, acc, begin == 0);
    } else if constexpr (WIDENED<T>) {
        dot_lines<WideDot>(weights, lines, (end - begin) / 2, x.at + 4 * begin, x.stride, rows, acc, begin == 0);
    } else {
#if STEMMA_BF16_DOT
        dot_lines<PairDot>(weights, lines, (end - begin) / 2, x.at + 2 * begin, x.stride, rows, acc, begin == 0);
#endif
    }
}

#if STEMMA_AMX
constexpr int64_t QUADS_OF_TILE = STEPS_OF_TILE / QUAD_STEPS;
constexpr int64_t TILES_EXPANDED = 4;  // at a time, for more than 16 rows: two chunks and their inputs stay in L1

// What is expanded beside a tile's inputs.
template <int J>
struct TileExpanding {
    Expanding<J> expanding;
    int64_t each;  // lines of quads a time
    int64_t done = 0;

    void next() {
        for (const int64_t end = done + each; done < end; done++) expanding(done);
    }
};

// Sums of up to 16 rows for the whole of J lines of a compressed strip: a tile's weights are expanded while the tile
// before is multiplied.
template <int J>
static void dot_few_expanding(const CompressedStrip& strip, int line, int64_t tiles, const char* x, float* acc) {
    constexpr int WIDTH = STRIP * 4;
    alignas(64) char steps[2][STEPS_OF_TILE * STEP_BYTES];
    PatchCursor patches(strip.patch, strip.end, line, J);
    auto expand = [&](int64_t t) {
        expand_quads(strip, line, J, t * QUADS_OF_TILE, (t + 1) * QUADS_OF_TILE, patches, steps[t & 1]);
        asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read memory
    };
    tile_zero(0);
    if constexpr (J > 1) {
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
    expand(0);
    for (int64_t t = 0; t < tiles; t++, x += TILE_BYTES) {
        const char* w = steps[t & 1];
        if (t + 1 < tiles) expand(t + 1);
        tile_loadd(4, x, 64);
        tile_loadd(5, w, STEP_BYTES);
        tile_dpbf16ps(0, 4, 5);
        if constexpr (J > 1) {
            tile_loadd(6, w + 64, STEP_BYTES);
            tile_dpbf16ps(1, 4, 6);
            tile_loadd(7, w + 128, STEP_BYTES);
            tile_dpbf16ps(2, 4, 7);
            tile_loadd(5, w + 192, STEP_BYTES);
            tile_dpbf16ps(3, 4, 5);
        }
    }
    tile_stored(0, acc, WIDTH);
    if constexpr (J > 1) {
        tile_stored(1, acc + 16, WIDTH);
        tile_stored(2, acc + 32, WIDTH);
        tile_stored(3, acc + 48, WIDTH);
    }
    asm volatile("" ::: "memory");
}

// The same for more rows: weights are expanded a chunk at a time, the next one while rows pass over this one.
template <int J>
static void dot_many_expanding(const CompressedStrip& strip, int line, int64_t tiles, const char* x, int rows, float* acc) {
    alignas(64) char chunks[2][TILES_EXPANDED * STEPS_OF_TILE * STEP_BYTES];
    PatchCursor patches(strip.patch, strip.end, line, J);
    expand_quads(strip, line, J, 0, std::min(TILES_EXPANDED, tiles) * QUADS_OF_TILE, patches, chunks[0]);
    for (int64_t begin = 0, end, turn = 0; begin < tiles; begin = end, turn ^= 1) {
        end = std::min(begin + TILES_EXPANDED, tiles);
        const int64_t next_end = std::min(end + TILES_EXPANDED, tiles), first = end * QUADS_OF_TILE;
        const int64_t more = (next_end - end) * QUADS_OF_TILE * J, passes = tile_passes(rows, J, end - begin);
        const Expanding<J> next{strip.tables + line * TABLE_BYTES, strip.quads + first * QUAD_BYTES + line * LINE_OF_QUAD,
                                more, chunks[turn ^ 1]};
        dot_chunk_on_tiles(chunks[turn], J, end - begin, x + begin * TILE_BYTES, tiles * TILE_BYTES, rows, acc, begin == 0,
                           TileExpanding<J>{next, (more + passes - 1) / passes});
        patch_quads(first, next_end * QUADS_OF_TILE, patches, chunks[turn ^ 1]);
    }
}
#endif

// Sums of `rows` <= PASS_ROWS rows for the whole of `lines` lines of a compressed strip.
static void dot_compressed(const Strips& w, int64_t strip_index, int line, int lines, const Inputs& x, int rows,
                           float* acc) {
#if STEMMA_AMX
    const CompressedStrip strip(w, strip_index);
    const int64_t tiles = strip.num_quads(w) / QUADS_OF_TILE;  // compressed are weights of whole tiles alone
    if (rows <= 16) {
        auto run = lines == LINES ? dot_few_expanding<LINES> : dot_few_expanding<1>;
        return run(strip, line, tiles, x.at, acc);
    }
    auto run = lines == LINES ? dot_many_expanding<LINES> : dot_many_expanding<1>;
    run(strip, line, tiles, x.at, rows, acc);
#elif STEMMA_COMPRESSED
    const CompressedStrip strip(w, strip_index);
    const int64_t quads = strip.num_quads(w);
    if (rows <= MOST_DIRECT_ROWS) return dot_quads_directly(strip, quads, line, lines, x.at, x.stride, rows, acc);
    // Weights are expanded a chunk at a time: of whole steps, the next one is while the last rows multiply this one.
    const int64_t most = (rows < BLOCK_ROWS ? MANY_STEPS : rows < 2 * BLOCK_ROWS ? 96 : BLOCK_STEPS) / QUAD_STEPS;
    const int groups = (rows + GROUP - 1) / GROUP;
    alignas(64) char chunks[2][BLOCK_STEPS * STEP_BYTES];
    PatchCursor patches(strip.patch, strip.end, line, lines);
    expand_quads(strip, line, lines, 0, std::min(most, quads), patches, chunks[0]);
    for (int64_t begin = 0, end, turn = 0; begin < quads; begin = end, turn ^= 1) {
        end = std::min(begin + most, quads);
        const int64_t steps = (end - begin) * QUAD_STEPS, next_end = std::min(end + most, quads);
        const char *chunk = chunks[turn], *inputs = x.at + begin * QUAD_STEPS * CompressedDot::BYTES;
        const char *next = strip.quads + end * QUAD_BYTES, *ahead = next;
        for (int g = 0; g < groups; g++) {
            const int first = rows * g / groups, count = rows * (g + 1) / groups - first;
            const char* in = inputs + first * x.stride;
            float* out = acc + first * STRIP;
            if (lines == LINES && g == groups - 1) {
                const Expanding<LINES> beside{strip.tables, next, (next_end - end) * LINES, chunks[turn ^ 1]};
                dot_group<CompressedDot, LINES>(count, chunk, in, x.stride, steps, out, begin == 0, beside);
            } else {
                // The weights of a single line lie apart: the processor's own prefetching follows them.
                const int asks = lines == LINES ? lines_to_ask(lines, g, groups - 1) : 0;
                auto run = lines == LINES ? dot_pass<CompressedDot, LINES> : dot_pass<CompressedDot, 1>;
                run(count, chunk, in, x.stride, steps, out, begin == 0, ahead, 2, asks);
                ahead += steps * asks * 64;
            }
        }
        if (lines == LINES)
            patch_quads(end, next_end, patches, chunks[turn ^ 1]);
        else if (end < quads)
            expand_quads(strip, line, lines, end, next_end, patches, chunks[turn ^ 1]);
    }
#endif
}

// How many rows go through a piece at a time: the more, the less often it is expanded.
static inline int64_t rows_of_piece(const Strips& w) { return w.patches ? PASS_ROWS : BLOCK_ROWS; }

// Piece `piece` of strips * parts: sums of `rows` <= rows_of_piece() rows for its outputs into acc[rows][STRIP], bias
// included. `first` is a multiple of that.
template <class T>
Outputs dot_piece(const Strips& w, int64_t piece, int parts, const Inputs& x, int64_t first, int rows,
                         float* acc) {
    int64_t strip = piece / parts;
    int lines = LINES / parts, line = int(piece % parts) * lines;
    const Inputs inputs{x.at + first * x.stride, x.stride};
    const int64_t begin = strip * STRIP + 16 * line;
    const int width = int(std::max<int64_t>(0, std::min<int64_t>(16 * lines, w.n - begin)));
    if (w.codes.bits == 0) {
        if (w.patches)
            dot_compressed(w, strip, line, lines, inputs, rows, acc);
        else
            dot_plain<T>(w.strip<T>(strip) + 64 * line, lines, w.k, 0, w.k, inputs, rows, acc);
        if (w.bias) add_bias((const T*)w.bias + begin, width, rows, acc);
        return {begin, width};
    }
    if (wants_int8(w))
        dot_int8({w, GroupLayout(w).strip(w, strip), line, lines, inputs.at, inputs.stride, rows, acc});
    else
        CodePiece<T>{w, strip, line, lines, inputs.at, inputs.stride, rows, acc}.run();
    if (w.bias) add_bias((const float*)w.bias + begin, width, rows, acc);
    return {begin, width};
}

// Round a row of sums to T; `out` may be of floats nevertheless.
template <class T, class Out>
static inline void put(const float* acc, int width, Out* out) {
    constexpr bool IS_WIDER = sizeof(Out) > sizeof(T);
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, IS_WIDER ? rounded<T>(load(acc + i)) : load(acc + i));
    for (; i < width; i++) out[i] = from_float<Out>(to_float(from_float<T>(acc[i])));
}

// Outputs of a piece for all rows, out `stride` elements a row.
template <class T, class Out>
static void multiply_piece(const Strips& w, int64_t piece, int parts, const Inputs& x, int64_t rows, Out* out,
                           int64_t stride) {
    alignas(64) float acc[PASS_ROWS * STRIP];
    const int64_t most = rows_of_piece(w);
    for (int64_t first = 0; first < rows; first += most) {
        int count = int(std::min(most, rows - first));
        Outputs o = dot_piece<T>(w, piece, parts, x, first, count, acc);
        for (int r = 0; r < count; r++) put<T>(acc + r * STRIP, o.width, out + (first + r) * stride + o.begin);
    }
}

// The same for rows of x as they are: each piece lays them out for itself. For products with so few outputs that this
// costs less than threads that wait for each other. X may be narrower than T: a router's inputs become floats.
template <class T, class X, class Out>
static void multiply_piece_alone(const Strips& w, int64_t piece, int parts, const X* x, int64_t x_stride, int64_t rows,
                                 Out* out, int64_t out_stride) {
    static thread_local std::vector<char> room;
    const int64_t row_bytes = sizeof(X) == sizeof(T) ? bytes_of_input_row<T>(w) : w.k * int64_t(sizeof(T));
    room.resize((BLOCK_ROWS + 1) * row_bytes + 64);
    char* at = room.data() + (-(uintptr_t)room.data() & 63);
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        const int64_t count = std::min<int64_t>(BLOCK_ROWS, rows - first);
        const X* from = x + first * x_stride;
        Inputs inputs{at, row_bytes};
        if constexpr (sizeof(X) != sizeof(T)) {
            for (int64_t r = 0; r < count; r++) widen_row(from + r * x_stride, w.k, (T*)(at + r * row_bytes));
        } else {
            inputs = lay_out_alone(w, (const T*)from, x_stride, count, at);
        }
        multiply_piece<T>(w, piece, parts, inputs, count, out + first * out_stride, out_stride);
    }
}

// out[r] = w x[r] for any number of rows, laid out in `room` (bytes_of_inputs) pass by pass. Called by all members.
template <class T, class Out>
static void multiply(Team& team, int member, const Strips& w, const T* x, int64_t x_stride, int64_t rows, Out* out,
                     int64_t out_stride, char* room) {
    int parts = parts_of_strip(w.count(), team.size());
    for (int64_t first = 0; first < rows; first += PASS_ROWS) {
        int64_t count = std::min(PASS_ROWS, rows - first);
        Inputs inputs = lay_out(team, member, w, x + first * x_stride, x_stride, count, room);
        share_pass(team, member, w.count() * parts, count, [&](int64_t piece, int64_t begin, int64_t some) {
            multiply_piece<T>(w, piece, parts, inputs.from(begin), some, out + (first + begin) * out_stride,
                              out_stride);
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
