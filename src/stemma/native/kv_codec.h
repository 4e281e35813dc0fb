// Blocks of bf16 KV in some two thirds of their bytes, equal to the bit.
//
// Sign and mantissa of a number are noise and stay as they are, a byte each. Exponents aren't: within a channel (a dim of
// a head) they lie close below the largest. A segment is the tokens of one part of a layer. Each of its channels has a
// base, the largest exponent there; what is missing to it is ranked by how often it occurs in the segment, and ranks 0 to
// 2 take two bits, 3 to 5 two more, and so on: each pair of bits that is 3 says "go on", and what goes on lies in a layer
// of its own. That is within 3 % of the entropy, as Huffman's codes are, but each layer is unpacked by plain loops.
// What ranks can't tell is written out. (Exponents of weights in Huffman codes: DFloat11, arXiv:2504.11651.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

constexpr int CODEC_LAYERS = 5;            // of two bits
constexpr int CODEC_RANKS = 15;            // beside the last one, which says that the exponent is written out
constexpr int64_t CODEC_PADDING = 32;      // bytes behind all segments and buffers: loops read whole vectors
constexpr int64_t CODEC_WORTH = 15;        // sixteenths of a segment: one that takes more stays as it is
constexpr int64_t CODEC_TRIED = 1 << 17;   // bytes after which a value that doesn't shrink is given up

struct SegmentHead {
    uint32_t layers[CODEC_LAYERS];  // pairs of bits in each; 0 in the first: the segment is stored as it is
    uint32_t written;               // exponents written out
    uint8_t top;                    // the largest base
    uint8_t missing[CODEC_RANKS];   // what a rank says is missing to the base
};

struct CodecBuffers {
    std::vector<uint8_t> ranks[CODEC_LAYERS], exponents, base;

    void make_room(int64_t n, int64_t period) {
        for (auto& one : ranks) one.resize(n + CODEC_PADDING);
        exponents.resize(n + CODEC_PADDING);
        base.resize(period + CODEC_PADDING);
    }
};

static inline int64_t layer_bytes(int64_t pairs) { return (pairs + 3) / 4; }

#if defined(__AVX2__)
struct SpreadTable {      // where each of 8 bytes takes its addend from: the n-th of those that go on takes the n-th
    uint8_t at[256][8];
    SpreadTable() {
        for (int mask = 0; mask < 256; mask++)
            for (int i = 0, next = 0; i < 8; i++) at[mask][i] = mask >> i & 1 ? uint8_t(next++) : 0x80;
    }
};
static const SpreadTable KV_SPREAD;

struct GatherTable {      // the other way: where those that go on lie
    uint8_t at[256][8];
    GatherTable() {
        for (int mask = 0; mask < 256; mask++)
            for (int i = 0, next = 0; i < 8; i++) {
                at[mask][i] = 0x80;
                if (mask >> i & 1) at[mask][next++] = uint8_t(i);
            }
    }
};
static const GatherTable KV_GATHER;
#endif

// ---- packing

// The lowest two bits of each rank, or 3 where there are more, four to a byte. Ranks behind the n-th are overwritten.
static void pack_pairs(uint8_t* __restrict ranks, int64_t n, uint8_t* __restrict out) {
    std::memset(ranks + n, 0, 4);
    const int64_t bytes = layer_bytes(n);
    for (int64_t i = 0; i < bytes; i++) {
        uint32_t four;
        std::memcpy(&four, ranks + 4 * i, 4);
        const uint32_t more = (four >> 2 | four >> 3) & 0x01010101;  // ranks end at 15
        four = (four | more | more << 1) & 0x03030303;
        out[i] = uint8_t(four | four >> 6 | four >> 12 | four >> 18);
    }
}

