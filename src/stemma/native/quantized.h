// How quantized weights lie in memory, and how they get there.
//
// A weight [n outputs, k inputs] is cut into strips of 64 outputs as a plain one is (strips.h). A strip is a run of
// groups, those of inputs that share a scale; a group is its codes, then 64 scales, then 64 offsets if there are any:
//
//     weight = scale * code + offset
//
// A step holds four inputs a byte each for 64 outputs: four lines of 64 bytes, as VPDPBUSD wants them; 16 steps of a
// line are a tile as TDPBSUD wants its right operand. Bytes are unsigned: code + 128, or code + 8 where a code has 4
// bits. There one line holds two steps, the first in the lower half of each byte. So a group is a multiple of eight inputs.
#pragma once

#include "strips.h"

constexpr int INPUTS_OF_BYTE_STEP = 4;

// Geometry of a group.
struct GroupLayout {
    int64_t count;       // in a strip
    int64_t steps;       // even
    int64_t code_bytes;
    int64_t scale_at, offset_at;  // from the group's begin
    int64_t bytes;

    explicit GroupLayout(const Strips& w)
        : count(w.k / w.codes.group),
          steps(w.codes.group / 4),
          code_bytes(steps * STEP_BYTES * w.codes.bits / 8),
          scale_at(code_bytes),
          offset_at(scale_at + STRIP * w.codes.scale_bytes),
          bytes(offset_at + (w.codes.has_offsets ? STRIP * w.codes.scale_bytes : 0)) {}
};

constexpr int64_t PAST_CODES = STEPS_OF_TILE * STEP_BYTES;  // a tile may read so far beyond the last group

static inline int64_t bytes_of_codes(const Strips& w) {
    GroupLayout g(w);
    return w.count() * g.count * g.bytes + PAST_CODES;
}

static inline v16f load_half(const uint16_t* p) {
#if STEMMA_AVX512
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return {(native_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            (native_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#else
    v16u bits = Memory<v16u>::widen(p);
    v16f size = as_float((bits & 0x7FFFu) << 13) * 0x1p112f;  // the exponent's bias; exact for denormals too
    return as_float(as_bits(size) | ((bits & 0x8000u) << 16));
#endif
}
// 16 scales or offsets, from the `index`-th of those at `p`.
static inline v16f load_scales(const char* p, int64_t index, int scale_bytes) {
    return scale_bytes == 2 ? load_half((const uint16_t*)p + index) : load((const float*)p + index);
}

static inline native_f to_floats(native_i x) { return __builtin_convertvector(x, native_f); }
template <class V>
static inline auto to_floats(Twice<V> x) -> Twice<decltype(to_floats(x.lo))> {
    return {to_floats(x.lo), to_floats(x.hi)};
}

struct PackCodesArgs {
    const int8_t* codes;  // [rows, target.k]
    const char *scales, *offsets;  // [rows, groups] of target.codes.scale_bytes; offsets may be null
    int64_t rows, first;  // output of the strips that row 0 becomes
    Strips target;        // memory that was zeroed
    int32_t threads;
};

// Copy the rows that fall into strip `strip` of the target.
static void pack_codes(const PackCodesArgs& a, int64_t strip) {
    const Strips& w = a.target;
    const GroupLayout g(w);
    const int64_t begin = std::max(a.first, strip * STRIP), end = std::min(a.first + a.rows, (strip + 1) * STRIP);
    const int size = w.codes.scale_bytes;
    char* at = (char*)w.data + strip * g.count * g.bytes;
    const uint32_t flipped = w.codes.bits == 8 ? 0x80808080u : 0x08080808u;  // adds 128, or 8 to the lower half
    for (int64_t group = 0; group < g.count; group++, at += g.bytes) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t lane = row - strip * STRIP, source = (row - a.first) * g.count + group;
            std::memcpy(at + g.scale_at + lane * size, a.scales + source * size, size);
            if (w.codes.has_offsets) std::memcpy(at + g.offset_at + lane * size, a.offsets + source * size, size);
        }
        for (int64_t step = 0; step < w.codes.group / 4; step += STEPS_OF_TILE) {  // whole lines of the target together
            const int64_t last = std::min<int64_t>(step + STEPS_OF_TILE, w.codes.group / 4);
            for (int64_t row = begin; row < end; row++) {
                const int8_t* codes = a.codes + (row - a.first) * w.k + group * w.codes.group;
                char* out = at + (row - strip * STRIP) * 4;
                for (int64_t i = step; i < last; i += 2) {
                    uint32_t pair[2];
                    std::memcpy(pair, codes + 4 * i, 8);
                    pair[0] ^= flipped, pair[1] ^= flipped;
                    if (w.codes.bits == 8) {
                        std::memcpy(out + i * STEP_BYTES, &pair[0], 4);
                        std::memcpy(out + (i + 1) * STEP_BYTES, &pair[1], 4);
                    } else {
                        uint32_t both = (pair[0] & 0x0F0F0F0Fu) | (pair[1] & 0x0F0F0F0Fu) << 4;
                        std::memcpy(out + i / 2 * STEP_BYTES, &both, 4);
                    }
                }
            }
        }
    }
}

// Row `row` of the weight, dequantized, into out[k].
template <class T>
static void take_dequantized_row(const Strips& w, int64_t row, T* out) {
    const GroupLayout g(w);
    const int middle = w.codes.bits == 8 ? 128 : 8;
    const int64_t lane = row % STRIP, line = lane / 16 * 16;
    const char* at = w.data + row / STRIP * g.count * g.bytes;
    for (int64_t group = 0; group < g.count; group++, at += g.bytes) {
        float scales[LANES], offsets[LANES] = {};
        store(scales, load_scales(at + g.scale_at, line, w.codes.scale_bytes));
        if (w.codes.has_offsets) store(offsets, load_scales(at + g.offset_at, line, w.codes.scale_bytes));
        const uint8_t* in = (const uint8_t*)at + lane * 4;
        for (int64_t i = 0; i < w.codes.group; i++) {
            int64_t step = i / 4;
            int value = w.codes.bits == 8 ? in[step * STEP_BYTES + i % 4]
                                          : in[step / 2 * STEP_BYTES + i % 4] >> (step % 2 * 4) & 15;
            *out++ = from_float<T>(scales[lane - line] * float(value - middle) + offsets[lane - line]);
        }
    }
}

// Steps [begin, begin + count) of one group, `lines` lines from `from` on, as bytes: steps of 256 bytes in `out`.
static inline void unpack_halves(const char* from, int lines, int64_t begin, int64_t count, char* out) {
    for (int64_t pair = begin / 2; pair < (begin + count) / 2; pair++, out += 2 * STEP_BYTES)
        for (int line = 0; line < lines; line++) {
            v16u both = load((const uint32_t*)(from + pair * STEP_BYTES + 64 * line));
            Memory<v16u>::store((uint32_t*)(out + 64 * line), both & 0x0F0F0F0Fu);
            Memory<v16u>::store((uint32_t*)(out + STEP_BYTES + 64 * line), (both >> 4) & 0x0F0F0F0Fu);
        }
}
