// Attention of one work item: up to 64 query rows over a run of keys, read straight from paged blocks.
//
// Scores are kept as [key][row], rows in vector lanes: the maximum, the exponentials and their sum need no
// reduction across lanes, and a key's values are broadcast instead. Softmax is the online one of
// FlashAttention (arXiv:2205.14135), a tile of 64 keys at a time. With AVX512_BF16 both products are dot
// products of bf16 pairs, with AMX products of tiles; otherwise everything is computed in float.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "amx.h"
#include "plan.h"
#include "vec.h"

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
};

struct Scratch {
    std::vector<float> query, scores, keys, values, acc;
    std::vector<char> gathered;
    float max[ROWS], sum[ROWS], alpha[ROWS];
    int32_t low[ROWS], high[ROWS];  // visible keys of each row: [low, high)
};

// Keys or values of consecutive tokens, all in one block.
template <class T>
struct Rows {
    const T* first;
    int64_t stride;
    const T* operator[](int64_t i) const { return first + i * stride; }
};

// Scores of K keys [key][dim] against NB x 16 rows [dim][row], in float.
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

#if STEMMA_BF16_DOT
static inline __m512i broadcast_pair(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}

template <int NB, int K>
static inline void score_tile(const float* query, Rows<bf16> keys, int dim, float* scores) {
    constexpr int W = NB * LANES, GROUPS = (K + 3) / 4;
    __m512 acc[K][NB];
    const bf16* base[GROUPS];  // every fourth key: the others are reached by addressing modes
    for (int g = 0; g < GROUPS; g++) base[g] = keys[4 * g];
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) acc[i][b] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 2, query += W) {
        __m512i q[NB];
        for (int b = 0; b < NB; b++) q[b] = _mm512_loadu_si512(query + b * LANES);
        for (int i = 0; i < K; i++) {
            __m512i k = broadcast_pair(base[i / 4] + i % 4 * keys.stride);
            for (int b = 0; b < NB; b++) acc[i][b] = _mm512_dpbf16_ps(acc[i][b], (__m512bh)q[b], (__m512bh)k);
        }
        for (int g = 0; g < GROUPS; g++) base[g] += 2;
    }
    for (int i = 0; i < K; i++)
        for (int b = 0; b < NB; b++) _mm512_storeu_ps(scores + i * W + b * LANES, acc[i][b]);
}

template <int NB>
static void scores_of_pairs(const float* query, Rows<bf16> keys, int num_keys, int dim, bool tiles,
                            float* scores) {
    constexpr int K = NB == 1 ? 16 : NB == 2 ? 8 : 4;
    int t = 0;
#if STEMMA_AMX
    if (tiles && dim % 32 == 0)
        for (; t + 16 <= num_keys; t += 16)
            scoretile_amx<NB>(query, keys[t], keys.stride, dim, scores + t * NB * LANES);
#endif
    (void)tiles;
    for (; t + K <= num_keys; t += K)
        score_tile<NB, K>(query, {keys[t], keys.stride}, dim, scores + t * NB * LANES);
    for (; t < num_keys; t++) score_tile<NB, 1>(query, {keys[t], keys.stride}, dim, scores + t * NB * LANES);
}

// Rows of values as pairs of consecutive keys, [key / 2][dim]: the order that the pair product wants.
static void pair_values(Rows<bf16> rows, int num_keys, int dim, float* paired) {
    for (int t = 0; t < num_keys; t += 2) {
        const bf16 *a = rows[t], *b = rows[t + 1 < num_keys ? t + 1 : t];
        for (int d = 0; d < dim; d += 16) {
            __m512i lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + d)));
            __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + d)));
            _mm512_storeu_si512(paired + t / 2 * dim + d, _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)));
        }
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
#if STEMMA_AMX
// The same on tiles: fills weights and values with zeros up to a multiple of 16 pairs first.
static void weigh_tiles(float* weights, int width, int rows, float* paired, int num_pairs, int dim, float* acc) {
    int padded = (num_pairs + 15) / 16 * 16;
    std::memset(weights + num_pairs * width, 0, sizeof(float) * (padded - num_pairs) * width);
    std::memset(paired + int64_t(num_pairs) * dim, 0, sizeof(float) * (padded - num_pairs) * dim);
    for (int r = 0; r < rows; r += LANES)
        weightile_amx(weights + r, width, paired, padded, dim, acc + int64_t(r) * dim);
}
#endif
#endif

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