// Ranks of 3 and more, less 3, side by side. Returns how many they are.
static int64_t those_that_go_on(const uint8_t* __restrict ranks, int64_t n, uint8_t* __restrict deeper) {
    int64_t i = 0, next = 0;
#if defined(__AVX2__)
    for (; i + 8 <= n; i += 8) {
        const __m128i here = _mm_loadl_epi64((const __m128i*)(ranks + i));
        const __m128i less = _mm_sub_epi8(here, _mm_set1_epi8(3));
        const unsigned mask = ~unsigned(_mm_movemask_epi8(less)) & 255;
        const __m128i order = _mm_loadl_epi64((const __m128i*)KV_GATHER.at[mask]);
        _mm_storel_epi64((__m128i*)(deeper + next), _mm_shuffle_epi8(less, order));
        next += __builtin_popcount(mask);
    }
#endif
    for (; i < n; i++) deeper[next] = uint8_t(ranks[i] - 3), next += ranks[i] >= 3;
    return next;
}

static void rank_all(const uint8_t* __restrict rank_of, uint8_t* __restrict values, int64_t n) {
    int64_t i = 0;
#if defined(__AVX2__)
    bool is_small = true;  // what misses 16 or more has no rank of its own
    for (int missing = 16; missing < 256; missing++) is_small &= rank_of[missing] == CODEC_RANKS;
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)rank_of));
    const __m256i last = _mm256_set1_epi8(CODEC_RANKS);
    for (; is_small && i + 32 <= n; i += 32) {
        const __m256i here = _mm256_loadu_si256((const __m256i*)(values + i));
        const __m256i is_known = _mm256_cmpeq_epi8(_mm256_min_epu8(here, last), here);
        const __m256i found = _mm256_shuffle_epi8(table, here);
        _mm256_storeu_si256((__m256i*)(values + i), _mm256_blendv_epi8(last, found, is_known));
    }
#endif
    for (; i < n; i++) values[i] = rank_of[values[i]];
}

static void raise_to(uint8_t* __restrict base, const uint8_t* __restrict exponents, int64_t n) {
    for (int64_t i = 0; i < n; i++) base[i] = std::max(base[i], exponents[i]);
}

static void fall_short(const uint8_t* __restrict base, const uint8_t* __restrict exponents, int64_t n,
                       uint8_t* __restrict missing) {
    for (int64_t i = 0; i < n; i++) missing[i] = uint8_t(base[i] - exponents[i]);
}

static void count_each(const uint8_t* values, int64_t n, uint32_t (*counts)[256]) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, values + i, 8);
        for (int k = 0; k < 8; k++) counts[k & 3][eight >> (8 * k) & 255]++;
    }
    for (; i < n; i++) counts[0][values[i]]++;
}

