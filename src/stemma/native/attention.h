// Attention of one work item: query rows over a run of keys, read straight from paged blocks.
//
// One order of sums per row. A row is a query token and a head. What comes out for it depends on its query, its
// keys and values and their positions, on nothing else: not on the rows beside it, the chunk it came in, what was
// cached, blocks and their size, the plan or the threads. So all paths, few rows or many, compute this:
//
// - A score is a sum over the dimensions of a head in order, fused products (of bf16 pairs where the processor has
//   them). It is capped, and what the row doesn't see is MASKED.
// - Keys are taken in tiles, and tiles in splits of SPLIT keys, both at multiples of their size from position 0. A
//   split's softmax is the online one of FlashAttention (arXiv:2205.14135), tile by tile: the maximum so far, the sum
//   of weights, the weighted values. In a tile, weights are summed by key modulo 16 and those sums in a tree;
//   values are added key by key (pair by pair). A key that the row doesn't see adds zero, which changes no sum; a
//   tile in which it sees none is as if it weren't there.
// - Splits in which the row sees a key are merged in order, the first one taken as it is.
// - The merged sum is divided once, with the head's sink in it if there is one.
//
// The products differ by instruction set, and so do the bits; one machine uses one of them for all rows.
#pragma once

#include <optional>
#include <vector>

#include "attention_decode_floats.h"
#include "attention_floats.h"
#include "attention_merge.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "plan.h"
#include "softmax.h"

// Of one KV head of an item
struct HeadState {
    RowState split, whole;  // of the split at hand, of all splits before
    float* query;           // as the scores want it
    float *split_acc, *whole_acc;  // [row][value_dim]
};

// The keys that any row of an item sees, and those that all of them see: outside the latter, tiles are masked.
struct Visible {
    int begin, end, all_begin, all_end;

    Visible() = default;
    Visible(const Item& item, const RowLimits& limits) {
        begin = all_begin = limits.low[0], end = all_end = limits.high[0];
        for (int r = 1; r < item.num_rows; r++) {
            begin = std::min(begin, limits.low[r]), all_begin = std::max(all_begin, limits.low[r]);
            end = std::max(end, limits.high[r]), all_end = std::min(all_end, limits.high[r]);
        }
        begin = std::max(begin, item.key_begin), end = std::min(end, item.key_end);
    }
};

// An item of a bundle
struct BundledItem {
    const Item* item;
    RowLimits limits;
    Visible visible;
    HeadState head;
    int64_t slot;
};

constexpr int L1_BYTES = 32 << 10;

// Floats that begin with a cache line: else each vector would lie in two.
class Floats {
  public:
    void resize(size_t count) { lines_.resize((count + LANES - 1) / LANES); }
    float* data() { return lines_.data()->floats; }

  private:
    struct alignas(64) Line {
        float floats[LANES];
    };
    std::vector<Line> lines_;
};

struct Scratch {
    Floats query, scores, keys, values, acc;
    std::vector<HeadState> heads;
    std::vector<BundledItem> bundled;
    TileTokens tokens, next_tokens;
    float alpha[ROWS];
    RowLimits limits;
    std::vector<bf16> gathered, decoded;
};

// ---- an item

// What an item's products need to know
struct ItemShape {
    int tile;
    bool paired, tiles;  // products of bf16 pairs, and those on tiles
    bool decodes;        // few rows, lanes over keys: attention_decode.h, attention_decode_floats.h

    template <class T>
    static ItemShape of(const AttendArgs& args, int num_rows) {
        ItemShape shape{args.value_dim > 256 ? TILE / 2 : TILE, false, false, false};
        shape.paired = STEMMA_AVX512_BF16 && sizeof(T) == 2 && args.key_dim % 2 == 0 && args.value_dim % 16 == 0;
#if STEMMA_AMX
        shape.tiles = shape.paired && args.key_dim % 32 == 0 && amx_ready();
#endif
        const bool fits = shape.paired || (STEMMA_FLOAT_DECODE && decodes_floats<T>(args));
        shape.decodes = fits && num_rows <= DECODE_ROWS;
        return shape;
    }
};

