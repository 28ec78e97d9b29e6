// Codes to floats: value = (number - center - zero_point) * scale + offset, each step rounded to float32, the value
// clamped to the output's range and rounded once. Bit-identical to core/numerics.py.
//
// For all layouts, codes are first expanded to bytes of one row, at most SPAN at a time, which stay in the cache.
#pragma once

#include <algorithm>

#include "abi.h"
#include "pack.h"
#include "simd.h"

namespace {

constexpr int64_t SPAN = 1024;
constexpr float LARGEST_OF[4] = {0, 3.40282346638528859812e+38f, 3.38953138925153547590e+38f, 65504.0f};

inline float float_from(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}

// Element i of a scale, zero point or offset.
inline float part_at(int kind, const void* p, int64_t i) {
    switch (kind) {
        case F32: return ((const float*)p)[i];
        case BF16: return float_from((uint32_t)((const uint16_t*)p)[i] << 16);
        case F16: {
            const uint16_t h = ((const uint16_t*)p)[i];
            const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
            if (e == 31) return float_from(sign | 0x7f800000 | m << 13);
            if (e) return float_from(sign | (e + 112) << 23 | m << 13);
            return (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-08f;
        }
        case E8M0: {  // 2**(byte - 127); byte 0 is 2**-127, a subnormal; 255 is NaN
            const uint32_t b = ((const uint8_t*)p)[i];
            return float_from(b == 255 ? 0x7fc00000 : b ? b << 23 : 1u << 22);
        }
        case I8: return (float)((const int8_t*)p)[i];
        default: return (float)((const uint8_t*)p)[i];
    }
}
inline int64_t part_index(const Affine& a, int64_t r, int64_t g) {
    return a.store == TILES && a.row_block == 1 ? (r / 16 * a.groups + g) * 16 + r % 16
                                                : r / a.row_block * a.groups + g;
}

// The zero point of row r, group g.
inline int32_t zero_at(const Affine& a, const void* p, int64_t r, int64_t g) {
    if (!a.zero_point) return 0;
    if (!a.zero_bits) return (int32_t)part_at(a.zero_point, p, part_index(a, r, g));
    const auto* row = (const uint8_t*)p + r / a.row_block * ((a.groups * a.zero_bits + 7) / 8);
    const int64_t at = g * a.zero_bits, from = at & 7;
    uint32_t word = row[at >> 3];
    if (from + a.zero_bits > 8) word |= (uint32_t)row[(at >> 3) + 1] << 8;
    return (int32_t)(word >> from & ((1u << a.zero_bits) - 1)) + a.zero_lo;
}

// Numbers of 16 bytes of codes, minus `less` for integers.
template <int NUMBERS> PW_INLINE F numbers(const Affine& a, const uint8_t* p, I less) {
    if constexpr (NUMBERS == SIGNED) return cvt(isub(iload8s((const int8_t*)p), less));
    const I u = iload8u(p);
    if constexpr (NUMBERS == UNSIGNED) return cvt(isub(u, less));
    if constexpr (NUMBERS == LOOKUP) return a.bits <= 4 ? pick16(a.table, iand(u, iset(15))) : pick(a.table, u);
    // MINIFLOAT: a subnormal is the smallest normal with the same mantissa, minus the smallest power of two.
    const I size = iand(u, iset((1 << (a.bits - 1)) - 1)), sign = ishl(ishr(u, a.bits - 1), 31);
    const I wide = ishl(size, 23 - a.mantissa), bottom = iset((128 - a.bias) << 23);
    const F low = fsub(bitcast(iadd(wide, bottom)), bitcast(bottom));
    const I high = iadd(wide, iset((127 - a.bias) << 23));
    const I rest = iabove(size, iset((1 << a.mantissa) - 1), high, bits(low));
    return bitcast(ior(ior(rest, sign), iabove(size, iset(a.special - 1), iset(0x7f800000), iset(0))));
}

// `count` values with one scale.
template <int NUMBERS, int KIND>
void segment(const Affine& a, const uint8_t* p, int64_t count, int32_t less, float scale, float offset, char* out) {
    const I l = iset(less);
    const F s = fset(scale), o = fset(offset), top = fset(LARGEST_OF[KIND]), bottom = fset(-LARGEST_OF[KIND]);
    const auto value = [&](const uint8_t* q) {
        return fclip(fadd(fmul(numbers<NUMBERS>(a, q, l), s), o), bottom, top);
    };
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store_kind<KIND>(out + i * bytes_of(KIND), value(p + i));
    if (i < count) {
        uint8_t rest[16] = {0};
        alignas(64) char tail[64];
        memcpy(rest, p + i, (size_t)(count - i));
        store_kind<KIND>(tail, value(rest));
        memcpy(out + i * bytes_of(KIND), tail, (size_t)((count - i) * bytes_of(KIND)));
    }
}

// Columns c0..c1 of row r, whose codes are bytes at p. The neutral offset is -0, because adding +0 changes -0.
template <int NUMBERS, int KIND>
void span_of(const Affine& a, const Parts& w, int64_t r, int64_t c0, int64_t c1, const uint8_t* p, char* out) {
    for (int64_t c = c0, g = c0 / a.group; c < c1; ++g) {
        const int64_t end = std::min((g + 1) * a.group, c1), i = part_index(a, r, g);
        const int32_t zero = zero_at(a, w.zero_point, r, g);
        segment<NUMBERS, KIND>(a, p + (c - c0), end - c, a.center + zero, a.scale ? part_at(a.scale, w.scale, i) : 1.0f,
                               a.offset ? part_at(a.offset, w.offset, i) : -0.0f, out + (c - c0) * bytes_of(KIND));
        c = end;
    }
}
using Spanner = void (*)(const Affine&, const Parts&, int64_t, int64_t, int64_t, const uint8_t*, char*);
template <int NUMBERS> Spanner spanner_of(int kind) {
    return kind == BF16 ? span_of<NUMBERS, BF16> : kind == F16 ? span_of<NUMBERS, F16> : span_of<NUMBERS, F32>;
}
inline Spanner spanner(const Affine& a) {
    switch (a.numbers) {
        case UNSIGNED: return spanner_of<UNSIGNED>(a.x);
        case SIGNED: return spanner_of<SIGNED>(a.x);
        case MINIFLOAT: return spanner_of<MINIFLOAT>(a.x);
        default: return spanner_of<LOOKUP>(a.x);
    }
}

// `count` codes of a bit stream that starts on a byte boundary; `size` bytes may be read.
void bytes_of_stream(int bits, const uint8_t* p, int64_t size, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count; i += 16, p += 2 * bits, size -= 2 * bits) {
        uint8_t edge[16] = {0};
        if (size < 16) memcpy(edge, p, (size_t)size);
        istore8((int8_t*)out + i, stream16(size < 16 ? edge : p, bits));
    }
}

// Codes c0..c1 of row r as bytes; c0 is a multiple of 32. `room`: scratch of SPAN + 32 bytes.
inline const uint8_t* bytes_of_row(const Affine& a, const uint8_t* codes, int64_t r, int64_t c0, int64_t c1,
                                   uint8_t* room) {
    if (a.store == TILES) {
        const uint8_t* tile = codes + r / 16 * a.stride + c0 / 32 * 64 * a.bits;
        for (int64_t c = 0; c < c1 - c0; c += 32, tile += 64 * a.bits)
            row_of_tile(a.bits, tile, (int)(r % 16), room + c);
        return room;
    }
    const uint8_t* row = codes + r * a.stride;
    if (a.store == PLAIN || a.bits == 8) return row + c0;
    const int64_t at = c0 * a.bits / 8;
    bytes_of_stream(a.bits, row + at, a.stride - at, c1 - c0, room);
    return room;
}

// Rows index[0..m), or all rows if index is null, to out [m, k]. Indices must be in 0..n.
void dequantize(const Affine* w, const Parts* parts, const int64_t* index, int64_t m, char* out, int threads) {
    const Affine& a = *w;
    const Spanner run = spanner(a);
    const auto* codes = (const uint8_t*)parts->codes;
    const bool whole = a.store == TILES && !index;  // 16 rows at a time
    const int64_t rows = whole ? (a.n + 15) / 16 : m, spans = (a.k + SPAN - 1) / SPAN, size = bytes_of(a.x);
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (threads > 1)
    for (int64_t unit = 0; unit < rows * spans; ++unit) {
        alignas(64) uint8_t room[16 * SPAN + 32];
        const int64_t i = unit / spans, c0 = unit % spans * SPAN, c1 = std::min(c0 + SPAN, a.k);
        if (!whole) {
            const int64_t r = index ? index[i] : i;
            run(a, *parts, r, c0, c1, bytes_of_row(a, codes, r, c0, c1, room), out + (i * a.k + c0) * size);
            continue;
        }
        const uint8_t* tile = codes + i * a.stride + c0 / 32 * 64 * a.bits;
        for (int64_t c = 0; c < c1 - c0; c += 32, tile += 64 * a.bits) rows_of_tile(a.bits, tile, 0, room + c, SPAN);
        for (int64_t r = 16 * i; r < 16 * i + 16 && r < a.n; ++r)
            run(a, *parts, r, c0, c1, room + (r - 16 * i) * SPAN, out + (r * a.k + c0) * size);
    }
}

}  // namespace
