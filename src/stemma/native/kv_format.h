// How a token's row of KV is stored.
//
// As codes of one byte with scales, a token's behind its codes: `kv_cache_dtype` int8 and fp8. What a code means and
// how it is rounded is told in model/kv_format.py, which computes the same bits with torch. Whoever reads a row sees
// rounded<T>(code * scale): products, their order and their rounding are those of plain KV.
//
// In one run, or cut into pieces of COLUMNS numbers (of codes: bytes, scales included) with the other tokens' pieces
// of the same columns between them: `kv_layout` nz, [columns / 16][token][16] in each block. Such rows have one head.
#pragma once

#include <cmath>
#include <vector>

#include "vec.h"

constexpr int COLUMNS = 16;  // of a piece

enum StoredAs : int32_t { PLAIN = 0, INT8 = 1, FP8 = 2 };

struct KVFormat {
    int32_t stored;        // a StoredAs
    int32_t num_scales;    // of a row: 1, or 2 where its first numbers have one of their own
    int32_t first_dims;    // how many; at least the row's length if there is one scale
    int32_t scale_offset;  // bytes of a row before its scales, [head][scale] bf16
    int64_t column_stride; // elements (of codes: bytes) from a piece of a row to the next one; COLUMNS: rows are whole

    bool whole() const { return column_stride == COLUMNS; }
    // Where column d lies, from the row's first one on
    int64_t at(unsigned d) const { return d / COLUMNS * column_stride + d % COLUMNS; }
};

constexpr float MIN_SCALE = 1e-30f;

// ---- codes to numbers

static inline v16i widen(const int8_t* p) {
#if STEMMA_AVX512
    return (native_i)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return {(native_i)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            (native_i)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
#elif STEMMA_NEON
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t lower = vmovl_s8(vget_low_s8(bytes)), upper = vmovl_high_s8(bytes);
    const auto first = [](int16x8_t x) { return (native_i)vmovl_s16(vget_low_s16(x)); };
    const auto last = [](int16x8_t x) { return (native_i)vmovl_high_s16(x); };
    return {{first(lower), last(lower)}, {first(upper), last(upper)}};
#else
    int32_t lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = p[i];
    return load(lanes);
#endif
}

static inline native_f number_of(native_i x) { return __builtin_convertvector(x, native_f); }
template <class V>
static inline auto number_of(Twice<V> x) -> Twice<decltype(number_of(x.lo))> {
    return {number_of(x.lo), number_of(x.hi)};
}

static inline v16f e4m3_of(const uint8_t* codes, v16i wide) {
#if STEMMA_AVX512 || defined(__AVX2__)
    // Moved to where a half float has exponent and mantissa, whose exponents are 8 less
    const auto number = [](__m256i half) {
        const __m256i moved = _mm256_slli_epi16(_mm256_and_si256(half, _mm256_set1_epi16(0x7F)), 7);
        return _mm256_or_si256(moved, _mm256_and_si256(half, _mm256_set1_epi16(int16_t(0x8000))));
    }(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)));
#if STEMMA_AVX512
    return (native_f)_mm512_cvtph_ps(number) * 256.0f;
#else
    return v16f{(native_f)_mm256_cvtph_ps(_mm256_castsi256_si128(number)),
                (native_f)_mm256_cvtph_ps(_mm256_extracti128_si256(number, 1))} * 256.0f;
#endif
#else
    // Moved to where a float has them; below 2^-6 the mantissa counts 2^-9
    const v16i magnitude = (wide & 0x7F) << 20;
    const v16f normal = as_float(magnitude + (120 << 23));
    const v16f small = as_float(magnitude | (121 << 23)) - splat(0.015625f);
    const v16f absolute = select(magnitude < (1 << 23), small, normal);
    return as_float(as_int(absolute) | (wide & int32_t(0x80000000)));
#endif
}

// 16 codes as numbers, not yet scaled
template <int32_t stored>
static inline v16f numbers_of(const uint8_t* codes) {
    const v16i wide = widen((const int8_t*)codes);
    if (stored == INT8) return number_of(wide);
    return e4m3_of(codes, wide);
}

