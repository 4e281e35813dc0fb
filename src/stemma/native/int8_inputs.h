// Rows of inputs as int8: what quantized weights are multiplied with.
//
// A row is its codes group by group, then for each group what its sum begins with (below), then for each group the
// sum of its inputs as they are after rounding, then for each group its scale. A weight's bytes are unsigned, code + middle, so a sum of products
// begins with -middle * (sum of the inputs' codes): integers are exact, whatever the order.
#pragma once

#include <atomic>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include "quantized.h"
#include "tiles.h"

// Whether products of bytes have an instruction of their own here. All ways give the same integers, so the processor
// decides while the program runs, not the level.
inline std::atomic<int> byte_dots_allowed{1};  // tests switch them off
static bool has_byte_dots() {
#if defined(__x86_64__) && defined(__AVX2__)
    static const bool present = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (NATIVE == 16) return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);  // AVX512_VNNI
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);                     // AVX_VNNI
    }();
    return present && byte_dots_allowed.load(std::memory_order_relaxed);
#elif STEMMA_NEON && defined(__ARM_FEATURE_DOTPROD)
    return byte_dots_allowed.load(std::memory_order_relaxed);
#elif STEMMA_NEON && defined(__linux__)
    static const bool present = getauxval(AT_HWCAP) >> 20 & 1;  // ASIMDDP
    return present && byte_dots_allowed.load(std::memory_order_relaxed);
#else
    return false;
#endif
}
// Whether pairs of products of bytes can be added in 16 bits (VPMADDUBSW, which saturates).
#if STEMMA_AVX512 || defined(__AVX2__)
#define STEMMA_NARROW 1
#else
#define STEMMA_NARROW 0
#endif
// How many steps' pairs are added in 16 bits: for codes below 2^bits and inputs down to -128 no sum leaves them.
// 0: not even one's.
constexpr int narrow_steps(int bits) { return !STEMMA_NARROW || bits > 7 ? 0 : 1 << (7 - bits); }
// Of the bytes that codes become.
static inline int bits_of_bytes(const Strips& w) {
    if (w.codes.levels == nullptr) return w.codes.bits;
    int most = 0;
    for (int i = 0; i < 16; i++) most = std::max(most, w.codes.levels[i] + w.codes.middle);
    return most < 32 ? 5 : 8;
}
// Inputs are bytes for byte dots, tiles and sums in 16 bits; else 16 bits, in pairs of inputs (0, 2) and (1, 3) of a step.
static inline bool inputs_are_bytes(const Strips& w) {
    return STEMMA_AMX || has_byte_dots() || narrow_steps(bits_of_bytes(w)) > 0;
}

// What byte dots take off a weight's byte: SDOT wants signed ones; USDOT and x86's instruction take them as they are.
#if STEMMA_NEON && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int BYTES_SHIFTED = 128;
#else
constexpr int BYTES_SHIFTED = 0;
#endif

struct Int8Layout {
    int64_t group_bytes;  // of a group's codes
    int64_t starts_at, sums_at, scales_at, bytes;

    explicit Int8Layout(const Strips& w) {
        const GroupLayout g(w);
        // A tile takes 64 inputs: a group is filled up with zeros.
        group_bytes = inputs_are_bytes(w) ? g.steps * 4 : g.steps * 8;
        if (STEMMA_AMX) group_bytes = (group_bytes + 63) / 64 * 64;
        starts_at = (g.count * group_bytes + 16 * 2 + 63) / 64 * 64;  // a vector's codes may reach beyond the last group
        sums_at = starts_at + g.count * 4;
        scales_at = sums_at + g.count * 4;
        bytes = (scales_at + g.count * 4 + 63) / 64 * 64;
    }
};

static inline bool wants_int8(const Strips& w) { return w.codes.bits != 0 && w.codes.activations != 0; }

