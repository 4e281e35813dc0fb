// Sums of products of inputs as they are with a strip of codes, on vectors. A group's products are summed from zero, in
// the order of its pairs; groups are added up in their order, whatever the number of rows:
//
//     acc = acc + scale * (sum of numbers * inputs), then acc + (offset - surplus * scale) * (sum of inputs).
//
// Where inputs are integers (FIXED_POINT), so are the sums of a piece, which begin with what takes the surplus off; they
// take the piece's power of two, and pieces are added up in float.
#pragma once

#include "code_inputs.h"
#include "dots.h"

// Models in float32 keep more digits than numbers that are all too large by the same would leave: codes themselves are
// multiplied there.
struct CenteredDot : WideDot {};
template <class K>
constexpr bool CENTERED = std::is_same<K, CenteredDot>::value;
template <class K>
constexpr bool INTEGERS = std::is_same<K, FixedDot>::value;
template <class K>
using SumOf = std::conditional_t<INTEGERS<K>, v16i, v16f>;

constexpr int64_t ROW_AHEAD = 8192;     // bytes to the codes that one row asks for
constexpr int64_t GROUPS_TOGETHER = 8;  // whose sums wait as integers until all of them are scaled

// Scales and offsets of a group as floats, for the lines from one on.
struct ScaledGroup {
    alignas(64) float scale[STRIP], offset[STRIP];
};

// Ask for those of group `group`.
static inline void ask_for_scales(const GroupScales& scales, int64_t group) {
    const char* at = scales.at + group * scales.next;
    const int numbers = scales.has_offsets ? 2 : 1;
    for (int i = 0; i < scales.scale_bytes * numbers; i++) __builtin_prefetch(at + 64 * i);
    if (scales.scale_bytes == 1 && group % (1 << scales.unit_shift) == 0)
        for (int i = 0; i < 2 * numbers; i++)
            __builtin_prefetch(scales.units + (group >> scales.unit_shift) * scales.next_unit + 64 * i);
}

// Line `line` of numbers of `count` groups from `first` on, a ScaledGroup apart.
template <int SCALE_BYTES>
static inline void read_line(const GroupScales& scales, int64_t first, int64_t count, int64_t line, float* out) {
    const char* from = scales.at + first * scales.next + 16 * line * SCALE_BYTES;
    v16f unit = splat(0.0f);
    for (int64_t g = 0; g < count; g++, from += scales.next, out += sizeof(ScaledGroup) / sizeof(float)) {
        if constexpr (SCALE_BYTES == 1) {
            if (g == 0 || (first + g) % (1 << scales.unit_shift) == 0) unit = scales.unit(first + g, 16 * line);
            store(out, to_floats(load_bytes((const int8_t*)from)) * unit);
        } else {
            store(out, SCALE_BYTES == 2 ? load_half((const uint16_t*)from) : load((const float*)from));
        }
    }
}

// Scales, and offsets if there are any, of `count` groups from `first` on.
static inline void read_scales(const GroupScales& scales, int64_t first, int64_t count, int lines, ScaledGroup* out) {
    auto read = scales.scale_bytes == 1 ? read_line<1> : scales.scale_bytes == 2 ? read_line<2> : read_line<4>;
    for (int j = 0; j < lines; j++) {
        read(scales, first, count, j, out->scale + 16 * j);
        if (scales.has_offsets) read(scales, first, count, LINES + j, out->offset + 16 * j);
    }
}

// A run of groups of a strip, or a piece of one group, for some rows.
struct CodeRun {
    const char* codes;    // of the first group, as they lie, or unpacked as pairs
    int64_t next_codes;   // bytes to the next group's
    int64_t high_at;      // bytes from a group's codes to its higher bits
    const GroupScales* scales;
    const Levels* levels;
    float surplus;        // of each number that is multiplied: taken off it before, or by the offset after
    bool is_centered;
    int64_t group, count; // the first one, and how many
    int64_t piece;        // integers: of the first group
    const ScaledGroup* floats;  // integers: scales and offsets of these groups
    int64_t groups_ahead;       // integers: how far ahead they are asked for
    int64_t eights;       // of each group, or of the piece
    const char *x, *sums; // row 0's inputs of the first group, and the sums of all groups
    const char *starts, *input_scales;  // integers: of all pieces
    int64_t x_stride, next_x;
    float* acc;           // [rows][STRIP]
    float* partial;       // likewise: sums of a group of which this isn't the first or the last piece
    bool resumes, stops;
    int line;             // of those that `codes` and `scales` begin with

