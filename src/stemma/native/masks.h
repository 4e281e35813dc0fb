// The most likely of the tokens that a grammar allows.
#pragma once

#include <cmath>

#include "vec.h"

// The first place of the largest of those of x [n] whose bits in `mask`, lowest first, are set; -1 if none is.
static int64_t masked_argmax(const float* x, const uint32_t* mask, int64_t n) {
    int32_t ones[LANES];
    for (int i = 0; i < LANES; i++) ones[i] = 1 << i;
    const v16i bits = load(ones);
    v16f top = splat(-INFINITY), place = as_float(splat(-1));
    int64_t first = -1;
    for (int64_t i = 0; i < n; i += LANES) {
        uint32_t word = mask[i / 32] >> (i % 32) & 0xFFFF;
        if (i + LANES > n) word &= (1u << (n - i)) - 1;
        if (word == 0) continue;
        if (first < 0) first = i + __builtin_ctz(word);
        float rest[LANES] = {};
        const float* from = x + i;
        if (i + LANES > n) std::memcpy(rest, from, sizeof(float) * (n - i)), from = rest;
        const v16f value = load(from);
        const v16i better = ((bits & int32_t(word)) > 0) & (value > top);
        top = select(better, value, top);
        place = select(better, as_float(splat(int32_t(i))), place);
    }
    float values[LANES];
    int32_t places[LANES];
    store(values, top), std::memcpy(places, &place, sizeof places);
    int64_t best = first;  // where all of them are minus infinity
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t at = int64_t(places[lane]) + lane;
        if (places[lane] < 0 || values[lane] < largest || (values[lane] == largest && at > best)) continue;
        best = at, largest = values[lane];
    }
    return best;
}
