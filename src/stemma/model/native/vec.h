// Vectors of 16 floats by the compiler's vector extension: one zmm with AVX-512, two ymm with AVX2, and so on.
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
static inline v16f vmax(v16f a, v16f b) { return a > b ? a : b; }

// exp by splitting off a power of two and a polynomial of degree 6 on [-ln2/2, ln2/2] (relative error 2e-7).
// Arguments below -87 give (nearly) 0.
static inline v16f vexp(v16f x) {
    x = vmax(x, splat(-87.0f));
    const v16f magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v16f shifted = x * 1.44269504088896341f + magic;
    v16f n = shifted - magic;
    v16f r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    v16f p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (v16f)((v16i)p + ((v16i)shifted << 23));
}
