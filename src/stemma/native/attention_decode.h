// A tile of attention for few rows: sequences that decode. Lanes are keys, where attention_pairs.h has rows in them, so
// no lane is empty; every sum has the same order. While a tile is computed, the next one's lines are asked for into
// L2, in the order in which they lie.
#pragma once

#include "attention_pairs.h"
#include "softmax.h"

constexpr int DECODE_ROWS = 8;  // with more rows, lanes over rows take as long

#if STEMMA_AVX512
// 16 dwords of each of 16 keys, turned: [dword][key]
static inline void turn_keys(const __m512i* rows, __m512i* turned) {
    __m512i s[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        t[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        t[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        t[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        t[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        turned[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        turned[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
        turned[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
        turned[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
    }
}

#endif

// Lines of the next tile's keys or values. While a KV head of this tile is computed, its share of them is asked for;
// together the heads ask for all, in the order in which they lie.
class NextRows {
  public:
    NextRows() = default;  // no next tile
    // A row: `row_bytes` from `offset` on. `head` counts from the first of `num_heads` heads.
    NextRows(const void* const* tokens, int num_tokens, int64_t offset, int64_t row_bytes, int head, int num_heads)
        : tokens_(tokens), offset_(offset), lines_of_row_(int((row_bytes + 63) / 64)) {
        all_ = num_tokens * lines_of_row_;
        begin_ = asked_ = all_ * head / num_heads;
        end_ = all_ * (head + 1) / num_heads;
    }
    // Rows in pieces: those of the tokens side by side, piece after piece, `size` bytes an element
    static NextRows tiled(const void* const* tokens, int num_tokens, int num_columns, int64_t size, int64_t stride) {
        NextRows next;
        next.tokens_ = tokens;
        next.tokens_of_line_ = int(64 / (COLUMNS * size));
        next.lines_of_piece_ = (num_tokens + next.tokens_of_line_ - 1) / next.tokens_of_line_;
        next.piece_stride_ = stride * size;
        next.all_ = next.end_ = next.lines_of_piece_ * ((num_columns + COLUMNS - 1) / COLUMNS);
        return next;
    }

    int num_bytes() const { return 64 * all_; }  // of all heads together

    // Ask for as large a part of the share as `done` is of `all` keys; into L1 if `near`, else into L2.
    template <bool near = false>
    void ask(int done, int all) {
        const int until = std::min(end_, begin_ + (end_ - begin_) * done / all);
        for (; asked_ < until; asked_++) __builtin_prefetch(line(asked_), 0, near ? 3 : 2);
    }

  private:
    const void* const* tokens_ = nullptr;
    int64_t offset_ = 0, piece_stride_ = 0;
    int lines_of_row_ = 1, all_ = 0, begin_ = 0, end_ = 0, asked_ = 0;
    int tokens_of_line_ = 1, lines_of_piece_ = 0;  // 0: rows are whole

    const char* line(int i) const {
        if (lines_of_piece_ == 0) return (const char*)tokens_[i / lines_of_row_] + offset_ + i % lines_of_row_ * 64;
        return (const char*)tokens_[i % lines_of_piece_ * tokens_of_line_] + i / lines_of_piece_ * piece_stride_;
    }
};

// What a tile's rows need beside keys and values
struct DecodeTile {
    const float* query;  // [key_dim / 2][LANES] pairs, or [key_dim][LANES] floats
    const RowLimits& limits;
    RowState& state;
    float* acc;  // [row][value_dim]
    int first_key;
    NextRows next_keys, next_values;
};

#if STEMMA_AVX512_BF16
// Keys and values of a tile of `n` tokens, for one KV head, as they lie.
struct PlainTile {
    Rows<bf16> key_rows, value_rows;
    int n;

    // 16 dwords from `first` on of a token's key, those of the mask
    __m512i key(int t, int first, __mmask16 some) const {
        return _mm512_maskz_loadu_epi32(some, key_rows[t] + 2 * first);
    }
    // V x 16 dimensions from `d` on of tokens t and t + 1, in pairs; an odd last token is paired with itself.
    template <int V>
    void values(int t, int d, __m512i* paired) const {
        const bf16 *a = value_rows[t] + d, *b = value_rows[t + 1 < n ? t + 1 : t] + d;
        if constexpr (V == 1) {
            paired[0] = interleave(a, b);
        } else {
#pragma GCC unroll 2
            for (int v = 0; v < V; v += 2) interleave(a + v * LANES, b + v * LANES, paired[v], paired[v + 1]);
        }
    }
};

// The same where rows lie in pieces.
struct TiledTile {
    Rows<bf16> key_rows, value_rows;
    int n;

    __m512i key(int t, int first, __mmask16 some) const {
        const bf16* row = key_rows[t];
        const auto piece = [&](int d) { return _mm256_loadu_si256((const __m256i*)(row + key_rows.at(d))); };
        const __m512i low = _mm512_castsi256_si512(piece(2 * first));
        return some > 0xFF ? _mm512_inserti64x4(low, piece(2 * first + COLUMNS), 1) : low;
    }
    template <int V>
    void values(int t, int d, __m512i* paired) const {
        alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const bf16 *a = value_rows[t], *b = value_rows[t + 1 < n ? t + 1 : t];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int64_t at = value_rows.at(d + v * LANES);
            const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(a + at)));
            const __m512i both = _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)(b + at)), 1);
            paired[v] = _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
        }
    }
};

// The same for a tile that is stored as codes: they are decoded in registers.
template <int32_t stored>
struct CodedTile {
    const KVFormat& format;
    const uint8_t *key_codes[TILE], *value_codes[TILE];
    alignas(64) float key_scales[2][TILE], value_scales[TILE];
    int first, n;  // key dimensions under the first scale: all, or a multiple of 16

    CodedTile(const AttendArgs& args, const TileTokens& tokens, int kv_head, int num_tokens)
        : format(args.format), first(std::min(args.format.first_dims, args.key_dim)), n(num_tokens) {
        const bool two = first < args.key_dim;
        const int64_t codes_at = kv_head * args.head_stride;
        const int offset = format.scale_offset + kv_head * format.num_scales * int(sizeof(bf16));
        const int64_t scale_at = format.at(offset), second_at = format.at(offset + sizeof(bf16));
        alignas(64) uint16_t scales[3][TILE];
        for (int t = 0; t < n; t++) {
            const uint8_t *key = (const uint8_t*)tokens.keys[t], *value = (const uint8_t*)tokens.values[t];
            key_codes[t] = key + codes_at, value_codes[t] = value + codes_at;
            std::memcpy(&scales[0][t], key + scale_at, 2);
            std::memcpy(&scales[1][t], value + scale_at, 2);
            if (two) std::memcpy(&scales[2][t], key + second_at, 2);
        }
        for (int t = 0; t < n; t += LANES) {
            store(key_scales[0] + t, load((const bf16*)scales[0] + t));
            store(value_scales + t, load((const bf16*)scales[1] + t));
            if (two) store(key_scales[1] + t, load((const bf16*)scales[2] + t));
        }
    }

    __m512i key(int t, int begin, __mmask16 some) const {
        const int d = 2 * begin;
        const uint8_t *codes = key_codes[t] + format.at(d), *more = key_codes[t] + format.at(d + LANES);
        uint8_t rest[2 * LANES] = {};
        if (some != 0xFFFF) {
            const int count = 2 * __builtin_popcount(some);
            std::memcpy(rest, codes, std::min(count, LANES));
            if (count > LANES) std::memcpy(rest + LANES, more, count - LANES);
            codes = rest, more = rest + LANES;
        }
        const v16f low = numbers_of<stored>(codes) * splat(key_scales[d >= first][t]);
        const v16f high = numbers_of<stored>(more) * splat(key_scales[d + LANES >= first][t]);
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
    template <int V>
    void values(int t, int d, __m512i* paired) const {
        const int next = t + 1 < n ? t + 1 : t;
        const v16f scale = splat(value_scales[t]), next_scale = splat(value_scales[next]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int64_t at = format.at(d + v * LANES);
            paired[v] = pair_up((__m512)(numbers_of<stored>(value_codes[t] + at) * scale),
                                (__m512)(numbers_of<stored>(value_codes[next] + at) * next_scale));
        }
    }
};

// Scores [row][TILE] of R rows with the tile's keys; query [dim / 2][LANES]. Those of keys from source.n on are
// undefined.
template <int R, class Source>
static inline void score_keys(const float* query, Source& source, int dim, NextRows& next, float* scores) {
    const int pairs = dim / 2;
    for (int t = 0; t < source.n; t += LANES) {
        next.ask(t + LANES, source.n);
        __m512 sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
        for (int first = 0; first < pairs; first += 16) {
            const int count = std::min(16, pairs - first);
            const __mmask16 some = __mmask16((1u << count) - 1);
            __m512i rows[16], turned[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                rows[i] = source.key(std::min(t + i, source.n - 1), first, some);
            turn_keys(rows, turned);
            const float* q = query + first * LANES;
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) {
                if (p >= count) break;
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)turned[p], (__m512bh)broadcast_pair(q + p * LANES + r));
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) _mm512_storeu_ps(scores + r * TILE + t, sum[r]);
    }
}

// Sum of all lanes in the order of tree_sum
static inline float tree_sum(__m512 x) {
    x = x + _mm512_shuffle_f32x4(x, x, 0x4e);
    x = x + _mm512_shuffle_f32x4(x, x, 0xb1);
    x = x + _mm512_permute_ps(x, 0x4e);
    x = x + _mm512_permute_ps(x, 0xb1);
    return _mm512_cvtss_f32(x);
}

// What attention_pairs.h and softmax.h do with scores [key][row], for scores [row][TILE]: weights [row][TILE] in bf16,
// the rows' new maximum, their sums, and by how much what was summed before shrinks.
template <int R>
static inline void soften_keys(const RowLimits& limits, RowState& state, float* alpha, const float* scores,
                               int first_key, int num_keys, float factor, bf16* weights) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float tops[LANES], totals[LANES];
    const int vectors = (num_keys + LANES - 1) / LANES;
    __mmask16 seen[R][TILE / LANES];
    store(tops, splat(MASKED)), store(totals, splat(0.0f));
    for (int r = 0; r < R; r++) {
        const int low = std::max(0, limits.low[r] - first_key), high = std::min(num_keys, limits.high[r] - first_key);
        __m512 top = _mm512_set1_ps(MASKED);
        for (int v = 0; v < vectors; v++) {
            const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(v * LANES));
            seen[r][v] = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(low)) &
                         _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(high));
            top = _mm512_mask_max_ps(top, seen[r][v], top, _mm512_loadu_ps(scores + r * TILE + v * LANES));
        }
        tops[r] = _mm512_reduce_max_ps(top);
    }
    const v16f old = load(state.max), top = vmax(old, load(tops) * splat(factor));
    store(alpha, vexp2(old - top));
    store(state.max, top);
    store(tops, top);
    const __m512 scale = _mm512_set1_ps(factor);
    for (int r = 0; r < R; r++) {
        const __m512 highest = _mm512_set1_ps(tops[r]);
        __m512 sum = _mm512_setzero_ps();
        for (int v = 0; v < vectors; v++) {
            __m512 p = _mm512_fmsub_ps(_mm512_loadu_ps(scores + r * TILE + v * LANES), scale, highest);
            p = _mm512_maskz_mov_ps(seen[r][v], exp2_fast<true>(p));
            sum = sum + p;
            _mm256_storeu_si256((__m256i*)(weights + r * TILE + v * LANES), (__m256i)_mm512_cvtneps_pbh(p));
        }
        totals[r] = tree_sum(sum);
    }
    store(state.sum, fma(load(state.sum), load(alpha), load(totals)));
}