// acc [row][dim] += weights [key][row] x values [key][dim], in float
static void weigh_floats(const float* weights, int width, int rows, const float* values, int num_keys, int dim,
                         float* acc) {
    constexpr int R = ACCUMULATORS < 8 ? 2 : 4, V = ACCUMULATORS / R;
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
            for (; d + LANES <= dim; d += LANES)
                weigh_floats_tile<1, 1>(w, width, values + d, num_keys, dim, a + d);
        }
        for (; d < dim; d++)
            for (int i = 0; i < n; i++)
                for (int t = 0; t < num_keys; t++) a[i * dim + d] += w[t * width + i] * values[int64_t(t) * dim + d];
        r += n;
    }
}

template <class T>
static void to_floats(Rows<T> rows, int num_rows, int dim, float* out) {
    for (int t = 0; t < num_rows; t++)
        for (int d = 0; d < dim; d++) out[int64_t(t) * dim + d] = to_float(rows[t][d]);
}

// Scale, cap and mask scores [key][row] in place. From here on they are exponents of 2.
template <int NB>
static void adjust(const AttendArgs& args, Scratch& s, int num_keys, int first_key, bool masked) {
    constexpr int W = NB * LANES;
    for (int b = 0; b < NB; b++) {
        v16i low = load(s.low + b * LANES), high = load(s.high + b * LANES);
        for (int t = 0; t < num_keys; t++) {
            float* cell = s.scores.data() + t * W + b * LANES;
            v16f x = load(cell) * args.scale;
            if (args.softcap > 0) {
                v16f e = vexp(x * (2.0f / args.softcap));  // tanh(y) = 1 - 2 / (exp(2y) + 1)
                x = args.softcap - 2.0f * args.softcap / (e + 1.0f);
            }
            x *= LOG2_E;
            if (masked) {
                v16i position = splat(int32_t(first_key + t));
                x = select((position >= low) & (position < high), x, splat(MASKED));
            }
            store(cell, x);
        }
    }
}

// Begin a tile of 16 rows: raise their running maximum to that of `num_keys` scores [key][row] times `factor`,
// and note by how much that shrinks what was summed so far. Returns the maximum.
template <int NB>
static inline v16f raise_max(Scratch& s, int b, const float* column, int num_keys, float factor) {
    v16f old = load(s.max + b * LANES), top = load(column);
    for (int t = 1; t < num_keys; t++) top = vmax(top, load(column + t * NB * LANES));
    top = vmax(old, top * factor);
    v16f shrink = vexp2(old - top);
    store(s.alpha + b * LANES, shrink);
    store(s.max + b * LANES, top);
    store(s.sum + b * LANES, load(s.sum + b * LANES) * shrink);
    return top;
}

// Turn scores [key][row] into weights (in place), and update the running maximum and sum of each row.
template <int NB>
static void soften(Scratch& s, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float* column = s.scores.data() + b * LANES;
        v16f top = raise_max<NB>(s, b, column, num_keys, factor), total = load(s.sum + b * LANES);
        for (int t = 0; t < num_keys; t++, column += NB * LANES) {
            v16f x = load(column), p = vexp2(x * factor - top);
            p = select(x > MASKED, p, splat(0.0f));
            total += p;
            store(column, p);
        }
        store(s.sum + b * LANES, total);
    }
}

#if STEMMA_BF16_DOT
// The same, but weights become bf16 pairs of consecutive keys, [key / 2][row]; what an odd last key lacks is 0.
template <int NB, bool masked>
static void soften_pairs(Scratch& s, int num_keys, float factor) {
    for (int b = 0; b < NB; b++) {
        float *column = s.scores.data() + b * LANES, *paired = column;
        const __m512 top = (__m512)raise_max<NB>(s, b, column, num_keys, factor), scale = _mm512_set1_ps(factor);
        auto weight = [&](const float* at) {
            __m512 x = _mm512_loadu_ps(at), p = exp2_fast<true>(_mm512_fmsub_ps(x, scale, top));
            if (!masked) return p;
            return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(MASKED), _CMP_GT_OQ), p);
        };
        __m512 total = _mm512_loadu_ps(s.sum + b * LANES);
        int t = 0;
        for (; t + 2 <= num_keys; t += 2, column += 2 * NB * LANES, paired += NB * LANES) {
            __m512 p = weight(column), q = weight(column + NB * LANES);
            total = total + (p + q);
            _mm512_storeu_si512(paired, pair_up(p, q));
        }
        if (t < num_keys) {
            __m512 p = weight(column);
            total = total + p;
            _mm512_storeu_si512(paired, pair_up(p, _mm512_setzero_ps()));
        }
        _mm512_storeu_ps(s.sum + b * LANES, total);
    }
}
#endif