// Rows of an item one after another: a token of the segment, and which query head of its KV head
struct RowOfItem {
    int token, head, group;

    RowOfItem(const Plan& plan, const Item& item)
        : token(item.row_begin / plan.group_size), head(item.row_begin % plan.group_size), group(plan.group_size) {}
    void next() {
        if (++head == group) head = 0, token++;
    }
};

// Queries [dim][row], as pairs [dim / 2][row] if `paired`; rows that the item doesn't have are 0.
template <class T>
static void gather_query(const AttendArgs& args, const Plan& plan, const Item& item, int head, int width, bool paired,
                         float* query) {
    const int dim = args.key_dim;
    const int32_t* tokens = &plan.tokens[plan.segments[item.segment].token_begin];
    RowOfItem row(plan, item);
    for (int first = 0; first < width; first += LANES, query += LANES) {
        const T* rows[LANES];
        const int count = std::min(LANES, item.num_rows - first);
        for (int r = 0; r < count; r++, row.next())
            rows[r] = (const T*)args.query + tokens[row.token] * args.query_token_stride +
                      (head * row.group + row.head) * args.query_head_stride;
#if STEMMA_AVX512_BF16
        if (paired) {
            for (int p = 0; p < dim / 2; p += LANES) {
                const int some = std::min(LANES, dim / 2 - p);
                const __mmask16 mask = __mmask16((1u << some) - 1);
                __m512i pairs[LANES], turned[LANES];
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++)
                    pairs[r] = r < count ? _mm512_maskz_loadu_epi32(mask, rows[r] + 2 * p) : _mm512_setzero_si512();
                turn_keys(pairs, turned);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    if (i < some) _mm512_storeu_si512(query + size_t(p + i) * width, turned[i]);
            }
            continue;
        }
#endif
        for (int d = 0; d < dim; d++) {
            float* out = query + size_t(d) * width;
            for (int r = 0; r < count; r++) out[r] = to_float(rows[r][d]);
            for (int r = count; r < LANES; r++) out[r] = 0;
        }
    }
}

// What each of an item's rows sees; nothing, where `width` is more than it has.
static void limit_rows(const AttendArgs& args, const Plan& plan, const Item& item, int width, RowLimits& limits) {
    const Segment& segment = plan.segments[item.segment];
    RowOfItem row(plan, item);
    for (int r = 0; r < item.num_rows; r++, row.next()) {
        int at = segment.token_begin + row.token, position = plan.positions[at];
        limits.high[r] = position + 1;
        if (args.lows) {
            limits.low[r] = args.lows[plan.tokens[at]];
            continue;
        }
        int low = args.window > 0 ? std::max(0, position - args.window + 1) : 0;
        limits.low[r] = std::max(low, std::min(args.first_key, position));
    }
    for (int r = item.num_rows; r < width; r++) limits.low[r] = limits.high[r] = 0;
}

// Cut the scratch into what the item's KV heads need.
template <class T>
static void set_up(const AttendArgs& args, const Plan& plan, const Item& item, int width, const ItemShape& shape,
                   Scratch& s) {
    size_t query_size = size_t(width) * (shape.paired ? args.key_dim / 2 : args.key_dim);
    size_t acc_size = size_t(width) * args.value_dim;
    s.query.resize(query_size * item.num_heads);
    s.acc.resize(acc_size * item.num_heads * 2);
    s.heads.resize(item.num_heads);
    if (args.format.stored != PLAIN) s.decoded.resize(size_t(DECODED_KEYS) * args.key_dim);
    s.scores.resize(size_t(TILE) * width);
    s.values.resize(size_t(TILE) * args.value_dim);
    if (!shape.paired) s.keys.resize(size_t(TILE) * args.key_dim);
    for (int h = 0; h < item.num_heads; h++) {
        HeadState& head = s.heads[h];
        head.query = s.query.data() + h * query_size;
        head.split_acc = s.acc.data() + 2 * h * acc_size;
        head.whole_acc = head.split_acc + acc_size;
        head.whole.clear();
        gather_query<T>(args, plan, item, item.first_head + h, width, shape.paired, head.query);
    }
    limit_rows(args, plan, item, width, s.limits);
}

