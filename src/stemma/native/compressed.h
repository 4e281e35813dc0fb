// Plain bf16 weights in twelve bits each, equal to the bit.
//
// A decode step waits for its weights to come from memory, so fewer bytes are fewer milliseconds. The upper byte of a
// bf16 is its sign and its exponent but for the last bit, and the weights of 16 outputs (a line of strips.h) hardly use
// more than 8 of those exponents: from the largest down to 2^-16 of it. So each line of a strip has a table of 16 upper
// bytes, 8 of either sign, and a weight is an index of four bits into it beside its lower byte. The few weights whose
// upper byte isn't in the table, one in some 8,000, are patched. (DFloat11, arXiv:2504.11651, keeps exponents in Huffman
// codes: eleven bits a weight, but no few instructions expand a line of them.)
//
// A strip is its four tables, then quads: four steps of all lines. A line of a quad, 128 weights, takes 192 bytes: a line
// of indexes, those of steps 0 and 1 in the lower halves of bytes, then the lower bytes of steps 0 and 1, then of steps 2
// and 3. A byte's place is what unpacking bytes (VPUNPCKLBW, VPUNPCKHBW) of two lines wants.
#pragma once



#include "dots.h"

constexpr int QUAD_STEPS = 4;
constexpr int LINE_OF_QUAD = 192;                  // bytes
constexpr int QUAD_BYTES = LINES * LINE_OF_QUAD;
constexpr int TABLE_BYTES = 16;                    // of a line
constexpr int64_t INPUTS_OF_QUAD = 8;

struct Patch {      // a weight that its line's table can't tell
    uint32_t quad;
    uint16_t at;    // its place in the quad's steps as they are in a plain strip, in bytes
    uint16_t bits;
};

// Whether products at this level read compressed weights.
#define STEMMA_COMPRESSED STEMMA_AVX512

struct CompressedStrip {
    const char* tables;
    const char* quads;
    const Patch *patch, *end;

    CompressedStrip(const Strips& w, int64_t i)
        : tables(w.data + i * bytes(w)), quads(tables + LINES * TABLE_BYTES) {
        const uint32_t* starts = (const uint32_t*)w.patches;
        const Patch* all = (const Patch*)(starts + (w.count() + 2) / 2 * 2);
        patch = all + starts[i], end = all + starts[i + 1];
    }
    static int64_t num_quads(const Strips& w) { return w.k / INPUTS_OF_QUAD; }
    static int64_t bytes(const Strips& w) { return LINES * TABLE_BYTES + num_quads(w) * QUAD_BYTES; }
};

// Place of a weight in a line of a quad: which of the two lines of lower bytes, and the byte in it.
struct PlaceInQuad {
    int half, byte;

    PlaceInQuad(int step, int output, int input)
        : half(step / 2), byte(output / 4 * 16 + step % 2 * 8 + output % 4 * 2 + input) {}
};

// Row `row` of a compressed weight, into out[k].
static void take_compressed_row(const Strips& w, int64_t row, bf16* out) {
    const CompressedStrip strip(w, row / STRIP);
    const int lane = int(row % STRIP), line = lane / 16, output = lane % 16;
    const uint8_t* table = (const uint8_t*)strip.tables + line * TABLE_BYTES;
    const uint8_t* at = (const uint8_t*)strip.quads + line * LINE_OF_QUAD;
    for (int64_t i = 0; i < w.k; i++) {
        const PlaceInQuad place(int(i / 2 % QUAD_STEPS), output, int(i % 2));
        const uint8_t* quad = at + i / INPUTS_OF_QUAD * QUAD_BYTES;
        const int index = quad[place.byte] >> (4 * place.half) & 15;
        out[i].bits = uint16_t(table[index] << 8 | quad[64 + 64 * place.half + place.byte]);
    }
    for (const Patch* p = strip.patch; p < strip.end; p++)
        if (p->at % STEP_BYTES / 4 == lane)
            out[p->quad * INPUTS_OF_QUAD + p->at / STEP_BYTES * 2 + p->at / 2 % 2].bits = p->bits;
}

#if STEMMA_COMPRESSED
#if STEMMA_BF16_DOT
using CompressedDot = PairDot;
#else
using CompressedDot = WideDot;
#endif

// The four steps of a line of a quad.
struct QuadLine {
    __m512i step[QUAD_STEPS];

    QuadLine() = default;
    QuadLine(const char* at, __m512i table) {
        const __m512i lower = _mm512_set1_epi8(0x0F);
        const __m512i index = _mm512_loadu_si512(at);
        const __m512i a = _mm512_loadu_si512(at + 64), b = _mm512_loadu_si512(at + 128);
        const __m512i upper_a = _mm512_shuffle_epi8(table, _mm512_and_si512(index, lower));
        const __m512i upper_b = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(index, 4), lower));
        step[0] = _mm512_unpacklo_epi8(a, upper_a);
        step[1] = _mm512_unpackhi_epi8(a, upper_a);
        step[2] = _mm512_unpacklo_epi8(b, upper_b);
        step[3] = _mm512_unpackhi_epi8(b, upper_b);
    }
};
static inline __m512i load_table(const char* at) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)at)); }

