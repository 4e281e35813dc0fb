// Vectors of 16 floats by the compiler's vector extension: one register of AVX-512. (Compilers can split them
// for lesser processors, but do it so badly that torch is faster there; native/library.py doesn't load us.)
// Element types: float, and bf16 as its upper 16 bits.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define STEMMA_BF16_DOT 1
#else
#define STEMMA_BF16_DOT 0
#endif

typedef float v16f __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int LANES = 16;
constexpr int ACCUMULATORS = 16;  // v16f that fit in registers beside operands
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

static inline v16f splat(float x) { return v16f{} + x; }
static inline v16f load(const float* p) { return *reinterpret_cast<const v16f*>(p); }
static inline void store(float* p, v16f x) { *reinterpret_cast<v16f*>(p) = x; }

// 16 bf16 as floats and back, rounding to nearest even as torch does
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4), may_alias));
static inline v16f load(const bf16* p) {
    return (v16f)(__builtin_convertvector(*reinterpret_cast<const v16h*>(p), v16u) << 16);
}
static inline v16u round_bits(v16f x) {
    v16u wide = (v16u)x;
    return (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
}
static inline void store(bf16* p, v16f x) {
    *reinterpret_cast<v16h*>(p) = __builtin_convertvector(round_bits(x), v16h);
}
// What x becomes when it is kept as a T
template <class T>
static inline v16f rounded(v16f x) {
    if (sizeof(T) == sizeof(float)) return x;
    return (v16f)(round_bits(x) << 16);
}
static inline v16f vmax(v16f a, v16f b) { return a > b ? a : b; }

// 2^x: a power of two times a polynomial on [-1/2, 1/2]; relative error 2e-7. Arguments below -126 give
// (nearly) 0.
static inline v16f vexp2(v16f x) {
    x = vmax(x, splat(-126.0f));
    const v16f magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v16f shifted = x + magic;
    v16f r = x - (shifted - magic), p = splat(1.540353e-4f);
    p = p * r + 1.333356e-3f;
    p = p * r + 9.618129e-3f;
    p = p * r + 5.550411e-2f;
    p = p * r + 2.402265e-1f;
    p = p * r + 6.931472e-1f;
    p = p * r + 1.0f;
    return (v16f)((v16i)p + ((v16i)shifted << 23));
}

#if STEMMA_BF16_DOT
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
