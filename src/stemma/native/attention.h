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

#include <cmath>
#include <optional>
#include <vector>

#include "amx.h"
#include "plan.h"
#include "vec.h"

constexpr int TILE = 64;  // keys; half of it for long values

struct AttendArgs {  // strides in elements
    const void* query;  // [tokens, heads, key_dim]
    const void* keys;   // first block of the layer: [blocks, block_size, kv_heads, key_dim]
    const void* values;
    void* output;       // [tokens, heads, value_dim], contiguous
    int64_t query_token_stride, query_head_stride;
    int64_t block_stride, token_stride, head_stride;
    int32_t key_dim, value_dim;
    int32_t window;     // tokens a query sees, itself included; 0: all
    int32_t is_bf16;
    float scale, softcap;  // softcap 0: none
    const float* sinks;    // [heads]: a score beside those of the keys, with no value; null: none
};

// Softmax so far: weights and values are relative to 2^max.
struct RowState {
    float max[ROWS], sum[ROWS];

    void clear() {
        std::fill(max, max + ROWS, MASKED);
        std::fill(sum, sum + ROWS, 0.0f);
    }
};

// Of one KV head of an item
struct HeadState {
    RowState split, whole;  // of the split at hand, of all splits before
    float* query;           // as the scores want it
    float *split_acc, *whole_acc;  // [row][value_dim]
};

struct Scratch {
    std::vector<float> query, scores, keys, values, acc;
    std::vector<HeadState> heads;
    const void *key_rows[TILE], *value_rows[TILE];  // of the tile's tokens, KV head 0
    float alpha[ROWS];
    int32_t low[ROWS], high[ROWS];  // visible keys of each row: [low, high)
    std::vector<bf16> gathered;
};

// Keys or values of a tile's tokens
template <class T>
struct Rows {
    const void* const* tokens;
    int64_t offset;  // of the KV head
    const T* operator[](int i) const { return (const T*)tokens[i] + offset; }
    Rows from(int i) const { return {tokens + i, offset}; }
};

// a * b + c as the vectors' fma() computes it
static inline float fma_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_NEON)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// ---- products in float

