// Sums of products of some rows with a strip, on vectors. One accumulator a result, one order over the inputs
// whatever the number of rows: a row's result never depends on its neighbours.
#pragma once

#include "strips.h"
#include "tiles.h"

// Arithmetic of one step, in PARTS one after the other: Sum += Line (16 outputs) * Input (one row), where a row's
// inputs of a step take BYTES.
struct FloatDot {  // float weights
    using Element = float;
    using Line = v16f;
    using Input = v16f;
    static constexpr int BYTES = 4, PARTS = 1;
    static Line line(const char* p, int) { return load((const float*)p); }
    static Input input(const char* p, int) { return splat(*(const float*)p); }
    static v16f add(v16f sum, Line w, Input x) { return fma(w, x, sum); }
};
struct WideDot {  // bf16 weights, inputs widened to float before; first even inputs, then odd ones
    using Element = bf16;
    using Line = v16f;
    using Input = v16f;
    static constexpr int BYTES = 8, PARTS = 2;
    static Line line(const char* p, int part) {
        v16u pairs = load((const uint32_t*)p);
#if defined(__AVX2__) && !STEMMA_AVX512
        if (part == 0) return {even(pairs.lo), even(pairs.hi)};
#endif
        return as_float(part == 0 ? pairs << 16 : pairs & 0xFFFF0000u);
    }
    static Input input(const char* p, int part) { return splat(((const float*)p)[part]); }
    static v16f add(v16f sum, Line w, Input x) { return fma(w, x, sum); }
#if defined(__AVX2__) && !STEMMA_AVX512
    // A shuffle, since shifts take turns with multiplications on Intel's processors.
    static native_f even(native_u pairs) {
        const __m256i moved = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13));
        return (native_f)_mm256_shuffle_epi8((__m256i)pairs, moved);
    }
#endif
#if STEMMA_AVX512
    static Line line(__m512i pairs, int part) {
        const __m512i upper = _mm512_set1_epi32(0xFFFF0000);
        return (Line)(part == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, upper));
    }