// acc [row][value_dim] = acc * alpha + weights [row][TILE] x values, for R rows and V x 16 dimensions from `d` on
template <int R, int V, class Source>
static inline void weigh_keys_tile(const bf16* weights, const Source& source, int d, NextRows& next,
                                   const float* alpha, int64_t stride, float* acc) {
    __m512 sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            sum[r][v] = _mm512_loadu_ps(acc + r * stride + v * LANES) * _mm512_set1_ps(alpha[r]);
    for (int t = 0; t < source.n; t += 2) {
        next.ask(t + 2, source.n);
        __m512i value[V];
        source.template values<V>(t, d, value);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i w = broadcast_pair(weights + r * TILE + t);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)value[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc + r * stride + v * LANES, sum[r][v]);
}

template <int R, class Source>
static inline void weigh_keys(const bf16* weights, Source& source, int dim, NextRows& next, const float* alpha,
                              float* acc) {
    constexpr int V = R <= 5 ? 4 : 2;
    NextRows none;
    int d = 0;
    for (; d + V * LANES <= dim; d += V * LANES)
        weigh_keys_tile<R, V>(weights, source, d, d == 0 ? next : none, alpha, dim, acc + d);
    for (; d < dim; d += LANES)
        weigh_keys_tile<R, 1>(weights, source, d, d == 0 ? next : none, alpha, dim, acc + d);
}