// Writes a segment of n numbers; returns its bytes. The target has room for it unpacked.
static int64_t pack_segment(const uint16_t* __restrict in, int64_t n, int64_t period, CodecBuffers& b,
                            uint8_t* __restrict out) {
    SegmentHead head = {};
    uint8_t* __restrict lower = out + sizeof head + (period + 1) / 2;
    uint8_t* __restrict exponents = b.exponents.data();
    uint8_t* base = b.base.data();
    std::memset(base, 0, period);
    for (int64_t i = 0; i < n; i++) {
        exponents[i] = uint8_t(in[i] >> 7);
        lower[i] = uint8_t((in[i] >> 8 & 0x80) | (in[i] & 0x7f));
    }
    for (int64_t row = 0; row < n; row += period)
        raise_to(base, exponents + row, std::min(period, n - row));
    for (int64_t i = 0; i < period; i++) head.top = std::max(head.top, base[i]);
    uint8_t* nibbles = out + sizeof head;
    std::memset(nibbles, 0, (period + 1) / 2);
    for (int64_t i = 0; i < period; i++) {
        const int below = std::min(15, head.top - base[i]);
        nibbles[i / 2] |= uint8_t(below << (i % 2 * 4));
        base[i] = uint8_t(head.top - below);
    }
    uint32_t counts[4][256] = {};
    for (int64_t row = 0; row < n; row += period) {
        const int64_t width = std::min(period, n - row);
        uint8_t* ranks = b.ranks[0].data() + row;
        fall_short(base, exponents + row, width, ranks);
    }
    count_each(b.ranks[0].data(), n, counts);
    int order[256];
    uint32_t total[256];
    for (int i = 0; i < 256; i++) order[i] = i, total[i] = counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i];
    std::partial_sort(order, order + CODEC_RANKS, order + 256,
                      [&](int x, int y) { return total[x] != total[y] ? total[x] > total[y] : x < y; });
    uint8_t rank_of[256];
    std::memset(rank_of, CODEC_RANKS, sizeof rank_of);
    int64_t sizes[CODEC_LAYERS] = {n}, known = 0;
    for (int rank = 0; rank < CODEC_RANKS; rank++) {
        head.missing[rank] = uint8_t(order[rank]), rank_of[order[rank]] = uint8_t(rank);
        known += total[order[rank]];
        if (rank % 3 == 2 && rank + 1 < CODEC_RANKS) sizes[rank / 3 + 1] = n - known;
    }
    head.written = uint32_t(n - known);
    int64_t bytes = sizeof head + (period + 1) / 2 + n + head.written;
    for (int k = 0; k < CODEC_LAYERS; k++) head.layers[k] = uint32_t(sizes[k]), bytes += layer_bytes(sizes[k]);
    if (bytes > n * 2 * CODEC_WORTH / 16) {
        head = {};
        std::memcpy(out, &head, sizeof head);
        std::memcpy(out + sizeof head, in, n * 2);
        return int64_t(sizeof head) + n * 2;
    }
    uint8_t* at = lower + n;
    rank_all(rank_of, b.ranks[0].data(), n);
    for (int k = 0; k < CODEC_LAYERS; k++) {
        if (k + 1 < CODEC_LAYERS) those_that_go_on(b.ranks[k].data(), sizes[k], b.ranks[k + 1].data());
        pack_pairs(b.ranks[k].data(), sizes[k], at);
        at += layer_bytes(sizes[k]);
    }
    if (head.written) {
        const uint8_t* first = b.ranks[0].data();
        for (int64_t i = 0; i < n; i++)
            if (first[i] == CODEC_RANKS) *at++ = exponents[i];
    }
    std::memcpy(out, &head, sizeof head);
    return bytes;
}

// Returns the bytes written, or 0 if that isn't worth it. The target has codec_room(..).
static int64_t pack_kv(const void* source, int64_t num_bytes, int64_t period, int64_t rows, void* target) {
    static thread_local CodecBuffers buffers;
    buffers.make_room(period * rows, period);
    uint8_t* out = (uint8_t*)target;
    const uint16_t* in = (const uint16_t*)source;
    const int64_t n = num_bytes / 2, segment = period * rows;
    int64_t bytes = 0;
    for (int64_t start = 0; start < n; start += segment) {
        const int64_t count = std::min(segment, n - start);
        bytes += pack_segment(in + start, count, period, buffers, out + bytes);
        const int64_t done = (start + count) * 2;
        if ((done >= CODEC_TRIED || done == num_bytes) && bytes + CODEC_PADDING > done * CODEC_WORTH / 16) return 0;
    }
    std::memset(out + bytes, 0, CODEC_PADDING);
    return bytes + CODEC_PADDING;
}

static inline int64_t codec_room(int64_t num_bytes, int64_t period, int64_t rows) {
    const int64_t segment = period * rows, segments = num_bytes / 2 / segment + 1;
    return num_bytes + segments * int64_t(sizeof(SegmentHead)) + 4 * segment + period + 2 * CODEC_PADDING;
}

// ---- unpacking

struct PairTable {
    uint32_t bytes[256];
    PairTable() {
        for (uint32_t i = 0; i < 256; i++) bytes[i] = (i & 3) | (i >> 2 & 3) << 8 | (i >> 4 & 3) << 16 | (i >> 6) << 24;
    }
};
static const PairTable KV_PAIRS;

