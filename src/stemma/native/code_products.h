// Products of inputs as they are with one strip of codes: which way is taken for how many rows.
#pragma once

#include "code_dots.h"
#include "code_tiles.h"

constexpr int64_t CHUNK_EIGHTS = PIECE_INPUTS / INPUTS_OF_EIGHT;  // 128 inputs: 16 to 32 kB of pairs that stay in L1 while all rows pass

// Sums of `rows` rows for `lines` (1 or 4) lines of a strip from line `line` on, into acc[rows][STRIP], scaled.
template <class T>
struct CodePiece {
    const Strips& w;
    int64_t strip;
    int line, lines;
    const char* x;
    int64_t x_stride;
    int rows;
    float* acc;

    void run() {
        const GroupLayout g(w);
        const CodeInputs<T> in(w);
        const char* at = g.strip(w, strip);
        const GroupScales scales(w, g, at, line);
        const Levels levels(w);
        CodeRun all{};
        all.codes = at + 64 * line, all.next_codes = g.bytes, all.high_at = g.high_at;
        all.scales = &scales, all.levels = &levels, all.surplus = surplus(w), all.is_centered = sizeof(T) == 4 || FIXED_POINT<T>;
        all.count = g.count, all.eights = g.steps / 2;
        all.x = x, all.sums = x + in.sums_at, all.starts = x + in.starts_at, all.input_scales = x + in.scales_at, all.x_stride = x_stride, all.next_x = in.group_bytes;
        all.acc = acc;
        with_bits(w.codes, [&](auto bits) { run_with<decltype(bits)::value>(all); });
    }

  private:
    template <int BITS>
    void run_with(const CodeRun& all) {
        if constexpr (CODES_ON_TILES<T>) {
#if STEMMA_AMX
            if (rows <= 16)
                return lines == LINES ? FewRows<BITS, LINES>(all, rows).run() : FewRows<BITS, 1>(all, rows).run();
            by_chunks<BITS>(all, [&](const CodeRun& run) {
                lines == LINES ? run_on_tiles<LINES>(run, rows) : run_on_tiles<1>(run, rows);
            });
#endif
        } else {
#if STEMMA_BF16_DOT
            using Dot = std::conditional_t<sizeof(T) == 4, CenteredDot, PairDot>;
#else
            using Dot = std::conditional_t<sizeof(T) == 4, CenteredDot, FixedDot>;
#endif
            const auto chunk = [&](const CodeRun& run) { run_code_lines<Dot, BITS>(lines, rows, run); };
            if (rows > MOST_PACKED_ROWS) {
                by_chunks<BITS>(all, [&](const CodeRun& run) { run_code_lines<Dot, 0>(lines, rows, run); });
            } else if constexpr (FIXED_POINT<T>) {
                if (rows == 1 && lines == LINES && all.eights <= CHUNK_EIGHTS) run_integer_row<BITS>(all);
                else by_chunks<BITS, false>(all, chunk);
            } else {
                chunk(all);
            }
        }
    }

    // Call body(run) for some groups, or a piece of one, whose codes are unpacked or stay as they lie.
    template <int BITS, bool UNPACKS = true, class F>
    void by_chunks(const CodeRun& all, F&& body) {
        constexpr int64_t EIGHT_BYTES = PAIRS_OF_EIGHT * STEP_BYTES;
        alignas(64) float partial[BLOCK_ROWS * STRIP];
        alignas(64) char pairs[CHUNK_EIGHTS * EIGHT_BYTES + STEPS_OF_TILE * STEP_BYTES];
        if (CODES_ON_TILES<T> && all.eights % 4) std::memset(pairs, 0, sizeof pairs);  // what tiles read is finite
        const int64_t most = UNPACKS ? CHUNK_EIGHTS : 2 * CHUNK_EIGHTS;
        const int64_t together = std::max<int64_t>(1, std::min(GROUPS_TOGETHER, most / all.eights));
        ScaledGroup floats[FIXED_POINT<T> ? GROUPS_TOGETHER : 1];
        for (int64_t first = 0; first < all.count; first += together) {
            CodeRun run = all;
            run.group = first, run.count = std::min(together, all.count - first), run.partial = partial;
            if constexpr (FIXED_POINT<T>) read_scales(*all.scales, first, run.count, lines, floats);
            run.floats = floats, run.groups_ahead = together;
            for (int64_t begin = 0; begin < all.eights; begin += CHUNK_EIGHTS) {
                run.eights = std::min(CHUNK_EIGHTS, all.eights - begin);
                run.resumes = begin > 0, run.stops = begin + run.eights < all.eights;
                run.x = all.x + first * all.next_x + begin * PAIRS_OF_EIGHT * CodeInputs<T>::PAIR_BYTES;
                run.piece = first * CodeInputs<T>(w).pieces + begin / CHUNK_EIGHTS;
                const int64_t low = begin * Eight<BITS>::LOW_BYTES, high = begin / Eight<BITS>::TOGETHER * STEP_BYTES;
                if (UNPACKS) run.codes = pairs, run.next_codes = run.eights * EIGHT_BYTES;
                else run.codes = all.codes + first * all.next_codes + low, run.high_at = all.high_at + high - low;
                for (int64_t g = 0; UNPACKS && g < run.count; g++) {
                    const char* group = all.codes + (first + g) * all.next_codes;
                    const CodePlace place{group + low, group + all.high_at + high, all.levels};
                    if (FIXED_POINT<T>) ask_for_scales(*all.scales, first + together + g);
                    unpack_pairs<BITS, FIXED_POINT<T>>(place, lines, run.eights, pairs + g * run.next_codes);
                }
                body(run);
            }
        }
    }
};