#if STEMMA_AVX512_BF16
// Scores of a tile's keys in products of pairs.
template <int NB>
static void score_pairs(const AttendArgs& args, const Plan& plan, const float* query, int kv_head, int n,
                        const ItemShape& shape, Scratch& s) {
    const int dim = args.key_dim;
    float* scores = s.scores.data();
    const auto ask = [&](int begin, int end) {  // for the values of these tokens
        if (!args.format.whole() || args.format.stored != PLAIN) return;
        for (int t = begin; t < end; t++) {
            const char* row = (const char*)s.tokens.values[t] + kv_head * args.head_stride * sizeof(bf16);
            for (int line = 0; line < 2 * args.value_dim; line += 64) __builtin_prefetch(row + line, 0, 3);
        }
    };
    const auto score = [&](Rows<bf16> keys, int count, int block_size, int64_t stride, float* out) {
#if STEMMA_AMX
        if (shape.tiles)
            return scores_of_tiles<NB>(query, keys, count, block_size, stride, dim, s.gathered, out);
#endif
        scores_of_pairs<NB>(query, keys, count, dim, out, ask);
    };
    if (args.format.stored == PLAIN)
        return score(keys_of<bf16>(args, s.tokens, kv_head), n, plan.block_size, args.token_stride, scores);
    Decoded<bf16> decoded;
    for (int t = 0; t < n; t += DECODED_KEYS) {
        const int count = std::min(DECODED_KEYS, n - t);
        const Rows<bf16> keys = decoded.of(args, s.tokens.keys + t, kv_head, count, dim, s.decoded.data());
        score(keys, count, DECODED_KEYS, dim, scores + t * NB * LANES);
    }
}

// Values of a tile in pairs; for tiles filled up. `ask(end)` is called before values up to `end` are taken.
template <class Ask>
static void pair_values_of(const AttendArgs& args, const TileTokens& tokens, int kv_head, int n, const ItemShape& shape,
                           float* paired, Ask&& ask) {
    const auto codes = [&](auto stored) {
        pair_codes<stored.value>(args.format, tokens.values, kv_head, args.head_stride, n, args.value_dim, paired, ask);
    };
    switch (args.format.stored) {
        case PLAIN: pair_values(values_of<bf16>(args, tokens, kv_head), n, args.value_dim, paired, ask); break;
        case INT8: codes(std::integral_constant<int32_t, INT8>{}); break;
        default: codes(std::integral_constant<int32_t, FP8>{});
    }
#if STEMMA_AMX
    if (shape.tiles) fill_pairs(paired, (n + 1) / 2, args.value_dim);
#endif
}

static void pair_values_of(const AttendArgs& args, const TileTokens& tokens, int kv_head, int n, const ItemShape& shape,
                           float* paired) {
    pair_values_of(args, tokens, kv_head, n, shape, paired, [](int) {});
}

// acc = acc * alpha + weights x values; without alpha there was nothing before. The next tile's keys are asked for.
static void weigh_values(const AttendArgs& args, float* weights, int width, int rows, const float* paired, int n,
                         const float* alpha, const ItemShape& shape, float* acc, NextRows& next_keys) {
#if STEMMA_AMX
    if (shape.tiles) return weigh_tiles(weights, width, rows, paired, (n + 1) / 2, args.value_dim, alpha, acc);
#endif
    // What doesn't fill half of L1 is asked for into it: from L2, keys came half as fast.
    const bool is_near = next_keys.num_bytes() <= L1_BYTES / 2;
    weigh_pairs(weights, width, rows, paired, (n + 1) / 2, args.value_dim, alpha, acc,
                [&](int done, int all) { is_near ? next_keys.ask<true>(done, all) : next_keys.ask(done, all); });
}
#endif