// Scores to weights: scaled, capped, masked and softened, as pairs if `paired`.
template <int NB>
static void weigh(const AttendArgs& args, Scratch& s, int num_keys, int first_key, bool masked, bool paired) {
    float factor = args.scale * LOG2_E;
    if (masked || args.softcap > 0) {
        adjust<NB>(args, s, num_keys, first_key, masked);
        factor = 1.0f;
    }
#if STEMMA_BF16_DOT
    if (paired && masked) return soften_pairs<NB, true>(s, num_keys, factor);
    if (paired) return soften_pairs<NB, false>(s, num_keys, factor);
#endif
    soften<NB>(s, num_keys, factor);
}

template <class T>
static void gather_query(const AttendArgs& args, const Plan& plan, const Item& item, int width, bool paired,
                         Scratch& s) {
    const Segment& segment = plan.segments[item.segment];
    int group = plan.group_size, dim = args.key_dim;
    s.query.assign(size_t(width) * (paired ? dim / 2 : dim), 0.0f);
    for (int r = 0; r < width; r++) {
        s.max[r] = MASKED;
        s.sum[r] = 0;
        s.low[r] = s.high[r] = 0;
        if (r >= item.num_rows) continue;
        int at = segment.token_begin + (item.row_begin + r) / group, head = (item.row_begin + r) % group;
        int position = plan.positions[at];
        s.high[r] = position + 1;
        s.low[r] = args.window > 0 ? std::max(0, position - args.window + 1) : 0;
        const T* q = (const T*)args.query + plan.tokens[at] * args.query_token_stride +
                     (item.kv_head * group + head) * args.query_head_stride;
        if (paired)
            for (int d = 0; d < dim / 2; d++) std::memcpy(&s.query[size_t(d) * width + r], q + 2 * d, 4);
        else
            for (int d = 0; d < dim; d++) s.query[size_t(d) * width + r] = to_float(q[d]);
    }
}

template <class T>
static void emit(const AttendArgs& args, Plan& plan, const Item& item, const Scratch& s) {
    const Segment& segment = plan.segments[item.segment];
    int group = plan.group_size, heads = plan.num_kv_heads * group, dim = args.value_dim;
    for (int r = 0; r < item.num_rows; r++) {
        int local = (item.row_begin + r) / group, head = item.kv_head * group + (item.row_begin + r) % group;
        const float* acc = s.acc.data() + int64_t(r) * dim;
        if (item.partial < 0) {
            int token = plan.tokens[segment.token_begin + local];
            T* out = (T*)args.output + (int64_t(token) * heads + head) * dim;
            float inverse = 1.0f / s.sum[r];
            for (int d = 0; d < dim; d++) out[d] = from_float<T>(acc[d] * inverse);
        } else {
            float* slot = plan.partials.data() + (item.partial + int64_t(local) * heads + head) * (dim + 2);
            slot[0] = s.max[r];
            slot[1] = s.sum[r];
            std::memcpy(slot + 2, acc, sizeof(float) * dim);
        }
    }
}

// Find up to `n` tokens from `key` on: in place as far as their block reaches, or, where blocks are too short
// to be worth a tile, gathered from several. Returns how many they are.
template <class T>
static int locate(const AttendArgs& args, const Plan& plan, const Segment& segment, int kv_head, int key, int n,
                  Scratch& s, Rows<T>& keys, Rows<T>& values) {
    auto offset = [&](int k) {
        return segment.table[k / plan.block_size] * args.block_stride +
               k % plan.block_size * args.token_stride + kv_head * args.head_stride;
    };
    if (plan.block_size >= LANES) {
        keys = {(const T*)args.keys + offset(key), args.token_stride};
        values = {(const T*)args.values + offset(key), args.token_stride};
        return std::min(n, plan.block_size - key % plan.block_size);
    }
    s.gathered.resize(sizeof(T) * n * (args.key_dim + args.value_dim));
    T* k = (T*)s.gathered.data();
    T* v = k + n * args.key_dim;
    for (int t = 0; t < n; t++) {
        std::memcpy(k + t * args.key_dim, (const T*)args.keys + offset(key + t), sizeof(T) * args.key_dim);
        std::memcpy(v + t * args.value_dim, (const T*)args.values + offset(key + t), sizeof(T) * args.value_dim);
    }
    keys = {k, args.key_dim};
    values = {v, args.value_dim};
    return n;
}

// Ask for rows that are read soon: heads lie between each other, which the processor's own asking doesn't follow.
template <class T>
static void ask_for(Rows<T> rows, int num_rows, int dim) {
    for (int t = 0; t < num_rows; t++)
        for (int at = 0; at < dim; at += 64 / int(sizeof(T))) __builtin_prefetch(rows[t] + at);
}

