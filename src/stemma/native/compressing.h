// How a plain bf16 weight becomes a compressed one (compressed.h), strip by strip.
#pragma once

#include <vector>

#include "compressed.h"

struct CompressArgs {
    const PackArgs* sources;  // [num_sources] bf16 weights below each other, k a multiple of 32; their targets aren't read
    int64_t num_sources;
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
    constexpr int APART = 8;  // counts of neighbours, which are often of the same exponent and would wait for each other
    uint32_t counts_of[APART][128] = {};
    for (int64_t q = 0; q < quads; q += std::max<int64_t>(1, quads / SAMPLED_QUADS)) {
        const SplitLine split(line + q * QUAD_STEPS * STEP_BYTES);
        alignas(64) uint8_t bytes[128];
        _mm512_store_si512(bytes, split.upper[0]);
        _mm512_store_si512(bytes + 64, split.upper[1]);
        for (int i = 0; i < 128; i += APART)
            for (int part = 0; part < APART; part++) counts_of[part][bytes[i + part] & 127]++;
    }
    uint32_t* counts = counts_of[0];
    for (int part = 1; part < APART; part++)
        for (int i = 0; i < 128; i++) counts[i] += counts_of[part][i];
    int smallest = 127;
    for (int i = 0; i < EXPONENTS; i++) {
        int next = int(std::max_element(counts, counts + 128) - counts);
        if (counts[next] == 0) next = smallest > 0 ? smallest - 1 : 0;
        counts[next] = 0;
        if (next > 0) smallest = std::min(smallest, next);  // zeros aren't small numbers
        table[i] = uint8_t(next), table[EXPONENTS + i] = uint8_t(next | 128);
    }
}

// Finds upper bytes in a table.
class TableIndex {
  public:
    explicit TableIndex(const uint8_t* table) : table_(table), least_(*std::min_element(table, table + EXPONENTS)) {
        alignas(16) uint8_t places[16];
        std::memset(places, NOWHERE, 16);
        for (int i = 0; i < EXPONENTS; i++) {
            if (table[i] - least_ >= 16) is_narrow_ = false;
            else if (places[table[i] - least_] == NOWHERE) places[table[i] - least_] = uint8_t(i);
        }
        places_ = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)places));
    }
    // Where each of 64 upper bytes stands; bits of `missing`: nowhere.
    __m512i find(__m512i upper, uint64_t& missing) const {
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi8(EXPONENTS));
        const __m512i exponents = _mm512_and_si512(upper, _mm512_set1_epi8(127));
        __m512i place;
        if (is_narrow_) {
            const __m512i from_least = _mm512_sub_epi8(exponents, _mm512_set1_epi8(char(least_)));
            place = _mm512_shuffle_epi8(places_, _mm512_and_si512(from_least, _mm512_set1_epi8(15)));
            missing = _mm512_cmpgt_epu8_mask(_mm512_or_si512(from_least, place), _mm512_set1_epi8(15));
        } else {
            uint64_t found = 0;
            place = _mm512_setzero_si512();
            for (int i = 0; i < EXPONENTS; i++) {
                const __mmask64 same = _mm512_cmpeq_epi8_mask(exponents, _mm512_set1_epi8(char(table_[i])));
                place = _mm512_mask_mov_epi8(place, same & ~found, _mm512_set1_epi8(char(i)));
                found |= same;
            }
            missing = ~found;
        }
        return _mm512_or_si512(sign, _mm512_and_si512(place, _mm512_set1_epi8(EXPONENTS - 1)));
    }

  private:
    static constexpr uint8_t NOWHERE = 255;
    const uint8_t* table_;
    const uint8_t least_;
    bool is_narrow_ = true;  // all exponents lie within 16, as those of random numbers do
    __m512i places_;
};

// Strip `strip` as a plain one, in memory of this thread that stays in its caches.
static const char* pack_for_compression(const CompressArgs& a, int64_t strip) {
    static thread_local std::vector<char> room;
    const int64_t bytes = a.target.steps<bf16>() * STEP_BYTES;
    room.resize(bytes + 64);
    char* at = room.data() + (-(uintptr_t)room.data() & 63);
    if ((strip + 1) * STRIP > a.target.n) std::memset(at, 0, bytes);  // outputs beyond the last
    for (int64_t i = 0; i < a.num_sources; i++) {
        PackArgs source = a.sources[i];
        source.target = a.target, source.target.data = at - strip * bytes;
        pack_strip<bf16>(source, strip);
    }
    return at;
}

static void compress_strip(const CompressArgs& a, int64_t strip) {
    const char* from = pack_for_compression(a, strip);
    const int64_t quads = CompressedStrip::num_quads(a.target);
    char* tables = (char*)a.target.data + strip * CompressedStrip::bytes(a.target);
    for (int line = 0; line < LINES; line++)
        make_table(from + 64 * line, quads, (uint8_t*)tables + line * TABLE_BYTES);
    const uint8_t* table = (const uint8_t*)tables;
    const TableIndex indexes[LINES]{TableIndex(table), TableIndex(table + TABLE_BYTES), TableIndex(table + 2 * TABLE_BYTES),
                                    TableIndex(table + 3 * TABLE_BYTES)};
    char* out = tables + LINES * TABLE_BYTES;
    Patch* patches = a.patches + strip * a.most_patches;
    int64_t count = 0;
    for (int64_t q = 0; q < quads; q++, from += QUAD_STEPS * STEP_BYTES) {
        for (int line = 0; line < LINES; line++, out += LINE_OF_QUAD) {
            const SplitLine split(from + 64 * line);
            __m512i index[2];
            for (int half = 0; half < 2; half++) {
                uint64_t missing;
                index[half] = indexes[line].find(split.upper[half], missing);
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
