// Sums of products of some rows with a strip, on tiles (tiles.h): 16 rows x 16 outputs x 32 inputs an instruction.
#pragma once

#include "strips.h"
#include "tiles.h"

#if STEMMA_AMX
constexpr int TILE_BYTES = 1024;
constexpr int TILES_AT_ONCE = 16;  // in a row: with 2 lines, 32 kB of weights that stay in L1 while all rows pass
constexpr int TILE_AHEAD = 8192;   // bytes: how far ahead weights are asked for where memory is the limit

// acc[16 m ..][16 j ..] (+)= rows x lines, M x J tiles with M * J <= 4. Rows lie in tiles, those of the next 16 rows
// `next_rows` bytes on.
template <int M, int J>
static inline void tile_block(const char* w, const char* x, int64_t next_rows, int64_t tiles, float* acc, bool first,
                              bool memory_bound) {
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
        if (memory_bound)
            for (int step = 0; step < STEPS_OF_TILE; step++)
                for (int j = 0; j < J; j++) __builtin_prefetch(w + TILE_AHEAD + step * STEP_BYTES + j * 64);
        tile_loadd(4, x, 64);
        if constexpr (M > 1) tile_loadd(5, x + next_rows, 64);
        tile_loadd(6, w, STEP_BYTES);
        tile_dpbf16ps(0, 4, 6);
        if constexpr (M > 1) tile_dpbf16ps(2, 5, 6);
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

// As dot_lines of dots.h; rows are in tiles (lay_in_tiles), 16 of them in `next_rows` bytes, and acc has room for a
// multiple of 16.
static void dot_lines_on_tiles(const char* w, int lines, int64_t tiles, const char* x, int64_t next_rows, int rows,
                               float* acc, bool first) {
    const int row_tiles = (rows + 15) / 16;
    if (row_tiles == 1) {
        auto run = lines == 4 ? tile_block<1, 4> : tile_block<1, 1>;
        return run(w, x, next_rows, tiles, acc, first, true);
    }
    const int width = std::min(lines, 2);
    for (int64_t done = 0; done < tiles; done += TILES_AT_ONCE) {
        int64_t now = std::min<int64_t>(TILES_AT_ONCE, tiles - done);
        for (int line = 0; line < lines; line += width) {
            const char* here = w + done * STEPS_OF_TILE * STEP_BYTES + line * 64;
            for (int m = 0; m < row_tiles; m += 2) {
                const char* inputs = x + m * next_rows + done * TILE_BYTES;
                float* out = acc + m * 16 * STRIP + line * 16;
                auto run = m + 2 <= row_tiles ? (width == 2 ? tile_block<2, 2> : tile_block<2, 1>)
                                              : (width == 2 ? tile_block<1, 2> : tile_block<1, 1>);
                run(here, inputs, next_rows, now, out, first && done == 0, m == 0);
            }
        }
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
