// Up to 16 rows of inputs as they are times a strip of codes, on tiles: what takes time is taking codes apart, so the rest
// is kept small.
//
// Tiles of weights are unpacked some units before they are multiplied, what tile instructions read has left the store
// buffer by then. A tile's time doesn't depend on its rows, and storing sums takes as long as multiplying: so sums of
// several groups share tiles. Group q of those has rows q * R to q * R + R - 1; its inputs stand in these rows of the left
// operand and zeros in the others, whose sums stay as they are. Groups of 16 inputs share a tile of weights too, each with
// zeros where the other's inputs are.
#pragma once

#include "code_dots.h"

#if STEMMA_AMX
constexpr int EIGHTS_OF_TILE = 4;
constexpr int64_t TILE_PAIR_BYTES = STEPS_OF_TILE * STEP_BYTES;  // of four lines

// Tiles 0 to J - 1 += rows x J lines of pairs. No tile of weights is loaded again before two others were: it would wait.
template <int J>
static inline void add_unit(const char* pairs, const char* x, int64_t x_stride, int64_t unit) {
#define LINE(J_, TILE)                                   \
    if constexpr (J > J_) {                              \
        tile_loadd(TILE, pairs + 64 * J_, STEP_BYTES);   \
        tile_dpbf16ps(J_, 4, TILE);                      \
    }
    asm volatile("" ::: "memory");  // tile instructions don't tell the compiler that they read and write memory
    tile_loadd(4, x, x_stride);
    switch (unit % 3) {
        case 0: LINE(0, 5) LINE(1, 6) LINE(2, 7) LINE(3, 5) break;
        case 1: LINE(0, 6) LINE(1, 7) LINE(2, 5) LINE(3, 6) break;
        default: LINE(0, 7) LINE(1, 5) LINE(2, 6) LINE(3, 7)
    }
    asm volatile("" ::: "memory");
#undef LINE
}
template <int J>
static inline void zero_sums() {
    tile_zero(0);
    if constexpr (J > 1) {
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
}
template <int J>
static inline void store_sums(float* to) {
    constexpr int WIDTH = STRIP * 4;
    tile_stored(0, to, WIDTH);
    if constexpr (J > 1) {
        tile_stored(1, to + 16, WIDTH);
        tile_stored(2, to + 32, WIDTH);
        tile_stored(3, to + 48, WIDTH);
    }
    asm volatile("" ::: "memory");
}

template <int BITS, int J>
class FewRows {
  public:
    FewRows(const CodeRun& run, int rows)
        : run_(run), rows_(rows), is_half_(run.eights * 2 == EIGHTS_OF_TILE && rows <= 8),
          tiles_((run.eights + EIGHTS_OF_TILE - 1) / EIGHTS_OF_TILE),
          is_staged_(is_half_ || (run.eights == EIGHTS_OF_TILE && rows <= 8)),
          together_(!is_staged_ ? 1 : rows <= 2 ? 8 : rows <= 4 ? 4 : 2),
          all_(is_half_ ? (run.count + 1) / 2 : run.count * tiles_) {}

    void run() {
        const int steps = is_half_ ? STEPS_OF_TILE : std::min(STEPS_OF_TILE, int(run_.eights) * PAIRS_OF_EIGHT);
        const TileShape shape(together_ * rows_, steps);
        if (rows_ > 2) std::memset(partial_, 0, sizeof partial_);  // rows are added beside that no tile stores
        const bool is_ragged = is_half_ ? run_.count % 2 : run_.eights % EIGHTS_OF_TILE;
        if (is_ragged) std::memset(pairs_, 0, sizeof pairs_);  // what tiles read is finite
        if (is_staged_)
            for (auto& slot : staged_) std::memset(slot, 0, together_ * rows_ * 64);
        for (int i = 0; i < AHEAD; i++) prepare();
        const int64_t units_together = is_half_ ? together_ / 2 : tiles_;
        int64_t unit = 0;
        for (int64_t first = 0, turn = 0; first < run_.count; first += together_, turn++) {
            zero_sums<J>();
            const int64_t end = std::min(all_, unit + (is_staged_ && !is_half_ ? together_ : units_together));
            for (; unit < end; unit++) {
                prepare();
                if (is_staged_) add_unit<J>(pairs_[unit % BUFFERS], staged_[unit % SLOTS], 64, unit);
                else add_unit<J>(pairs_[unit % BUFFERS], inputs(unit), run_.x_stride, unit);
            }
            store_sums<J>(partial_[turn & 1]);
            if (turn > 0) add_groups(first - together_, turn - 1);
        }
        const int64_t turns = (run_.count + together_ - 1) / together_;
        add_groups((turns - 1) * together_, turns - 1);
    }

  private:
    static constexpr int AHEAD = 2, BUFFERS = 4, SLOTS = 8;
    const CodeRun& run_;
    const int rows_;
    const bool is_half_;       // two groups of 16 inputs share a tile of weights
    const int64_t tiles_;      // of a group
    const bool is_staged_;     // inputs stand among zeros
    const int together_;       // groups whose sums share tiles
    const int64_t all_;        // units
    int64_t prepared_ = 0;
    alignas(64) char pairs_[BUFFERS][TILE_PAIR_BYTES];
    alignas(64) char staged_[SLOTS][16 * 64];
    alignas(64) float partial_[2][16 * STRIP];

    const char* inputs(int64_t unit) const { return run_.x + unit / tiles_ * run_.next_x + unit % tiles_ * 64; }

    // Unpack the next unit's codes, and lay its inputs among zeros.
    void prepare() {
        if (prepared_ == all_) return;
        const int64_t unit = prepared_++;
        char* to = pairs_[unit % BUFFERS];
        if (is_half_) {
            const int64_t group = 2 * unit;
            for (int64_t g = group; g < std::min(group + 2, run_.count); g++) {
                unpack(g, 0, EIGHTS_OF_TILE / 2, to + (g - group) * TILE_PAIR_BYTES / 2);
                stage(unit, g, 32);
            }
        } else {
            const int64_t begin = tiles_ == 1 ? 0 : unit % tiles_ * EIGHTS_OF_TILE;
            unpack(tiles_ == 1 ? unit : unit / tiles_, begin, std::min<int64_t>(EIGHTS_OF_TILE, run_.eights - begin), to);
            if (is_staged_) stage(unit, unit, 64);
        }
    }
    void unpack(int64_t group, int64_t begin, int64_t count, char* to) const {
        const char* codes = run_.codes + group * run_.next_codes;
        const CodePlace place{codes + begin * Eight<BITS>::LOW_BYTES,
                              codes + run_.high_at + begin / Eight<BITS>::TOGETHER * STEP_BYTES, run_.levels};
        if (J == LINES && begin == 0) {  // unpacking asks for as many lines as it reads; these are left
            const char* ahead = codes + UNPACKED_AHEAD + run_.high_at + (BITS == 8 ? run_.high_at : 0);
            for (; ahead < codes + UNPACKED_AHEAD + run_.next_codes; ahead += 64) __builtin_prefetch(ahead, 0, 2);
        }
        if (count == EIGHTS_OF_TILE) unpack_pairs<BITS>(place, J, EIGHTS_OF_TILE, to);
        else unpack_pairs<BITS>(place, J, count, to);
    }
    void stage(int64_t unit, int64_t group, int bytes) {
        const int64_t among = group % together_;
        char* to = staged_[unit % SLOTS] + among * rows_ * 64 + (bytes == 64 ? 0 : group % 2 * 32);
        const char* from = run_.x + group * run_.next_x;
        for (int r = 0; r < rows_; r++) {
            if (bytes == 64) std::memcpy(to + r * 64, from + r * run_.x_stride, 64);
            else std::memcpy(to + r * 64, from + r * run_.x_stride, 32);
        }
    }
    void add_groups(int64_t first, int64_t turn) const {
        const int64_t end = std::min(first + together_, run_.count);
        const float* from = partial_[turn & 1];
        for (int64_t g = first; g < end; g++, from += rows_ * STRIP) {
            auto sums = [&](int r, int j) { return load(from + r * STRIP + 16 * j); };
            if (rows_ == 1) add_scaled_group<1, J>(run_, g, sums);
            else if (rows_ == 2) add_scaled_group<2, J>(run_, g, sums);
            else if (rows_ <= 4) add_scaled_group<4, J>(run_, g, sums);
            else if (rows_ <= 8) add_scaled_group<8, J>(run_, g, sums);
            else add_scaled_group<16, J>(run_, g, sums);
        }
    }
};
#endif