// Weights [row][TILE] of R rows' scores [row][TILE], which are capped first.
template <int R>
static inline void soften_scores(const AttendArgs& args, DecodeTile& tile, int num_keys, float* scores, float* alpha,
                                 bf16* weights) {
    float factor = args.scale * LOG2_E;
    if (args.softcap > 0) {
        for (int r = 0; r < R; r++) cap(args, scores + r * TILE, (num_keys + LANES - 1) / LANES * LANES);
        factor = 1.0f;
    }
    soften_keys<R>(tile.limits, tile.state, alpha, scores, tile.first_key, num_keys, factor, weights);
}

template <int R, class Source>
static void decode_tile(const AttendArgs& args, DecodeTile& tile, Source& source) {
    alignas(64) float scores[R * TILE], alpha[LANES];
    alignas(64) bf16 weights[R * TILE];
    score_keys<R>(tile.query, source, args.key_dim, tile.next_keys, scores);
    soften_scores<R>(args, tile, source.n, scores, alpha, weights);
    weigh_keys<R>(weights, source, args.value_dim, tile.next_values, alpha, tile.acc);
}

// f(rows, as a constant)
template <class F>
static void with_rows(int num_rows, F&& f) {
    switch (num_rows) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        case 4: return f(std::integral_constant<int, 4>{});
        case 5: return f(std::integral_constant<int, 5>{});
        case 6: return f(std::integral_constant<int, 6>{});
        case 7: return f(std::integral_constant<int, 7>{});
        default: return f(std::integral_constant<int, 8>{});
    }
}

template <class Source>
static void decode_tile_any(const AttendArgs& args, int rows, DecodeTile& tile, Source& source) {
    with_rows(rows, [&](auto count) { decode_tile<count.value>(args, tile, source); });
}
#endif