// Scores of K keys [key][dim] against NB x 16 rows [dim][row].
template <int NB, int K>
static inline void score_floats(const float* query, const float* keys, int dim, float* scores) {
    constexpr int W = NB * LANES;
    v16f acc[K][NB] = {};
    for (int d = 0; d < dim; d++)
        for (int b = 0; b < NB; b++) {
            v16f q = load(query + d * W + b * LANES);
            for (int i = 0; i < K; i++) acc[i][b] = fma(q, splat(keys[i * dim + d]), acc[i][b]);
        }
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) store(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB>
static void scores_of_floats(const float* query, const float* keys, int num_keys, int dim, float* scores) {
    constexpr int K = ACCUMULATORS / NB > 8 ? 8 : ACCUMULATORS / NB > 1 ? ACCUMULATORS / NB : 1;
    int t = 0;
    for (; t + K <= num_keys; t += K)
        score_floats<NB, K>(query, keys + int64_t(t) * dim, dim, scores + t * NB * LANES);
    for (; t < num_keys; t++) score_floats<NB, 1>(query, keys + int64_t(t) * dim, dim, scores + t * NB * LANES);
}

template <int R, int V>
static inline void weigh_floats_tile(const float* weights, int width, const float* values, int num_keys, int dim,
                                     float* acc) {
    v16f sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load(acc + r * dim + v * LANES);
    for (int t = 0; t < num_keys; t++)
        for (int v = 0; v < V; v++) {
            v16f value = load(values + int64_t(t) * dim + v * LANES);
            for (int r = 0; r < R; r++) sum[r][v] = fma(value, splat(weights[t * width + r]), sum[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(acc + r * dim + v * LANES, sum[r][v]);
}

// acc [row][dim] += weights [key][row] x values [key][dim]
static void weigh_floats(const float* weights, int width, int rows, const float* values, int num_keys, int dim,
                         float* acc) {
    constexpr int R = ACCUMULATORS >= 8 ? 4 : 2, V = ACCUMULATORS / R > 1 ? ACCUMULATORS / R : 1;
    for (int r = 0; r < rows;) {
        int n = rows - r >= R ? R : 1, d = 0;
        const float* w = weights + r;
        float* a = acc + int64_t(r) * dim;
        if (n == R) {
            for (; d + V * LANES <= dim; d += V * LANES)
                weigh_floats_tile<R, V>(w, width, values + d, num_keys, dim, a + d);
            for (; d + LANES <= dim; d += LANES)
                weigh_floats_tile<R, 1>(w, width, values + d, num_keys, dim, a + d);
        } else {
            for (; d + V * LANES <= dim; d += V * LANES)
                weigh_floats_tile<1, V>(w, width, values + d, num_keys, dim, a + d);
            for (; d + LANES <= dim; d += LANES)
                weigh_floats_tile<1, 1>(w, width, values + d, num_keys, dim, a + d);
        }
        for (; d < dim; d++)
            for (int i = 0; i < n; i++)
                for (int t = 0; t < num_keys; t++)
                    a[i * dim + d] = fma_one(w[t * width + i], values[int64_t(t) * dim + d], a[i * dim + d]);
        r += n;
    }
}

template <class T>
static void to_floats(Rows<T> rows, int num_rows, int dim, float* out) {
    for (int t = 0; t < num_rows; t++) {
        const T* row = rows[t];
        for (int d = 0; d < dim; d++) out[int64_t(t) * dim + d] = to_float(row[d]);
    }
}

// ---- products of bf16 pairs

#if STEMMA_BF16_DOT
static inline __m512i broadcast_pair(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}

// Scores of K keys against NB x 16 rows [dim / 2][row].
template <int NB, int K>
static inline void score_tile(const float* query, Rows<bf16> keys, int dim, float* scores) {
    constexpr int W = NB * LANES;
    __m512 acc[K][NB];
    const bf16* base[K];
    for (int i = 0; i < K; i++) base[i] = keys[i];
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) acc[i][b] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 2, query += W) {
        __m512i q[NB];
        for (int b = 0; b < NB; b++) q[b] = _mm512_loadu_si512(query + b * LANES);
        for (int i = 0; i < K; i++) {
            __m512i k = broadcast_pair(base[i] + d);
            for (int b = 0; b < NB; b++) acc[i][b] = _mm512_dpbf16_ps(acc[i][b], (__m512bh)q[b], (__m512bh)k);
        }
    }
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) _mm512_storeu_ps(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB>
static void scores_of_pairs(const float* query, Rows<bf16> keys, int num_keys, int dim, float* scores) {
    constexpr int K = NB <= 2 ? 8 : 4;
    int t = 0;
    for (; t + K <= num_keys; t += K) score_tile<NB, K>(query, keys.from(t), dim, scores + t * NB * LANES);
    for (; t < num_keys; t++) score_tile<NB, 1>(query, keys.from(t), dim, scores + t * NB * LANES);
}

// 32 elements of two rows as 32 pairs: the lower and the upper 16.
static inline void interleave(const bf16* a, const bf16* b, __m512i& lower, __m512i& upper) {
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    lower = _mm512_permutex2var_epi16(x, _mm512_load_si512(order[0]), y);
    upper = _mm512_permutex2var_epi16(x, _mm512_load_si512(order[1]), y);
}

static inline __m512i interleave(const bf16* a, const bf16* b) {
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

// Values as pairs of consecutive keys, [key / 2][dim]: the order that the pair product wants. An odd last key is
// paired with itself, and its pair has no weight.
static void pair_values(Rows<bf16> rows, int num_keys, int dim, float* paired) {
    for (int t = 0; t < num_keys; t += 2, paired += dim) {
        const bf16 *a = rows[t], *b = rows[t + 1 < num_keys ? t + 1 : t];
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            __m512i lower, upper;
            interleave(a + d, b + d, lower, upper);
            _mm512_storeu_si512(paired + d, lower);
            _mm512_storeu_si512(paired + d + 16, upper);
        }
        if (d < dim) _mm512_storeu_si512(paired + d, interleave(a + d, b + d));
    }
}

template <int R, int V>
static inline void weigh_pairs_tile(const float* weights, int width, const float* paired, int num_pairs, int dim,
                                    float* acc) {
    __m512 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_loadu_ps(acc + r * dim + v * LANES);
    for (int p = 0; p < num_pairs; p++) {
        __m512i value[V];
        for (int v = 0; v < V; v++) value[v] = _mm512_loadu_si512(paired + p * dim + v * LANES);
        for (int r = 0; r < R; r++) {
            __m512i w = broadcast_pair(weights + p * width + r);
            for (int v = 0; v < V; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)w, (__m512bh)value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc + r * dim + v * LANES, sum[r][v]);
}

template <int V>
static void weigh_pairs_rows(const float* weights, int width, int rows, const float* paired, int num_pairs,
                             int dim, float* acc) {
    for (int r = 0; r < rows;) {
        int left = rows - r, n = left <= 6 ? left : left <= 12 ? (left + 1) / 2 : 6;
        const float* w = weights + r;
        float* a = acc + int64_t(r) * dim;
        switch (n) {
            case 1: weigh_pairs_tile<1, V>(w, width, paired, num_pairs, dim, a); break;
            case 2: weigh_pairs_tile<2, V>(w, width, paired, num_pairs, dim, a); break;
            case 3: weigh_pairs_tile<3, V>(w, width, paired, num_pairs, dim, a); break;
            case 4: weigh_pairs_tile<4, V>(w, width, paired, num_pairs, dim, a); break;
            case 5: weigh_pairs_tile<5, V>(w, width, paired, num_pairs, dim, a); break;
            default: weigh_pairs_tile<6, V>(w, width, paired, num_pairs, dim, a); break;
        }
        r += n;
    }
}

// acc [row][dim] += weights [pair][row] x values [pair][dim]
static void weigh_pairs(const float* weights, int width, int rows, const float* paired, int num_pairs, int dim,
                        float* acc) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) weigh_pairs_rows<4>(weights, width, rows, paired + d, num_pairs, dim, acc + d);
    for (; d < dim; d += 16) weigh_pairs_rows<1>(weights, width, rows, paired + d, num_pairs, dim, acc + d);
}
#endif

// ---- the same on tiles

#if STEMMA_AMX
// Scores of up to 16 keys a time; what is no full group of one block is gathered and filled with zeros.
template <int NB>
static void scores_of_tiles(const float* query, Rows<bf16> keys, int num_keys, int block_size, int64_t stride, int dim,
                            Scratch& s, float* scores) {
    for (int t = 0; t < num_keys; t += 16) {
        if (t + 16 <= num_keys && block_size % 16 == 0) {
            score_tile_amx<NB>(query, keys[t], stride, dim, scores + t * NB * LANES);
            continue;
        }
        s.gathered.assign(size_t(16) * dim, bf16{0});
        for (int i = 0; i < 16 && t + i < num_keys; i++)
            std::memcpy(&s.gathered[size_t(i) * dim], keys[t + i], sizeof(bf16) * dim);
        score_tile_amx<NB>(query, s.gathered.data(), dim, dim, scores + t * NB * LANES);
    }
}

// Fills weights and values with zeros up to a multiple of 16 pairs first.
static void weigh_tiles(float* weights, int width, int rows, float* paired, int num_pairs, int dim, float* acc) {
    int padded = (num_pairs + 15) / 16 * 16;
    std::memset(weights + num_pairs * width, 0, sizeof(float) * (padded - num_pairs) * width);
    std::memset(paired + int64_t(num_pairs) * dim, 0, sizeof(float) * (padded - num_pairs) * dim);
    for (int r = 0; r < rows; r += LANES)
        weigh_tile_amx(weights + r, width, paired, padded, dim, acc + int64_t(r) * dim);
}
#endif

// ---- scores to weights

// Cap scores [key][row] in place. From here on they are exponents of 2.
static void cap(const AttendArgs& args, float* scores, int count) {
    for (int i = 0; i < count; i += LANES) {
        v16f e = vexp(load(scores + i) * (args.scale * 2.0f / args.softcap));
        v16f x = splat(args.softcap) - splat(2.0f * args.softcap) / (e + 1.0f);
        store(scores + i, x * LOG2_E);  // tanh(y) = 1 - 2 / (exp(2y) + 1)
    }
}

static void mask(const Scratch& s, int num_rows, int first_key, int num_keys, int width, float* scores) {
    for (int r = 0; r < num_rows; r++) {
        int low = std::min(num_keys, std::max(0, s.low[r] - first_key));
        int high = std::max(low, std::min(num_keys, s.high[r] - first_key));
        for (int t = 0; t < low; t++) scores[t * width + r] = MASKED;
        for (int t = high; t < num_keys; t++) scores[t * width + r] = MASKED;
    }
}

// Sums by key modulo 16, in a tree
static inline v16f tree_sum(v16f* part) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] + part[i + half];
    return part[0];
}

