// Vectors of 16 floats at every instruction-set level: one register of AVX-512, two of AVX2, four of SSE2 or NEON.
// Element types: float, and bf16 as its upper 16 bits.
//
// The compiler must not fuse products and sums by itself (-ffp-contract=off): whether it did would depend on how
// a loop was unrolled, and a row's result on how many rows surround it. fma() says where both are one instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
// The levels of arm64 define it. Without it that processor rounds as every other one at the portable level.
#ifndef STEMMA_NEON
#define STEMMA_NEON 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif STEMMA_NEON
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define STEMMA_AVX512 1
#else
#define STEMMA_AVX512 0
#endif
#if STEMMA_AVX512 && defined(__AVX512BF16__)
#define STEMMA_AVX512_BF16 1
#else
#define STEMMA_AVX512_BF16 0
#endif
#if STEMMA_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define STEMMA_NEON_BF16 1
#else
#define STEMMA_NEON_BF16 0
#endif
// Whether products of bf16 pairs are one instruction.
#define STEMMA_BF16_DOT (STEMMA_AVX512_BF16 || STEMMA_NEON_BF16)

constexpr int LANES = 16;
#if STEMMA_AVX512
constexpr int NATIVE = 16;          // floats in a register
constexpr int ACCUMULATORS = 16;    // v16f that fit in registers beside operands
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
constexpr int ACCUMULATORS = 6;
#else
constexpr int NATIVE = 4;
constexpr int ACCUMULATORS = STEMMA_NEON ? 6 : 3;
#endif
constexpr int REGISTERS = NATIVE == 16 || STEMMA_NEON ? 32 : 16;
constexpr int HELD = REGISTERS * NATIVE / LANES;  // vectors of 16 floats that all registers hold: 32, 8 or 4
constexpr float MASKED = -1e30f;  // a score nobody sees; finite, so that differences stay defined

struct bf16 {
    uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &wide, 4);
    return result;
}

template <class T>
static inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline bf16 from_float<bf16>(float x) {  // round to nearest even, as torch does
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    return {uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)};
}

// One register, and several of them side by side: V is a register's vector or Twice of fewer.
typedef float native_f __attribute__((vector_size(4 * NATIVE)));
typedef int32_t native_i __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t native_u __attribute__((vector_size(4 * NATIVE)));
typedef uint16_t native_h __attribute__((vector_size(2 * NATIVE)));

template <class V>
struct Twice {
    V lo, hi;
};

template <class V>
struct Element {
    using type = std::decay_t<decltype(V{}[0])>;
};
template <class V>
struct Element<Twice<V>> : Element<V> {};
template <class S>
using if_scalar = std::enable_if_t<std::is_arithmetic<S>::value, int>;

#define STEMMA_EACH(OP)                                                                                      \
    template <class V>                                                                                       \
    static inline auto operator OP(Twice<V> a, Twice<V> b) -> Twice<decltype(a.lo OP b.lo)> {                \
        return {a.lo OP b.lo, a.hi OP b.hi};                                                                 \
    }                                                                                                        \
    template <class V, class S, if_scalar<S> = 0>                                                            \
    static inline auto operator OP(Twice<V> a, S s) -> Twice<decltype(a.lo OP a.lo)> {                       \
        auto b = typename Element<V>::type(s);                                                               \
        return {a.lo OP b, a.hi OP b};                                                                       \
    }                                                                                                        \
    template <class V, class S, if_scalar<S> = 0>                                                            \
    static inline auto operator OP(S s, Twice<V> b) -> Twice<decltype(b.lo OP b.lo)> {                       \
        auto a = typename Element<V>::type(s);                                                               \
        return {a OP b.lo, a OP b.hi};                                                                       \
    }