    CodeRun at_rows(int64_t row, int to_line) const {
        CodeRun run = *this;
        run.x += row * x_stride, run.sums += row * x_stride;
        run.starts += row * x_stride, run.input_scales += row * x_stride;
        run.codes += 64 * to_line, run.line += to_line;
        run.acc += row * STRIP + 16 * to_line, run.partial += row * STRIP + 16 * to_line;
        return run;
    }
    v16f scale(int64_t g, int j) const { return scales->scale(group + g, line + j); }
    v16f shift(int64_t g, int j, v16f scale) const {
        return fma(splat(is_centered ? 0.0f : -surplus), scale, scales->offset(group + g, line + j));
    }
    float sum(int64_t g, int64_t row) const { return ((const float*)(sums + row * x_stride))[group + g]; }
    v16i start(int64_t g, int64_t row) const { return splat(((const int32_t*)(starts + row * x_stride))[piece + g]); }
    float input_scale(int64_t g, int64_t row) const {
        return ((const float*)(input_scales + row * x_stride))[piece + g];
    }
};

// Add sums of group g, J lines of R rows that sums(r, j) returns, to acc.
template <int R, int J, class F>
static inline __attribute__((always_inline)) void add_scaled_group(const CodeRun& run, int64_t g, F&& sums) {
    const bool first = run.group + g == 0;
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) {
        const v16f scale = run.scale(g, j), shift = run.shift(g, j, scale);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            float* acc = run.acc + r * STRIP + 16 * j;
            const v16f before = first ? splat(0.0f) : load(acc);
            store(acc, fma(splat(run.sum(g, r)), shift, fma(scale, sums(r, j), before)));
        }
    }
}

template <class K, int BITS>
static inline typename K::Line line_of_codes(const Eight<BITS>& eight, int k, int part) {
    if constexpr (INTEGERS<K>) return as_int(eight.integers(k));
    else if constexpr (K::PARTS == 1) return (typename K::Line)eight.pair(k);
    else return eight.single(k, part);
}

template <class K>
static inline typename K::Line centered(typename K::Line weights, float surplus) {
    if constexpr (CENTERED<K>) return weights - splat(surplus);
    else return weights;
}

template <class K, int R, int J>
static inline __attribute__((always_inline)) void add_pairs(SumOf<K> (&sum)[R][J], const typename K::Line (&weights)[J],
                                                            const char* x, int64_t x_stride, int part) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const typename K::Input input = K::input(x + r * x_stride, part);
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sum[r][j] = K::add(sum[r][j], weights[j], input);
    }
}

// Sums of a group or a piece of it; BITS is 0 where codes are unpacked.
template <class K, int BITS, int R, int J>
static inline __attribute__((always_inline)) void add_eights(SumOf<K> (&sum)[R][J], const CodeRun& run, const char* codes,
                                                             const char* x) {
    constexpr int STEP = K::BYTES;
    if constexpr (BITS == 0) {
        for (int64_t i = 0; i < PAIRS_OF_EIGHT * run.eights; i++, codes += STEP_BYTES, x += STEP) {
#pragma GCC unroll 2
            for (int part = 0; part < K::PARTS; part++) {
                typename K::Line weights[J];
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) weights[j] = centered<K>(K::line(codes + 64 * j, part), run.surplus);
                add_pairs<K, R, J>(sum, weights, x, run.x_stride, part);
            }
        }
    } else {
        constexpr int TOGETHER = Eight<BITS>::TOGETHER;
        const CodePlace place_of{codes, codes + run.high_at, run.levels};
        for (int64_t i = 0; i < run.eights; i += TOGETHER) {
#pragma GCC unroll 4
            for (int place = 0; place < TOGETHER; place++, x += PAIRS_OF_EIGHT * STEP) {
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) {
                    const Eight<BITS> eight = place_of.template eight<BITS>(i / TOGETHER, place, j);
                    const int64_t distance = !INTEGERS<K> ? 4096 : J < LINES ? run.groups_ahead * run.next_codes : ROW_AHEAD;
                    const char* ahead = codes + (i + place) * Eight<BITS>::LOW_BYTES + 64 * j + distance;
                    __builtin_prefetch(ahead);
                    if (BITS == 8) __builtin_prefetch(ahead + STEP_BYTES);
                    if (INTEGERS<K> && TOGETHER > 1 && place == 0)
                        __builtin_prefetch(place_of.high + i / TOGETHER * STEP_BYTES + 64 * j + distance);
#pragma GCC unroll 4
                    for (int k = 0; k < PAIRS_OF_EIGHT; k++) {
#pragma GCC unroll 2
                        for (int part = 0; part < K::PARTS; part++) {
                            const auto weights = centered<K>(line_of_codes<K, BITS>(eight, k, part), run.surplus);
#pragma GCC unroll 8
                            for (int r = 0; r < R; r++)
                                sum[r][j] = K::add(sum[r][j], weights, K::input(x + r * run.x_stride + k * STEP, part));
                        }
                    }
                }
            }
        }
    }
}

