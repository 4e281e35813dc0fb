// Intel's tile unit (AMX): eight tiles of 16 rows of 64 bytes, and a product of two of them in one instruction.
//
// With STEMMA_EMULATE_TILES the same names work on memory, so that code on tiles is tested on processors without
// them. The emulation follows the operation sections of Intel's manual. TDPBF16PS: within a row, products of
// even and of odd inputs are summed apart, each by fused multiply-add, then both sums are added, then the
// result; denormals are taken and given as zero; rounding is to nearest even whatever MXCSR says.
#pragma once

#include "vec.h"

#if defined(STEMMA_EMULATE_TILES)
#define STEMMA_AMX 1
#include <cfloat>

struct EmulatedTile {
    alignas(64) uint8_t row[16][64];
};
static thread_local EmulatedTile emulated_tiles[8];

static inline v16f flushed(v16f x) {
    const v16f tiny = splat(FLT_MIN);
    return select((x < tiny) & (-x < tiny), as_float(as_bits(x) & 0x80000000u), x);
}
static inline void emulate_zero(int tile) { std::memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile)); }
static inline void emulate_load(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy(emulated_tiles[tile].row[r], (const char*)from + r * stride, 64);
}
static inline void emulate_store(int tile, void* to, int64_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy((char*)to + r * stride, emulated_tiles[tile].row[r], 64);
}
static inline void emulate_dpbf16ps(int result, int left, int right) {
    v16f even_of[16], odd_of[16];
    for (int k = 0; k < 16; k++) {
        v16u pairs = load((const uint32_t*)emulated_tiles[right].row[k]);
        even_of[k] = flushed(as_float(pairs << 16)), odd_of[k] = flushed(as_float(pairs & 0xFFFF0000u));
    }
    for (int m = 0; m < 16; m++) {
        const bf16* inputs = (const bf16*)emulated_tiles[left].row[m];
        v16f even = splat(0.0f), odd = splat(0.0f);
        for (int k = 0; k < 16; k++) {
            even = flushed(fma(flushed(splat(to_float(inputs[2 * k]))), even_of[k], even));
            odd = flushed(fma(flushed(splat(to_float(inputs[2 * k + 1]))), odd_of[k], odd));
        }
        float* row = (float*)emulated_tiles[result].row[m];
        store(row, flushed(flushed(load(row)) + flushed(even + odd)));
    }
}
// Bytes: signed on the left, unsigned on the right; integers wrap.
static inline void emulate_dpbsud(int result, int left, int right) {
    for (int m = 0; m < 16; m++) {
        int32_t* row = (int32_t*)emulated_tiles[result].row[m];
        for (int k = 0; k < 64; k++)
            for (int n = 0; n < 16; n++)
                row[n] += int8_t(emulated_tiles[left].row[m][k]) * emulated_tiles[right].row[k / 4][4 * n + k % 4];
    }
}
#define tile_zero(tile) emulate_zero(tile)
#define tile_loadd(tile, from, stride) emulate_load(tile, from, stride)
#define tile_stored(tile, to, stride) emulate_store(tile, to, stride)
#define tile_dpbf16ps(result, left, right) emulate_dpbf16ps(result, left, right)
#define tile_dpbsud(result, left, right) emulate_dpbsud(result, left, right)

static bool amx_ready() { return true; }
struct TileScope {
    TileScope() {}
    ~TileScope() {}
};
// (Emulated tiles stay whole: what is behind a shape is computed too, and nobody reads it.)
struct TileShape {
    TileShape(int, int) {}
};

#elif STEMMA_AVX512_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define STEMMA_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define tile_zero(tile) _tile_zero(tile)
#define tile_loadd(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_stored(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dpbf16ps(result, left, right) _tile_dpbf16ps(result, left, right)
#define tile_dpbsud(result, left, right) _tile_dpbsud(result, left, right)

// Linux lets a process use tiles only if it asks; the answer is for all its threads.
static bool amx_ready() {
    static const bool ready = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return ready;
}

// Tiles 0 to 3 hold sums of `rows` rows, tile 4 their inputs of `steps` steps, 5 to 7 weights of as many.
static inline void shape_tiles(int rows, int steps) {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = uint8_t(i < 5 ? rows : steps);
    config.row_bytes[4] = uint16_t(4 * steps);
    asm volatile("" : : "r"(&config) : "memory");  // the instruction doesn't tell the compiler that it reads all of it
    _tile_loadconfig(&config);
}

// All eight tiles: 16 rows of 64 bytes. Scopes may be nested: the outermost holds the tiles.
struct TileScope {
    TileScope() {
        if (depth()++ == 0) shape_tiles(16, 16);
    }
    ~TileScope() {
        if (--depth() == 0) _tile_release();
    }
    static int& depth() {
        static thread_local int value = 0;
        return value;
    }
};

// Within a scope, smaller tiles (shape_tiles): few rows take a tile's time by their number, and none of it is stored.
struct TileShape {
    TileShape(int rows, int steps) { shape_tiles(rows, steps); }
    ~TileShape() { shape_tiles(16, 16); }
};
#else
#define STEMMA_AMX 0
struct TileScope {
    TileScope() {}
    ~TileScope() {}
};
struct TileShape {
    TileShape(int, int) {}
};
#endif
