// How quantized weights lie in memory, and how they get there.
//
// A weight [n outputs, k inputs] is cut into strips of 64 outputs as a plain one is (strips.h). A strip is a run of
// groups, those of inputs that share a scale; a group is its codes, then 64 scales, then 64 offsets if there are any:
//
//     weight = scale * code + offset
//
// Scales and offsets are floats, halves, or signed bytes that take a unit, a half that a run of groups shares: units lie
// behind all groups of a strip, 64 of scales and 64 of offsets for each run.
//
// A step holds four inputs a byte each for 64 outputs: four lines of 64 bytes, as VPDPBUSD wants them; 16 steps of a
// line are a tile as TDPBSUD wants its right operand. Bytes are unsigned: code + middle. With fewer bits than 8, one line
// holds the lower four of two steps, the first in the lower half of each byte; behind all of these, lines hold the
// fifth bits of eight steps or the fifth and sixth of four, the first step's in the lowest bits of each byte. So a group is
// a multiple of 8 inputs, with 6 bits of 16, with 5 bits of 32.
#pragma once

#include <vector>

#include "blocks.h"
#include "strips.h"

constexpr int INPUTS_OF_BYTE_STEP = 4;

// Geometry of a group, and of a strip.
struct GroupLayout {
    int64_t count;       // in a strip
    int64_t steps;       // even
    int64_t code_bytes;
    int64_t high_at;              // bits beyond the lower four, from the group's begin
    int64_t scale_at, offset_at;  // likewise
    int64_t bytes;
    int64_t units_at, unit_bytes;  // units of scales and offsets, from the strip's begin; of a run of groups
    int64_t strip_bytes;

    explicit GroupLayout(const Strips& w)
        : count(w.k / w.codes.group),
          steps(w.codes.group / 4),
          code_bytes(steps * STEP_BYTES * w.codes.bits / 8),
          high_at(steps * STEP_BYTES / 2),
          scale_at(code_bytes),
          offset_at(scale_at + STRIP * w.codes.scale_bytes),
          bytes(offset_at + (w.codes.has_offsets ? STRIP * w.codes.scale_bytes : 0)),
          units_at(count * bytes),
          unit_bytes(w.codes.scale_bytes == 1 ? STRIP * 2 * (w.codes.has_offsets ? 2 : 1) : 0),
          strip_bytes(units_at + count / w.codes.groups_of_unit * unit_bytes) {}

    char* strip(const Strips& w, int64_t i) const { return (char*)w.data + i * strip_bytes; }
};

constexpr int64_t PAST_CODES = STEPS_OF_TILE * STEP_BYTES;  // a tile may read so far beyond the last group

static inline int64_t bytes_of_codes(const Strips& w) { return w.count() * GroupLayout(w).strip_bytes + PAST_CODES; }