// Apart from the sums: where these fill the registers, scales of either form would drive them out.
template <int R, int J>
static __attribute__((noinline)) void add_scaled_apart(const CodeRun& run, int64_t g, const v16f (&sum)[R][J]) {
    add_scaled_group<R, J>(run, g, [&](int r, int j) { return sum[r][j]; });
}

// The same for integers of up to GROUPS_TOGETHER groups, [group][R][J][16], or of a piece of one.
template <bool OFFSETS, int R, int J>
static inline void add_scaled_integers(const CodeRun& run, const int32_t* sums) {
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) {
            float *acc = run.acc + r * STRIP + 16 * j, *partial = run.partial + r * STRIP + 16 * j;
            v16f total = run.group == 0 ? splat(0.0f) : load(acc);
            for (int64_t g = 0; g < run.count; g++) {
                v16f sum = to_floats(load(sums + ((g * R + r) * J + j) * 16)) * run.input_scale(g, r);
                if (run.resumes) sum = load(partial) + sum;
                if (run.stops) {
                    store(partial, sum);
                    continue;
                }
                total = fma(load(run.floats[g].scale + 16 * (run.line + j)), sum, total);
                if (OFFSETS) total = fma(splat(run.sum(g, r)), load(run.floats[g].offset + 16 * (run.line + j)), total);
            }
            if (!run.stops) store(acc, total);
        }
    }
}

template <int BITS, int R, int J>
static void run_integer_groups(const CodeRun& run) {
    alignas(64) int32_t sums[GROUPS_TOGETHER * R * J * 16];
    const char *codes = run.codes, *x = run.x;
    for (int64_t g = 0; g < run.count; g++, codes += run.next_codes, x += run.next_x) {
        v16i sum[R][J];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) sum[r][j] = run.start(g, r);
        }
        add_eights<FixedDot, BITS, R, J>(sum, run, codes, x);
        if (BITS != 0 && run.line == 0) ask_for_scales(*run.scales, run.group + run.groups_ahead + g);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) Memory<v16i>::store(sums + ((g * R + r) * J + j) * 16, sum[r][j]);
        }
    }
    run.scales->has_offsets ? add_scaled_integers<true, R, J>(run, sums) : add_scaled_integers<false, R, J>(run, sums);
}

// One row of a group's four lines, its scales straight from where they lie: apart from the sums, or registers would not do.
template <int SCALE_BYTES, bool OFFSETS>
static __attribute__((noinline)) void add_scaled_row(const CodeRun& run, int64_t g, const int32_t* sums) {
    const float input_scale = run.input_scale(g, 0);
    const v16f sum = splat(run.sum(g, 0));
#pragma GCC unroll 4
    for (int j = 0; j < LINES; j++) {
        const v16f before = g == 0 ? splat(0.0f) : load(run.acc + 16 * j);
        const v16f scale = run.scales->numbers_of<SCALE_BYTES>(g, 16 * j);
        v16f total = fma(scale, to_floats(load(sums + 16 * j)) * input_scale, before);
        if (OFFSETS) total = fma(sum, run.scales->numbers_of<SCALE_BYTES>(g, STRIP + 16 * j), total);
        store(run.acc + 16 * j, total);
    }
}

