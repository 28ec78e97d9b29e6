// Keys and values of a cache: the newest are floats, those before may be codes with a scale and an offset for groups of
// tokens or of channels. Codes may be those of rotated keys and values; the newest are not rotated.
#pragma once

#include "attention_parts.h"
#include "hadamard.h"

namespace {
namespace attend {

// Those of a token that are floats.
inline const char* key_at(const AttentionArgs& a, int64_t b, int64_t shared, int64_t key) {
    return (const char*)a.keys +
           (b * a.key_strides[0] + shared * a.key_strides[1] + (key - a.past) * a.key_strides[2]) * size_of(a.kind);
}
inline const char* value_at(const AttentionArgs& a, int64_t b, int64_t shared, int64_t key) {
    return (const char*)a.values +
           (b * a.value_strides[0] + shared * a.value_strides[1] + (key - a.past) * a.value_strides[2]) *
               size_of(a.kind);
}
inline const uint8_t* codes_at(const CacheCodes& c, int64_t b, int64_t shared, int64_t key) {
    return c.codes + b * c.code_strides[0] + shared * c.code_strides[1] + key * c.code_strides[2];
}
inline const char* part_at(const CacheCodes& c, const void* part, const int64_t* strides, int64_t b, int64_t shared,
                           int64_t key) {
    return (const char*)part + (b * strides[0] + shared * strides[1] + key / c.tokens * strides[2]) * size_of(c.kind);
}
inline const char* scale_at(const CacheCodes& c, int64_t b, int64_t shared, int64_t key) {
    return part_at(c, c.scale, c.scale_strides, b, shared, key);
}
inline const char* offset_at(const CacheCodes& c, int64_t b, int64_t shared, int64_t key) {
    return part_at(c, c.offset, c.offset_strides, b, shared, key);
}

// A row of codes as float32 [width], zero beyond the channels; rotated back, if it was rotated.
inline void widen_codes(const AttentionArgs& a, const CacheCodes& c, int64_t width, int64_t b, int64_t shared,
                        int64_t key, float* out) {
    const uint8_t* row = codes_at(c, b, shared, key);
    const char *scale = scale_at(c, b, shared, key), *offset = offset_at(c, b, shared, key);
    const int64_t size = ((int64_t)a.size * c.bits + 7) / 8, each = size_of(c.kind);
    for (int64_t d = 0; d < width; d += 16) {
        const int64_t at = d / 8 * c.bits, left = std::min<int64_t>(16, a.size - d);
        alignas(64) uint8_t codes[16] = {0};
        alignas(64) char scales[64] = {0}, offsets[64] = {0};
        memcpy(codes, row + at, (size_t)std::min<int64_t>(16, size - at));
        for (int64_t i = 0; i < left; ++i) {
            memcpy(scales + i * each, scale + (d + i) / c.channels * each, (size_t)each);
            memcpy(offsets + i * each, offset + (d + i) / c.channels * each, (size_t)each);
        }
        const I u = c.bits == 8 ? iload8u(codes) : stream16(codes, c.bits);
        fstore(out + d, fadd(fmul(cvt(u), load16(scales, c.kind, 0)), load16(offsets, c.kind, 0)));
    }
    for (int64_t d = a.size; d < width; ++d) out[d] = 0;
    if (c.hadamard) rotate_blocks(out, width, c.hadamard);
}
inline void widen_key(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key,
                      float* out) {
    if (key < a.past) widen_codes(a, *a.past_keys, p.width, b, shared, key, out);
    else widen_row(key_at(a, b, shared, key), a.kind, a.size, p.width, out);
}
inline void widen_value(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key,
                        float* out) {
    if (key < a.past) widen_codes(a, *a.past_values, p.width, b, shared, key, out);
    else widen_row(value_at(a, b, shared, key), a.kind, a.size, p.width, out);
}

}  // namespace attend
}  // namespace
