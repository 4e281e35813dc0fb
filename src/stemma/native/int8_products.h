// Products of int8 inputs with one strip of codes: which way is taken for how many rows.
#pragma once

#include "int8_dots.h"
#include "int8_tiles.h"

constexpr int FEW_ROWS = 2 * GROUP;  // up to here halves of bytes are unpacked in registers for each group of rows

// Sums of `rows` rows for `lines` (1 or 4) lines of a strip from line `line` on, into acc[rows][STRIP], scaled.
// Room for whole tiles of 16 rows must be behind both acc and x on processors with tiles.
struct Int8Piece {
    const Strips& w;
    const char* strip;
    int line, lines;
    const char* x;
    int64_t x_stride;
    int rows;
    float* acc;

    void run() {
        const GroupLayout g(w);
        const Int8Layout in(w);
        GroupRun run{};
        const GroupScales scales(w, g, strip, line);
        const Levels levels(w);
        run.codes = strip + 64 * line, run.next_codes = g.bytes, run.high_at = g.high_at, run.scales = &scales, run.levels = &levels;
        run.count = g.count, run.steps = g.steps;
        run.x = x, run.x_stride = x_stride, run.next_x = in.group_bytes;
        run.starts = x + in.starts_at, run.sums = x + in.sums_at, run.input_scales = x + in.scales_at;
        run.acc = acc, run.first = true;
        with_bits(w.codes, [&](auto bits) {
            constexpr int BITS = decltype(bits)::value;
            if (has_byte_dots()) return run_with<ByteDot, BITS>(run, true);
#if STEMMA_NARROW
            constexpr int STEPS = narrow_steps(BITS == LOOKED_UP ? 5 : BITS);
            if constexpr (STEPS > 0)
                if (inputs_are_bytes(w)) return run_with<NarrowDot<STEPS>, BITS>(run, false);
#endif
            run_with<PairwiseDot, BITS>(run, false);
        });
    }

  private:
    template <class D, int BITS>
    void run_with(const GroupRun& run, bool bytes) {
        if (STEMMA_AMX && (rows >= 16 || !bytes)) {
            const TileShape shape(16, int(std::min<int64_t>(STEPS_OF_TILE, run.steps)));
            by_chunks<BITS>(run, BITS != 8, [&](const GroupRun& part) { on_tiles(part, lines, rows); });
        } else if (rows <= GROUP && lines_at_once(rows, lines) == lines) {  // memory is the limit: weights pass once, as they lie
            run_lines<D, BITS>(lines, rows, run, true);
        } else if (BITS != 8 && rows <= FEW_ROWS) {
            by_chunks<BITS>(run, false, [&](const GroupRun& part) { run_lines<D, BITS>(lines, rows, part, true); });
        } else {
            by_chunks<BITS>(run, BITS != 8, [&](const GroupRun& part) { run_lines<D, 8>(lines, rows, part, BITS == 8); });
        }
    }

    // Call body(part) for runs whose codes stay in L1 while all rows pass: some groups, or a piece of one. `unpacks`:
    // halves of bytes become bytes, once for all rows.
    template <int BITS, class F>
    void by_chunks(const GroupRun& whole, bool unpacks, F&& body) {
        alignas(64) int32_t partial[BLOCK_ROWS * STRIP];
        alignas(64) char unpacked[CHUNK_STEPS * STEP_BYTES + PAST_CODES];
        const int64_t code_bytes = inputs_are_bytes(w) ? 4 : 8, groups = std::max<int64_t>(1, CHUNK_STEPS / whole.steps);
        constexpr int64_t STEPS_TOGETHER = 2 * Eight<BITS>::TOGETHER;
        for (int64_t g = 0; g < whole.count; g += groups) {
            GroupRun run = whole;
            run.count = std::min(groups, whole.count - g), run.partial = partial, run.first = g == 0;
            run.group = g, run.x += g * whole.next_x, run.starts += 4 * g, run.sums += 4 * g, run.input_scales += 4 * g;
            for (int64_t begin = 0; begin < whole.steps; begin += CHUNK_STEPS) {
                GroupRun piece = run;
                piece.steps = std::min<int64_t>(CHUNK_STEPS, whole.steps - begin);
                piece.resumes = begin > 0, piece.stops = begin + piece.steps < whole.steps;
                piece.x += begin * code_bytes;
                const int64_t low = begin / 2 * Eight<BITS>::LOW_BYTES, high = begin / STEPS_TOGETHER * STEP_BYTES;
                piece.codes = whole.codes + g * whole.next_codes + low, piece.high_at += high - low;
                if (unpacks) {
                    for (int64_t i = 0; i < run.count; i++)
                        unpack_bytes<BITS>({piece.codes + i * whole.next_codes,
                                            piece.codes + i * whole.next_codes + piece.high_at, whole.levels},
                                           lines, piece.steps / 2, unpacked + i * piece.steps * STEP_BYTES);
                    piece.codes = unpacked, piece.next_codes = piece.steps * STEP_BYTES;
                }
                body(piece);
            }
        }
    }
};

// Runs it. Its unit is neither that of bf16 nor that of floats, or both would compile it (units.h).
void dot_int8(Int8Piece piece);
