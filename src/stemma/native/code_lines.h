// Codes as they lie (quantized.h), taken apart: into bytes for products with int8 inputs, and into pairs of 16 bits, bf16
// or integers, or into floats for products with inputs as they are.
//
// Eight inputs of a line's 16 outputs become four pairs, of inputs (0, 2), (4, 6), (1, 3) and (5, 7): so a pair is a
// shift away from where its bits lie in the two halves of each 32 bits. Inputs are laid out in that order (code_inputs.h).
// A code of fewer than 8 bits, stored as u, becomes 128 + u: a bf16 whose lower bits are u itself. One of 8 bits becomes
// u. Either is exact; what is too much, `surplus` a code, is taken off by the group's offset. One that is looked up becomes
// its level. As integers they are the bytes.
#pragma once

#include "quantized.h"
#include "tiles.h"

template <class T>
constexpr bool FIXED_POINT = !STEMMA_BF16_DOT && sizeof(T) == 2;  // inputs are integers of 16 bits (code_inputs.h)

constexpr int PAIRS_OF_EIGHT = 4;
constexpr int INPUTS_OF_EIGHT = 8;

// What a code stands for less than the number that it becomes.
static inline float surplus(const Strips& w) {
    return w.codes.levels ? 0.0f : float(w.codes.middle + (w.codes.bits == 8 ? 0 : 128));
}

constexpr int LOOKED_UP = 16;  // in place of the bits of codes: four, which are looked up

// The levels of a weight as products take them; nothing if it has none.
struct Levels {
    alignas(64) uint16_t pairs[32] = {};  // bf16, twice: the fifth bit of an index may be anything
    alignas(64) uint8_t bytes[64] = {};   // level + middle, in each 16 bytes
    int32_t middle;

    explicit Levels(const Strips& w) : middle(w.codes.middle) {
        if (w.codes.levels == nullptr) return;
        for (int i = 0; i < 32; i++) pairs[i] = from_float<bf16>(float(w.codes.levels[i % 16])).bits;
        for (int i = 0; i < 64; i++) bytes[i] = uint8_t(w.codes.levels[i % 16] + middle);
    }
    // Of four indices below 16 in each 32 bits.
    v16u bytes_of(v16u indices) const {
        v16u out;
#if STEMMA_AVX512
        out = (v16u)_mm512_shuffle_epi8(_mm512_load_si512(bytes), (__m512i)indices);
#elif defined(__AVX2__)
        const __m256i table = _mm256_load_si256((const __m256i*)bytes);
        out = {(native_u)_mm256_shuffle_epi8(table, (__m256i)indices.lo),
               (native_u)_mm256_shuffle_epi8(table, (__m256i)indices.hi)};
#else
        uint8_t found[64];
        std::memcpy(found, &indices, 64);
        for (uint8_t& each : found) each = bytes[each];
        std::memcpy(&out, found, 64);
#endif
        return out;
    }
};

template <int BITS>
struct Eight {
    static constexpr int TOGETHER = BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // eights that share a line of higher bits
    static constexpr bool IS_BYTES = BITS == 8 || (BITS == LOOKED_UP && !STEMMA_AVX512);  // that become floats one by one
    static constexpr int64_t LOW_BYTES = BITS == 8 ? 2 * STEP_BYTES : STEP_BYTES;
    v16u low, high;  // of 8 bits: both steps
    int place;       // among those that share a line
    const Levels* levels;

    // `at`: a line of the codes, `high`: of the higher bits.
    Eight(const char* at, const char* higher, int place_, const Levels* levels_)
        : low(load((const uint32_t*)at)), high(low), place(place_), levels(levels_) {
        if constexpr (BITS == 8) high = load((const uint32_t*)(at + STEP_BYTES));
        if constexpr (BITS == 5 || BITS == 6) high = load((const uint32_t*)higher);
    }
    // Bytes of step 0 or 1.
    v16u step(int s) const {
        if constexpr (BITS == 8) return s ? high : low;
        v16u bytes = (s ? low >> 4 : low) & 0x0F0F0F0Fu;
        if constexpr (BITS == LOOKED_UP) return levels->bytes_of(bytes);
        if constexpr (BITS == 5) bytes = bytes | shifted(2 * place + s - 4, 0x10101010u);
        if constexpr (BITS == 6) bytes = bytes | shifted(2 * (2 * place + s) - 4, 0x30303030u);
        return bytes;
    }
    // Pair k as two bf16.
    v16u pair(int k) const {
#if STEMMA_AVX512
        if constexpr (BITS == LOOKED_UP) {
            const __m512i indices = (__m512i)(low >> (4 * k));
            return (v16u)_mm512_permutexvar_epi16(indices, _mm512_load_si512(levels->pairs));
        }
#endif
        if constexpr (IS_BYTES) return (as_bits(single(k, 0)) >> 16) | as_bits(single(k, 1));
        v16u bits = ((low >> (4 * k)) & 0x000F000Fu) | 0x43004300u;
        const int byte = 8 * (k / 2), s = k % 2;
        if constexpr (BITS == 5) bits = bits | shifted(byte + 2 * place + s - 4, 0x00100010u);
        if constexpr (BITS == 6) bits = bits | shifted(byte + 2 * (2 * place + s) - 4, 0x00300030u);
        return bits;
    }
    // One of pair k as floats.
    v16f single(int k, int part) const {
        if constexpr (IS_BYTES) {
            const v16u bytes = (step(k % 2) >> (16 * part + 8 * (k / 2))) & 0xFFu;
            return to_floats(as_int(as_float(bytes)) - (BITS == 8 ? 0 : levels->middle));
        }
        const v16u bits = pair(k);
        return as_float(part == 0 ? bits << 16 : bits & 0xFFFF0000u);
    }

