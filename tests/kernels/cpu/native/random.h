// Random sizes and numbers, the same ones for the same seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "../../../../pennyweight/kernels/cpu/src/abi.h"

namespace {

using Bytes = std::vector<uint8_t>;

uint64_t state = 1;
bool wild = false;  // numbers that are NaN, infinite, subnormal or very large among the others

uint32_t random_bits() { return (uint32_t)((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33); }
int64_t below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }
bool chance(int64_t one_in) { return below(one_in) == 0; }
template <class T> T one_of(std::initializer_list<T> items) { return items.begin()[below((int64_t)items.size())]; }
int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows or columns: what lies at the edges of vectors, tiles and chunks, or anything.
int64_t rows_of() { return chance(2) ? one_of<int64_t>({1, 5, 15, 16, 17, 31, 32, 33, 48, 70}) : 1 + below(90); }
int64_t columns_of() {
    if (chance(40)) return one_of<int64_t>({2047, 2048, 2049, 4096, 4097, 5000});
    return chance(2) ? one_of<int64_t>(
                           {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640})
                     : 1 + below(700);
}

float number() {  // of one sign or the other, about 1
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += (float)random_bits() / 2147483648.0f - 0.5f;
    return sum * 1.7f;
}
uint32_t bits_of(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
float float_of(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}
uint16_t half_of(float f) {  // toward zero: any half will do
    const uint32_t b = bits_of(f);
    const int e = (int)(b >> 23 & 255) - 112;
    if (e <= 0) return (uint16_t)(b >> 16 & 0x8000);
    return (uint16_t)((b >> 16 & 0x8000) | (e > 30 ? 0x7bff : (uint32_t)e << 10 | (b >> 13 & 1023)));
}
int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : kind == NONE ? 0 : 1; }

// A number at an edge of its kind, as bits.
uint32_t edge_of(int kind) {
    const uint32_t sign = random_bits() & 1;
    switch (kind) {
        case F32:
            return one_of<uint32_t>({0, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0x7f800000, 0x7fc00000, 0x7f800001,
                                     0x71000000, 0x0a000000}) |
                   sign << 31;
        case BF16: return one_of<uint32_t>({0, 1, 0x7f, 0x80, 0x7f7f, 0x7f80, 0x7fc0, 0x7100, 0x0a00}) | sign << 15;
        default: return one_of<uint32_t>({0, 1, 0x3ff, 0x400, 0x7bff, 0x7c00, 0x7e00, 0x7c01}) | sign << 15;
    }
}

// `count` numbers of a kind, times `scale`; greater than 0 where `positive`.
Bytes numbers(int kind, int64_t count, float scale = 1, bool positive = false) {
    Bytes out((size_t)(count * size_of(kind)));
    if (kind == NONE) return out;
    const bool edges = wild && chance(3);
    for (int64_t i = 0; i < count; ++i) {
        float f = number() * scale;
        if (positive) f = (std::fabs(f) + 0.1f * scale);
        uint8_t* p = out.data() + i * size_of(kind);
        const uint32_t edge = edges && size_of(kind) > 1 && chance(count > 64 ? 50 : 8) ? edge_of(kind) : 0;
        if (edge) memcpy(p, &edge, (size_t)size_of(kind));
        else if (kind == F32) memcpy(p, &f, 4);
        else if (kind == BF16) {
            const uint16_t b = (uint16_t)(bits_of(f) >> 16);
            memcpy(p, &b, 2);
        } else if (kind == F16) {
            const uint16_t b = half_of(f);
            memcpy(p, &b, 2);
        } else if (kind == E8M0 && !edges) *p = (uint8_t)(118 + below(8));
        else if (kind == E4M3 && !edges) *p = (uint8_t)(40 + below(40));
        else *p = (uint8_t)random_bits();
    }
    return out;
}
Bytes any_bytes(int64_t count) {
    Bytes out((size_t)count);
    for (auto& b : out) b = (uint8_t)random_bits();
    return out;
}
float value(int kind, const uint8_t* p) {
    if (kind == F32) {
        float f;
        memcpy(&f, p, 4);
        return f;
    }
    uint16_t b;
    memcpy(&b, p, 2);
    if (kind == BF16) return float_of((uint32_t)b << 16);
    const int e = b >> 10 & 31;
    if (e == 31) return float_of((uint32_t)(b & 0x8000) << 16 | 0x7f800000 | (uint32_t)(b & 1023) << 13);
    const float m = std::ldexp((float)(b & 1023) / 1024 + (e ? 1.0f : 0.0f), (e ? e : 1) - 15);
    return b & 0x8000 ? -m : m;
}
// Whether `count` numbers of a kind hold neither NaN nor an infinity.
bool all_finite(int kind, const Bytes& b) {
    for (size_t i = 0; i < b.size(); i += (size_t)size_of(kind))
        if (!std::isfinite(value(kind, b.data() + i))) return false;
    return true;
}

// Whether they are all below 2**60 besides, so that no square of theirs leaves float32.
bool all_moderate(int kind, const Bytes& b) {
    for (size_t i = 0; i < b.size(); i += (size_t)size_of(kind))
        if (!(std::fabs(value(kind, b.data() + i)) < 0x1p60f)) return false;
    return true;
}

}  // namespace