// Begin a tile of 16 rows: raise their running maximum to that of `num_keys` scores [key][row] times `factor`,
// and note by how much that shrinks what was summed so far. Returns the maximum.
template <int NB>
static inline v16f raise_max(RowState& state, float* alpha, int b, const float* column, int num_keys, float factor) {
    v16f old = load(state.max + b * LANES), top = load(column);
    for (int t = 1; t < num_keys; t++) top = vmax(top, load(column + t * NB * LANES));
    top = vmax(old, top * splat(factor));
    store(alpha + b * LANES, vexp2(old - top));
    store(state.max + b * LANES, top);
    return top;
}

static inline void add_sum(RowState& state, const float* alpha, int b, v16f total) {
    store(state.sum + b * LANES, fma(load(state.sum + b * LANES), load(alpha + b * LANES), total));
}

// Turn scores [key][row] into weights (in place), and update the running maximum and sum of each row.
template <int NB>
static void soften(RowState& state, float* alpha, float* scores, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float* column = scores + b * LANES;
        v16f top = raise_max<NB>(state, alpha, b, column, num_keys, factor), part[16] = {};
        for (int t = 0; t < num_keys; t++, column += NB * LANES) {
            v16f x = load(column), p = vexp2(fma(x, splat(factor), -top));
            p = select(x > MASKED, p, splat(0.0f));
            part[t % 16] = part[t % 16] + p;
            store(column, p);
        }
        add_sum(state, alpha, b, tree_sum(part));
    }
}