template <class T>
static void to_floats(const AttendArgs& args, const void* const* tokens, int kv_head, int n, int dim, float* out) {
    if (args.format.stored == PLAIN)
        return to_floats(Rows<T>{tokens, kv_head * args.head_stride, args.format.column_stride}, n, dim, out);
    decode<T>(args, tokens, kv_head, n, dim, out);
}

// Lines of the next tile, whose tokens are in s.next_tokens; of an item's heads, those that head `h` asks for.
template <class T>
static NextRows next_rows(const AttendArgs& args, const Item& item, int h, const void* const* tokens, int num_next) {
    const KVFormat& format = args.format;
    const bool plain = format.stored == PLAIN;
    if (!format.whole()) {
        const int64_t size = plain ? sizeof(T) : 1;
        const int columns = plain ? args.key_dim : format.scale_offset + format.num_scales * int(sizeof(bf16));
        return NextRows::tiled(tokens, num_next, columns, size, format.column_stride);
    }
    const int64_t bytes = args.head_stride * int64_t(sizeof(T));  // of codes, rows whole: scales lie at their end
    const int64_t offset = plain ? item.first_head * bytes : 0;
    const int64_t row_bytes = plain ? item.num_heads * bytes : args.token_stride;
    return NextRows(tokens, num_next, offset, row_bytes, h, item.num_heads);
}

// The next tile's keys, for items of many rows. Of codes none are asked for: a token's lie with those of all heads.
template <class T>
static NextRows next_keys_of(const AttendArgs& args, const Item& item, int h, int num_next, const Scratch& s) {
    return next_rows<T>(args, item, h, s.next_tokens.keys, args.format.stored == PLAIN ? num_next : 0);
}

// One tile of one KV head, the `first` one of its split or a later one; `num_next` tokens of the next one are in
// s.next_tokens.
template <class T, int NB>
static void run_tile(const AttendArgs& args, const Plan& plan, const Item& item, int h, int key, int n, int num_next,
                     bool first, bool masked, const ItemShape& shape, Scratch& s) {
    constexpr int W = NB * LANES;
    HeadState& head = s.heads[h];
    const int dim = args.value_dim, rows = item.num_rows, kv_head = item.first_head + h;
    float* scores = s.scores.data();
#if STEMMA_AVX512_BF16
    if constexpr (sizeof(T) == 2) {
        if (shape.paired) {
            score_pairs<NB>(args, plan, head.query, kv_head, n, shape, s);
            weigh<NB>(args, s.limits, head.split, s.alpha, scores, n, key, masked, true);
            pair_values_of(args, s.tokens, kv_head, n, shape, s.values.data());
            NextRows next_keys = next_keys_of<T>(args, item, h, num_next, s);
            return weigh_values(args, scores, W, rows, s.values.data(), n, first ? nullptr : s.alpha, shape,
                                head.split_acc, next_keys);
        }
    }
#endif
    to_floats<T>(args, s.tokens.keys, kv_head, n, args.key_dim, s.keys.data());
    scores_of_floats<NB>(head.query, s.keys.data(), n, args.key_dim, scores);
    weigh<NB>(args, s.limits, head.split, s.alpha, scores, n, key, masked, false);
    shrink(s.alpha, rows, dim, head.split_acc);
    to_floats<T>(args, s.tokens.values, kv_head, n, dim, s.values.data());
    weigh_floats(scores, W, rows, s.values.data(), n, dim, head.split_acc);
}

