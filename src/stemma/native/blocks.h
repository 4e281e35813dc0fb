// Codes as file formats pack them, taken apart into a byte each: fields of a few bits, the lowest ones of a run of bytes
// first, then the next. GGUF's block formats hold them so.
#pragma once

#include <cstdint>
#include <cstring>

struct CodeFields {
    const uint8_t* source;   // those of the first block
    int64_t stride;          // bytes from one block to the next
    int32_t num_bytes;       // of a block: a multiple of width
    int32_t bits, width;     // of a field: 1, 2, 4 or 8; bytes of a run: 1, 16, 32 or 64
    int32_t left, added;     // how far a field is moved up; what a code takes then
    int32_t joins;           // fields belong to codes that are there

    int64_t count() const { return num_bytes * (8 / bits); }  // of a block
};

struct SpreadArgs {
    CodeFields fields;
    int8_t* out;     // [blocks, fields of a block]
    int64_t blocks;
    int32_t threads;
};

// Fields of one run of `WIDTH` bytes.
template <int WIDTH, bool joins>
static inline void spread_run(const CodeFields& a, const uint8_t* from, uint8_t* to) {
    typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
    typedef uint16_t pairs __attribute__((vector_size(WIDTH)));  // no processor shifts single bytes
    const uint16_t mask = uint16_t(((1 << a.bits) - 1) * 0x0101);
    pairs run;
    bytes codes;
    std::memcpy(&run, from, WIDTH);
    for (int shift = 0; shift < 8; shift += a.bits, to += WIDTH) {
        const bytes fields = (bytes)(((run >> uint16_t(shift)) & mask) << uint16_t(a.left));
        if (joins) std::memcpy(&codes, to, WIDTH);
        codes = (joins ? fields | codes : fields) + uint8_t(a.added);
        std::memcpy(to, &codes, WIDTH);
    }
}

template <int WIDTH>
static void spread_runs(const CodeFields& a, const uint8_t* from, uint8_t* to) {
    for (int at = 0; at < a.num_bytes; at += WIDTH, to += WIDTH * (8 / a.bits))
        a.joins ? spread_run<WIDTH, true>(a, from + at, to) : spread_run<WIDTH, false>(a, from + at, to);
}

// Sixteen bytes of two codes each, the lower one first.
static inline void spread_pairs(const uint8_t* from, uint8_t added, uint8_t* to) {
    typedef uint8_t sixteen __attribute__((vector_size(16)));
    typedef uint16_t wide __attribute__((vector_size(32)));
    typedef uint8_t bytes __attribute__((vector_size(32)));
    sixteen run;
    std::memcpy(&run, from, 16);
    const wide both = __builtin_convertvector(run, wide);
    const bytes codes = (bytes)((both | both << 4) & 0x0F0F) + added;
    std::memcpy(to, &codes, 32);
}

// Fields that lie behind each other: all of a byte's come before those of the next byte.
static void spread_bytes(const CodeFields& a, const uint8_t* from, uint8_t* to) {
    const uint8_t mask = uint8_t((1 << a.bits) - 1), added = uint8_t(a.added);
    int i = 0;
    if (a.bits == 4 && !a.joins)
        for (; i + 16 <= a.num_bytes; i += 16, to += 32) spread_pairs(from + i, added, to);
    for (; i < a.num_bytes; i++)
        for (int shift = 0; shift < 8; shift += a.bits, to++)
            *to = uint8_t((a.joins ? *to : 0) | (from[i] >> shift & mask) << a.left) + added;
}

static void spread_block(const CodeFields& a, int64_t block, int8_t* out) {
    const uint8_t* from = a.source + block * a.stride;
    uint8_t* to = (uint8_t*)out;
    switch (a.width) {
        case 64: return spread_runs<64>(a, from, to);
        case 32: return spread_runs<32>(a, from, to);
        case 16: return spread_runs<16>(a, from, to);
        default: return spread_bytes(a, from, to);
    }
}