#if STEMMA_BF16_DOT
// The same, but weights become bf16 pairs of consecutive keys, [key / 2][row]; what an odd last key lacks is 0.
template <int NB, bool masked>
static void soften_pairs(RowState& state, float* alpha, float* scores, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float *column = scores + b * LANES, *paired = column;
        const __m512 top = (__m512)raise_max<NB>(state, alpha, b, column, num_keys, factor);
        const __m512 scale = _mm512_set1_ps(factor);
        auto weight = [&](const float* at) {
            __m512 x = _mm512_loadu_ps(at), p = exp2_fast<true>(_mm512_fmsub_ps(x, scale, top));
            if (!masked) return p;
            return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(MASKED), _CMP_GT_OQ), p);
        };
        v16f part[16] = {};
        int t = 0;
        for (; t + 16 <= num_keys; t += 16)
#pragma GCC unroll 8
            for (int i = 0; i < 16; i += 2, column += 2 * NB * LANES, paired += NB * LANES) {
                __m512 p = weight(column), q = weight(column + NB * LANES);
                part[i] += (v16f)p, part[i + 1] += (v16f)q;
                _mm512_storeu_si512(paired, pair_up(p, q));
            }
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2, column += 2 * NB * LANES, paired += NB * LANES) {
            if (t + i >= num_keys) break;
            __m512 p = weight(column), q = _mm512_setzero_ps();
            if (t + i + 1 < num_keys) q = weight(column + NB * LANES);
            part[i] += (v16f)p, part[i + 1] += (v16f)q;
            _mm512_storeu_si512(paired, pair_up(p, q));
        }
        add_sum(state, alpha, b, tree_sum(part));
    }
}
#endif

