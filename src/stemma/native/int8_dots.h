// Sums of products of int8 inputs with a strip of codes. Within a group they are integers, so their order doesn't
// matter and every way gives the same bits; groups are added up in float, in their order, whatever the number of rows:
//
//     acc = acc + (float(sum of codes * inputs) * the inputs' scale) * scale, then acc + offset * (sum of inputs).
#pragma once

#include "dots.h"
#include "code_lines.h"
#include "int8_inputs.h"

constexpr int CODES_AHEAD = 4096;  // bytes of all four lines of a strip: how far ahead codes are asked for
constexpr int CHUNK_STEPS = 64;    // 16 kB that stay in L1 while several groups of rows pass

// Sum += 16 outputs * 4 inputs of one row. Weights are unsigned, inputs signed.
struct ByteDot {  // one instruction; in assembly, since the level doesn't promise it
    static constexpr int BYTES = 4, STEPS = 0;
    struct Input {
        native_i x;
    };
    static Input input(const char* p) {
        int32_t x;
        std::memcpy(&x, p, 4);
        return {native_i{} + x};
    }
    static native_i add(native_i sum, native_u w, Input x) {
#if STEMMA_AVX512
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x.x));
#elif defined(__AVX2__)
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x.x));
#elif STEMMA_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
        sum = (native_i)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x.x);
#elif STEMMA_NEON
        const native_u shifted = w ^ 0x80808080u;  // BYTES_SHIFTED
        // In assembly, since the level doesn't promise it; compilers know no narrower word that allows it.
        asm(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(shifted), "w"(x.x));
#endif
        return sum;
    }
};
struct PairwiseDot {  // bytes widened to 16 bits, even and odd ones apart
    static constexpr int BYTES = 8, STEPS = 0;
    struct Input {
        native_i even, odd;
    };
    static Input input(const char* p) {
        int32_t x[2];
        std::memcpy(x, p, 8);
        return {native_i{} + x[0], native_i{} + x[1]};
    }
    static native_i add(native_i sum, native_u w, Input x) {
        native_i even = (native_i)(w & 0x00FF00FFu), odd = (native_i)((w >> 8) & 0x00FF00FFu);
        return sum + multiply_pairs(even, x.even) + multiply_pairs(odd, x.odd);
    }
};
#if STEMMA_NARROW
// Pairs of products, and their sums over STEPS steps, in 16 bits: exact where codes are so small that none leaves them.
template <int STEPS_>
struct NarrowDot {
    static constexpr int BYTES = 4, STEPS = STEPS_;
    using Input = native_i;
    static Input input(const char* p) { return ByteDot::input(p).x; }
#if STEMMA_AVX512
    static native_i multiply(native_u w, Input x) { return (native_i)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
    static native_i add(native_i a, native_i b) {
        a = (native_i)_mm512_add_epi16((__m512i)a, (__m512i)b);
        asm("" : "+v"(a));  // or the compiler adds in another order, which takes more registers
        return a;
    }
#else
    static native_i multiply(native_u w, Input x) { return (native_i)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
    static native_i add(native_i a, native_i b) {
        a = (native_i)_mm256_add_epi16((__m256i)a, (__m256i)b);
        asm("" : "+x"(a));  // or the compiler adds in another order, which takes more registers
        return a;
    }
#endif
    static native_i widen(native_i sum, native_i narrow) { return sum + multiply_pairs(narrow, native_i{} + 0x00010001); }

    template <class W>
    static auto multiply(Twice<W> w, Input x) -> Twice<decltype(multiply(w.lo, x))> {
        return {multiply(w.lo, x), multiply(w.hi, x)};
    }
    template <class V>
    static Twice<V> add(Twice<V> a, Twice<V> b) {
        return {add(a.lo, b.lo), add(a.hi, b.hi)};
    }
    template <class V>
    static Twice<V> widen(Twice<V> sum, Twice<V> narrow) {
        return {widen(sum.lo, narrow.lo), widen(sum.hi, narrow.hi)};
    }
};
#endif
template <class D>
static inline native_i add_dot(native_i sum, native_u w, typename D::Input x) {
    return D::add(sum, w, x);
}
template <class D, class V, class W>
static inline Twice<V> add_dot(Twice<V> sum, Twice<W> w, typename D::Input x) {
    return {add_dot<D>(sum.lo, w.lo, x), add_dot<D>(sum.hi, w.hi, x)};
}

// A run of groups of a strip, or a piece of one group, for some rows.
struct GroupRun {
    const char* codes;
    int64_t next_codes;   // bytes to the next group's
    int64_t high_at;      // bytes from a group's codes to its higher bits
    const GroupScales* scales;
    const Levels* levels;
    int64_t group, count; // the first one, and how many
    int64_t steps;
    int line;             // of those that `scales` begins with
    const char* x;        // row 0's codes
    int64_t x_stride, next_x;
    const char *starts, *sums, *input_scales;  // row 0's, of the first group
    float* acc;           // [rows][STRIP]
    bool first;           // acc holds nothing yet
    int32_t* partial;     // [rows][STRIP]: sums of a group of which this isn't the first or the last piece
    bool resumes, stops;

    GroupRun at_row(int64_t row) const {
        GroupRun run = *this;
        run.x += row * x_stride, run.starts += row * x_stride, run.sums += row * x_stride;
        run.input_scales += row * x_stride;
        run.acc += row * STRIP, run.partial += row * STRIP;
        return run;
    }
    // What the sums of line j of row r begin with.
    v16i begin_of(int64_t g, int r, int j) const {
        if (resumes) return load(partial + r * STRIP + 16 * j);
        return splat(((const int32_t*)(starts + r * x_stride))[g]);
    }
};

// Asks for what J lines read a little later, in as many groups as that is.
template <int J>
struct CodesAhead {
    static constexpr int64_t EACH = 64 * LINES / J;  // of so many bytes J lines read one cache line
    const char* at;  // as far ahead of the group at hand; null: nothing is asked for

    // How far ahead, in bytes: whole groups, unless they are so large that this is too far.
    static int64_t distance(int64_t next_codes) {
        constexpr int64_t LEAST = CODES_AHEAD * (LINES / J);
        return next_codes < LEAST ? (LEAST + next_codes - 1) / next_codes * next_codes : LEAST;
    }
    // Beside eight `i` of the group.
    template <int BITS>
    void ask(int64_t i) const {
        if (at == nullptr) return;
        const char* from = at + i * Eight<BITS>::LOW_BYTES;
#pragma GCC unroll 8
        for (int line = 0; line < J * int(Eight<BITS>::LOW_BYTES / STEP_BYTES); line++)
            __builtin_prefetch(from + line / J * STEP_BYTES + line % J * 64);
    }
    // What lies behind the eights of the group: higher bits and scales.
    void ask_for_rest(int64_t begin, int64_t end) const {
        if (at == nullptr) return;
        for (int64_t i = begin; i < end; i += EACH) __builtin_prefetch(at + i);
    }
};

template <class D, int BITS, int R, int J>
static inline void add_steps(v16i (&sum)[R][J], const GroupRun& run, const char* codes, const char* x,
                             const CodesAhead<J>& ahead) {
    constexpr int TOGETHER = Eight<BITS>::TOGETHER;
    const CodePlace place_of{codes, codes + run.high_at, run.levels};
    for (int64_t i = 0; i < run.steps / 2; i += TOGETHER) {
#pragma GCC unroll 4
        for (int place = 0; place < TOGETHER; place++) {
            ahead.template ask<BITS>(i + place);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                v16u weights[J];
#pragma GCC unroll 4
                for (int j = 0; j < J; j++)
                    weights[j] = place_of.template eight<BITS>(i / TOGETHER, place, j).step(half);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    typename D::Input inputs = D::input(x + r * run.x_stride + D::BYTES * (2 * (i + place) + half));
#pragma GCC unroll 4
                    for (int j = 0; j < J; j++) sum[r][j] = add_dot<D>(sum[r][j], weights[j], inputs);
                }
            }
        }
    }
}

