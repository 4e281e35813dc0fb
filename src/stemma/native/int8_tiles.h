// Sums of products of int8 inputs with a strip of codes, on tiles (tiles.h): 16 rows x 16 outputs x 64 inputs an
// instruction. A group of fewer inputs takes a whole one: its inputs are filled up with zeros (Int8Layout).
#pragma once

#include "int8_dots.h"

#if STEMMA_AMX
// partial[16 m ..][16 j ..] (+)= M row tiles x J lines.
template <int M, int J>
static inline void add_on_tiles(const char* w, const char* x, int64_t x_stride, int64_t steps, int32_t* partial,
                                bool resumes) {
    constexpr int WIDTH = STRIP * 4;
    asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read and write memory
    if (resumes) {
        tile_loadd(0, partial, WIDTH);
        if constexpr (J > 1) tile_loadd(1, partial + 16, WIDTH);
        if constexpr (M > 1) tile_loadd(2, partial + 16 * STRIP, WIDTH);
        if constexpr (M > 1 && J > 1) tile_loadd(3, partial + 16 * STRIP + 16, WIDTH);
    } else {
        tile_zero(0);
        if constexpr (J > 1) tile_zero(1);
        if constexpr (M > 1) tile_zero(2);
        if constexpr (M > 1 && J > 1) tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i += STEPS_OF_TILE, w += STEPS_OF_TILE * STEP_BYTES, x += 64) {
        tile_loadd(4, x, x_stride);
        if constexpr (M > 1) tile_loadd(5, x + 16 * x_stride, x_stride);
        tile_loadd(6, w, STEP_BYTES);
        tile_dpbsud(0, 4, 6);
        if constexpr (M > 1) tile_dpbsud(2, 5, 6);
        if constexpr (J > 1) {
            tile_loadd(7, w + 64, STEP_BYTES);
            tile_dpbsud(1, 4, 7);
            if constexpr (M > 1) tile_dpbsud(3, 5, 7);
        }
    }
    tile_stored(0, partial, WIDTH);
    if constexpr (J > 1) tile_stored(1, partial + 16, WIDTH);
    if constexpr (M > 1) tile_stored(2, partial + 16 * STRIP, WIDTH);
    if constexpr (M > 1 && J > 1) tile_stored(3, partial + 16 * STRIP + 16, WIDTH);
    asm volatile("" ::: "memory");
}

// Scale the sums of the run's group `g` and add them up.
static inline void add_group(const GroupRun& run, int64_t g, int lines, int rows) {
    for (int j = 0; j < lines; j++) {
        const v16f scale = run.scales->scale(run.group + g, run.line + j), offset = run.scales->offset(run.group + g, run.line + j);
        for (int r = 0; r < rows; r++) {
            float* acc = run.acc + r * STRIP + 16 * j;
            const int32_t start = ((const int32_t*)(run.starts + r * run.x_stride))[g];
            v16i sum = load(run.partial + r * STRIP + 16 * j) + splat(start);
            v16f products = to_floats(sum) * splat(((const float*)(run.input_scales + r * run.x_stride))[g]);
            v16f total = fma(products, scale, run.first && g == 0 ? splat(0.0f) : load(acc));
            if (run.scales->has_offsets) total = fma(splat(((const float*)(run.sums + r * run.x_stride))[g]), offset, total);
            store(acc, total);
        }
    }
}
#endif

// As run_lines of int8_dots.h.
static void on_tiles(const GroupRun& run, int lines, int rows) {
#if STEMMA_AMX
    const char *codes = run.codes, *x = run.x;
    const int row_tiles = (rows + 15) / 16;
    for (int64_t g = 0; g < run.count; g++, codes += run.next_codes, x += run.next_x) {
        for (int line = 0; line < lines; line += 2)
            for (int m = 0; m < row_tiles; m += 2) {
                auto add = m + 2 <= row_tiles ? (lines > 1 ? add_on_tiles<2, 2> : add_on_tiles<2, 1>)
                                              : (lines > 1 ? add_on_tiles<1, 2> : add_on_tiles<1, 1>);
                add(codes + 64 * line, x + 16 * m * run.x_stride, run.x_stride, run.steps,
                    run.partial + 16 * m * STRIP + 16 * line, run.resumes);
            }
        if (!run.stops) add_group(run, g, lines, rows);
    }
#else
    (void)run, (void)lines, (void)rows;
#endif
}