// All groups of a strip, each a piece, for one row. A step waits for codes: so that they are asked for all the time, each
// group is scaled at once.
template <int BITS>
static void run_integer_row(const CodeRun& run) {
    const int bytes = run.scales->scale_bytes;
    auto add = bytes == 1 ? add_scaled_row<1, false> : bytes == 2 ? add_scaled_row<2, false> : add_scaled_row<4, false>;
    if (run.scales->has_offsets)
        add = bytes == 1 ? add_scaled_row<1, true> : bytes == 2 ? add_scaled_row<2, true> : add_scaled_row<4, true>;
    alignas(64) int32_t sums[STRIP];
    const char *codes = run.codes, *x = run.x;
    for (int64_t g = 0; g < run.count; g++, codes += run.next_codes, x += run.next_x) {
        v16i sum[1][LINES];
#pragma GCC unroll 4
        for (int j = 0; j < LINES; j++) sum[0][j] = run.start(g, 0);
        add_eights<FixedDot, BITS, 1, LINES>(sum, run, codes, x);
#pragma GCC unroll 4
        for (int j = 0; j < LINES; j++) Memory<v16i>::store(sums + 16 * j, sum[0][j]);
        ask_for_scales(*run.scales, g + ROW_AHEAD / run.next_codes);
        add(run, g, sums);
    }
}

template <class K, int BITS, int R, int J>
static void run_code_groups(const CodeRun& run) {
    if constexpr (INTEGERS<K>) {
        run_integer_groups<BITS, R, J>(run);
    } else {
        const char *codes = run.codes, *x = run.x;
        for (int64_t g = 0; g < run.count; g++, codes += run.next_codes, x += run.next_x) {
            v16f sum[R][J];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                for (int j = 0; j < J; j++) sum[r][j] = run.resumes ? load(run.partial + r * STRIP + 16 * j) : splat(0.0f);
            }
            add_eights<K, BITS, R, J>(sum, run, codes, x);
            if (run.stops) {
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
                    for (int j = 0; j < J; j++) store(run.partial + r * STRIP + 16 * j, sum[r][j]);
                }
            } else if constexpr (NATIVE == 8 && R > 4) {
                add_scaled_apart(run, g, sum);
            } else {
                add_scaled_group<R, J>(run, g, [&](int r, int j) { return sum[r][j]; });
            }
        }
    }
}

constexpr int MOST_PACKED_ROWS = 4;  // up to here codes are taken apart in registers

template <class K, int BITS, int J>
static void run_code_rows(int rows, const CodeRun& run) {
    constexpr int FITTING = HELD == 32 ? GROUP : HELD == 8 ? (J == 4 ? 1 : J == 2 ? 2 : 6) : GROUP;
    constexpr int MOST = BITS == 0 ? FITTING : std::min(FITTING, MOST_PACKED_ROWS);
#define CASE(R) \
    case R:     \
        if constexpr (R <= MOST) return run_code_groups<K, BITS, R, J>(run);
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

// All rows and lines of a run.
template <class K, int BITS>
static void run_code_lines(int lines, int rows, const CodeRun& run) {
    constexpr int MOST = BITS == 0 ? GROUP : std::min(GROUP, MOST_PACKED_ROWS);
    const int groups = (rows + MOST - 1) / MOST, width = lines_at_once((rows + groups - 1) / groups, lines);
    for (int line = 0; line < lines; line += width)
        for (int i = 0; i < groups; i++) {
            const int begin = rows * i / groups, end = rows * (i + 1) / groups;
            auto kernel = run_code_rows<K, BITS, 1>;
            if constexpr (HELD >= 8) kernel = width == 4 ? run_code_rows<K, BITS, 4> : kernel;
            if constexpr (HELD == 8) kernel = width == 2 ? run_code_rows<K, BITS, 2> : kernel;
            kernel(end - begin, run.at_rows(begin, line));
        }
}
