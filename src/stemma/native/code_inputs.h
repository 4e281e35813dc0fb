// Rows of inputs as they are, laid out for products with codes: group by group in the order of pairs (code_lines.h), as
// bf16 or widened to float; then for each group the sum of its inputs, which takes the group's offset.
//
// Where no instruction multiplies pairs of bf16, bf16 inputs become integers of 16 bits times a power of two, one for each
// piece of a group: integers are multiplied twice as fast as floats. Those within 2^-7 of a piece's largest stay exact,
// since bf16 has eight bits; smaller ones are off by 2^-16 of the largest at most.
#pragma once

#include "code_lines.h"
#include "tiles.h"

template <class T>
constexpr bool CODES_ON_TILES = STEMMA_AMX && sizeof(T) == 2;

constexpr int64_t PIECE_INPUTS = 128;  // sums of so many products of bytes with 16 bits stay within 32

template <class T>
struct CodeInputs {
    static constexpr int64_t PAIR_BYTES = 2 * sizeof(T);
    int64_t pieces;  // of a group
    int64_t group_bytes, sums_at, starts_at, scales_at, bytes;

    explicit CodeInputs(const Strips& w) {
        const int64_t count = w.k / w.codes.group;
        pieces = FIXED_POINT<T> ? (w.codes.group + PIECE_INPUTS - 1) / PIECE_INPUTS : 0;
        group_bytes = w.codes.group / 2 * PAIR_BYTES;
        if (CODES_ON_TILES<T>) group_bytes = (group_bytes + 63) / 64 * 64;  // filled up with zeros
        sums_at = (count * group_bytes + 63) / 64 * 64;
        starts_at = sums_at + 4 * count;               // what the integers of each piece's sums begin with
        scales_at = starts_at + 4 * count * pieces;  // each piece's power of two
        bytes = (scales_at + 4 * count * pieces + 63) / 64 * 64;
        if (bytes % 128 == 0) bytes += 64;  // or the rows of a tile share few places of the caches
    }
};

// Two eights of integers in the order of pairs; `count` of 16 are left.
static inline void store_eights(int16_t* to, v16i codes, int64_t count) {
    int16_t eights[LANES];
#if defined(__AVX2__) && !STEMMA_AVX512
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i one = _mm256_permutevar8x32_epi32((__m256i)codes.lo, order);
    const __m256i two = _mm256_permutevar8x32_epi32((__m256i)codes.hi, order);
    _mm256_storeu_si256((__m256i*)eights, _mm256_permute4x64_epi64(_mm256_packs_epi32(one, two), 0xD8));
#else
    static constexpr int ORDER[LANES] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    int32_t lanes[LANES];
    Memory<v16i>::store(lanes, codes);
    for (int i = 0; i < LANES; i++) eights[i] = int16_t(lanes[ORDER[i]]);
#endif
    std::memcpy(to, eights, count >= LANES ? sizeof eights : sizeof eights / 2);
}

// The exponent of 2 that `count` inputs are integers of: as a float, and its inverse. NaN with NaN or infinity among them.
static void fixed_point_of(const bf16* x, int64_t count, float& scale, float& inverse) {
    v16f top = splat(0.0f), poison = splat(0.0f);
    for (int64_t d = 0; d < count; d += LANES) {
        const v16f v = load_few(x + d, int(count - d));
        top = vmax(as_float(as_bits(v) & 0x7FFFFFFFu), top);
        poison += v * 0.0f;
    }
    float lanes[LANES], largest = 0;
    store(lanes, top);
    for (float lane : lanes) largest = std::max(largest, lane);
    uint32_t bits, of_scale, of_inverse;
    std::memcpy(&bits, &largest, 4);
    const uint32_t exponent = std::max(bits >> 23, 24u);  // so small ones become zero: inverses stay finite
    of_scale = (exponent - 14) << 23, of_inverse = (268 - exponent) << 23;
    std::memcpy(&scale, &of_scale, 4);
    std::memcpy(&inverse, &of_inverse, 4);
    scale += sum_lanes(poison);
}

static void lay_out_fixed_point(const bf16* x, const Strips& w, char* row) {
    const CodeInputs<bf16> layout(w);
    const int64_t group = w.codes.group, count = w.k / group;
    const v16f magic = splat(12582912.0f);  // 1.5 * 2^23 rounds
    const v16i magic_bits = as_int(magic);
    float *sums = (float*)(row + layout.sums_at), *scales = (float*)(row + layout.scales_at);
    int32_t* starts = (int32_t*)(row + layout.starts_at);
    int16_t* to = (int16_t*)row;
    for (int64_t g = 0; g < count; g++) {
        sums[g] = 0;
        for (int64_t begin = 0; begin < group; begin += PIECE_INPUTS, starts++, scales++) {
            const int64_t some = std::min(PIECE_INPUTS, group - begin);
            float inverse;
            fixed_point_of(x, some, *scales, inverse);
            v16i total = splat(int32_t(0));
            for (int64_t d = 0; d < some; d += LANES) {
                const v16i codes = as_int(load_few(x + d, int(some - d)) * inverse + magic) - magic_bits;
                store_eights(to + d, codes, some - d);
                total += codes;
            }
            int32_t lanes[LANES], sum = 0;
            Memory<v16i>::store(lanes, total);
            for (int32_t lane : lanes) sum += lane;
            *starts = -w.codes.middle * sum;
            sums[g] += float(sum) * *scales;
            x += some, to += some;
        }
    }
}

template <class T>
static void lay_out_for_codes(const T* x, const Strips& w, char* row) {
    if constexpr (FIXED_POINT<T>) return lay_out_fixed_point(x, w, row);
    static constexpr int ORDER[INPUTS_OF_EIGHT] = {0, 2, 4, 6, 1, 3, 5, 7};
    const CodeInputs<T> layout(w);
    const int64_t group = w.codes.group, count = w.k / group;
    float* sums = (float*)(row + layout.sums_at);
    for (int64_t g = 0; g < count; g++, x += group, row += layout.group_bytes) {
        T* to = (T*)row;
        float sum[INPUTS_OF_EIGHT] = {};
        for (int64_t d = 0; d < group; d += INPUTS_OF_EIGHT) {
#pragma GCC unroll 8
            for (int i = 0; i < INPUTS_OF_EIGHT; i++) {
                to[d + i] = x[d + ORDER[i]];
                sum[i] += to_float(x[d + i]);
            }
        }
        if (CODES_ON_TILES<T>) std::memset(to + group, 0, layout.group_bytes - group * sizeof(T));
        sums[g] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    }
}
