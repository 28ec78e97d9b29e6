// A 16-lane vector abstraction for every instruction set, so that each kernel is written once.
//
//   I  16 x int32      F  16 x float32      B  64 bytes: 16 columns x 4 consecutive k
//   X  four bytes of one input row, as dot4 and dot2 take them
//
// Each simd_*.h also has the sizes of register blocks. TOKENS: tokens processed together per tile with one, two and
// three limbs, and with 16-bit words. PAIRS: whether two tiles are processed together for one limb. FLOAT_ROWS and
// DIRECT_ROWS: rows of x per tile of numbers, and of codes that are decoded directly; FLOAT_TILES and DIRECT_TILES:
// tiles side by side. CONV_TILES, CONV_PIXELS: tiles and pixels of a convolution; DIRECT_PIXELS: pixels of a depthwise
// one. CHAIN_TILES, and CHAIN_PIXELS by tiles - 1: the same in chains. DEPTHWISE_ROWS: whether depthwise_row() is used.
//
// A file that includes this one is compiled once per instruction set (see setup.py). Everything is in an anonymous
// namespace: inline functions with external linkage would be merged across translation units, and AVX-512 code would
// run on a machine without it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"

// For code in inner loops: if vectors are pairs of registers, compilers otherwise pass some of them through memory,
// which is ten times slower.
#define PW_INLINE __attribute__((always_inline)) inline
// Loops over registers must be unrolled before the compiler allocates registers. Other inner loops must not be
// unrolled, because the code would take longer to compile and run no faster.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define PW_UNROLL _Pragma("GCC unroll 32")
#else
#define PW_UNROLL
#endif
#define PW_ROLLED _Pragma("GCC unroll 1")

namespace {

// Positions of 16 codes of `bits` bits in 16 bytes: lane i begins at byte at[4 * i], bit shift[i].
struct Stream {
    alignas(64) uint8_t at[64];
    alignas(64) int32_t shift[16];
};
constexpr Stream stream_of(int bits) {
    Stream s = {};
    for (int i = 0; i < 16; ++i) {
        s.at[4 * i] = (uint8_t)(i * bits / 8);
        s.at[4 * i + 1] = (uint8_t)(i * bits / 8 + 1);
        s.at[4 * i + 2] = s.at[4 * i + 3] = 0x80;  // nothing
        s.shift[i] = i * bits % 8;
    }
    return s;
}
constexpr Stream STREAMS[8] = {stream_of(0), stream_of(1), stream_of(2), stream_of(3),
                               stream_of(4), stream_of(5), stream_of(6), stream_of(7)};

}  // namespace

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif

namespace {

// bfloat16 to nearest, ties to even; NaN stays NaN.
inline uint16_t narrow_bf16(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)((b >> 16) | 0x40);
    return (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
#if !defined(__AVX2__)
inline void fstore_bf16(uint16_t* p, F a) {
    float t[16];
    fstore(t, a);
    for (int i = 0; i < 16; ++i) p[i] = narrow_bf16(t[i]);
}
#endif
#if !defined(__AVX512F__)
// Transposes 4 x 4 quarters of four vectors.
inline void exchange4(B* v) {
    uint8_t from[4][64], to[64];
    for (int i = 0; i < 4; ++i) bstore(from[i], v[i]);
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) memcpy(to + 16 * j, from[j] + 16 * i, 16);
        v[i] = bload(to);
    }
}
inline float fleast(F a) {
    float t[16];
    fstore(t, a);
    for (int i = 1; i < 16; ++i) t[0] = t[i] < t[0] ? t[i] : t[0];
    return t[0];
}
inline float fmost(F a) {
    float t[16];
    fstore(t, a);
    for (int i = 1; i < 16; ++i) t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
}
#endif

// Rounded to a kind; a NaN may become an infinity.
template <int KIND> inline F round_kind(F a) {
    if constexpr (KIND == BF16) {
        const I b = bits(a), up = iadd(iset(0x7fff), iand(ishr<16>(b), iset(1)));
        return bitcast(iand(iadd(b, up), iset((int32_t)0xffff0000)));
    }
    if constexpr (KIND == F16) return round_f16(a);
    return a;
}
inline F round_kind(int kind, F a) { return kind == BF16 ? round_kind<BF16>(a) : kind == F16 ? round_kind<F16>(a) : a; }
template <int KIND> inline F load_kind(const void* p) {
    if constexpr (KIND == BF16) return fload_bf16((const uint16_t*)p);
    if constexpr (KIND == F16) return fload_f16((const uint16_t*)p);
    return fload((const float*)p);
}
template <int KIND> inline void store_kind(void* p, F a) {
    if constexpr (KIND == BF16) fstore_bf16((uint16_t*)p, a);
    else if constexpr (KIND == F16) fstore_f16((uint16_t*)p, a);
    else fstore((float*)p, a);
}
// A 16-bit float as a signed integer in the same order, and back; -0 is below 0.
inline int16_t ordered(uint16_t w) { return (int16_t)(w ^ (uint16_t)((int16_t)w < 0 ? 0x7fff : 0)); }
#if !defined(__AVX2__)
// Minimum and maximum of n 16-bit floats as such integers; n is a multiple of 32.
inline void ends_of_words(const uint16_t* p, int64_t n, int16_t* lo, int16_t* hi) {
    int16_t least = 0x7fff, most = -0x8000;
    for (int64_t i = 0; i < n; ++i) {
        const int16_t v = ordered(p[i]);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    *lo = least;
    *hi = most;
}
#endif
constexpr int64_t bytes_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : 1; }
// Reads 16 elements of a kind as float32.
inline F load16(const void* p, int kind, int64_t i) {
    switch (kind) {
        case BF16: return fload_bf16((const uint16_t*)p + i);
        case F16: return fload_f16((const uint16_t*)p + i);
        default: return fload((const float*)p + i);
    }
}
inline void store16(void* p, int kind, int64_t i, F v) {
    switch (kind) {
        case BF16: return fstore_bf16((uint16_t*)p + i, v);
        case F16: return fstore_f16((uint16_t*)p + i, v);
        default: return fstore((float*)p + i, v);
    }
}
inline int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : kind == NONE ? 0 : 1; }
inline uint32_t bits_of(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
inline float float_of(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}

// One row as float32 [kp], zero beyond k.
inline void widen_row(const void* x, int kind, int64_t k, int64_t kp, float* out) {
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) fstore(out + i, load16(x, kind, i));
    if (i < k) {
        alignas(64) float tail[16] = {0};
        memcpy(tail, (const char*)x + i * size_of(kind), (size_t)((k - i) * size_of(kind)));
        fstore(out + i, load16(tail, kind, 0));
        i += 16;
    }
    for (; i < kp; i += 16) fstore(out + i, fset(0));
}

}  // namespace
