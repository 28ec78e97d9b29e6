// The other steps of a chain of convolutions: inputs, pooling, means, sums; and which step runs.
#pragma once

#include "conv_chain_conv.h"

namespace {

// A row of the result.
inline void max_pool(const ChainSample& one, const ChainWork& k, int64_t oy) {
    const ChainStep& s = *k.s;
    const ChainTensor &x = one.tensor(s.x), &y = one.tensor(s.y);
    const float* numbers = one.numbers_of(x);
    const int64_t n = x.channels, y0 = std::max<int64_t>(0, oy * s.stride_h - s.pad_h),
                  y1 = std::min(x.h, oy * s.stride_h - s.pad_h + s.kh);
    const auto columns = [&](int64_t ox, int64_t& x0, int64_t& x1) {
        x0 = std::max<int64_t>(0, ox * s.stride_w - s.pad_w), x1 = std::min(x.w, ox * s.stride_w - s.pad_w + s.kw);
    };
    if (same_codes(x, y) && !one.numbers_of(y)) {  // codes have the order of the numbers
        const int64_t pixel = pixel_bytes(x);
        for (int64_t ox = 0, x0, x1; ox < y.w; ++ox) {
            columns(ox, x0, x1);
            uint8_t* out = one.code_at(y, oy, ox);
            memcpy(out, one.code_at(x, y0, x0), (size_t)pixel);
            for (int64_t iy = y0; iy < y1; ++iy)
                for (int64_t ix = x0; ix < x1; ++ix) {
                    const uint8_t* from = one.code_at(x, iy, ix);
                    for (int64_t i = 0; i < pixel; ++i) out[i] = from[i] > out[i] ? from[i] : out[i];
                }
        }
        return;
    }
    for (int64_t first = 0; first < y.w; first += CHAIN_BLOCK) {
        const int64_t count = std::min(CHAIN_BLOCK, y.w - first);
        one.place_codes(y, oy * y.w + first, count);
        for (int64_t c0 = 0; c0 < n; c0 += 16) {
            for (int64_t i = 0, x0, x1; i < count; ++i) {
                columns(first + i, x0, x1);
                const bool whole = c0 + 16 <= n;
                const auto at = [&](int64_t iy, int64_t ix) {
                    const float* from = numbers + (iy * x.w + ix) * n;
                    return whole ? fload(from + c0) : load_part(from, F32, c0, n);
                };
                F most = at(y0, x0);
                for (int64_t iy = y0; iy < y1; ++iy)
                    for (int64_t ix = x0; ix < x1; ++ix) most = fmost(at(iy, ix), most);
                fstore((float*)one.room.sums + CHAIN_ROW * i, most);
            }
            finish_numbers(one, k, y, c0 / 16, oy * y.w + first, count);
        }
    }
}

// 16 channels.
inline void mean(const ChainSample& one, const ChainWork& k, int64_t tile) {
    const ChainTensor &x = one.tensor(k.s->x), &y = one.tensor(k.s->y);
    const int64_t n = x.channels, pixels = x.h * x.w, c0 = 16 * tile;
    const float* numbers = one.numbers_of(x);
    F sum = fset(0);
    for (int64_t p = 0; p < pixels; ++p) sum = fadd(sum, load_part(numbers + p * n, F32, c0, n));
    fstore((float*)one.room.sums, fdiv(sum, fset((float)pixels)));
    one.place_codes(y, 0, 1);
    finish_numbers(one, k, y, tile, 0, 1);
}

// A row.
inline void add(const ChainSample& one, const ChainWork& k, int64_t oy) {
    const ChainTensor &x = one.tensor(k.s->x), &y = one.tensor(k.s->y);
    const int64_t n = x.channels;
    const float* numbers = one.numbers_of(x);
    for (int64_t first = oy * y.w; first < (oy + 1) * y.w; first += CHAIN_BLOCK) {
        const int64_t count = std::min(CHAIN_BLOCK, (oy + 1) * y.w - first);
        one.place_codes(y, first, count);
        for (int64_t c0 = 0; c0 < n; c0 += 16) {
            for (int64_t i = 0; i < count; ++i)
                fstore((float*)one.room.sums + CHAIN_ROW * i, load_part(numbers + (first + i) * n, F32, c0, n));
            finish_numbers(one, k, y, c0 / 16, first, count);
        }
    }
}

// One row of an input.
inline void take(const ChainSample& one, const ChainWork& k, int64_t iy) {
    const ChainTensor& y = one.tensor(k.s->y);
    const ChainInput& in = one.c.inputs[k.s->x];
    const int64_t n = y.channels, plane = y.h * y.w;
    const float* from = (const float*)in.data + one.sample * n * plane;
    const auto load = [](const float* p, int64_t count) {
        return count == 16 ? fload(p) : load_part(p, F32, 0, count);
    };
    I top = iset(0);
    const auto see = [&](F v) { top = imax(top, iand(bits(v), iset(0x7fffffff))); };
    for (int64_t x0 = 0; x0 < y.w; x0 += 16) {
        const int64_t count = std::min<int64_t>(16, y.w - x0), first = iy * y.w + x0;
        if (!in.last && n <= 4 && y.codes >= 0 && !one.numbers_of(y)) {  // images: a pixel is one word
            const Encoder encode = k.encode;
            I word = iset(0);
            for (int64_t j = 0; j < n; ++j) {
                const F v = load(from + j * plane + first, count);
                see(v);
                word = ior(word, ishl(iand(encode(v), iset(255)), (int)(8 * j)));
            }
            for (int64_t j = n; j < 4; ++j) word = ior(word, iset((int32_t)((uint32_t)BYTE_ZERO << (8 * j))));
            uint8_t* to = one.code_at(y, iy, x0);
            if (count == 16) {
                istore((int32_t*)to, word);
                continue;
            }
            alignas(64) int32_t words[16];
            istore(words, word);
            memcpy(to, words, (size_t)(4 * count));
            continue;
        }
        one.place_codes(y, first, count);
        for (int64_t c0 = 0; c0 < n; c0 += 16) {
            const int64_t channels = std::min<int64_t>(16, n - c0);
            float* numbers = (float*)one.room.sums;
            if (in.last) {
                for (int64_t i = 0; i < count; ++i)
                    fstore(numbers + CHAIN_ROW * i, load(from + (first + i) * n + c0, channels));
            } else {
                for (int64_t i = 0; i < count; ++i) fstore(numbers + CHAIN_ROW * i, fset(0));
                for (int64_t j = 0; j < channels; ++j)
                    for (int64_t i = 0; i < count; ++i) numbers[CHAIN_ROW * i + j] = from[(c0 + j) * plane + first + i];
            }
            for (int64_t i = 0; i < count; ++i) see(fload(numbers + CHAIN_ROW * i));
            finish_numbers(one, k, y, c0 / 16, first, count);
        }
    }
    alignas(64) int32_t t[16];
    istore(t, top);
    if (*std::max_element(t, t + 16) >= 0x7f800000) one.room.odd = true;
}

// One unit of a step; the last one fills the margin.
inline void run_unit(const ChainSample& one, const ChainWork& k, int64_t unit) {
    if (unit == k.units) return fill_margin(one, one.tensor(k.s->y));
    switch (k.s->kind) {
        case CHAIN_INPUT: return take(one, k, unit);
        case CHAIN_CONV: return convolve(one, k, unit);
        case CHAIN_MAX: return max_pool(one, k, unit);
        case CHAIN_MEAN: return mean(one, k, unit);
        default: return add(one, k, unit);
    }
}
// What a convolution makes of an input that is not finite.
inline void spoil(const ChainSample& one) {
    for (int32_t i = 0; i < one.c.tensor_count; ++i) {
        const ChainTensor& t = one.tensor(i);
        if (t.output >= 0) std::fill_n(one.numbers_of(t), t.channels * t.h * t.w, float_of(0x7fc00000));
    }
}

}  // namespace