    // Pair k as integers of 16 bits.
    v16u integers(int k) const {
        if constexpr (BITS == 4) return k == 3 ? halves_right<12>(low) : (low >> (4 * k)) & 0x000F000Fu;
        const v16u bytes = step(k % 2);
        return k < 2 ? bytes & 0x00FF00FFu : halves_right<8>(bytes);
    }

  private:
    v16u shifted(int by, uint32_t mask) const { return (by < 0 ? high << -by : high >> by) & mask; }
};

// Where a group's codes are: those of the first line, and the higher bits'; and what they are looked up in.
struct CodePlace {
    const char *low, *high;
    const Levels* levels;

    template <int BITS>
    inline __attribute__((always_inline)) Eight<BITS> eight(int64_t i, int place, int j) const {
        constexpr int TOGETHER = Eight<BITS>::TOGETHER;
        return {low + (i * TOGETHER + place) * Eight<BITS>::LOW_BYTES + 64 * j, high + i * STEP_BYTES + 64 * j, place, levels};
    }
};

constexpr int64_t UNPACKED_AHEAD = 8192;  // bytes: how far ahead codes are asked for
constexpr int UNPACKED_INTO = STEMMA_AMX ? 2 : 3;  // L2, where tiles need L1; else L1: on AMD's processors L2 is slower

// body(eight, its number, line): for `count` eights of `lines` lines, from the begin of a group or of whole lines of
// higher bits on.
template <int BITS, class F>
static inline __attribute__((always_inline)) void for_eights(const CodePlace& codes, int lines, int64_t count, F&& body) {
    constexpr int TOGETHER = Eight<BITS>::TOGETHER;
    for (int64_t i = 0; i < count; i += TOGETHER) {
#pragma GCC unroll 4
        for (int place = 0; place < TOGETHER; place++) {
            const char* ahead = codes.low + (i + place) * Eight<BITS>::LOW_BYTES + UNPACKED_AHEAD;
            for (int j = 0; j < lines; j++) {
                __builtin_prefetch(ahead + 64 * j, 0, UNPACKED_INTO);
                if (BITS == 8) __builtin_prefetch(ahead + STEP_BYTES + 64 * j, 0, UNPACKED_INTO);
                body(codes.template eight<BITS>(i / TOGETHER, place, j), i + place, j);
            }
        }
    }
}

// `count` eights of `lines` lines as bytes, steps of STEP_BYTES in `out`.
template <int BITS>
static void unpack_bytes(const CodePlace& codes, int lines, int64_t count, char* out) {
    for_eights<BITS>(codes, lines, count, [&](const Eight<BITS>& eight, int64_t i, int j) {
        char* to = out + 2 * i * STEP_BYTES + 64 * j;
        Memory<v16u>::store((uint32_t*)to, eight.step(0));
        Memory<v16u>::store((uint32_t*)(to + STEP_BYTES), eight.step(1));
    });
}
// The same as pairs, of bf16 as a plain strip holds them, or of integers.
template <int BITS, bool INTEGERS = false>
static inline void unpack_pairs(const CodePlace& codes, int lines, int64_t count, char* out) {
    for_eights<BITS>(codes, lines, count, [&](const Eight<BITS>& eight, int64_t i, int j) {
#pragma GCC unroll 4
        for (int k = 0; k < PAIRS_OF_EIGHT; k++)
            Memory<v16u>::store((uint32_t*)(out + (PAIRS_OF_EIGHT * i + k) * STEP_BYTES + 64 * j),
                                INTEGERS ? eight.integers(k) : eight.pair(k));
    });
}

// run(std::integral_constant<int, BITS>) for the weight's codes.
template <class F>
static inline void with_bits(const Codes& codes, F&& run) {
    if (codes.levels) return run(std::integral_constant<int, LOOKED_UP>{});
    switch (codes.bits) {
        case 4: return run(std::integral_constant<int, 4>{});
        case 5: return run(std::integral_constant<int, 5>{});
        case 6: return run(std::integral_constant<int, 6>{});
        default: return run(std::integral_constant<int, 8>{});
    }
}
