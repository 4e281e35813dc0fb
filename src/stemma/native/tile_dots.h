// Sums of products of some rows with a strip, on tiles (tiles.h): 16 rows x 16 outputs x 32 inputs an instruction.
#pragma once

#include "strips.h"
#include "tiles.h"

#if STEMMA_AMX
constexpr int TILE_BYTES = 1024;
constexpr int TILES_AT_ONCE = 6;  // in a row: their weights, 24 kB of four lines, stay in L1 while all rows pass
constexpr int TILE_AHEAD = 8192;  // bytes: how far ahead weights are asked for where one pass reads them

// What is asked for beside a tile's inputs: `lines` lines of 64 bytes, `stride` bytes apart, into L2.
struct TileAsking {
    const char* at;
    int64_t stride;
    int lines;

    void next() {
        for (int i = 0; i < lines; i++, at += stride) __builtin_prefetch(at, 0, 2);
    }
};

// acc[16 m ..][16 j ..] (+)= rows x lines, M x J tiles with M * J <= 4. Rows lie in tiles, those of the next 16 rows
// `next_rows` bytes on.
template <int M, int J, class Beside>
static inline void tile_block(const char* w, const char* x, int64_t next_rows, int64_t tiles, float* acc, bool first,
                              Beside& beside) {
    constexpr int WIDTH = STRIP * 4;
    asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read and write memory
    if (first) {
        tile_zero(0);
        if constexpr (J > 1) tile_zero(1);
        if constexpr (J > 2 || M > 1) tile_zero(2);
        if constexpr (J > 3 || M * J == 4) tile_zero(3);
    } else {
        tile_loadd(0, acc, WIDTH);
        if constexpr (J > 1) tile_loadd(1, acc + 16, WIDTH);
        if constexpr (J > 2) tile_loadd(2, acc + 32, WIDTH);
        if constexpr (J > 3) tile_loadd(3, acc + 48, WIDTH);
        if constexpr (M > 1) tile_loadd(2, acc + 16 * STRIP, WIDTH);
        if constexpr (M > 1 && J > 1) tile_loadd(3, acc + 16 * STRIP + 16, WIDTH);
    }
    for (int64_t i = 0; i < tiles; i++, w += STEPS_OF_TILE * STEP_BYTES, x += TILE_BYTES) {
        beside.next();
        tile_loadd(4, x, 64);
        tile_loadd(6, w, STEP_BYTES);
        tile_dpbf16ps(0, 4, 6);
        if constexpr (M > 1) {
            tile_loadd(5, x + next_rows, 64);
            tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (J > 1) {
            tile_loadd(7, w + 64, STEP_BYTES);
            tile_dpbf16ps(1, 4, 7);
            if constexpr (M > 1) tile_dpbf16ps(3, 5, 7);
        }
        if constexpr (J > 2) {
            tile_loadd(5, w + 128, STEP_BYTES);
            tile_dpbf16ps(2, 4, 5);
            tile_loadd(6, w + 192, STEP_BYTES);
            tile_dpbf16ps(3, 4, 6);
        }
    }
    tile_stored(0, acc, WIDTH);
    if constexpr (J > 1) tile_stored(1, acc + 16, WIDTH);
    if constexpr (J > 2) tile_stored(2, acc + 32, WIDTH);
    if constexpr (J > 3) tile_stored(3, acc + 48, WIDTH);
    if constexpr (M > 1) tile_stored(2, acc + 16 * STRIP, WIDTH);
    if constexpr (M > 1 && J > 1) tile_stored(3, acc + 16 * STRIP + 16, WIDTH);
    asm volatile("" ::: "memory");
}

// As dot_lines of dots.h for a chunk of weights that stays in L1 while all rows pass. Rows are in tiles (lay_in_tiles), 16
// of them in `next_rows` bytes, and acc has room for a multiple of 16. `beside` does its part with each tile (tile_passes).
template <class Beside>
static void dot_chunk_on_tiles(const char* w, int lines, int64_t tiles, const char* x, int64_t next_rows, int rows,
                               float* acc, bool first, Beside beside) {
    const int row_tiles = (rows + 15) / 16, width = row_tiles == 1 ? lines : std::min(lines, 2);
    for (int m = 0; m < row_tiles; m += 2)
        for (int line = 0; line < lines; line += width) {
            const char* inputs = x + m * next_rows;
            float* out = acc + m * 16 * STRIP + line * 16;
            auto run = row_tiles == 1        ? (width == 4 ? tile_block<1, 4, Beside> : tile_block<1, 1, Beside>)
                       : m + 2 <= row_tiles ? (width == 2 ? tile_block<2, 2, Beside> : tile_block<2, 1, Beside>)
                                             : (width == 2 ? tile_block<1, 2, Beside> : tile_block<1, 1, Beside>);
            run(w + line * 64, inputs, next_rows, tiles, out, first, beside);
        }
}
// How often that calls `beside`.
static inline int64_t tile_passes(int rows, int lines, int64_t tiles) {
    const int row_tiles = (rows + 15) / 16, width = row_tiles == 1 ? lines : std::min(lines, 2);
    return (row_tiles + 1) / 2 * (lines / width) * tiles;
}

// As dot_lines of dots.h. While rows pass over a chunk of weights, the next chunk is asked for: of this strip, or of the
// next one, which lies behind it.
static void dot_lines_on_tiles(const char* w, int lines, int64_t tiles, const char* x, int64_t next_rows, int rows,
                               float* acc, bool first) {
    const int64_t stride = lines == LINES ? 64 : STEP_BYTES;
    const int64_t most = rows <= 16 ? tiles : TILES_AT_ONCE;  // a single pass reads its weights once
    for (int64_t done = 0; done < tiles; done += most) {
        const int64_t now = std::min(most, tiles - done);
        const char* chunk = w + done * STEPS_OF_TILE * STEP_BYTES;
        const char* ahead = chunk + (rows <= 16 ? TILE_AHEAD : now * STEPS_OF_TILE * STEP_BYTES);
        const int64_t asked = now * STEPS_OF_TILE * lines, passes = tile_passes(rows, lines, now);
        const TileAsking beside{ahead, stride, int((asked + passes - 1) / passes)};
        dot_chunk_on_tiles(chunk, lines, now, x + done * TILE_BYTES, next_rows, rows, acc, first && done == 0, beside);
    }
}

// Rows [16 i, 16 i + 16) of x as tiles one after the other, filled up with zeros.
static void lay_in_tiles(const bf16* x, int64_t stride, int64_t rows, int64_t k, int64_t i, char* out) {
    const int64_t tiles = (k + 31) / 32;
    out += i * tiles * TILE_BYTES;
    for (int64_t tile = 0; tile < tiles; tile++, out += TILE_BYTES) {
        int64_t width = std::min<int64_t>(32, k - 32 * tile) * int64_t(sizeof(bf16));
        for (int r = 0; r < 16; r++) {
            int64_t row = 16 * i + r, filled = row < rows ? width : 0;
            if (filled == 64) {
                std::memcpy(out + 64 * r, x + row * stride + 32 * tile, 64);
            } else {
                if (filled) std::memcpy(out + 64 * r, x + row * stride + 32 * tile, filled);
                std::memset(out + 64 * r + filled, 0, 64 - filled);
            }
        }
    }
}
#endif