// Patches of some lines of a strip, in order.
class PatchCursor {
  public:
    PatchCursor(const Patch* patch, const Patch* end, int line, int lines)
        : patch_(patch), end_(end), line_(line), lines_(lines) {
        skip_others();
    }
    // The quad of the next patch; `otherwise` if there is none before it.
    int64_t next_quad(int64_t otherwise) const {
        return patch_ < end_ && patch_->quad < otherwise ? patch_->quad : otherwise;
    }
    // Patch a quad whose lines lie in `steps`, `width` bytes a step.
    void apply(int64_t quad, char* steps, int width) {
        for (; patch_ < end_ && patch_->quad == quad; patch_++, skip_others())
            std::memcpy(steps + patch_->at / STEP_BYTES * width + patch_->at % STEP_BYTES - 64 * line_, &patch_->bits, 2);
    }

  private:
    const Patch *patch_, *end_;
    const int line_, lines_;

    void skip_others() {
        while (patch_ < end_ && unsigned(patch_->at % STEP_BYTES / 64 - line_) >= unsigned(lines_)) patch_++;
    }
};

// sum[r][j] += x[r] . a quad, whose lines J come from line(j).
template <int R, int J, class F>
static inline __attribute__((always_inline)) void add_quad(v16f (&sum)[R][J], const char* x, int64_t x_stride, F&& line) {
    constexpr int TOGETHER = J == 1 ? 1 : 2;  // lines; their weights and all sums fit in the registers
#pragma GCC unroll 2
    for (int begin = 0; begin < J; begin += TOGETHER) {
        QuadLine lines[TOGETHER];
#pragma GCC unroll 2
        for (int j = 0; j < TOGETHER; j++) lines[j] = line(begin + j);
#pragma GCC unroll 4
        for (int s = 0; s < QUAD_STEPS; s++) {
#pragma GCC unroll 2
            for (int part = 0; part < CompressedDot::PARTS; part++) {
                CompressedDot::Line weights[TOGETHER];
#pragma GCC unroll 2
                for (int j = 0; j < TOGETHER; j++) weights[j] = CompressedDot::line(lines[j].step[s], part);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const auto input = CompressedDot::input(x + r * x_stride + CompressedDot::BYTES * s, part);
#pragma GCC unroll 2
                    for (int j = 0; j < TOGETHER; j++)
                        sum[r][begin + j] = CompressedDot::add(sum[r][begin + j], weights[j], input);
                }
            }
        }
    }
}

// As dot_tile of dots.h for J lines of quads [begin, end); beside each quad it asks for A lines of 64 bytes from `ahead` on.
template <int R, int J, int A>
static inline void dot_quads(const char* tables, const char* w, int64_t begin, int64_t end, PatchCursor patches,
                             const char* x, int64_t x_stride, float* acc, const char* ahead, int64_t ahead_stride) {
    v16f sum[R][J];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sum[r][j] = begin == 0 ? splat(0.0f) : load(acc + r * STRIP + 16 * j);
    }
    w += begin * QUAD_BYTES, x += begin * QUAD_STEPS * CompressedDot::BYTES;
    for (int64_t i = begin;;) {
        const int64_t stop = patches.next_quad(end);
        for (; i < stop; i++) {
#pragma GCC unroll 12
            for (int a = 0; a < A; a++) __builtin_prefetch(ahead + 64 * a, 0, 3);
            add_quad(sum, x, x_stride, [&](int j) { return QuadLine(w + j * LINE_OF_QUAD, load_table(tables + j * TABLE_BYTES)); });
            w += QUAD_BYTES, x += QUAD_STEPS * CompressedDot::BYTES, ahead += ahead_stride;
        }
        if (i == end) break;
        alignas(64) char steps[QUAD_STEPS][J][64];
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) {
            const QuadLine line(w + j * LINE_OF_QUAD, load_table(tables + j * TABLE_BYTES));
#pragma GCC unroll 4
            for (int s = 0; s < QUAD_STEPS; s++) _mm512_store_si512(steps[s][j], line.step[s]);
        }
        patches.apply(i, steps[0][0], 64 * J);
        add_quad(sum, x, x_stride, [&](int j) {
            QuadLine line;
#pragma GCC unroll 4
            for (int s = 0; s < QUAD_STEPS; s++) line.step[s] = _mm512_load_si512(steps[s][j]);
            return line;
        });
        w += QUAD_BYTES, x += QUAD_STEPS * CompressedDot::BYTES, ahead += ahead_stride, i++;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) store(acc + r * STRIP + 16 * j, sum[r][j]);
    }
}