// The same for few rows; `num_next` tokens of the next tile are in s.next_tokens.
template <class T>
static void run_decode_tile(const AttendArgs& args, const Plan& plan, const Item& item, int h, int key, int n,
                            int num_next, const ItemShape& shape, Scratch& s) {
    const bool plain = args.format.stored == PLAIN;
    const int kv_head = item.first_head + h;
    const auto next = [&](const void* const* tokens) { return next_rows<T>(args, item, h, tokens, num_next); };
    HeadState& head = s.heads[h];
    DecodeTile tile{head.query, s.limits, head.split, head.split_acc, key, next(s.next_tokens.keys),
                    next(s.next_tokens.values)};
#if STEMMA_FLOAT_DECODE
    if (!shape.paired) {
        if (plain && args.format.whole())
            return decode_tile_floats_any(args, item.num_rows, tile, keys_of<T>(args, s.tokens, kv_head),
                                          values_of<T>(args, s.tokens, kv_head), n);
        to_floats<T>(args, s.tokens.keys, kv_head, n, args.key_dim, s.keys.data());
        to_floats<T>(args, s.tokens.values, kv_head, n, args.value_dim, s.values.data());
        TileTokens decoded;
        for (int t = 0; t < n; t++) {
            decoded.keys[t] = s.keys.data() + int64_t(t) * args.key_dim;
            decoded.values[t] = s.values.data() + int64_t(t) * args.value_dim;
        }
        return decode_tile_floats_any(args, item.num_rows, tile, Rows<float>{decoded.keys, 0},
                                      Rows<float>{decoded.values, 0}, n);
    }
#endif
#if STEMMA_AMX
    if (shape.tiles) {
        // Asked for little by little: a core waits for so few lines at once that a burst would hold up its products.
        const auto ask = [&](int done) { tile.next_keys.ask(done, 4 * n), tile.next_values.ask(done, 4 * n); };
        score_pairs<1>(args, plan, head.query, kv_head, n, shape, s);
        pair_values_of(args, s.tokens, kv_head, n, shape, s.values.data(), [&](int end) {
            if (end % 4 == 0) ask(3 * end);
        });
        return with_rows(item.num_rows, [&](auto rows) {
            decode_tile_amx<rows.value>(args, tile, n, s.scores.data(), s.values.data(),
                                        [&](int end) { ask(3 * n + end); });
        });
    }
#endif
#if STEMMA_AVX512_BF16
    const Rows<bf16> keys = keys_of<bf16>(args, s.tokens, kv_head), values = values_of<bf16>(args, s.tokens, kv_head);
    if (plain && args.format.whole()) {
        PlainTile source{keys, values, n};
        return decode_tile_any(args, item.num_rows, tile, source);
    }
    if (plain) {
        TiledTile source{keys, values, n};
        return decode_tile_any(args, item.num_rows, tile, source);
    }
    if (args.format.stored == INT8) {
        CodedTile<INT8> source(args, s.tokens, kv_head, n);
        return decode_tile_any(args, item.num_rows, tile, source);
    }
    CodedTile<FP8> source(args, s.tokens, kv_head, n);
    decode_tile_any(args, item.num_rows, tile, source);
#endif
}

// Write an item's rows down: as results if nothing else is to be merged, or as partial ones from `slot` on.
template <class T>
static void emit(const AttendArgs& args, Plan& plan, const Item& item, int h, const RowState& state, const float* acc,
                 int64_t slot) {
    const Segment& segment = plan.segments[item.segment];
    const int heads = plan.num_heads(), dim = args.value_dim;
    RowOfItem row(plan, item);
    for (int r = 0; r < item.num_rows; r++, acc += dim, row.next()) {
        const int local = row.token, head = (item.first_head + h) * row.group + row.head;
        if (slot < 0) {
            int token = plan.tokens[segment.token_begin + local];
            put_row<T>(args, heads, token, head, state.max[r], state.sum[r], acc);
            continue;
        }
        float* partial = plan.partials.data() + (slot + int64_t(local) * heads + head) * (dim + 2);
        partial[0] = state.max[r], partial[1] = state.sum[r];
        if (state.sum[r] != 0) std::memcpy(partial + 2, acc, sizeof(float) * dim);
    }
}

