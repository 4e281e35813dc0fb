// Copies with stores that bypass the caches. A block of KV is too small for libc's memcpy to do so by itself,
// and then each line of the target is read from memory before it is overwritten: nearly twice the time.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

constexpr int64_t COPY_PAGE = 4096;
constexpr int COPY_STREAMS = 4;  // pages copied side by side: keeps several banks of memory busy

#if defined(__SSE2__)
static inline void stream_lines(char* target, const char* source) {  // 128 bytes
#if defined(__AVX512F__)
    for (int at = 0; at < 128; at += 64)
        _mm512_stream_si512((__m512i*)(target + at), _mm512_loadu_si512(source + at));
#elif defined(__AVX2__)
    for (int at = 0; at < 128; at += 32)
        _mm256_stream_si256((__m256i*)(target + at), _mm256_loadu_si256((const __m256i*)(source + at)));
#else
    for (int at = 0; at < 128; at += 16)
        _mm_stream_si128((__m128i*)(target + at), _mm_loadu_si128((const __m128i*)(source + at)));
#endif
}

static inline void stream_copy(char* target, const char* source, int64_t num_bytes) {
    int64_t at = (64 - (reinterpret_cast<uintptr_t>(target) & 63)) & 63;
    if (num_bytes < at + COPY_PAGE) {
        std::memcpy(target, source, num_bytes);
        return;
    }
    std::memcpy(target, source, at);
    for (; at + COPY_STREAMS * COPY_PAGE <= num_bytes; at += COPY_STREAMS * COPY_PAGE) {
        for (int64_t line = 0; line < COPY_PAGE; line += 128) {
            for (int page = 0; page < COPY_STREAMS; page++) {
                const int64_t here = at + page * COPY_PAGE + line;
                _mm_prefetch(source + here + COPY_STREAMS * COPY_PAGE, _MM_HINT_T0);
                _mm_prefetch(source + here + COPY_STREAMS * COPY_PAGE + 64, _MM_HINT_T0);
                stream_lines(target + here, source + here);
            }
        }
    }
    for (; at + 128 <= num_bytes; at += 128) stream_lines(target + at, source + at);
    _mm_sfence();  // streamed stores are not ordered with those that follow
    std::memcpy(target + at, source + at, num_bytes - at);
}
#else
static inline void stream_copy(char* target, const char* source, int64_t num_bytes) {
    std::memcpy(target, source, num_bytes);
}
#endif
