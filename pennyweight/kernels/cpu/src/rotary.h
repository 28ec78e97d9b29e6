// Normalization and rotation of the heads of q and k, and the new tokens of a key-value cache:
//
//   q = rotated(norm(q));  keys[b, head, past + s] = rotated(norm(k));  values[b, head, past + s] = v
//   HALVES       x * cos + cat(-x2, x1) * sin with (x1, x2) the halves of the rotated channels x
//   INTERLEAVED  the same with x1 the even and x2 the odd channels, in their places
//
// A unit of work is some heads of one row. Every instruction set gives the same bits.
#pragma once

#include <algorithm>

#include "elementwise.h"
#include "schedule.h"

namespace {

constexpr int64_t ROTARY_ELEMENTS = 1024;  // of a unit of work

inline int64_t rotary_heads(const RotaryArgs& a) { return std::max<int64_t>(1, ROTARY_ELEMENTS / std::max(1, a.size)); }
inline int64_t rotary_units(const RotaryArgs& a) {
    const int64_t heads = rotary_heads(a);
    return a.batch * a.tokens * ((a.heads + a.shared + heads - 1) / heads);
}

// cos and sin of a row as rotate_head reads them: those of the first channels of the pairs, then of the second ones.
struct Angles {
    alignas(64) float cos[2][MOST_CHANNELS / 2], sin[2][MOST_CHANNELS / 2];
    Angles(const RotaryArgs& a, int64_t b, int64_t s) {
        alignas(64) float wide[MOST_CHANNELS];
        const int64_t each = size_of(a.angle_kind), up = (a.rotated + 15) / 16 * 16;
        widen_row((const char*)a.cos + (b * a.cos_strides[0] + s * a.cos_strides[1]) * each, a.angle_kind, a.rotated,
                  up, wide);
        split(a, wide, cos);
        widen_row((const char*)a.sin + (b * a.sin_strides[0] + s * a.sin_strides[1]) * each, a.angle_kind, a.rotated,
                  up, wide);
        split(a, wide, sin);
    }
    static void split(const RotaryArgs& a, const float* x, float (*to)[MOST_CHANNELS / 2]) {
        const int64_t half = a.rotated / 2, step = a.rotation == HALVES ? 1 : 2,
                      second = a.rotation == HALVES ? half : 1;
        for (int64_t d = 0; d < half; ++d) to[0][d] = x[d * step], to[1][d] = x[d * step + second];
        for (int64_t d = half; d % 16; ++d) to[0][d] = to[1][d] = 0;
    }
};
// Vectors only: in loops over floats g++ 12 contracts pairs of products to fused ones, whatever -ffp-contract says.
inline void rotate_head(float* x, const RotaryArgs& a, const Angles& by) {
    const int64_t half = a.rotated / 2;
    alignas(64) float pairs[2][MOST_CHANNELS / 2];
    const size_t bytes = (size_t)half * 4;
    if (a.rotation == HALVES) memcpy(pairs[0], x, bytes), memcpy(pairs[1], x + half, bytes);
    else
        for (int64_t d = 0; d < half; ++d) pairs[0][d] = x[2 * d], pairs[1][d] = x[2 * d + 1];
    for (int64_t d = half; d % 16; ++d) pairs[0][d] = pairs[1][d] = 0;
    for (int64_t d = 0; d < half; d += 16) {
        const F one = fload(pairs[0] + d), two = fload(pairs[1] + d);
        fstore(pairs[0] + d, fsub(fmul(one, fload(by.cos[0] + d)), fmul(two, fload(by.sin[0] + d))));
        fstore(pairs[1] + d, fadd(fmul(two, fload(by.cos[1] + d)), fmul(one, fload(by.sin[1] + d))));
    }
    if (a.rotation == HALVES) memcpy(x, pairs[0], bytes), memcpy(x + half, pairs[1], bytes);
    else
        for (int64_t d = 0; d < half; ++d) x[2 * d] = pairs[0][d], x[2 * d + 1] = pairs[1][d];
}
// A head of the cache.
inline void store_head(const float* x, int64_t size, void* out, int kind) {
    int64_t d = 0;
    for (; d + 16 <= size; d += 16) store16(out, kind, d, fload(x + d));
    if (d < size) {
        alignas(64) float wide[16] = {0};
        alignas(64) char tail[64];
        memcpy(wide, x + d, (size_t)(size - d) * 4);
        store16(tail, kind, 0, fload(wide));
        memcpy((char*)out + d * size_of(kind), tail, (size_t)((size - d) * size_of(kind)));
    }
}

// Heads of a row from `first` on, query heads before those of k and v.
inline void rotary_heads_of(const RotaryArgs& a, int64_t first, int64_t row, const Angles* by) {
    alignas(64) float x[MOST_CHANNELS];
    const int64_t b = row / a.tokens, s = row % a.tokens, width = (a.size + 15) / 16 * 16;
    const int64_t end = std::min<int64_t>(a.heads + a.shared, first + rotary_heads(a));
    for (int64_t h = first; h < end; ++h) {
        const bool query = h < a.heads;
        if (query && !by && a.q_norm.kind == NO_NORM) continue;
        const int64_t head = query ? h : h - a.heads;
        const float* from = query ? a.q + row * a.q_stride + head * a.size : a.k + row * a.k_stride + head * a.size;
        widen_row(from, F32, a.size, width, x);
        normalize(query ? a.q_norm : a.k_norm, a.size, x);
        if (by) rotate_head(x, a, *by);
        if (query) {
            memcpy(a.q + row * a.q_stride + head * a.size, x, (size_t)a.size * 4);
            continue;
        }
        const int64_t each = size_of(a.cache_kind), at = a.past + s;
        store_head(x, a.size,
                   (char*)a.keys + (b * a.key_strides[0] + head * a.key_strides[1] + at * a.key_strides[2]) * each,
                   a.cache_kind);
        store_head(
            a.v + row * a.v_stride + head * a.size, a.size,
            (char*)a.values + (b * a.value_strides[0] + head * a.value_strides[1] + at * a.value_strides[2]) * each,
            a.cache_kind);
    }
}

inline void rotary_unit(const RotaryArgs& a, int64_t unit) {
    const int64_t heads = rotary_heads(a), per_row = (a.heads + a.shared + heads - 1) / heads;
    const int64_t row = unit / per_row;
    if (a.rotation == UNROTATED) return rotary_heads_of(a, unit % per_row * heads, row, nullptr);
    const Angles by(a, row / a.tokens, row % a.tokens);
    rotary_heads_of(a, unit % per_row * heads, row, &by);
}

// One call with threads of its own.
inline int rotary(const RotaryArgs* args, int most_threads) {
    const RotaryArgs& a = *args;
    const int64_t units = a.batch * a.tokens > 0 ? rotary_units(a) : 0;
    const double elements = (double)(a.batch * a.tokens) * (a.heads + 2.0 * a.shared) * a.size;
    const int threads = (int)std::min<double>(most_threads, 1 + elements * 16 / PRODUCTS_PER_THREAD);
    run_units(threads, false, 0, units, [](int, int64_t) {}, [&](int, int64_t u) { rotary_unit(a, u); });
    return DONE;
}

}  // namespace