// Find the `n` tokens of a tile and those of the next one, as far as `end`; return how many these are.
template <class T>
static int locate_two(const AttendArgs& args, const Plan& plan, const Segment& segment, int key, int n, int end,
                      const ItemShape& shape, Scratch& s) {
    locate<T>(args, plan, segment, key, n, s.tokens);
    const int next = std::max(0, std::min(shape.tile, end - key - n));
    locate<T>(args, plan, segment, key + n, next, s.next_tokens);
    return next;
}

template <class T, int NB>
static void run_split(const AttendArgs& args, const Plan& plan, const Item& item, int split, const Visible& visible,
                      const ItemShape& shape, Scratch& s) {
    for (HeadState& head : s.heads) {
        head.split.clear();
        if (shape.decodes || !shape.paired)  // else the first tile begins the sums
            std::fill(head.split_acc, head.split_acc + size_t(NB) * LANES * args.value_dim, 0.0f);
    }
    const Segment& segment = plan.segments[item.segment];
    const int begin = std::max(split, visible.begin / shape.tile * shape.tile);
    const int end = std::min(split + SPLIT, visible.end);
    for (int key = begin, n; key < end; key += n) {
        n = std::min(shape.tile, end - key);
        const int next = locate_two<T>(args, plan, segment, key, n, visible.end, shape, s);
        if (shape.decodes) {
            for (int h = 0; h < item.num_heads; h++)
                run_decode_tile<T>(args, plan, item, h, key, n, next, shape, s);
            continue;
        }
        bool masked = key + n > visible.all_end || key < visible.all_begin;
        for (int h = 0; h < item.num_heads; h++) {
            run_tile<T, NB>(args, plan, item, h, key, n, next, key == begin, masked, shape, s);
        }
    }
}

// Merge the split at hand into those before it, if there were any: what merge() does, for 16 rows at a time.
template <int NB>
static void merge_split(HeadState& head, int num_rows, int dim, bool is_first) {
    RowState &whole = head.whole, &split = head.split;
    if (is_first) {
        std::swap(whole, split);
        std::swap(head.whole_acc, head.split_acc);
        for (int r = 0; r < NB * LANES; r += LANES)
            store(whole.max + r, select(load(whole.sum + r) > 0.0f, load(whole.max + r), splat(MASKED)));
        return;
    }
    float before[ROWS], now[ROWS], max[ROWS], sum[ROWS];
    for (int r = 0; r < NB * LANES; r += LANES) {
        const v16f top = vmax(load(whole.max + r), load(split.max + r));
        const v16f old = vexp2(load(whole.max + r) - top), next = vexp2(load(split.max + r) - top);
        store(before + r, old), store(now + r, next), store(max + r, top);
        store(sum + r, fma(load(split.sum + r), next, load(whole.sum + r) * old));
    }
    for (int r = 0; r < num_rows; r++) {
        float* acc = head.whole_acc + int64_t(r) * dim;
        const float* next_acc = head.split_acc + int64_t(r) * dim;
        if (split.sum[r] == 0) continue;
        if (whole.sum[r] == 0) {
            whole.max[r] = split.max[r], whole.sum[r] = split.sum[r];
            std::memcpy(acc, next_acc, sizeof(float) * dim);
            continue;
        }
        whole.max[r] = max[r], whole.sum[r] = sum[r];
        add_scaled(acc, before[r], next_acc, now[r], dim);
    }
}

