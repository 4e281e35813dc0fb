// What this machine can do at most, for benchmarks: multiplications on registers alone, and reading memory.
#pragma once

#include "dots.h"
#include "tiles.h"

// Multiply and add `rounds` times on registers alone; returns how many floating-point operations that were.
template <class T>
static int64_t multiply_registers(int64_t rounds) {
#if STEMMA_AMX
    if constexpr (sizeof(T) == 2) {
        TileScope scope;
        tile_zero(4);
        tile_zero(5);
        tile_zero(6);
        tile_zero(7);
        for (int64_t i = 0; i < rounds; i++) {
            tile_dpbf16ps(0, 4, 6);
            tile_dpbf16ps(1, 4, 7);
            tile_dpbf16ps(2, 5, 6);
            tile_dpbf16ps(3, 5, 7);
        }
        return rounds * 4 * 2 * 16 * 16 * 32;
    }
#endif
#if STEMMA_BF16_DOT
    using Kind = std::conditional_t<sizeof(T) == 4, FloatDot, PairDot>;
#else
    using Kind = FloatDot;  // bf16 is widened: the same instructions
#endif
    constexpr int SUMS = HELD == 4 ? 2 : 6, LINES_HELD = NATIVE == 16 ? 4 : 1;
    alignas(64) static const float zeros[LANES] = {};
    v16f sum[SUMS][LINES_HELD];  // unrolled throughout, or they are kept in memory; unlike, or they become one
#pragma GCC unroll 8
    for (int r = 0; r < SUMS; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < LINES_HELD; j++) sum[r][j] = splat(float(r * LINES_HELD + j));
    }
    const char* unknown = (const char*)zeros;
    asm volatile("" : "+r"(unknown));  // or the compiler knows the results
    auto line = Kind::line(unknown, 0);
    auto input = Kind::input(unknown, 0);
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 8
        for (int r = 0; r < SUMS; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < LINES_HELD; j++) sum[r][j] = Kind::add(sum[r][j], line, input);
        }
    }
    v16f total = splat(0.0f);
#pragma GCC unroll 8
    for (int r = 0; r < SUMS; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < LINES_HELD; j++) total += sum[r][j];
    }
    static volatile float kept;
    kept = sum_lanes(total);
    return rounds * SUMS * LINES_HELD * LANES * 2 * (sizeof(typename Kind::Element) == 2 ? 2 : 1);
}

// Read `num_bytes`, a multiple of 1024; returns something that depends on all of them.
static float read_memory(const char* data, int64_t num_bytes) {
    v16f sum[4] = {};
    for (int64_t at = 0; at < num_bytes; at += 1024)
#pragma GCC unroll 16
        for (int line = 0; line < 16; line++) {
            __builtin_prefetch(data + at + 4096 + 64 * line);
            sum[line % 4] += load((const float*)(data + at + 64 * line));
        }
    return sum_lanes(sum[0] + sum[1] + (sum[2] + sum[3]));
}