static inline v16f load_half(const uint16_t* p) {
#if STEMMA_AVX512
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return {(native_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            (native_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#elif STEMMA_NEON
    const auto four = [p](int i) { return (native_f)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); };
    return {{four(0), four(1)}, {four(2), four(3)}};
#else
    v16u bits = Memory<v16u>::widen(p);
    v16f size = as_float((bits & 0x7FFFu) << 13) * 0x1p112f;  // the exponent's bias; exact for denormals too
    return as_float(as_bits(size) | ((bits & 0x8000u) << 16));
#endif
}
static inline native_f to_floats(native_i x) { return __builtin_convertvector(x, native_f); }
template <class V>
static inline auto to_floats(Twice<V> x) -> Twice<decltype(to_floats(x.lo))> {
    return {to_floats(x.lo), to_floats(x.hi)};
}

// Both halves of each 32 bits, shifted.
template <int BY>
static inline native_u halves_right(native_u x) {
#if STEMMA_AVX512
    return (native_u)_mm512_srli_epi16((__m512i)x, BY);
#elif defined(__AVX2__)
    return (native_u)_mm256_srli_epi16((__m256i)x, BY);
#else
    return (x >> BY) & ((0xFFFFu >> BY) * 0x00010001u);
#endif
}
template <int BY, class V>
static inline Twice<V> halves_right(Twice<V> x) {
    return {halves_right<BY>(x.lo), halves_right<BY>(x.hi)};
}

static inline v16i load_bytes(const int8_t* p) {
#if STEMMA_AVX512
    return (v16i)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return {(native_i)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            (native_i)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
#else
    int32_t lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = p[i];
    return load(lanes);
#endif
}

// Scales and offsets of a strip's groups, for the lines from one on.
struct GroupScales {
    const char *at, *units;
    int64_t next, next_unit;  // bytes to the next group's, to the next run's
    int scale_bytes, unit_shift;
    bool has_offsets;

    GroupScales(const Strips& w, const GroupLayout& g, const char* strip, int line)
        : at(strip + g.scale_at + 16 * line * w.codes.scale_bytes), units(strip + g.units_at + 16 * line * 2),
          next(g.bytes), next_unit(g.unit_bytes), scale_bytes(w.codes.scale_bytes),
          unit_shift(__builtin_ctz(w.codes.groups_of_unit)), has_offsets(w.codes.has_offsets) {}

    v16f scale(int64_t group, int line) const { return numbers(group, 16 * line); }
    // Zero where there are none.
    v16f offset(int64_t group, int line) const {
        return has_offsets ? numbers(group, STRIP + 16 * line) : splat(0.0f);
    }
    v16f numbers(int64_t group, int64_t index) const {
        return scale_bytes == 1   ? numbers_of<1>(group, index)
               : scale_bytes == 2 ? numbers_of<2>(group, index)
                                  : numbers_of<4>(group, index);
    }
    template <int SCALE_BYTES>
    v16f numbers_of(int64_t group, int64_t index) const {
        const char* from = at + group * next + index * SCALE_BYTES;
        if constexpr (SCALE_BYTES == 1) return to_floats(load_bytes((const int8_t*)from)) * unit(group, index);
        return SCALE_BYTES == 2 ? load_half((const uint16_t*)from) : load((const float*)from);
    }
    v16f unit(int64_t group, int64_t index) const {
        return load_half((const uint16_t*)(units + (group >> unit_shift) * next_unit) + index);
    }
};

struct PackCodesArgs {
    const int8_t* codes;   // [rows, target.k]; null: they lie in blocks, whose codes a group holds all of, or in turn
    CodeFields low, high;  // of blocks, [rows, a row's]; high.source is null where low has all bits
    const char *scales, *scale_units;    // [rows, groups] of target.codes.scale_bytes, [rows, units] of halves
    const char *offsets, *offset_units;  // likewise; what there isn't is null
    int64_t rows, first;  // output of the strips that row 0 becomes
    Strips target;        // memory that was zeroed
    int32_t threads;
};

// Copy numbers [row, group] to their lanes.
template <int SIZE>
static inline void pack_numbers_of(const char* from, int64_t rows, int64_t stride, char* to) {
    for (int64_t row = 0; row < rows; row++, from += stride * SIZE, to += SIZE) std::memcpy(to, from, SIZE);
}
static inline void pack_numbers(const char* from, int64_t rows, int64_t stride, int size, char* to) {
    if (size == 1) return pack_numbers_of<1>(from, rows, stride, to);
    size == 2 ? pack_numbers_of<2>(from, rows, stride, to) : pack_numbers_of<4>(from, rows, stride, to);
}

// The four bytes of a step: codes, each with `middle`, modulo 256.
static inline uint32_t step_of(const int8_t* codes, uint32_t middle) {
    uint32_t step;
    std::memcpy(&step, codes, 4);
    const uint32_t each = middle * 0x01010101u;  // added without carries from byte to byte
    return ((step & 0x7F7F7F7Fu) + (each & 0x7F7F7F7Fu)) ^ ((step ^ each) & 0x80808080u);
}
static inline void put_step(char* line, uint32_t bits) { std::memcpy(line, &bits, 4); }

// Codes of a row's group into a lane of it, from `to` on. Each line is written once: lines lie far apart.
template <int BITS>
static inline void pack_group(const GroupLayout& g, uint32_t middle, const int8_t* codes, char* to) {
    if constexpr (BITS == 8) {
        for (int64_t i = 0; i < g.steps; i++) put_step(to + i * STEP_BYTES, step_of(codes + 4 * i, middle));
        return;
    }
    constexpr int HIGH = BITS - 4, TOGETHER = HIGH > 0 ? 8 / HIGH : 2;  // steps that share a line
    char *low = to, *high = to + g.high_at;
    for (int64_t first = 0; first < g.steps; first += TOGETHER, high += STEP_BYTES) {
        uint32_t line = 0;
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i += 2, low += STEP_BYTES, codes += 8) {
            const uint32_t one = step_of(codes, middle), two = step_of(codes + 4, middle);
            put_step(low, (one & 0x0F0F0F0Fu) | (two & 0x0F0F0F0Fu) << 4);
            if constexpr (HIGH > 0) {
                constexpr uint32_t MASK = HIGH == 1 ? 0x01010101u : 0x03030303u;
                line |= (one >> 4 & MASK) << i * HIGH | (two >> 4 & MASK) << (i + 1) * HIGH;
            }
        }
        if (HIGH > 0) put_step(high, line);
    }
}

// Take codes apart that lie in blocks, some groups or blocks of a row at a time, and pack them.
template <int BITS>
static void pack_fields(const PackCodesArgs& a, const GroupLayout& g, int64_t source, int64_t rows, char* at) {
    const Strips& w = a.target;
    const uint32_t middle = w.codes.levels ? 0 : w.codes.middle;  // of an index
    CodeFields low = a.low;
    if (low.width == 1 && low.stride == low.num_bytes && low.count() < w.codes.group)  // one block is like many
        low.stride = low.num_bytes = w.codes.group / (8 / low.bits);
    const int64_t group = w.codes.group, of_block = low.count(), together = std::max(group, of_block);
    std::vector<int8_t> codes(together);
    for (int64_t first = 0; first < w.k; first += together, at += together / group * g.bytes)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t block = ((source + row) * w.k + first) / of_block;
            for (int64_t i = 0; i * of_block < together; i++) {
                spread_block(low, block + i, codes.data() + i * of_block);
                if (a.high.source) spread_block(a.high, block + i, codes.data() + i * of_block);
            }
            for (int64_t i = 0; i * group < together; i++)
                pack_group<BITS>(g, middle, codes.data() + i * group, at + i * g.bytes + row * 4);
        }
}

template <int BITS>
static void pack_groups(const PackCodesArgs& a, const GroupLayout& g, int64_t source, int64_t rows, char* at) {
    if (!a.codes) return pack_fields<BITS>(a, g, source, rows, at);
    const Strips& w = a.target;
    const uint32_t middle = w.codes.levels ? 0 : w.codes.middle;  // of an index
    for (int64_t group = 0; group < g.count; group++, at += g.bytes)
        for (int64_t row = 0; row < rows; row++)
            pack_group<BITS>(g, middle, a.codes + (source + row) * w.k + group * w.codes.group, at + row * 4);
}

// Copy the rows that fall into strip `strip` of the target.
static void pack_codes(const PackCodesArgs& a, int64_t strip) {
    const Strips& w = a.target;
    const GroupLayout g(w);
    const int64_t begin = std::max(a.first, strip * STRIP), end = std::min(a.first + a.rows, (strip + 1) * STRIP);
    const int64_t rows = end - begin, source = begin - a.first, lane = begin - strip * STRIP;
    const int size = w.codes.scale_bytes;
    char* at = g.strip(w, strip);
    const int64_t units = g.unit_bytes ? g.count / w.codes.groups_of_unit : 0;
    for (int64_t unit = 0; unit < units; unit++) {
        char* to = at + g.units_at + unit * g.unit_bytes + lane * 2;
        pack_numbers(a.scale_units + 2 * (source * units + unit), rows, units, 2, to);
        if (w.codes.has_offsets) pack_numbers(a.offset_units + 2 * (source * units + unit), rows, units, 2, to + STRIP * 2);
    }
    for (int64_t group = 0; group < g.count; group++, at += g.bytes) {
        const int64_t number = (source * g.count + group) * size;
        pack_numbers(a.scales + number, rows, g.count, size, at + g.scale_at + lane * size);
        if (w.codes.has_offsets)
            pack_numbers(a.offsets + number, rows, g.count, size, at + g.offset_at + lane * size);
    }
    char* codes = g.strip(w, strip) + lane * 4;
    switch (w.codes.bits) {
        case 4: return pack_groups<4>(a, g, source, rows, codes);
        case 5: return pack_groups<5>(a, g, source, rows, codes);
        case 6: return pack_groups<6>(a, g, source, rows, codes);
        default: return pack_groups<8>(a, g, source, rows, codes);
    }
}

// A code as it is stored, input `i` of a group, from its lane's place in the first line on.
static inline int stored_code(const Strips& w, const GroupLayout& g, const uint8_t* lane, int64_t i) {
    const int64_t step = i / 4, byte = i % 4;
    if (w.codes.bits == 8) return lane[step * STEP_BYTES + byte];
    int code = lane[step / 2 * STEP_BYTES + byte] >> (step % 2 * 4) & 15;
    const int high_bits = w.codes.bits - 4;
    if (high_bits == 0) return code;
    const int64_t together = 8 / high_bits;
    const int high = lane[g.high_at + step / together * STEP_BYTES + byte] >> (step % together * high_bits);
    return code | (high & ((1 << high_bits) - 1)) << 4;
}

// Row `row` of the weight, dequantized, into out[k].
template <class T>
static void take_dequantized_row(const Strips& w, int64_t row, T* out) {
    const GroupLayout g(w);
    const int64_t lane = row % STRIP, line = lane / 16;
    const char* at = g.strip(w, row / STRIP);
    const GroupScales all(w, g, at, int(line));
    for (int64_t group = 0; group < g.count; group++, at += g.bytes) {
        float scales[LANES], offsets[LANES];
        store(scales, all.scale(group, 0)), store(offsets, all.offset(group, 0));
        for (int64_t i = 0; i < w.codes.group; i++) {
            const int stored = stored_code(w, g, (const uint8_t*)at + lane * 4, i);
            const int code = w.codes.levels ? w.codes.levels[stored] : stored - w.codes.middle;
            *out++ = from_float<T>(scales[lane % 16] * float(code) + offsets[lane % 16]);
        }
    }
}
