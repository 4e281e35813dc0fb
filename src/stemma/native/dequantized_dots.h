// Products of inputs as they are with quantized weights: a strip is dequantized chunk by chunk into the layout of a
// plain one, rounded to the model's type, and multiplied as a plain one is. So results are those of the dequantized
// weight, to the bit, and what is read from memory is its codes.
#pragma once

#include "quantized.h"

template <class T>
constexpr int64_t INPUTS_OF_CHUNK = 128 * INPUTS_OF_STEP<T>;  // 32 kB, whole tiles

// Inputs [begin, end) of `lines` lines from `line` on, as steps of STEP_BYTES in `out`.
template <class T>
static void dequantize_chunk(const Strips& w, const char* strip, int line, int lines, int64_t begin, int64_t end,
                             char* out) {
    const GroupLayout g(w);
    const int middle = w.codes.bits == 8 ? 128 : 8, halves = w.codes.bits == 4 ? 2 : 1;
    v16f scale[LINES], offset[LINES];
    int64_t loaded = -1;
    for (int64_t input = begin; input < end; input += INPUTS_OF_BYTE_STEP) {
        const int64_t group = input / w.codes.group, step = input % w.codes.group / INPUTS_OF_BYTE_STEP;
        const char* at = strip + group * g.bytes;
        if (group != loaded) {
            for (int j = 0; j < lines; j++) {
                scale[j] = load_scales(at + g.scale_at, 16 * (line + j), w.codes.scale_bytes);
                if (w.codes.has_offsets) offset[j] = load_scales(at + g.offset_at, 16 * (line + j), w.codes.scale_bytes);
            }
            loaded = group;
        }
        const char* from = at + step / halves * STEP_BYTES + 64 * line;
        char* to = out + (input - begin) / INPUTS_OF_STEP<T> * STEP_BYTES;
        for (int j = 0; j < lines; j++) {
            v16u bytes = load((const uint32_t*)(from + 64 * j));
            if (halves == 2) bytes = (step % 2 ? bytes >> 4 : bytes) & 0x0F0F0F0Fu;
            v16f values[INPUTS_OF_BYTE_STEP];
#pragma GCC unroll 4
            for (int i = 0; i < INPUTS_OF_BYTE_STEP; i++) {
                v16u code = (bytes >> (8 * i)) & 0xFFu;
                values[i] = to_floats(as_int(as_float(code)) - middle) * scale[j];
                if (w.codes.has_offsets) values[i] += offset[j];
            }
            if constexpr (sizeof(T) == 4) {
#pragma GCC unroll 4
                for (int i = 0; i < INPUTS_OF_BYTE_STEP; i++)
                    store((float*)(to + i * STEP_BYTES + 64 * j), values[i]);
            } else {
#pragma GCC unroll 2
                for (int i = 0; i < INPUTS_OF_BYTE_STEP; i += 2) {
#if STEMMA_BF16_DOT
                    __m512i pair = pair_up((__m512)values[i], (__m512)values[i + 1]);
                    _mm512_store_si512(to + i / 2 * STEP_BYTES + 64 * j, pair);
#else
                    v16u pair = (round_high(values[i]) >> 16) | (round_high(values[i + 1]) & 0xFFFF0000u);
                    Memory<v16u>::store((uint32_t*)(to + i / 2 * STEP_BYTES + 64 * j), pair);
#endif
                }
            }
        }
    }
}