#endif
};
#if STEMMA_AVX512_BF16
struct PairDot {  // bf16 weights and inputs
    using Element = bf16;
    using Line = __m512bh;
    using Input = __m512bh;
    static constexpr int BYTES = 4, PARTS = 1;
    static Line line(const char* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
    static Line line(__m512i pairs, int) { return (__m512bh)pairs; }
    static Input input(const char* p, int) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static v16f add(v16f sum, Line w, Input x) { return (v16f)_mm512_dpbf16_ps((__m512)sum, w, x); }
};
#elif STEMMA_NEON_BF16
struct PairDot {  // bf16 weights and inputs; both sums of BFDOT are rounded to odd
    using Element = bf16;
    using Line = v16u;
    using Input = native_u;
    static constexpr int BYTES = 4, PARTS = 1;
    static Line line(const char* p, int) { return load((const uint32_t*)p); }
    static Input input(const char* p, int) {
        uint32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return native_u{} + pair;
    }
    static native_f add(native_f sum, native_u w, Input x) {
        const bfloat16x8_t weights = vreinterpretq_bf16_u32((uint32x4_t)w);
        return (native_f)vbfdotq_f32((float32x4_t)sum, weights, vreinterpretq_bf16_u32((uint32x4_t)x));
    }
    template <class V, class W>
    static Twice<V> add(Twice<V> sum, Twice<W> w, Input x) {
        return {add(sum.lo, w.lo, x), add(sum.hi, w.hi, x)};
    }
};
#endif

static inline native_i multiply_pairs(native_i a, native_i b) {  // of 16-bit integers, and add them
#if STEMMA_AVX512
    return (native_i)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (native_i)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (native_i)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif STEMMA_NEON
    const int16x8_t x = vreinterpretq_s16_s32((int32x4_t)a), y = vreinterpretq_s16_s32((int32x4_t)b);
    return (native_i)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
template <class V>
static inline Twice<V> multiply_pairs(Twice<V> a, native_i b) {
    return {multiply_pairs(a.lo, b), multiply_pairs(a.hi, b)};
}
struct FixedDot {  // pairs of 16-bit integers
    using Line = v16i;
    using Input = native_i;
    static constexpr int BYTES = 4, PARTS = 1;
    static Line line(const char* p, int) { return load((const int32_t*)p); }
    static Input input(const char* p, int) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return native_i{} + pair;
    }
    static v16i add(v16i sum, Line w, Input x) { return sum + multiply_pairs(w, x); }
};

// Rows x lines of a tile of accumulators: with the weights and an input they fill the registers.
constexpr int GROUP = HELD >= 8 ? 6 : 2;
static inline int lines_at_once(int rows, int lines) {
    if (HELD == 32) return lines;
    if (HELD == 8) return rows == 1 ? lines : rows == 2 ? std::min(lines, 2) : 1;
    return 1;
}
// How many of `rows` rows come last, by themselves: eight vectors (AVX2's registers, or NEON's) with 3 or 4 rows' sums of a line don't keep two
// multipliers busy, 6 rows do, and so do 1 or 2 rows with several lines.
static inline int rows_apart(int rows) { return HELD == 8 && rows > GROUP && rows % GROUP <= 2 ? rows % GROUP : 0; }

// While several passes go over a chunk of weights, the next chunk is asked for into L2. Into L1 it would wait for the
// few buffers of L1's misses and drive out the chunk at hand. A single pass asks for what it reads itself a little later:
// beside several rows the processor looks less far ahead than fast memory wants.
constexpr int SINGLE_AHEAD = 2048;                // bytes
constexpr int SOME_ROWS = NATIVE == 16 ? 12 : 0;  // up to here two passes, which want the next chunk sooner
constexpr int SOME_STEPS = 32, MANY_STEPS = 64;   // of a chunk: 8 and 16 kB
constexpr int BLOCK_ROWS = STEMMA_AMX ? 256 : 64;  // rows whose sums for one strip are kept at a time
// A whole block reads its weights out of L2 fast enough; longer chunks store and load its sums less often.
constexpr int BLOCK_STEPS = NATIVE >= 8 ? 448 : MANY_STEPS;
static inline int64_t steps_of_chunk(int rows) {
    return rows <= SOME_ROWS ? SOME_STEPS : rows < BLOCK_ROWS ? MANY_STEPS : BLOCK_STEPS;
}

// What is done beside a step of a pass: A lines of weights that are read soon are asked for; they lie in a piece with 2^shift
// lines a step.
template <int A>
struct Asking {
    const char* at;
    int shift;

    void operator()(int64_t step) const {
        const int64_t asked = step * A;
        const char* from = at + (asked >> shift) * STEP_BYTES + (asked & ((1 << shift) - 1)) * 64;
#pragma GCC unroll 4
        for (int a = 0; a < A; a++) __builtin_prefetch(from + 64 * a, 0, 2);
    }
};

// acc[r][16 j ..] (+)= x[r] . w for R rows, J lines and `steps` steps, with beside(step) for each.
template <class K, int R, int J, class B>
static inline void dot_tile(const char* w, const char* x, int64_t x_stride, int64_t steps, float* acc, bool first,
                            const B& beside) {
    v16f sum[R][J];  // unrolled throughout, or the compiler keeps a copy in memory
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sum[r][j] = first ? splat(0.0f) : load(acc + r * STRIP + 16 * j);
    }
    for (int64_t i = 0; i < steps; i++, w += STEP_BYTES) {
        beside(i);
#pragma GCC unroll 2
        for (int part = 0; part < K::PARTS; part++) {
            typename K::Line weights[J];
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) weights[j] = K::line(w + 64 * j, part);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                typename K::Input inputs = K::input(x + r * x_stride + K::BYTES * i, part);
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) sum[r][j] = K::add(sum[r][j], weights[j], inputs);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) store(acc + r * STRIP + 16 * j, sum[r][j]);
    }
}