// Scores to weights: scaled, capped, masked and softened, as pairs if `paired`.
template <int NB>
static void weigh(const AttendArgs& args, Scratch& s, RowState& state, int num_rows, int num_keys, int first_key,
                  bool masked, bool paired) {
    constexpr int W = NB * LANES;
    float factor = args.scale * LOG2_E;
    if (args.softcap > 0) {
        cap(args, s.scores.data(), num_keys * W);
        factor = 1.0f;
    }
    if (masked) mask(s, num_rows, first_key, num_keys, W, s.scores.data());
#if STEMMA_BF16_DOT
    if (paired && masked) return soften_pairs<NB, true>(state, s.alpha, s.scores.data(), num_keys, factor);
    if (paired) return soften_pairs<NB, false>(state, s.alpha, s.scores.data(), num_keys, factor);
#endif
    soften<NB>(state, s.alpha, s.scores.data(), num_keys, factor);
}

// ---- an item

// What an item's products need to know
struct ItemShape {
    int tile;
    bool paired, tiles;  // products of bf16 pairs, and those on tiles

    template <class T>
    static ItemShape of(const AttendArgs& args) {
        ItemShape shape{args.value_dim > 256 ? TILE / 2 : TILE, false, false};
        shape.paired = STEMMA_BF16_DOT && sizeof(T) == 2 && args.key_dim % 2 == 0 && args.value_dim % 16 == 0;
#if STEMMA_AMX
        shape.tiles = shape.paired && args.key_dim % 32 == 0 && amx_ready();
#endif
        return shape;
    }
};

template <class T>
static void gather_query(const AttendArgs& args, const Plan& plan, const Item& item, int head, int width, bool paired,
                         float* query) {
    const Segment& segment = plan.segments[item.segment];
    int group = plan.group_size, dim = args.key_dim;
    for (int r = 0; r < item.num_rows; r++) {
        int at = segment.token_begin + (item.row_begin + r) / group;
        const T* q = (const T*)args.query + plan.tokens[at] * args.query_token_stride +
                     (head * group + (item.row_begin + r) % group) * args.query_head_stride;
        if (paired)
            for (int d = 0; d < dim / 2; d++) std::memcpy(query + size_t(d) * width + r, q + 2 * d, 4);
        else
            for (int d = 0; d < dim; d++) query[size_t(d) * width + r] = to_float(q[d]);
    }
}

// Cut the scratch into what the item's KV heads need; only what is read before it is written is cleared.
template <class T>
static void set_up(const AttendArgs& args, const Plan& plan, const Item& item, int width, const ItemShape& shape,
                   Scratch& s) {
    size_t query_size = size_t(width) * (shape.paired ? args.key_dim / 2 : args.key_dim);
    size_t acc_size = size_t(width) * args.value_dim;
    s.query.assign(query_size * item.num_heads, 0.0f);
    s.acc.resize(acc_size * item.num_heads * 2);
    s.heads.resize(item.num_heads);
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
    const Segment& segment = plan.segments[item.segment];
    for (int r = 0; r < item.num_rows; r++) {
        int position = plan.positions[segment.token_begin + (item.row_begin + r) / plan.group_size];
        s.high[r] = position + 1;
        s.low[r] = args.window > 0 ? std::max(0, position - args.window + 1) : 0;
    }
}

// Where the tile's tokens lie, KV head 0.
template <class T>
static void locate(const AttendArgs& args, const Plan& plan, const Segment& segment, int key, int n, Scratch& s) {
    for (int t = 0; t < n;) {
        int inside = (key + t) % plan.block_size, end = std::min(n, t + plan.block_size - inside);
        int64_t offset = segment.table[(key + t) / plan.block_size] * args.block_stride + inside * args.token_stride;
        for (; t < end; t++, offset += args.token_stride) {
            s.key_rows[t] = (const T*)args.keys + offset;
            s.value_rows[t] = (const T*)args.values + offset;
        }
    }
}