#if defined(__AVX2__)
static inline __m128i two_halves(const uint8_t* lower, const uint8_t* upper) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)lower), _mm_loadl_epi64((const __m128i*)upper));
}
#endif

// Adds to each of n ranks that is 3 the next of `deeper`. Returns how many were.
static int64_t go_on(uint8_t* ranks, int64_t n, const uint8_t* deeper) {
    int64_t i = 0, next = 0;
#if defined(__AVX2__)
    const __m128i upper = _mm_set_epi64x(0x0808080808080808, 0);
    for (; i + 16 <= n; i += 16) {
        const __m128i here = _mm_loadu_si128((const __m128i*)(ranks + i));
        const unsigned mask = unsigned(_mm_movemask_epi8(_mm_cmpeq_epi8(here, _mm_set1_epi8(3))));
        const int first = __builtin_popcount(mask & 255);
        const __m128i take = _mm_or_si128(upper, two_halves(KV_SPREAD.at[mask & 255], KV_SPREAD.at[mask >> 8]));
        const __m128i more = two_halves(deeper + next, deeper + next + first);
        _mm_storeu_si128((__m128i*)(ranks + i), _mm_add_epi8(here, _mm_shuffle_epi8(more, take)));
        next += first + __builtin_popcount(mask >> 8);
    }
#endif
    for (; i < n; i++) {
        const int is_three = ranks[i] == 3;
        ranks[i] = uint8_t(ranks[i] + (deeper[next] & -is_three));
        next += is_three;
    }
    return next;
}

static void unpack_pairs(const uint8_t* in, int64_t n, uint8_t* ranks) {
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128i pair = _mm_set1_epi8(3);
    for (; i + 64 <= n; i += 64, in += 16) {
        const __m128i four = _mm_loadu_si128((const __m128i*)in);
        const __m128i first = _mm_and_si128(four, pair), second = _mm_and_si128(_mm_srli_epi16(four, 2), pair);
        const __m128i third = _mm_and_si128(_mm_srli_epi16(four, 4), pair);
        const __m128i fourth = _mm_and_si128(_mm_srli_epi16(four, 6), pair);
        const __m128i a = _mm_unpacklo_epi8(first, second), b = _mm_unpacklo_epi8(third, fourth);
        const __m128i c = _mm_unpackhi_epi8(first, second), d = _mm_unpackhi_epi8(third, fourth);
        _mm_storeu_si128((__m128i*)(ranks + i), _mm_unpacklo_epi16(a, b));
        _mm_storeu_si128((__m128i*)(ranks + i + 16), _mm_unpackhi_epi16(a, b));
        _mm_storeu_si128((__m128i*)(ranks + i + 32), _mm_unpacklo_epi16(c, d));
        _mm_storeu_si128((__m128i*)(ranks + i + 48), _mm_unpackhi_epi16(c, d));
    }
#endif
    for (; i < n; i += 4) std::memcpy(ranks + i, &KV_PAIRS.bytes[*in++], 4);
}

static void join_row(const uint8_t* base, const uint8_t* missing, const uint8_t* ranks, const uint8_t* lower, int64_t n,
                     uint16_t* out) {
    int64_t i = 0;
#if defined(__AVX2__)
    const __m128i table = _mm_loadu_si128((const __m128i*)missing);
    const __m256i sign = _mm256_set1_epi16(0x80), mantissa = _mm256_set1_epi16(0x7f);
    for (; i + 16 <= n; i += 16) {
        const __m128i less = _mm_shuffle_epi8(table, _mm_loadu_si128((const __m128i*)(ranks + i)));
        const __m128i exponent = _mm_sub_epi8(_mm_loadu_si128((const __m128i*)(base + i)), less);
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(lower + i)));
        const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(exponent), 7);
        const __m256i signs = _mm256_slli_epi16(_mm256_and_si256(wide, sign), 8);
        const __m256i whole = _mm256_or_si256(_mm256_or_si256(signs, upper), _mm256_and_si256(wide, mantissa));
        _mm256_storeu_si256((__m256i*)(out + i), whole);
    }