// The codes of one row, in parts that have a scale each
struct CodedRow {
    const KVFormat& format;
    const uint8_t* codes;
    int first;         // numbers under the first scale: all, or a multiple of COLUMNS unless rows are whole
    float scales[2];

    CodedRow(const KVFormat& f, const void* token, int head, int64_t head_stride, int dim)
        : format(f), codes((const uint8_t*)token + head * head_stride), first(std::min(f.first_dims, dim)) {
        const int at = f.scale_offset + head * f.num_scales * int(sizeof(bf16));
        for (int s = 0; s < (first < dim ? 2 : 1); s++) {
            bf16 scale;
            std::memcpy(&scale, (const uint8_t*)token + f.at(at + s * int(sizeof scale)), sizeof scale);
            scales[s] = to_float(scale);
        }
    }

    // 16 codes from d on
    const uint8_t* piece(int d) const { return codes + format.at(d); }
    // 16 numbers from d on, all under one scale
    template <int32_t stored>
    v16f at(int d) const {
        return numbers_of<stored>(piece(d)) * splat(scales[d >= first]);
    }
};

// `count` numbers, at most 16, to floats or bf16, rounded as T
template <class T>
static inline void put(float* out, v16f x, int count) {
    if (count >= LANES) return store(out, rounded<T>(x));
    float lanes[LANES];
    store(lanes, rounded<T>(x));
    std::memcpy(out, lanes, sizeof(float) * count);
}
template <class T>
static inline void put(bf16* out, v16f x, int count) {
    bf16 lanes[LANES];
    bf16* to = count >= LANES ? out : lanes;
#if STEMMA_AVX512_BF16
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store(to, x);
#endif
    if (count < LANES) std::memcpy(out, lanes, sizeof(bf16) * count);
}

// Numbers [begin, end) of a row, which have one scale
template <class T, int32_t stored, class Out>
static inline void decode_part(const CodedRow& row, int begin, int end, float scale, Out* out) {
    int d = begin;
    for (; d + LANES <= end; d += LANES) put<T>(out + d, numbers_of<stored>(row.piece(d)) * splat(scale), LANES);
    if (d == end) return;
    uint8_t rest[LANES] = {};
    std::memcpy(rest, row.piece(d), end - d);
    put<T>(out + d, numbers_of<stored>(rest) * splat(scale), end - d);
}

// `n` rows of one KV head to `out` [row][dim], as a T holds them
template <class T, int32_t stored, class Out>
static void decode_rows(const KVFormat& format, const void* const* tokens, int head, int64_t head_stride, int n, int dim,
                        Out* out) {
    for (int t = 0; t < n; t++, out += dim) {
        const CodedRow row(format, tokens[t], head, head_stride, dim);
        decode_part<T, stored>(row, 0, row.first, row.scales[0], out);
        if (row.first < dim) decode_part<T, stored>(row, row.first, dim, row.scales[1], out);
    }
}

// ---- numbers to codes

template <class T>
static inline v16f load_some(const T* p, int count) {
    if (count >= LANES) return load(p);
    T lanes[LANES] = {};
    std::memcpy(lanes, p, sizeof(T) * count);
    return load(lanes);
}

static inline v16f absolute(v16f x) { return as_float(as_int(x) & 0x7FFFFFFF); }

// The scale of `dim` numbers: their largest magnitude over the largest code, rounded up to bf16; NaN if one of them
// isn't finite
template <class T>
static inline bf16 choose_scale(const T* x, int dim, float largest_code) {
    v16f top = {}, finite = {};  // x * 0 is NaN where x isn't finite
    for (int d = 0; d < dim; d += LANES) {
        v16f v = load_some(x + d, dim - d);
        top = vmax(top, absolute(v)), finite = finite + v * 0.0f;
    }
    float lanes[LANES], largest = 0;
    store(lanes, top);
    for (float lane : lanes) largest = std::max(largest, lane);
    if (!(sum_lanes(finite) == 0.0f)) return {0x7FC0};
    float scale = std::max(largest / largest_code, MIN_SCALE);
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    return {uint16_t((bits + 0xFFFF) >> 16)};
}

