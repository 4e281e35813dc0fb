// Rows of inputs as they are, laid out for products with codes: group by group in the order of pairs (code_lines.h), as
// bf16 or widened to float; then for each group the sum of its inputs, which takes the group's offset.
#pragma once

#include "code_lines.h"
#include "tiles.h"

template <class T>
constexpr bool CODES_ON_TILES = STEMMA_AMX && sizeof(T) == 2;
template <class T>
constexpr bool CODES_AS_FLOATS = !STEMMA_BF16_DOT || sizeof(T) == 4;

template <class T>
struct CodeInputs {
    static constexpr int64_t PAIR_BYTES = CODES_AS_FLOATS<T> ? 8 : 4;
    int64_t group_bytes, sums_at, bytes;

    explicit CodeInputs(const Strips& w) {
        const int64_t count = w.k / w.codes.group;
        group_bytes = w.codes.group / 2 * PAIR_BYTES;
        if (CODES_ON_TILES<T>) group_bytes = (group_bytes + 63) / 64 * 64;  // filled up with zeros
        sums_at = (count * group_bytes + 63) / 64 * 64;
        bytes = (sums_at + 4 * count + 63) / 64 * 64;
        if (bytes % 128 == 0) bytes += 64;  // or the rows of a tile share few places of the caches
    }
};

template <class T>
static void lay_out_for_codes(const T* x, const Strips& w, char* row) {
    static constexpr int ORDER[INPUTS_OF_EIGHT] = {0, 2, 4, 6, 1, 3, 5, 7};
    using Laid = std::conditional_t<CODES_AS_FLOATS<T>, float, T>;
    const CodeInputs<T> layout(w);
    const int64_t group = w.codes.group, count = w.k / group;
    float* sums = (float*)(row + layout.sums_at);
    for (int64_t g = 0; g < count; g++, x += group, row += layout.group_bytes) {
        Laid* to = (Laid*)row;
        float sum[INPUTS_OF_EIGHT] = {};
        for (int64_t d = 0; d < group; d += INPUTS_OF_EIGHT) {
#pragma GCC unroll 8
            for (int i = 0; i < INPUTS_OF_EIGHT; i++) {
                const T value = x[d + ORDER[i]];
                if constexpr (CODES_AS_FLOATS<T>) to[d + i] = to_float(value);
                else to[d + i] = value;
                sum[i] += to_float(x[d + i]);
            }
        }
        if (CODES_ON_TILES<T>) std::memset(to + group, 0, layout.group_bytes - group * sizeof(Laid));
        sums[g] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    }
}