#endif
    for (; i < n; i++) {
        const uint8_t exponent = uint8_t(base[i] - missing[ranks[i]]);
        out[i] = uint16_t((lower[i] & 0x80) << 8 | exponent << 7 | (lower[i] & 0x7f));
    }
}

// Reads a segment of n numbers from `size` bytes; returns the bytes taken, or -1 if they can't be a segment.
static int64_t unpack_segment(const uint8_t* in, int64_t size, int64_t n, int64_t period, CodecBuffers& b, uint16_t* out) {
    SegmentHead head;
    if (size < int64_t(sizeof head)) return -1;
    std::memcpy(&head, in, sizeof head);
    if (head.layers[0] == 0) {
        if (size < int64_t(sizeof head) + n * 2) return -1;
        std::memcpy(out, in + sizeof head, n * 2);
        return int64_t(sizeof head) + n * 2;
    }
    int64_t bytes = sizeof head + (period + 1) / 2 + n + head.written;
    for (int k = 0; k < CODEC_LAYERS; k++) {
        if (head.layers[k] > (k == 0 ? n : head.layers[k - 1])) return -1;
        bytes += layer_bytes(head.layers[k]);
    }
    if (head.layers[0] != n || head.written > head.layers[CODEC_LAYERS - 1] || bytes > size) return -1;
    const uint8_t *nibbles = in + sizeof head, *lower = nibbles + (period + 1) / 2, *at = lower + n;
    uint8_t missing[16] = {};
    std::memcpy(missing, head.missing, CODEC_RANKS);
    uint8_t* base = b.base.data();
    for (int64_t i = 0; i < period; i++) base[i] = uint8_t(head.top - (nibbles[i / 2] >> (i % 2 * 4) & 15));
    for (int k = 0; k < CODEC_LAYERS; k++) {
        unpack_pairs(at, head.layers[k], b.ranks[k].data());
        at += layer_bytes(head.layers[k]);
    }
    // A damaged segment may have more that go on than its next layer has: they read what was there before, within
    // the buffer, since no layer is longer than the one above. The count says so.
    for (int k = CODEC_LAYERS - 1; k-- > 0;)
        if (go_on(b.ranks[k].data(), head.layers[k], b.ranks[k + 1].data()) != head.layers[k + 1]) return -1;
    uint8_t* ranks = b.ranks[0].data();
    for (int64_t row = 0; row < n; row += period)
        join_row(base, missing, ranks + row, lower + row, std::min(period, n - row), out + row);
    int64_t from = 0;
    for (uint32_t k = 0; k < head.written; k++, from++) {
        const void* found = std::memchr(ranks + from, CODEC_RANKS, n - from);
        if (found == nullptr) return -1;
        from = (const uint8_t*)found - ranks;
        out[from] = uint16_t((out[from] & 0x807f) | *at++ << 7);
    }
    return bytes;
}

// Whether `size` bytes are exactly num_bytes packed; else the target is undefined. Reads CODEC_PADDING less than `size`.
static bool unpack_kv(const void* source, int64_t size, int64_t period, int64_t rows, void* target, int64_t num_bytes) {
    static thread_local CodecBuffers buffers;
    buffers.make_room(period * rows, period);
    const uint8_t* in = (const uint8_t*)source;
    uint16_t* out = (uint16_t*)target;
    const int64_t n = num_bytes / 2, segment = period * rows;
    size -= CODEC_PADDING;
    for (int64_t start = 0; start < n; start += segment) {
        const int64_t count = std::min(segment, n - start);
        const int64_t bytes = unpack_segment(in, size, count, period, buffers, out + start);
        if (bytes < 0) return false;
        in += bytes, size -= bytes;
    }
    return size == 0;
}