// The codes of 16 numbers over their scale, in the lowest byte of each lane
template <int32_t stored>
static inline v16i codes_of(v16f x) {
    const v16f magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    if (stored == INT8) return as_int(x + magic);
    const v16i bits = as_int(absolute(x));
    const v16i normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const v16i small = as_int(absolute(x) * 512.0f + magic) & 0xFF;
    const v16i magnitude = as_int(select(absolute(x) < splat(0.015625f), as_float(small), as_float(normal)));
    return magnitude | ((as_int(x) >> 24) & 0x80);
}

template <class T, int32_t stored>
static inline bf16 encode_part(const T* x, int dim, uint8_t* codes) {
    const bf16 scale = choose_scale(x, dim, stored == INT8 ? 127.0f : 448.0f);
    const float inverse = 1.0f / to_float(scale);
    if (inverse != inverse) {
        std::memset(codes, 0, dim);
        return scale;
    }
    for (int d = 0; d < dim; d += LANES) {
        int32_t lanes[LANES];
        v16f share = load_some(x + d, dim - d) * inverse;
        Memory<v16i>::store(lanes, codes_of<stored>(share));
        for (int i = 0; i < LANES && d + i < dim; i++) codes[d + i] = uint8_t(lanes[i]);
    }
    return scale;
}

// Write the row `x` of one KV head to the codes and scales of a token, in one run.
template <class T>
static void encode_row(const KVFormat& format, const T* x, int dim, int head, int64_t head_stride, uint8_t* token) {
    const int first = std::min(format.first_dims, dim);
    const auto encode = format.stored == INT8 ? encode_part<T, INT8> : encode_part<T, FP8>;
    uint8_t* codes = token + head * head_stride;
    bf16 scales[2] = {encode(x, first, codes), {}};
    if (first < dim) scales[1] = encode(x + first, dim - first, codes + first);
    std::memcpy(token + format.scale_offset + head * format.num_scales * sizeof(bf16), scales,
                format.num_scales * sizeof(bf16));
}

// `count` elements of a row in one run, to where the format has them.
template <class E>
static void lay_row(const KVFormat& format, const E* row, int count, E* token) {
    const int step = format.whole() ? count : COLUMNS;
    for (int d = 0; d < count; d += step)
        std::memcpy(token + format.at(d), row + d, sizeof(E) * std::min(step, count - d));
}

// New rows of a layer's keys or values, written to their slots
struct WriteArgs {
    const void* source;  // [tokens, heads, dim], strides in elements
    void* target;        // the layer's blocks, as in AttendArgs, strides in elements; of codes, in bytes
    const int64_t* slots;  // [tokens]
    int64_t tokens, source_token_stride, source_head_stride;
    int64_t block_stride, token_stride, head_stride;
    int32_t heads, dim, block_size, is_bf16, threads;
    KVFormat format;
};

template <class T>
static void write_token(const WriteArgs& a, int64_t i) {
    const int64_t at = a.slots[i] / a.block_size * a.block_stride + a.slots[i] % a.block_size * a.token_stride;
    const T* x = (const T*)a.source + i * a.source_token_stride;
    if (a.format.stored == PLAIN) {
        for (int h = 0; h < a.heads; h++, x += a.source_head_stride)
            lay_row(a.format, x, a.dim, (T*)a.target + at + h * a.head_stride);
        return;
    }
    uint8_t* token = (uint8_t*)a.target + at;
    if (a.format.whole()) {
        for (int h = 0; h < a.heads; h++, x += a.source_head_stride)
            encode_row(a.format, x, a.dim, h, a.head_stride, token);
        return;
    }
    static thread_local std::vector<uint8_t> row;
    row.resize(a.format.scale_offset + a.format.num_scales * sizeof(bf16));
    encode_row(a.format, x, a.dim, 0, a.head_stride, row.data());
    lay_row(a.format, (const uint8_t*)row.data(), int(row.size()), token);
}