static inline void store_codes(char* to, v16i codes, bool bytes) {
#if STEMMA_AVX512
    if (bytes) return _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
#endif
    int32_t lanes[LANES];
    Memory<v16i>::store(lanes, codes);
    for (int step = 0; step < LANES; step += 4) {
        const int32_t* x = lanes + step;
        if (bytes) {
            for (int i = 0; i < 4; i++) to[step + i] = char(x[i]);
        } else {
            const int16_t pairs[4] = {int16_t(x[0]), int16_t(x[2]), int16_t(x[1]), int16_t(x[3])};
            std::memcpy(to + 2 * step, pairs, sizeof pairs);
        }
    }
}

template <class T>
static inline v16f load_part(const T* x, int64_t count) {  // what is missing is zero
    if (count >= LANES) return load(x);
    T part[LANES] = {};
    std::memcpy(part, x, count * sizeof(T));
    return load(part);
}

// Scale of `count` inputs and its inverse. With NaN or infinity among them the scale is NaN, so that results are.
template <class T>
static void scale_inputs(const T* x, int64_t count, const Strips& w, float& scale, float& inverse) {
    v16f top = splat(0.0f), poison = splat(0.0f);
    for (int64_t d = 0; d < count; d += LANES) {
        v16f v = load_part(x + d, count - d);
        top = vmax(as_float(as_bits(v) & 0x7FFFFFFFu), top);
        poison += v * 0.0f;
    }
    if (w.codes.activations != 2) {
        float lanes[LANES], largest = 0;
        store(lanes, top);
        for (float lane : lanes) largest = std::max(largest, lane);
        bool is_zero = largest < 1e-30f;  // or the inverse would be infinite
        scale = is_zero ? 0.0f : largest / 127.0f;
        inverse = is_zero ? 0.0f : 127.0f / largest;
    } else {
        scale = w.codes.input_scale, inverse = 1.0f / w.codes.input_scale;
    }
    scale += sum_lanes(poison);
}

// Codes are x / scale, rounded to nearest even; if the scale is static, plus its zero, clamped to int8.
template <class T>
static void quantize_row(const T* x, const Strips& w, char* row) {
    const GroupLayout g(w);
    const Int8Layout layout(w);
    const bool bytes = inputs_are_bytes(w), is_static = w.codes.activations == 2;
    const int64_t group = w.codes.group, vector_bytes = bytes ? LANES : 2 * LANES;
    const int middle = w.codes.middle - (bytes ? BYTES_SHIFTED : 0);
    const v16f magic = splat(12582912.0f), zero = splat(float(w.codes.input_zero));  // 1.5 * 2^23 rounds
    const v16i magic_bits = as_int(magic);
    const bool by_group = w.codes.activations == 3;
    float scale, inverse;
    if (!by_group) scale_inputs(x, w.k, w, scale, inverse);
    for (int64_t i = 0; i < g.count; i++, x += group) {
        if (by_group) scale_inputs(x, group, w, scale, inverse);
        char *to = row + i * layout.group_bytes, *end = to + layout.group_bytes;
        v16i sums = splat(int32_t(0));
        for (int64_t d = 0; d < group; d += LANES, to += vector_bytes) {
            v16f v = load_part(x + d, group - d) * inverse;
            if (is_static) {
                v = vmin(vmax(v, splat(-1000.0f)), splat(1000.0f));
                v = vmin(vmax((v + magic) - magic + zero, splat(-128.0f)), splat(127.0f));
                if (group - d < LANES) v = load_part((const float*)&v, group - d);
            }
            v16i codes = as_int(v + magic) - magic_bits;
            store_codes(to, codes, bytes);
            sums += codes;
        }
        if (to < end) std::memset(to, 0, end - to);
        int32_t lanes[LANES], sum = 0;
        Memory<v16i>::store(lanes, sums);
        for (int32_t lane : lanes) sum += lane;
        ((int32_t*)(row + layout.starts_at))[i] = -middle * sum;
        ((float*)(row + layout.sums_at))[i] = float(sum) * scale;
        ((float*)(row + layout.scales_at))[i] = scale;
    }
}
