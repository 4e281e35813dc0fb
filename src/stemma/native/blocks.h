// Codes as file formats pack them, taken apart into a byte each: fields of a few bits, the lowest ones of a run of bytes
// first, then the next. GGUF's block formats hold them so.
#pragma once

#include <cstdint>
#include <cstring>

struct SpreadArgs {
    const uint8_t* source;  // fields of the first block
    int8_t* out;            // [blocks, fields of a block]
    int64_t blocks, stride;  // bytes from one block to the next
    int32_t num_bytes;       // fields' bytes of a block: a multiple of width
    int32_t bits, width;     // of a field: 1, 2 or 4; bytes of a run
    int32_t left, added;     // how far a field is moved up; what a code takes then
    int32_t joins;           // fields belong to codes that `out` has
    int32_t threads;
};

// Fields of one run of `WIDTH` bytes, eight bytes at a time: no processor shifts single ones.
template <int WIDTH, bool joins>
static inline void spread_run(const SpreadArgs& a, const uint8_t* from, uint8_t* to) {
    constexpr uint64_t EACH = 0x0101010101010101u, LOW = 0x7F * EACH, HIGH = 0x80 * EACH;
    const uint64_t mask = EACH * ((1 << a.bits) - 1), added = EACH * uint8_t(a.added);
    uint64_t run[WIDTH / 8], codes[WIDTH / 8];
    std::memcpy(run, from, WIDTH);
    for (int shift = 0; shift < 8; shift += a.bits, to += WIDTH) {
        if (joins) std::memcpy(codes, to, WIDTH);
        for (int i = 0; i < WIDTH / 8; i++) {
            uint64_t code = (run[i] >> shift & mask) << a.left;
            if (joins) code |= codes[i];
            codes[i] = ((code & LOW) + (added & LOW)) ^ ((code ^ added) & HIGH);  // no carries from byte to byte
        }
        std::memcpy(to, codes, WIDTH);
    }
}

template <int WIDTH>
static void spread_block(const SpreadArgs& a, int64_t block) {
    const uint8_t* from = a.source + block * a.stride;
    const int fields = 8 / a.bits;
    uint8_t* to = (uint8_t*)a.out + block * a.num_bytes * fields;
    for (int at = 0; at < a.num_bytes; at += WIDTH, to += WIDTH * fields)
        a.joins ? spread_run<WIDTH, true>(a, from + at, to) : spread_run<WIDTH, false>(a, from + at, to);
}

static void spread(const SpreadArgs& a, int64_t block) {
    switch (a.width) {
        case 64: return spread_block<64>(a, block);
        case 32: return spread_block<32>(a, block);
        default: return spread_block<16>(a, block);
    }
}
