// Sums of products of inputs as they are with a strip of codes, on tiles: a group takes whole tiles of 32 inputs, those of
// rows filled up with zeros. Sums of a group begin with zero on the tiles; vectors scale them and add them up.
#pragma once

#include "code_few_rows.h"

#if STEMMA_AMX
// partial[16][16 j ..] (+)= 16 rows x J lines of pairs, `tiles` of them.
template <int J>
static inline void sum_on_tiles(const char* pairs, const char* x, int64_t x_stride, int64_t tiles, float* partial,
                                bool resumes) {
    constexpr int WIDTH = STRIP * 4;
    asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read and write memory
    if (resumes) {
        tile_loadd(0, partial, WIDTH);
        if constexpr (J > 1) {
            tile_loadd(1, partial + 16, WIDTH);
            tile_loadd(2, partial + 32, WIDTH);
            tile_loadd(3, partial + 48, WIDTH);
        }
    } else {
        tile_zero(0);
        if constexpr (J > 1) {
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
        }
    }
    for (int64_t t = 0; t < tiles; t++, pairs += STEPS_OF_TILE * STEP_BYTES, x += 64) {
        tile_loadd(4, x, x_stride);
        tile_loadd(5, pairs, STEP_BYTES);
        tile_dpbf16ps(0, 4, 5);
        if constexpr (J > 1) {
            tile_loadd(6, pairs + 64, STEP_BYTES);
            tile_dpbf16ps(1, 4, 6);
            tile_loadd(7, pairs + 128, STEP_BYTES);
            tile_dpbf16ps(2, 4, 7);
            tile_loadd(5, pairs + 192, STEP_BYTES);
            tile_dpbf16ps(3, 4, 5);
        }
    }
    tile_stored(0, partial, WIDTH);
    if constexpr (J > 1) {
        tile_stored(1, partial + 16, WIDTH);
        tile_stored(2, partial + 32, WIDTH);
        tile_stored(3, partial + 48, WIDTH);
    }
    asm volatile("" ::: "memory");
}

// All rows of a run whose codes are unpacked; acc, partial and x have room for whole tiles of rows.
template <int J>
static void run_on_tiles(const CodeRun& run, int rows) {
    const int64_t tiles = (run.eights + EIGHTS_OF_TILE - 1) / EIGHTS_OF_TILE;
    for (int first = 0; first < rows; first += 16) {
        const CodeRun part = run.at_rows(first, 0);
        const char *pairs = part.codes, *x = part.x;
        for (int64_t g = 0; g < part.count; g++, pairs += part.next_codes, x += part.next_x) {
            float* partial = run.stops || run.resumes ? part.partial : run.partial + g % 2 * 16 * STRIP;
            sum_on_tiles<J>(pairs, x, part.x_stride, tiles, partial, part.resumes);
            if (part.stops) continue;
            auto sums = [&](int r, int j) { return load(partial + r * STRIP + 16 * j); };
            if (rows == 1) add_scaled_group<1, J>(part, g, sums);
            else add_scaled_group<16, J>(part, g, sums);
        }
    }
}
#endif