template <class T, int NB>
static void run_item(const AttendArgs& args, Plan& plan, const Item& item, Scratch& s) {
    constexpr int W = NB * LANES;
    const bool paired = STEMMA_BF16_DOT && sizeof(T) == 2 && args.key_dim % 2 == 0 && args.value_dim % 16 == 0;
    const Segment& segment = plan.segments[item.segment];
    const int tile = args.value_dim > 256 ? 32 : 64, dim = args.value_dim;
#if STEMMA_AMX
    const bool tiles = paired && amx_ready();
    std::optional<TileScope> scope;
    if (tiles) scope.emplace();
#else
    const bool tiles = false;
#endif
    gather_query<T>(args, plan, item, W, paired, s);
    (void)tiles;
    s.acc.assign(size_t(W) * dim, 0.0f);
    s.scores.resize(size_t(64) * W);
    s.values.resize(size_t(64) * dim);
    if (!paired) s.keys.resize(size_t(64) * args.key_dim);
    int first_high = s.high[0], last_high = s.high[0], first_low = s.low[0], last_low = s.low[0];
    for (int r = 1; r < item.num_rows; r++) {
        first_high = std::min(first_high, s.high[r]), last_high = std::max(last_high, s.high[r]);
        first_low = std::min(first_low, s.low[r]), last_low = std::max(last_low, s.low[r]);
    }
    int begin = std::max(item.key_begin, first_low), end = std::min(item.key_end, last_high);
    for (int key = begin, n; key < end; key += n) {
        n = std::min(tile, end - key);
        Rows<T> keys, values;
        n = locate<T>(args, plan, segment, item.kv_head, key, n, s, keys, values);
        bool masked = key + n > first_high || key < last_low;
        if (NB == 1 && plan.block_size >= LANES) {  // few rows: memory is the limit
            ask_for(values, n, dim);
            if (key + n < end) {
                Rows<T> next_keys, next_values;
                int more = std::min(tile, end - key - n);
                more = locate<T>(args, plan, segment, item.kv_head, key + n, more, s, next_keys, next_values);
                ask_for(next_keys, more, args.key_dim);
            }
        }
#if STEMMA_BF16_DOT
        if constexpr (sizeof(T) == 2)
            if (paired) scores_of_pairs<NB>(s.query.data(), keys, n, args.key_dim, tiles, s.scores.data());
#endif
        if (!paired) {
            to_floats(keys, n, args.key_dim, s.keys.data());
            scores_of_floats<NB>(s.query.data(), s.keys.data(), n, args.key_dim, s.scores.data());
        }
        weigh<NB>(args, s, n, key, masked, paired);
        for (int r = 0; r < item.num_rows; r++) {
            if (s.alpha[r] == 1.0f) continue;
            float* acc = s.acc.data() + int64_t(r) * dim;
            for (int d = 0; d < dim; d++) acc[d] *= s.alpha[r];
        }
#if STEMMA_BF16_DOT
        if constexpr (sizeof(T) == 2)
            if (paired) {
                pair_values(values, n, dim, s.values.data());
#if STEMMA_AMX
                if (tiles) {
                    weigh_tiles(s.scores.data(), W, item.num_rows, s.values.data(), (n + 1) / 2, dim, s.acc.data());
                    continue;
                }
#endif
                weigh_pairs(s.scores.data(), W, item.num_rows, s.values.data(), (n + 1) / 2, dim, s.acc.data());
            }
#endif
        if (!paired) {
            to_floats(values, n, dim, s.values.data());
            weigh_floats(s.scores.data(), W, item.num_rows, s.values.data(), n, dim, s.acc.data());
        }
    }
    emit<T>(args, plan, item, s);
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

// Merge the pieces of one token's heads: weigh each by its own sum and its maximum's distance from the largest.
template <class T>
static void merge_token(const AttendArgs& args, const Plan& plan, int index) {
    int heads = plan.num_kv_heads * plan.group_size, dim = args.value_dim;
    int begin = plan.merged_begin[index], end = plan.merged_begin[index + 1];
    std::vector<float> acc(dim);
    for (int h = 0; h < heads; h++) {
        float top = MASKED, total = 0;
        for (int p = begin; p < end; p++)
            top = std::max(top, plan.partials[(plan.pieces[p] + h) * (dim + 2)]);
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (int p = begin; p < end; p++) {
            const float* slot = plan.partials.data() + (plan.pieces[p] + h) * (dim + 2);
            if (slot[1] == 0) continue;
            float weight = std::exp2(slot[0] - top);
            total += weight * slot[1];
            for (int d = 0; d < dim; d++) acc[d] += weight * slot[2 + d];
        }
        T* out = (T*)args.output + (int64_t(plan.merged[index]) * heads + h) * dim;
        for (int d = 0; d < dim; d++) out[d] = from_float<T>(acc[d] / total);
    }
}