template <int J, int A>
static void dot_quads_of(int rows, const char* tables, const char* w, int64_t begin, int64_t end, PatchCursor patches,
                         const char* x, int64_t x_stride, float* acc, const char* ahead, int64_t ahead_stride) {
    constexpr int LEAST = J == 2 ? 4 : 1, MOST = J == 4 ? 4 : J == 2 ? 8 : 12;
#define CASE(R)                                \
    case R:                                    \
        if constexpr (R >= LEAST && R <= MOST) \
            return dot_quads<R, J, A>(tables, w, begin, end, patches, x, x_stride, acc, ahead, ahead_stride);
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

constexpr int MOST_DIRECT_ROWS = 16;  // up to here weights are expanded in registers, for each group of rows
constexpr int64_t QUADS_AHEAD = 6;    // that a single pass asks for

// Patch quads [begin, end), laid out as plain steps in `steps`.
static void patch_quads(int64_t begin, int64_t end, PatchCursor& patches, char* steps) {
    for (int64_t quad = patches.next_quad(end); quad < end; quad = patches.next_quad(end))
        patches.apply(quad, steps + (quad - begin) * QUAD_STEPS * STEP_BYTES, STEP_BYTES);
}

// Ask for the line of a quad that is expanded some quads later, into L2: into L1 it would wait for the few buffers of
// L1's misses.
static inline void ask_for_line(const char* w) {
    constexpr int AHEAD = 8 * QUAD_BYTES;
#pragma GCC unroll 3
    for (int i = 0; i < LINE_OF_QUAD; i += 64) __builtin_prefetch(w + AHEAD + i, 0, 2);
}

// Lay quads [begin, end) of `lines` lines out as plain steps in `out`, patched.
static void expand_quads(const CompressedStrip& strip, int line, int lines, int64_t begin, int64_t end,
                         PatchCursor& patches, char* out) {
    __m512i table[LINES];
    for (int j = 0; j < lines; j++) table[j] = load_table(strip.tables + (line + j) * TABLE_BYTES);
    const char* w = strip.quads + begin * QUAD_BYTES + line * LINE_OF_QUAD;
    char* to = out;
    for (int64_t i = begin; i < end; i++, w += QUAD_BYTES, to += QUAD_STEPS * STEP_BYTES) {
        for (int j = 0; j < lines; j++) {
            if (STEMMA_AMX) ask_for_line(w + j * LINE_OF_QUAD);
            const QuadLine quad(w + j * LINE_OF_QUAD, table[j]);
#pragma GCC unroll 4
            for (int s = 0; s < QUAD_STEPS; s++) _mm512_store_si512(to + s * STEP_BYTES + 64 * j, quad.step[s]);
        }
    }
    patch_quads(begin, end, patches, out);
}

// Expands a line of a quad, of J, beside each step of a pass: what follows is multiplied by the next passes.
template <int J>
struct Expanding {
    const char *tables, *quads;
    int64_t num_lines;  // of quads, J each
    char* out;

    void operator()(int64_t i) const {
        if (i >= num_lines) return;
        const char* from = quads + i / J * QUAD_BYTES + i % J * LINE_OF_QUAD;
        if (STEMMA_AMX) ask_for_line(from);
        const QuadLine line(from, load_table(tables + i % J * TABLE_BYTES));
        char* to = out + i / J * QUAD_STEPS * STEP_BYTES + i % J * 64;
#pragma GCC unroll 4
        for (int s = 0; s < QUAD_STEPS; s++) _mm512_store_si512(to + s * STEP_BYTES, line.step[s]);
    }
};

// Sums of a few rows for the whole of `lines` (1 or 4) lines: groups of rows take two lines at a time, up to 4 rows all four,
// so that each weight is expanded once for a group and sums fill the registers.
static void dot_quads_directly(const CompressedStrip& strip, int64_t quads, int line, int lines, const char* x,
                               int64_t x_stride, int rows, float* acc) {
    const int width = lines == 1 ? 1 : rows <= 4 ? 4 : 2;
    const int most = width == 4 ? 4 : width == 2 ? 8 : 12, groups = (rows + most - 1) / most;
    const bool single = groups * lines == width;
    const int64_t chunk = single ? quads : 8 * groups;  // inputs stay in L1 while lines pass
    const int64_t asked_stride = lines == 1 ? QUAD_BYTES : width * LINE_OF_QUAD / groups;
    const char* w = strip.quads + line * LINE_OF_QUAD;
    const Patch* patch = strip.patch;
    for (int64_t begin = 0; begin < quads; begin += chunk) {
        const int64_t end = std::min(quads, begin + chunk);
        const char* ahead = w + (single ? begin + QUADS_AHEAD : end) * QUAD_BYTES;
        for (int g = 0; g < groups; g++) {
            const int first = rows * g / groups, last = rows * (g + 1) / groups;
            for (int j = 0; j < lines; j += width) {
                auto run = width == 4   ? dot_quads_of<4, 12>
                           : width == 2 ? (groups == 1 ? dot_quads_of<2, 6> : dot_quads_of<2, 3>)
                                        : (g == 0 ? dot_quads_of<1, 3> : dot_quads_of<1, 0>);
                const PatchCursor patches(patch, strip.end, line + j, width);
                run(last - first, strip.tables + (line + j) * TABLE_BYTES, w + j * LINE_OF_QUAD, begin, end, patches,
                    x + first * x_stride, x_stride, acc + first * STRIP + 16 * j, ahead, asked_stride);
                ahead += (end - begin) * asked_stride;
            }
        }
        while (patch < strip.end && patch->quad < end) patch++;
    }
}
#endif