// As add_steps, for NarrowDot: the eights from `i` on that share a line of higher bits or a sum of 16 bits.
template <class D, int BITS, int R, int J, bool BEGINS>
static inline __attribute__((always_inline)) void add_narrow_eights(v16i (&sum)[R][J], const GroupRun& run, int64_t g,
                                                                    int64_t i, const char* codes, const char* x,
                                                                    const CodesAhead<J>& ahead) {
    constexpr int TOGETHER = Eight<BITS>::TOGETHER, EIGHTS = D::STEPS / 2;
    const CodePlace place_of{codes, codes + run.high_at, run.levels};
#pragma GCC unroll 4
    for (int first = 0; first < std::max(TOGETHER, EIGHTS); first += EIGHTS) {
        v16i narrow[R][J] = {};
#pragma GCC unroll 4
        for (int eight = first; eight < first + EIGHTS; eight++) {
            if (TOGETHER == 1 && i + eight >= run.steps / 2) break;
            ahead.template ask<BITS>(i + eight);
            const int64_t line = TOGETHER == 1 ? i + eight : i / TOGETHER;
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const char* at = x + D::BYTES * (2 * (i + eight) + half);
                auto weights = [&](int j) { return place_of.template eight<BITS>(line, eight % TOGETHER, j).step(half); };
                auto add = [&](int r, int j, v16u w, native_i input) {
                    narrow[r][j] = D::add(narrow[r][j], D::multiply(w, input));
                };
                if constexpr (R <= 2) {  // few registers hold all inputs
                    native_i inputs[R];
#pragma GCC unroll 2
                    for (int r = 0; r < R; r++) inputs[r] = D::input(at + r * run.x_stride);
#pragma GCC unroll 4
                    for (int j = 0; j < J; j++) {
                        const v16u w = weights(j);
#pragma GCC unroll 2
                        for (int r = 0; r < R; r++) add(r, j, w, inputs[r]);
                    }
                } else {
                    v16u w[J];
#pragma GCC unroll 4
                    for (int j = 0; j < J; j++) w[j] = weights(j);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const native_i input = D::input(at + r * run.x_stride);
#pragma GCC unroll 4
                        for (int j = 0; j < J; j++) add(r, j, w[j], input);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < J; j++)
                sum[r][j] = D::widen(BEGINS && first == 0 ? run.begin_of(g, r, j) : sum[r][j], narrow[r][j]);
        }
    }
}