template <class T, int NB>
static void run_item(const AttendArgs& args, Plan& plan, const Item& item, Scratch& s) {
    const ItemShape shape = ItemShape::of<T>(args, item.num_rows);
#if STEMMA_AMX
    std::optional<TileScope> scope;
    if (shape.tiles) scope.emplace();
#endif
    set_up<T>(args, plan, item, NB * LANES, shape, s);
    const Visible visible(item, s.limits);
    const bool merges = item.merges();
    const int dim = args.value_dim;
    int64_t slot = item.partial;
    int first = merges ? visible.begin / SPLIT * SPLIT : item.key_begin, last = merges ? visible.end : item.key_end;
    for (int split = first; split < last; split += SPLIT) {
        run_split<T, NB>(args, plan, item, split, visible, shape, s);
        for (int h = 0; h < item.num_heads; h++) {
            HeadState& head = s.heads[h];
            if (!merges) {
                emit<T>(args, plan, item, h, head.split, head.split_acc, slot);
                continue;
            }
            merge_split<NB>(head, item.num_rows, dim, split == first);
        }
        slot += int64_t(plan.segments[item.segment].num_tokens) * plan.num_heads();
    }
    for (int h = 0; merges && h < item.num_heads; h++)
        emit<T>(args, plan, item, h, s.heads[h].whole, s.heads[h].whole_acc, item.partial);
}

// f(blocks of 16 rows, as a constant)
template <class F>
static void with_blocks(int num_rows, F&& f) {
    switch ((num_rows + LANES - 1) / LANES) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        default: return f(std::integral_constant<int, 4>{});
    }
}

template <class T>
static void run_item_any(const AttendArgs& args, Plan& plan, const Item& item, Scratch& s) {
    with_blocks(item.num_rows, [&](auto blocks) { run_item<T, blocks.value>(args, plan, item, s); });
}

#if STEMMA_AVX512_BF16
// Several items in products of pairs. Tile by tile, all of them take its keys and values out of the first caches, and
// values are laid out in pairs once. What comes out is what run_item() computes for each.
class BundleOfPairs {
  public:
    BundleOfPairs(const AttendArgs& args, Plan& plan, const Bundle& bundle, Scratch& s)
        : args_(args),
          plan_(plan),
          segment_(plan.segments[plan.items[bundle.first].segment]),
          kv_head_(plan.items[bundle.first].first_head),
          shape_(ItemShape::of<bf16>(args, ROWS)),
          s_(s) {
        set_up(&plan.items[bundle.first], bundle.count);
    }

    void run() {
#if STEMMA_AMX
        std::optional<TileScope> scope;
        if (shape_.tiles) scope.emplace();
#endif
        const bool merges = s_.bundled[0].item->merges();
        int begin = INT32_MAX, end = 0;
        for (const BundledItem& b : s_.bundled) begin = std::min(begin, first(b)), end = std::max(end, last(b));
        for (int split = begin; split < end; split += SPLIT) {
            run_split(split);
            for (BundledItem& b : s_.bundled) {
                if (split < first(b) || split >= last(b)) continue;
                if (merges) {
                    with_blocks(b.item->num_rows, [&](auto blocks) {
                        merge_split<blocks.value>(b.head, b.item->num_rows, args_.value_dim, split == first(b));
                    });
                    continue;
                }
                emit<bf16>(args_, plan_, *b.item, 0, b.head.split, b.head.split_acc, b.slot);
                b.slot += int64_t(segment_.num_tokens) * plan_.num_heads();
            }
        }
        for (BundledItem& b : s_.bundled)
            if (merges) emit<bf16>(args_, plan_, *b.item, 0, b.head.whole, b.head.whole_acc, b.item->partial);
    }

  private:
    const AttendArgs& args_;
    Plan& plan_;
    const Segment& segment_;
    const int kv_head_;
    const ItemShape shape_;
    Scratch& s_;

    // The splits of an item
    static int first(const BundledItem& b) {
        return b.item->merges() ? b.visible.begin / SPLIT * SPLIT : b.item->key_begin;
    }
    static int last(const BundledItem& b) { return b.item->merges() ? b.visible.end : b.item->key_end; }