STEMMA_EACH(+)
STEMMA_EACH(-)
STEMMA_EACH(*)
STEMMA_EACH(/)
STEMMA_EACH(&)
STEMMA_EACH(|)
STEMMA_EACH(<<)
STEMMA_EACH(>>)
STEMMA_EACH(<)
STEMMA_EACH(>)
STEMMA_EACH(<=)
STEMMA_EACH(>=)
#undef STEMMA_EACH
template <class V>
static inline Twice<V> operator-(Twice<V> a) {
    return {-a.lo, -a.hi};
}
template <class V, class S>
static inline Twice<V>& operator+=(Twice<V>& a, S b) {
    return a = a + b;
}
template <class V, class S>
static inline Twice<V>& operator*=(Twice<V>& a, S b) {
    return a = a * b;
}

// a where mask is true (all bits set), else b
static inline native_f select(native_i mask, native_f a, native_f b) { return mask ? a : b; }
template <class M, class V>
static inline Twice<V> select(Twice<M> mask, Twice<V> a, Twice<V> b) {
    return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}

// a * b + c; one rounding where the processor has such an instruction
static inline native_f fma(native_f a, native_f b, native_f c) {
#if STEMMA_AVX512
    return (native_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (native_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif STEMMA_NEON
    return (native_f)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
template <class V>
static inline Twice<V> fma(Twice<V> a, Twice<V> b, Twice<V> c) {
    return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}

// a * b + c of single floats, as fma() computes it
static inline float fma_one(float a, float b, float c) {
#if defined(__FMA__) || STEMMA_NEON
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline native_f as_float(native_i x) { return (native_f)x; }
static inline native_f as_float(native_u x) { return (native_f)x; }
static inline native_i as_int(native_f x) { return (native_i)x; }
static inline native_i as_int(native_u x) { return (native_i)x; }
static inline native_u as_bits(native_f x) { return (native_u)x; }
#define STEMMA_EACH(NAME)                                                     \
    template <class V>                                                        \
    static inline auto NAME(Twice<V> x) -> Twice<decltype(NAME(x.lo))> {      \
        return {NAME(x.lo), NAME(x.hi)};                                      \
    }
STEMMA_EACH(as_float)
STEMMA_EACH(as_int)
STEMMA_EACH(as_bits)
#undef STEMMA_EACH

// From and to memory, which needs no alignment. bf16 are rounded to nearest even, as torch does.
template <class V>
struct Memory {
    using E = typename Element<V>::type;
    typedef V unaligned __attribute__((aligned(1), may_alias));
    static constexpr int lanes = NATIVE;
    static V load(const E* p) { return *(const unaligned*)p; }
    static void store(E* p, V x) { *(unaligned*)p = x; }
    static native_u widen(const uint16_t* p) {
#if STEMMA_AVX512
        return (native_u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
        return (native_u)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
        native_h half;
        std::memcpy(&half, p, sizeof half);
        return __builtin_convertvector(half, native_u);
#endif
    }
    static void narrow(uint16_t* p, native_u x) {  // x < 2^16
#if STEMMA_AVX512
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
        __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
        native_h half = __builtin_convertvector(x, native_h);
        std::memcpy(p, &half, sizeof half);
#endif
    }
};
template <class V>
struct Memory<Twice<V>> {
    using E = typename Element<V>::type;
    static constexpr int lanes = 2 * Memory<V>::lanes;
    static Twice<V> load(const E* p) { return {Memory<V>::load(p), Memory<V>::load(p + lanes / 2)}; }
    static void store(E* p, Twice<V> x) { Memory<V>::store(p, x.lo), Memory<V>::store(p + lanes / 2, x.hi); }
    static Twice<V> widen(const uint16_t* p) { return {Memory<V>::widen(p), Memory<V>::widen(p + lanes / 2)}; }
    static void narrow(uint16_t* p, Twice<V> x) {
        Memory<V>::narrow(p, x.lo), Memory<V>::narrow(p + lanes / 2, x.hi);
    }
};

template <class V>
struct Sixteen {
    using type = std::conditional_t<NATIVE == 16, V,
                                    std::conditional_t<NATIVE == 8, Twice<V>, Twice<Twice<V>>>>;
};
using v16f = Sixteen<native_f>::type;
using v16i = Sixteen<native_i>::type;
using v16u = Sixteen<native_u>::type;

static inline v16f splat(float x) { return x - v16f{}; }  // (adding to zero would turn -0 into 0)
static inline v16i splat(int32_t x) { return v16i{} + x; }
static inline v16f load(const float* p) { return Memory<v16f>::load(p); }
static inline v16i load(const int32_t* p) { return Memory<v16i>::load(p); }
static inline v16u load(const uint32_t* p) { return Memory<v16u>::load(p); }
static inline v16f load(const bf16* p) { return as_float(Memory<v16u>::widen((const uint16_t*)p) << 16); }
static inline void store(float* p, v16f x) { Memory<v16f>::store(p, x); }
// The upper half of each is x rounded to bf16.
static inline v16u round_high(v16f x) {
    v16u wide = as_bits(x);
    return wide + 0x7FFF + ((wide >> 16) & 1);
}
static inline void store(bf16* p, v16f x) {
#if STEMMA_AVX512  // the upper halves in one instruction
    alignas(64) static const uint16_t odd[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(odd), (__m512i)round_high(x));
    _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256(halves));
#else
    Memory<v16u>::narrow((uint16_t*)p, round_high(x) >> 16);
#endif
}
// Some of 16 numbers, the others 0
template <class T>
static inline v16f load_few(const T* p, int count) {
    if (count >= LANES) return load(p);
    float lanes[LANES] = {};
    for (int i = 0; i < count; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}
template <class T>
static inline void store_few(T* p, v16f x, int count) {
    if (count >= LANES) return store(p, x);
    float lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < count; i++) p[i] = from_float<T>(lanes[i]);
}
// What x becomes when it is kept as a T
template <class T>
static inline v16f rounded(v16f x) {
    if (sizeof(T) == sizeof(float)) return x;
    return as_float(round_high(x) & 0xFFFF0000u);
}
static inline v16f vmax(v16f a, v16f b) { return select(a > b, a, b); }
static inline v16f vmin(v16f a, v16f b) { return select(a < b, a, b); }
static inline float first_lane(v16f x) {
    float lanes[LANES];
    store(lanes, x);
    return lanes[0];
}
// The sum of all lanes, in their order
static inline float sum_lanes(v16f x) {
    float lanes[LANES], sum = 0;
    store(lanes, x);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

// 2^x: a power of two times a polynomial on [-1/2, 1/2]; relative error 2e-7. Arguments below -126 give
// (nearly) 0.
static inline v16f vexp2(v16f x) {
    x = vmax(x, splat(-126.0f));
    const v16f magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v16f shifted = x + magic;
    v16f r = x - (shifted - magic), p = splat(1.540353e-4f);
    p = fma(p, r, splat(1.333356e-3f));
    p = fma(p, r, splat(9.618129e-3f));
    p = fma(p, r, splat(5.550411e-2f));
    p = fma(p, r, splat(2.402265e-1f));
    p = fma(p, r, splat(6.931472e-1f));
    p = fma(p, r, splat(1.0f));
    return as_float(as_int(p) + (as_int(shifted) << 23));
}

#if STEMMA_AVX512_BF16
// 2^x; any x, far negative ones give 0. Relative error 3e-6, or 8e-5 if `rough`.
template <bool rough>
static inline __m512 exp2_fast(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - whole, p;
    if (rough) {
        p = _mm512_fmadd_ps(_mm512_set1_ps(0.05517166f), r, _mm512_set1_ps(0.24261112f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69326099f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992807f));
    } else {
        p = _mm512_fmadd_ps(_mm512_set1_ps(0.0095701014f), r, _mm512_set1_ps(0.05591786f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24024745f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69312181f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99999926f));
    }
    return _mm512_scalef_ps(p, whole);
}
// Two vectors as bf16, element by element side by side: a in the lower half of each 32 bits, b in the upper.
static inline __m512i pair_up(__m512 a, __m512 b) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
#endif

constexpr float LOG2_E = 1.44269504088896341f;
static inline v16f vexp(v16f x) { return vexp2(x * LOG2_E); }
