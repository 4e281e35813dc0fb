// How a plain bf16 weight becomes a compressed one (compressed.h), strip by strip.
#pragma once

#include "compressed.h"

struct CompressArgs {
    Strips plain;       // bf16, k a multiple of 8
    Strips target;      // its patches aren't read
    Patch* patches;     // [strips][most_patches]
    int32_t* counts;    // [strips]: how many patches a strip wants; beyond most_patches they are left out
    int64_t most_patches;
    int32_t threads;
};

#if STEMMA_COMPRESSED
constexpr int64_t SAMPLED_QUADS = 32;  // of a line: 4,096 weights
constexpr int EXPONENTS = TABLE_BYTES / 2;

// Upper and lower bytes of a line of a quad, each in the places of PlaceInQuad.
struct SplitLine {
    __m512i upper[2], lower[2];

    explicit SplitLine(const char* steps) {  // of a plain strip, from the line on
        const __m512i low = _mm512_set1_epi16(0xFF);
        for (int half = 0; half < 2; half++, steps += 2 * STEP_BYTES) {
            const __m512i a = _mm512_loadu_si512(steps), b = _mm512_loadu_si512(steps + STEP_BYTES);
            upper[half] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
            lower[half] = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
        }
    }
};

// The table of a line: the exponents seen most often in some of its quads. Those that weren't seen are likeliest just
// below the smallest, as weights around zero are spread evenly.
static void make_table(const char* line, int64_t quads, uint8_t* table) {
    uint32_t counts[128] = {};
    for (int64_t q = 0; q < quads; q += std::max<int64_t>(1, quads / SAMPLED_QUADS)) {
        const SplitLine split(line + q * QUAD_STEPS * STEP_BYTES);
        alignas(64) uint8_t bytes[128];
        _mm512_store_si512(bytes, split.upper[0]);
        _mm512_store_si512(bytes + 64, split.upper[1]);
        for (uint8_t byte : bytes) counts[byte & 127]++;
    }
    int smallest = 127;
    for (int i = 0; i < EXPONENTS; i++) {
        int next = int(std::max_element(counts, counts + 128) - counts);
        if (counts[next] == 0) next = smallest > 0 ? smallest - 1 : 0;
        counts[next] = 0;
        if (next > 0) smallest = std::min(smallest, next);  // zeros aren't small numbers
        table[i] = uint8_t(next), table[EXPONENTS + i] = uint8_t(next | 128);
    }
}

// Where each of 64 upper bytes stands in the table; bits of `missing`: not at all.
static inline __m512i indexes_in(const uint8_t* table, __m512i upper, uint64_t& missing) {
    const __m512i exponents = _mm512_and_si512(upper, _mm512_set1_epi8(127));
    __m512i index = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi8(EXPONENTS));  // the sign
    uint64_t found = 0;
    for (int i = 0; i < EXPONENTS; i++) {
        const __mmask64 same = _mm512_cmpeq_epi8_mask(exponents, _mm512_set1_epi8(char(table[i])));
        index = _mm512_mask_add_epi8(index, same & ~found, index, _mm512_set1_epi8(char(i)));
        found |= same;
    }
    missing = ~found;
    return index;
}

static void compress_strip(const CompressArgs& a, int64_t strip) {
    const char* from = a.plain.strip<bf16>(strip);
    const int64_t quads = CompressedStrip::num_quads(a.target);
    char* tables = (char*)a.target.data + strip * CompressedStrip::bytes(a.target);
    for (int line = 0; line < LINES; line++)
        make_table(from + 64 * line, quads, (uint8_t*)tables + line * TABLE_BYTES);
    char* out = tables + LINES * TABLE_BYTES;
    Patch* patches = a.patches + strip * a.most_patches;
    int64_t count = 0;
    for (int64_t q = 0; q < quads; q++, from += QUAD_STEPS * STEP_BYTES) {
        for (int line = 0; line < LINES; line++, out += LINE_OF_QUAD) {
            const SplitLine split(from + 64 * line);
            __m512i index[2];
            for (int half = 0; half < 2; half++) {
                uint64_t missing;
                index[half] = indexes_in((const uint8_t*)tables + line * TABLE_BYTES, split.upper[half], missing);
                _mm512_storeu_si512(out + 64 + 64 * half, split.lower[half]);
                for (; missing; missing &= missing - 1, count++) {
                    if (count >= a.most_patches) continue;
                    const int byte = __builtin_ctzll(missing), step = 2 * half + byte / 8 % 2;
                    const int place = step * STEP_BYTES + 64 * line + byte / 16 * 16 + byte % 8 * 2;
                    patches[count].quad = uint32_t(q), patches[count].at = uint16_t(place);
                    std::memcpy(&patches[count].bits, from + place, 2);
                }
            }
            _mm512_storeu_si512(out, _mm512_or_si512(index[0], _mm512_slli_epi16(index[1], 4)));
        }
    }
    a.counts[strip] = int32_t(std::min<int64_t>(count, INT32_MAX));
}
#endif
