// A sample of a chain of convolutions, and how results of a step become its numbers and codes.
#pragma once

#include "conv_chain_work.h"
#include "elementwise.h"
#include "int_microkernel.h"

namespace {

// Where the tensors of a sample are.
struct ChainSample {
    const Chain& c;
    char* scratch;  // of the sample
    const int64_t sample;
    ChainRoom& room;

    const ChainTensor& tensor(int32_t i) const { return c.tensors[i]; }
    uint8_t* codes_of(const ChainTensor& t) const { return (uint8_t*)scratch + t.codes; }
    uint8_t* code_at(const ChainTensor& t, int64_t y, int64_t x) const {
        return codes_of(t) + (y + t.margin_h) * row_bytes(t) + (x + t.margin_w) * pixel_bytes(t);
    }
    float* numbers_of(const ChainTensor& t) const {
        if (t.output >= 0) return (float*)c.outputs[t.output] + sample * t.channels * t.h * t.w;
        return t.numbers < 0 ? nullptr : (float*)(scratch + t.numbers);
    }
    // Places of the codes of `count` pixels from `first` on.
    void place_codes(const ChainTensor& y, int64_t first, int64_t count) const {
        for (int64_t i = 0; i < count && y.codes >= 0; ++i)
            room.codes[i] = code_at(y, (first + i) / y.w, (first + i) % y.w);
    }
};

// 16 codes of channels [c0, ..) of a pixel, whose first byte is `to`. Those beyond the channels contribute nothing.
PW_INLINE void put(const ChainTensor& t, uint8_t* to, int64_t c0, I q) {
    if (c0 + 16 <= t.channels) return istore8((int8_t*)to + c0, q);
    alignas(16) uint8_t tail[16];
    istore8((int8_t*)tail, q);
    for (int64_t i = t.channels - c0; i < 16; ++i) tail[i] = BYTE_ZERO;
    memcpy(to + c0, tail, (size_t)(pixel_bytes(t) - c0));
}

// The zero point, around the codes of a tensor.
inline void fill_margin(const ChainSample& one, const ChainTensor& t) {
    if (t.codes < 0 || (t.margin_h == 0 && t.margin_w == 0)) return;
    const int64_t pixel = pixel_bytes(t), row = row_bytes(t), side = t.margin_w * pixel;
    const int byte = t.zero_point + 128;
    uint8_t* at = one.codes_of(t);
    const auto fill = [&](uint8_t* p, int64_t bytes) {
        memset(p, byte, (size_t)bytes);
        for (int64_t i = pixel; t.channels != pixel && i <= bytes; i += pixel)
            memset(p + i - (pixel - t.channels), BYTE_ZERO, (size_t)(pixel - t.channels));
    };
    fill(at, t.margin_h * row);
    for (int64_t y = 0; y < t.h && side; ++y) {
        fill(at + (t.margin_h + y) * row, side);
        fill(at + (t.margin_h + y + 1) * row - side, side);
    }
    fill(at + (t.margin_h + t.h) * row, t.margin_h * row);
}

#if PW_MASKS
// Tiles [t0, t0 + N) of `count` pixels from pixel `first` on: room.sums (or FLOATS) -> numbers and codes. scale, bias:
// [N]. The codes of N tiles are one store. lanes: sums, scale and bias are in the order of interleave4().
template <int N, bool FLOATS, bool ADD, bool NUMBERS, bool CODES>
void finish_row(const ChainSample& one, const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias,
                int64_t t0, int64_t first, int64_t count, bool lanes) {
    const ChainStep& s = *k.s;
    const int64_t channels = y.channels, c0 = 16 * t0;
    const float* more = ADD ? one.numbers_of(one.tensor(s.residual)) + first * channels + c0 : nullptr;
    float* numbers = NUMBERS ? one.numbers_of(y) + first * channels + c0 : nullptr;
    const F lo = fset(s.lo), hi = fset(s.hi), factor = fset(k.encode.factor);
    const F most = fset(40000);  // above every code, and it fits an integer
    const Narrow narrow(k.encode.zero, k.encode.first, k.encode.last, lanes);
    const Mask64 valid = first64(channels - c0), written = first64(std::min<int64_t>(16 * N, pixel_bytes(y) - c0));
    F scales[N], shifts[N];
    Mask16 there[N];
    PW_UNROLL for (int t = 0; t < N; ++t) {
        scales[t] = fload(scale + 16 * t), shifts[t] = fload(bias + 16 * t);
        there[t] = first16(channels - c0 - 16 * t);
    }
    const int32_t* sums = one.room.sums;
    uint8_t* const* codes = one.room.codes;
    for (int64_t i = 0; i < count; ++i, sums += CHAIN_ROW) {
        I q[4];
        PW_UNROLL for (int t = 0; t < N; ++t) {
            F v = FLOATS ? fload((const float*)sums + 16 * t) : fma(cvt(iload(sums + 16 * t)), scales[t], shifts[t]);
            if constexpr (ADD) v = fadd(v, fload(more + i * channels + 16 * t, there[t]));
            if constexpr (CODES) q[t] = iround(fleast(most, fmul(v, factor)));  // NaN is below all codes
            if constexpr (NUMBERS) fstore(numbers + i * channels + 16 * t, fleast(fmost(v, lo), hi), there[t]);
        }
        if constexpr (CODES) bstore(codes[i] + c0, narrow.template of<N>(q), written, valid);
    }
}
template <bool FLOATS, bool ADD, bool NUMBERS, bool CODES>
void finish(const ChainSample& one, const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias,
            int64_t t0, int64_t n, int64_t first, int64_t count, bool lanes) {
    switch (n) {
        case 1: return finish_row<1, FLOATS, ADD, NUMBERS, CODES>(one, k, y, scale, bias, t0, first, count, lanes);
        case 2: return finish_row<2, FLOATS, ADD, NUMBERS, CODES>(one, k, y, scale, bias, t0, first, count, lanes);
        case 3: return finish_row<3, FLOATS, ADD, NUMBERS, CODES>(one, k, y, scale, bias, t0, first, count, lanes);
        default: return finish_row<4, FLOATS, ADD, NUMBERS, CODES>(one, k, y, scale, bias, t0, first, count, lanes);
    }
}
#else
// Tiles [t0, t0 + n) of `count` pixels from pixel `first` on: room.sums (or FLOATS) -> numbers and codes. scale, bias:
// [n].
template <bool FLOATS, bool ADD, bool NUMBERS, bool CODES>
void finish(const ChainSample& one, const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias,
            int64_t t0, int64_t n, int64_t first, int64_t count, bool) {
    const ChainStep& s = *k.s;
    const int64_t channels = y.channels;
    const float* more = ADD ? one.numbers_of(one.tensor(s.residual)) + first * channels : nullptr;
    float* numbers = NUMBERS ? one.numbers_of(y) + first * channels : nullptr;
    const F lo = fset(s.lo), hi = fset(s.hi);
    const Encoder encode = k.encode;
    for (int64_t t = 0; t < n; ++t) {
        const int64_t c0 = 16 * (t0 + t);
        const bool whole = c0 + 16 <= channels;
        const F factor = fload(scale + 16 * t), shift = fload(bias + 16 * t);
        const int32_t* sums = one.room.sums + 16 * t;
        for (int64_t i = 0; i < count; ++i, sums += CHAIN_ROW) {
            F v = FLOATS ? fload((const float*)sums) : fma(cvt(iload(sums)), factor, shift);
            if constexpr (ADD)
                v = fadd(v,
                         whole ? fload(more + i * channels + c0) : load_part(more + i * channels, F32, c0, channels));
            if constexpr (CODES) {
                if (whole) istore8((int8_t*)one.room.codes[i] + c0, encode(v));
                else put(y, one.room.codes[i], c0, encode(v));
            }
            if constexpr (NUMBERS) {
                v = fleast(fmost(v, lo), hi);
                if (whole) fstore(numbers + i * channels + c0, v);
                else store_part(numbers + i * channels, F32, c0, channels, v);
            }
        }
    }
}
#endif
template <bool FLOATS, bool ADD>
void finish(const ChainSample& one, const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias,
            int64_t t0, int64_t n, int64_t first, int64_t count, bool lanes) {
    const bool numbers = one.numbers_of(y) != nullptr, codes = y.codes >= 0;
    if (numbers && codes) finish<FLOATS, ADD, true, true>(one, k, y, scale, bias, t0, n, first, count, lanes);
    else if (codes) finish<FLOATS, ADD, false, true>(one, k, y, scale, bias, t0, n, first, count, lanes);
    else finish<FLOATS, ADD, true, false>(one, k, y, scale, bias, t0, n, first, count, lanes);
}
inline void finish(const ChainSample& one, const ChainWork& k, const ChainTensor& y, const float* scale,
                   const float* bias, int64_t t0, int64_t n, int64_t first, int64_t count, bool lanes) {
    const bool add = k.s->residual >= 0;
    if (k.s->function != IDENTITY) {
        with_function(k.s->function, [&](auto f) {
            for (int64_t i = 0; i < count; ++i) PW_ROLLED for (int64_t t = 0; t < n; ++t) {
                    float* v = (float*)one.room.sums + i * CHAIN_ROW + 16 * t;
                    fstore(v, apply<decltype(f)::value>(
                                  fma(cvt(iload((const int32_t*)v)), fload(scale + 16 * t), fload(bias + 16 * t))));
                }
        });
        if (add) finish<true, true>(one, k, y, scale, bias, t0, n, first, count, lanes);
        else finish<true, false>(one, k, y, scale, bias, t0, n, first, count, lanes);
    } else if (add) finish<false, true>(one, k, y, scale, bias, t0, n, first, count, lanes);
    else finish<false, false>(one, k, y, scale, bias, t0, n, first, count, lanes);
}

// Numbers in room.sums of one group of 16 channels are written as the result.
inline void finish_numbers(const ChainSample& one, const ChainWork& k, const ChainTensor& y, int64_t tile,
                           int64_t first, int64_t count) {
    const float none[16] = {0};
    if (k.s->residual >= 0) finish<true, true>(one, k, y, none, none, tile, 1, first, count, false);
    else finish<true, false>(one, k, y, none, none, tile, 1, first, count, false);
}

}  // namespace
