// Sums of products of int8 inputs with a strip of codes, on tiles (tiles.h): 16 rows x 16 outputs x 64 inputs an
// instruction. A group of fewer inputs takes a whole one: its inputs are filled up with zeros (Int8Layout).
#pragma once

#include "int8_dots.h"

#if STEMMA_AMX
// partial[16][16 j ..] (+)= 16 rows x J lines. No tile of weights is loaded again before two others were: it would wait.
template <int J>
static inline void sum_bytes_on_tiles(const char* w, const char* x, int64_t x_stride, int64_t steps, int32_t* partial,
                                      bool resumes, int64_t& turn) {
    constexpr int WIDTH = STRIP * 4;
#define EACH(DO) \
    DO(0) if constexpr (J > 1) { DO(1) DO(2) DO(3) }
#define LOAD(J_) tile_loadd(J_, partial + 16 * J_, WIDTH);
#define ZERO(J_) tile_zero(J_);
#define STORE(J_) tile_stored(J_, partial + 16 * J_, WIDTH);
#define LINE(J_, TILE)                              \
    if constexpr (J > J_) {                         \
        tile_loadd(TILE, w + 64 * J_, STEP_BYTES);  \
        tile_dpbsud(J_, 4, TILE);                   \
    }
    asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read and write memory
    if (resumes) {
        EACH(LOAD)
    } else {
        EACH(ZERO)
    }
    for (int64_t i = 0; i < steps; i += STEPS_OF_TILE, w += STEPS_OF_TILE * STEP_BYTES, x += 64, turn++) {
        tile_loadd(4, x, x_stride);
        switch (turn % 3) {
            case 0: LINE(0, 5) LINE(1, 6) LINE(2, 7) LINE(3, 5) break;
            case 1: LINE(0, 6) LINE(1, 7) LINE(2, 5) LINE(3, 6) break;
            default: LINE(0, 7) LINE(1, 5) LINE(2, 6) LINE(3, 7)
        }
    }
    EACH(STORE)
    asm volatile("" ::: "memory");
#undef LINE
#undef STORE
#undef ZERO
#undef LOAD
#undef EACH
}

// Scale the sums of the run's group `g`, 16 rows and J lines, and add them up.
template <int J, bool OFFSETS>
static inline void add_bytes_group(const GroupRun& run, int64_t g, const int32_t* partial) {
    const bool first = run.first && g == 0;
    for (int j = 0; j < J; j++) {
        const v16f scale = run.scales->scale(run.group + g, run.line + j);
        const v16f offset = OFFSETS ? run.scales->offset(run.group + g, run.line + j) : splat(0.0f);
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            float* acc = run.acc + r * STRIP + 16 * j;
            const int32_t start = ((const int32_t*)(run.starts + r * run.x_stride))[g];
            v16i sum = load(partial + r * STRIP + 16 * j) + splat(start);
            v16f products = to_floats(sum) * splat(((const float*)(run.input_scales + r * run.x_stride))[g]);
            v16f total = fma(products, scale, first ? splat(0.0f) : load(acc));
            if (OFFSETS) total = fma(splat(((const float*)(run.sums + r * run.x_stride))[g]), offset, total);
            store(acc, total);
        }
    }
}

// 16 rows of all groups of a run at a time: their sums stay in L1 till they are scaled, while the next group's are made.
template <int J, bool OFFSETS>
static void run_bytes_on_tiles(const GroupRun& run, int rows) {
    int64_t turn = 0;
    for (int first = 0; first < rows; first += 16) {
        const GroupRun part = run.at_row(first);
        const char *codes = part.codes, *x = part.x;
        auto partial_of = [&](int64_t g) { return part.stops || part.resumes ? part.partial : run.partial + g % 2 * 16 * STRIP; };
        for (int64_t g = 0; g < part.count; g++, codes += part.next_codes, x += part.next_x) {
            sum_bytes_on_tiles<J>(codes, x, part.x_stride, part.steps, partial_of(g), part.resumes, turn);
            if (!part.stops && g > 0) add_bytes_group<J, OFFSETS>(part, g - 1, partial_of(g - 1));
        }
        if (!part.stops) add_bytes_group<J, OFFSETS>(part, part.count - 1, partial_of(part.count - 1));
    }
}
#endif

// As run_lines of int8_dots.h; acc, partial and x have room for whole tiles of rows.
static void on_tiles(const GroupRun& run, int lines, int rows) {
#if STEMMA_AMX
    auto go = run.scales->has_offsets ? (lines == LINES ? run_bytes_on_tiles<LINES, true> : run_bytes_on_tiles<1, true>)
                                      : (lines == LINES ? run_bytes_on_tiles<LINES, false> : run_bytes_on_tiles<1, false>);
    go(run, rows);
#else
    (void)run, (void)lines, (void)rows;
#endif
}