// acc [row][dim] *= alpha [row]
static void shrink(const float* alpha, int num_rows, int dim, float* acc) {
    for (int r = 0; r < num_rows; r++, acc += dim) {
        if (alpha[r] == 1.0f) continue;
        for (int d = 0; d < dim; d++) acc[d] *= alpha[r];
    }
}

// One tile of one KV head.
template <class T, int NB>
static void run_tile(const AttendArgs& args, const Plan& plan, const Item& item, int h, int key, int n, bool masked,
                     const ItemShape& shape, Scratch& s) {
    constexpr int W = NB * LANES;
    HeadState& head = s.heads[h];
    const int dim = args.value_dim, rows = item.num_rows;
    const int64_t offset = (item.first_head + h) * args.head_stride;
    const Rows<T> keys{s.key_rows, offset}, values{s.value_rows, offset};
    float* scores = s.scores.data();
    if constexpr (STEMMA_BF16_DOT && sizeof(T) == 2) {
#if STEMMA_BF16_DOT
        if (shape.paired) {
#if STEMMA_AMX
            if (shape.tiles)
                scores_of_tiles<NB>(head.query, keys, n, plan.block_size, args.token_stride, args.key_dim, s, scores);
            else
#endif
                scores_of_pairs<NB>(head.query, keys, n, args.key_dim, scores);
            weigh<NB>(args, s, head.split, rows, n, key, masked, true);
            shrink(s.alpha, rows, dim, head.split_acc);
            pair_values(values, n, dim, s.values.data());
#if STEMMA_AMX
            if (shape.tiles)
                return weigh_tiles(scores, W, rows, s.values.data(), (n + 1) / 2, dim, head.split_acc);
#endif
            return weigh_pairs(scores, W, rows, s.values.data(), (n + 1) / 2, dim, head.split_acc);
        }
#endif
    }
    to_floats(keys, n, args.key_dim, s.keys.data());
    scores_of_floats<NB>(head.query, s.keys.data(), n, args.key_dim, scores);
    weigh<NB>(args, s, head.split, rows, n, key, masked, false);
    shrink(s.alpha, rows, dim, head.split_acc);
    to_floats(values, n, dim, s.values.data());
    weigh_floats(scores, W, rows, s.values.data(), n, dim, head.split_acc);
}

// Merge one row's next partial result into what was merged before; one without weights doesn't count.
static inline void merge(float& max, float& sum, float* acc, float next_max, float next_sum, const float* next_acc,
                         int dim) {
    if (next_sum == 0) return;
    if (sum == 0) {
        max = next_max, sum = next_sum;
        std::memcpy(acc, next_acc, sizeof(float) * dim);
        return;
    }
    float top = std::max(max, next_max), factors[2 * LANES];
    store(factors, vexp2(splat(max - top)));
    store(factors + LANES, vexp2(splat(next_max - top)));
    const float before = factors[0], now = factors[LANES];
    max = top;
    sum = fma_one(next_sum, now, sum * before);
    int d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(acc + d, fma(load(next_acc + d), splat(now), load(acc + d) * splat(before)));
    for (; d < dim; d++) acc[d] = fma_one(next_acc[d], now, acc[d] * before);
}

// Divide one row's merged sum and write it as token `token` of query head `head`.
template <class T>
static void put_row(const AttendArgs& args, int num_heads, int64_t token, int head, float max, float sum,
                    const float* acc) {
    float factor = 1.0f;
    if (args.sinks) {
        float sink = args.sinks[head] * LOG2_E, top = std::max(max, sink), both[2 * LANES];
        store(both, vexp2(splat(max - top)));
        store(both + LANES, vexp2(splat(sink - top)));
        factor = both[0];
        sum = fma_one(sum, factor, both[LANES]);
    }
    factor /= sum;
    T* out = (T*)args.output + (token * num_heads + head) * args.value_dim;
    int d = 0;
    for (; d + LANES <= args.value_dim; d += LANES) store(out + d, load(acc + d) * splat(factor));
    for (; d < args.value_dim; d++) out[d] = from_float<T>(acc[d] * factor);
}