    void set_up(const Item* items, int count) {
        const size_t query_size = size_t(ROWS) * (args_.key_dim / 2), acc_size = size_t(ROWS) * args_.value_dim;
        s_.query.resize(query_size * count);
        s_.acc.resize(acc_size * count * 2);
        if (args_.format.stored != PLAIN) s_.decoded.resize(size_t(DECODED_KEYS) * args_.key_dim);
        s_.scores.resize(size_t(TILE) * ROWS);
        s_.values.resize(size_t(TILE) * args_.value_dim);
        s_.bundled.resize(count);
        for (int i = 0; i < count; i++) {
            BundledItem& b = s_.bundled[i];
            b.item = items + i, b.slot = items[i].partial;
            b.head.query = s_.query.data() + i * query_size;
            b.head.split_acc = s_.acc.data() + 2 * i * acc_size;
            b.head.whole_acc = b.head.split_acc + acc_size;
            b.head.whole.clear();
            const int width = (items[i].num_rows + LANES - 1) / LANES * LANES;
            gather_query<bf16>(args_, plan_, items[i], kv_head_, width, true, b.head.query);
            limit_rows(args_, plan_, items[i], width, b.limits);
            b.visible = Visible(items[i], b.limits);
        }
    }

    void run_split(int split) {
        int begin = INT32_MAX, last = 0;
        for (BundledItem& b : s_.bundled) {
            b.head.split.clear();
            begin = std::min(begin, b.visible.begin / shape_.tile * shape_.tile), last = std::max(last, b.visible.end);
        }
        begin = std::max(begin, split);
        const int end = std::min(last, split + SPLIT);
        for (int key = begin; key < end; key += shape_.tile) {
            const int n = std::min(shape_.tile, end - key);
            const int next = locate_two<bf16>(args_, plan_, segment_, key, n, last, shape_, s_);
            NextRows next_keys = next_keys_of<bf16>(args_, *s_.bundled[0].item, 0, next, s_);
            int num_paired = 0;
            for (BundledItem& b : s_.bundled) {
                const int first_tile = std::max(split, b.visible.begin / shape_.tile * shape_.tile);
                const int some = std::min(n, b.visible.end - key);
                if (key < first_tile || some <= 0) continue;
                with_blocks(b.item->num_rows, [&](auto blocks) {
                    run_tile<blocks.value>(b, key, some, key == first_tile, num_paired, next_keys);
                });
            }
        }
    }

    // `num_paired` keys' values are in pairs already.
    template <int NB>
    void run_tile(BundledItem& b, int key, int n, bool is_first, int& num_paired, NextRows& next_keys) {
        const bool masked = key + n > b.visible.all_end || key < b.visible.all_begin;
        score_pairs<NB>(args_, plan_, b.head.query, kv_head_, n, shape_, s_);
        weigh<NB>(args_, b.limits, b.head.split, s_.alpha, s_.scores.data(), n, key, masked, true);
        if (n != num_paired && (n > num_paired || n % 2)) {  // the last of an odd number is paired with itself
            pair_values_of(args_, s_.tokens, kv_head_, n, shape_, s_.values.data());
            num_paired = n;
        }
        weigh_values(args_, s_.scores.data(), NB * LANES, b.item->num_rows, s_.values.data(), n,
                     is_first ? nullptr : s_.alpha, shape_, b.head.split_acc, next_keys);
    }
};
#endif

template <class T>
void run_bundle(const AttendArgs& args, Plan& plan, const Bundle& bundle, Scratch& s) {
#if STEMMA_AVX512_BF16
    if constexpr (sizeof(T) == 2) {
        const Item& first = plan.items[bundle.first];
        const ItemShape shape = ItemShape::of<T>(args, bundle.count > 1 ? ROWS : first.num_rows);
        if (bundle.count > 1 ? shape.paired : shape.tiles && !shape.decodes && first.num_heads == 1)
            return BundleOfPairs(args, plan, bundle, s).run();
    }
#endif
    for (int i = 0; i < bundle.count; i++) run_item_any<T>(args, plan, plan.items[bundle.first + i], s);
}