// The sums of group g, not scaled.
template <class D, int BITS, int R, int J>
static inline void sum_group(v16i (&sum)[R][J], const GroupRun& run, int64_t g, const char* codes, const char* x,
                             const CodesAhead<J>& ahead) {
    if constexpr (D::STEPS > 0) {
        constexpr int TOGETHER = std::max(Eight<BITS>::TOGETHER, D::STEPS / 2);
        add_narrow_eights<D, BITS, R, J, true>(sum, run, g, 0, codes, x, ahead);
        for (int64_t i = TOGETHER; i < run.steps / 2; i += TOGETHER)
            add_narrow_eights<D, BITS, R, J, false>(sum, run, g, i, codes, x, ahead);
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) sum[r][j] = run.begin_of(g, r, j);
        }
        add_steps<D, BITS, R, J>(sum, run, codes, x, ahead);
    }
}

// Add the sums of group g, scaled, to acc.
template <bool OFFSETS, int R, int J>
static inline void add_scaled(const v16i (&sum)[R][J], const GroupRun& run, int64_t g) {
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) {
        v16f scale = run.scales->scale(run.group + g, run.line + j), offset = splat(0.0f);
        if (OFFSETS) offset = run.scales->offset(run.group + g, run.line + j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float* acc = run.acc + r * STRIP + 16 * j;
            v16f products = to_floats(sum[r][j]) * splat(((const float*)(run.input_scales + r * run.x_stride))[g]);
            v16f total = fma(products, scale, load(acc));
            if (OFFSETS) total = fma(splat(((const float*)(run.sums + r * run.x_stride))[g]), offset, total);
            store(acc, total);
        }
    }
}

// One row by byte dots takes so few instructions that asking holds up the processor's own requests: measured on Zen 4,
// not where tiles are.
template <class D, int R>
constexpr bool READS_ALONE = R == 1 && STEMMA_AVX512_BF16 && !STEMMA_AMX && std::is_same<D, ByteDot>::value;

template <class D, int BITS, int R, int J>
static void run_groups(const GroupRun& run, bool asks) {
    const char *codes = run.codes, *x = run.x;
    const int64_t distance = CodesAhead<J>::distance(run.next_codes);
    for (int64_t g = 0; g < run.count; g++, codes += run.next_codes, x += run.next_x) {
        v16i sum[R][J];
        const CodesAhead<J> ahead{asks && !READS_ALONE<D, R> ? codes + distance : nullptr};
        sum_group<D, BITS, R, J>(sum, run, g, codes, x, ahead);
        if (run.stops) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) Memory<v16i>::store(run.partial + r * STRIP + 16 * j, sum[r][j]);
            }
            continue;
        }
        const int64_t eights_bytes = run.steps / 2 * Eight<BITS>::LOW_BYTES;
        if (!run.resumes) ahead.ask_for_rest(eights_bytes, run.next_codes);
        const bool first = run.first && g == 0;
        if (first) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) store(run.acc + r * STRIP + 16 * j, splat(0.0f));
            }
        }
        run.scales->has_offsets ? add_scaled<true>(sum, run, g) : add_scaled<false>(sum, run, g);
    }
}

template <class D, int BITS, int J>
static void run_rows(int rows, const GroupRun& run, bool asks) {
    constexpr int MOST = HELD == 32 ? GROUP : HELD == 8 ? (J == 4 ? 1 : J == 2 ? 2 : 6) : GROUP;
#define CASE(R) \
    case R:     \
        if constexpr (R <= MOST) return run_groups<D, BITS, R, J>(run, asks);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

// All rows and lines of a run; `asks`: memory is the limit.
template <class D, int BITS>
static void run_lines(int lines, int rows, const GroupRun& run, bool asks) {
    const int width = lines_at_once(rows, lines), groups = (rows + GROUP - 1) / GROUP;
    for (int line = 0; line < lines; line += width) {
        for (int i = 0; i < groups; i++) {
            int begin = rows * i / groups, end = rows * (i + 1) / groups;
            GroupRun part = run.at_row(begin);
            part.codes += 64 * line, part.line += line;
            part.acc += 16 * line, part.partial += 16 * line;
            auto kernel = run_rows<D, BITS, 1>;
            if constexpr (HELD >= 8) kernel = width == 4 ? run_rows<D, BITS, 4> : kernel;
            if constexpr (HELD == 8) kernel = width == 2 ? run_rows<D, BITS, 2> : kernel;
            kernel(end - begin, part, asks && i == 0);
        }
    }
}