template <class K, int J, class B>
static void dot_group(int rows, const char* w, const char* x, int64_t x_stride, int64_t steps, float* acc, bool first,
                      const B& beside) {
    constexpr int MOST = HELD == 32 ? GROUP : HELD == 8 ? (J == 4 ? 1 : J == 2 ? 2 : 6) : GROUP;
#define CASE(R) \
    case R:     \
        if constexpr (R <= MOST) return dot_tile<K, R, J>(w, x, x_stride, steps, acc, first, beside);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

template <class K, int J>
static void dot_pass(int rows, const char* w, const char* x, int64_t x_stride, int64_t steps, float* acc, bool first,
                     const char* ahead, int shift, int asks) {
    if constexpr (J == LINES)
        if (asks == LINES)
            return dot_group<K, J>(rows, w, x, x_stride, steps, acc, first, Asking<LINES>{ahead, shift});
    if constexpr (J >= 2)
        if (asks == 2) return dot_group<K, J>(rows, w, x, x_stride, steps, acc, first, Asking<2>{ahead, shift});
    if (asks == 1) return dot_group<K, J>(rows, w, x, x_stride, steps, acc, first, Asking<1>{ahead, shift});
    dot_group<K, J>(rows, w, x, x_stride, steps, acc, first, Asking<0>{ahead, shift});
}

// How many lines a step pass `pass` of `passes` asks for, so that together they ask for `lines`.
static inline int lines_to_ask(int lines, int pass, int passes) {
    if (passes >= lines) return pass < lines;
    return pass == 0 ? lines / 2 : lines / 2 / (passes - 1);
}

// acc[rows][STRIP]: products of `rows` rows with `lines` (1 or 4) lines of a strip, from `w` on. The inputs of a group of
// rows stay in L1 while its lines pass. acc holds nothing yet if `first`.
template <class K>
static void dot_lines(const char* w, int lines, int64_t steps, const char* x, int64_t x_stride, int rows, float* acc,
                      bool first) {
    const int apart = rows_apart(rows), even = rows - apart, shift = lines == 4 ? 2 : 0;
    const int groups = (even + GROUP - 1) / GROUP, width = lines_at_once(even, lines);
    const int passes = groups * (lines / width) + (apart ? lines / lines_at_once(apart, lines) : 0);
    const int64_t chunk = passes == 1 ? steps : steps_of_chunk(rows);
    for (int64_t done = 0; done < steps; done += chunk) {
        int64_t now = std::min(chunk, steps - done);
        const char* here = w + done * STEP_BYTES;
        const char* ahead = here + (passes == 1 ? SINGLE_AHEAD : now * STEP_BYTES);
        int pass = 0;
        auto run_group = [&](int begin, int end, int width) {
            for (int line = 0; line < lines; line += width, pass++) {
                int asks = passes == 1 ? (width == LINES ? LINES : 0) : lines_to_ask(lines, pass, passes);
                const char* inputs = x + begin * x_stride + K::BYTES * done;
                float* out = acc + begin * STRIP + 16 * line;
                auto run = dot_pass<K, 1>;
                if constexpr (HELD >= 8) run = width == 4 ? dot_pass<K, 4> : run;
                if constexpr (HELD == 8) run = width == 2 ? dot_pass<K, 2> : run;
                run(end - begin, here + 64 * line, inputs, x_stride, now, out, first && done == 0, ahead, shift, asks);
                ahead += now * asks * (STEP_BYTES >> shift);
            }
        };
        for (int g = 0; g < groups; g++) run_group(even * g / groups, even * (g + 1) / groups, width);
        if (apart) run_group(even, rows, lines_at_once(apart, lines));
    }
}