// Write an item's rows down: as results if nothing else is to be merged, or as partial ones from `slot` on.
template <class T>
static void emit(const AttendArgs& args, Plan& plan, const Item& item, int h, const RowState& state, const float* acc,
                 int64_t slot) {
    const Segment& segment = plan.segments[item.segment];
    const int group = plan.group_size, heads = plan.num_heads(), dim = args.value_dim;
    for (int r = 0; r < item.num_rows; r++, acc += dim) {
        int local = (item.row_begin + r) / group;
        int head = (item.first_head + h) * group + (item.row_begin + r) % group;
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

// The keys that any row of an item sees, and those that all of them see: outside the latter, tiles are masked.
struct Visible {
    int begin, end, all_begin, all_end;

    Visible(const Item& item, const Scratch& s) {
        begin = all_begin = s.low[0], end = all_end = s.high[0];
        for (int r = 1; r < item.num_rows; r++) {
            begin = std::min(begin, s.low[r]), all_begin = std::max(all_begin, s.low[r]);
            end = std::max(end, s.high[r]), all_end = std::min(all_end, s.high[r]);
        }
        begin = std::max(begin, item.key_begin), end = std::min(end, item.key_end);
    }
};

template <class T, int NB>
static void run_split(const AttendArgs& args, const Plan& plan, const Item& item, int split, const Visible& visible,
                      const ItemShape& shape, Scratch& s) {
    for (HeadState& head : s.heads) {
        head.split.clear();
        std::fill(head.split_acc, head.split_acc + size_t(NB) * LANES * args.value_dim, 0.0f);
    }
    const int begin = std::max(split, visible.begin / shape.tile * shape.tile), end = std::min(split + SPLIT, visible.end);
    for (int key = begin, n; key < end; key += n) {
        n = std::min(shape.tile, end - key);
        locate<T>(args, plan, plan.segments[item.segment], key, n, s);
        bool masked = key + n > visible.all_end || key < visible.all_begin;
        for (int h = 0; h < item.num_heads; h++) run_tile<T, NB>(args, plan, item, h, key, n, masked, shape, s);
    }
}

template <class T, int NB>
static void run_item(const AttendArgs& args, Plan& plan, const Item& item, Scratch& s) {
    const ItemShape shape = ItemShape::of<T>(args);
#if STEMMA_AMX
    std::optional<TileScope> scope;
    if (shape.tiles) scope.emplace();
#endif
    set_up<T>(args, plan, item, NB * LANES, shape, s);
    const Visible visible(item, s);
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
            for (int r = 0; r < item.num_rows; r++)
                merge(head.whole.max[r], head.whole.sum[r], head.whole_acc + int64_t(r) * dim, head.split.max[r],
                      head.split.sum[r], head.split_acc + int64_t(r) * dim, dim);
        }
        slot += int64_t(plan.segments[item.segment].num_tokens) * plan.num_heads();
    }
    for (int h = 0; merges && h < item.num_heads; h++)
        emit<T>(args, plan, item, h, s.heads[h].whole, s.heads[h].whole_acc, item.partial);
}

template <class T>
static void run_item_any(const AttendArgs& args, Plan& plan, const Item& item, Scratch& s) {
    switch ((item.num_rows + LANES - 1) / LANES) {
        case 1: return run_item<T, 1>(args, plan, item, s);
        case 2: return run_item<T, 2>(args, plan, item, s);
        case 3: return run_item<T, 3>(args, plan, item, s);
        default: return run_item<T, 4>(args, plan, item, s);
    }
}

// Merge the partial results of one token's heads.
template <class T>
static void merge_token(const AttendArgs& args, const Plan& plan, int index) {
    const int heads = plan.num_heads(), dim = args.value_dim;
    std::vector<float> acc(dim);
    for (int h = 0; h < heads; h++) {
        float max = MASKED, sum = 0;
        for (int i = plan.merged_begin[index]; i < plan.merged_begin[index + 1]; i++) {
            const float* slot = plan.partials.data() + (plan.slots[i] + h) * (dim + 2);
            merge(max, sum, acc.data(), slot[0], slot[1], slot + 2, dim);
        }
        put_row<T>(args, heads, plan.merged[index], h, max, sum, acc.data());
    }
}
