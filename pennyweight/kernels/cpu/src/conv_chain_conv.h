// Convolutions of a chain: an implicit matrix product on the codes of a sample.
#pragma once

#include "conv_chain_result.h"

namespace {

// What the sums of tiles start from.
inline void start(const ChainSample& one, const ChainWork& k, const ChainTensor& x, int64_t t0, int64_t n) {
    const I zero =
        iset((k.depthwise ? 0 : BYTE_ZERO) - x.zero_point - 128);  // depthwise products are of the bytes themselves
    for (int64_t t = 0; t < n; ++t)
        istore(one.room.start + 16 * t, t0 + t < k.tiles ? umul(iload(k.s->sums + 16 * (t0 + t)), zero) : iset(0));
}

// Sums of tiles for the pixels in room.px.
inline void dense(const ChainSample& one, const ChainWork& k, int64_t t0, int64_t n, int64_t count) {
    const int64_t most = CHAIN_PIXELS[n - 1], blocks = (count + most - 1) / most, small = count / blocks,
                  larger = count % blocks;
    const int64_t group = k.s->groups == 1 ? 0 : 16 * t0 / k.rows_of_group * k.s->conv->c;
    const uint8_t* px[CHAIN_BLOCK];
    for (int64_t i = 0; i < count; ++i) px[i] = one.room.px[i] + group;
    const uint8_t* w = (const uint8_t*)k.s->codes + t0 * k.tile_bytes;
    const Piece *piece = k.pieces, *end = piece + k.piece_count;
    for (bool fresh = true; piece < end; fresh = false) {
        int64_t pieces = 0, columns = 0;
        while (piece + pieces < end && (!pieces || columns + piece[pieces].count <= CONV_CHUNK))
            columns += piece[pieces++].count;
        for (int64_t b = 0, p = 0; b < blocks; ++b) {
            const int64_t each = small + (b < larger);
            pick_chain(n, each)(w, k.tile_bytes, piece, pieces, px + p, one.room.start, one.room.sums + CHAIN_ROW * p,
                                fresh);
            p += each;
        }
        piece += pieces;
    }
}

// The same of tiles with one input channel each. Whether the sums are in the order of interleave4().
inline bool depthwise(const ChainSample& one, const ChainWork& k, const ChainTensor& x, int64_t t0, int64_t n,
                      int64_t first, int64_t count) {
    const ChainStep& s = *k.s;
    if (DEPTHWISE_ROWS && k.interleaved) {
        exchange16(one.room.start);
        const uint8_t* w = k.interleaved + t0 / 4 * k.quads * s.kw * 256;
        const int64_t row = row_bytes(x) * s.dilation_h, pixel = pixel_bytes(x), width = one.tensor(s.y).w;
        for (int64_t i = 0; i < count;) {
            const int64_t each = std::min({count - i, (int64_t)DEPTHWISE_PIXELS, width - (first + i) % width});
            const uint8_t* rows[16];
            for (int64_t r = 0; r < 4 * k.quads; ++r) rows[r] = one.room.px[i] + 16 * t0 + std::min(r, s.kh - 1) * row;
            pick_depthwise(s.kw, s.stride_w, each)(w, k.quads, rows, pixel, one.room.start,
                                                   one.room.sums + CHAIN_ROW * i);
            i += each;
        }
        return true;
    }
    const int64_t width = 16 * k.tiles, taps = s.kh * s.kw;
    for (int64_t t = 0; t < n; ++t) {
        const float* w = k.numbers + 16 * (t0 + t);
        int32_t* sums = one.room.sums + 16 * t;
        int64_t p = 0;
        for (; p + 4 <= count; p += 4)
            depthwise_taps<4>(w, width, k.taps, taps, one.room.px + p, 16 * (t0 + t), one.room.start + 16 * t,
                              sums + CHAIN_ROW * p);
        for (; p < count; ++p)
            depthwise_taps<1>(w, width, k.taps, taps, one.room.px + p, 16 * (t0 + t), one.room.start + 16 * t,
                              sums + CHAIN_ROW * p);
    }
    return false;
}

// Scales and bias of tiles: `count` of them are prepared, those from n on do not exist.
inline void scales_of(const ChainStep& s, float x_scale, int64_t t0, int64_t n, int64_t count, float* scale,
                      float* bias) {
    const Conv& w = *s.conv;
    for (int64_t t = 0; t < count; ++t) {
        F factor = fset(x_scale);
        if (w.one_scale) {
            alignas(64) char only[64] = {0};
            memcpy(only, s.scale, (size_t)size_of(w.scale));
            alignas(64) float f[16];
            fstore(f, part16({only, w.scale}, 0));
            factor = fset(x_scale * f[0]);
        } else if (t < n) {
            factor = fmul(factor, part16({s.scale, w.scale}, 16 * (t0 + t)));
        }
        fstore(scale + 16 * t, factor);
        fstore(bias + 16 * t, s.bias ? load_part(s.bias, F32, 16 * (t0 + t), w.o) : fset(0));
    }
}

// One unit of a convolution.
inline void convolve(const ChainSample& one, const ChainWork& k, int64_t unit) {
    const ChainStep& s = *k.s;
    const ChainTensor &x = one.tensor(s.x), &y = one.tensor(s.y);
    const int64_t pixels = y.h * y.w, b = unit % k.blocks, small = pixels / k.blocks, larger = pixels % k.blocks;
    const int64_t first = b * small + std::min(b, larger), count = small + (b < larger);
    const int64_t begin = unit / k.blocks * k.split_tiles, end = std::min(k.tiles, begin + k.split_tiles);
    const int64_t in_row = row_bytes(x), in_pixel = pixel_bytes(x);
    for (int64_t i = 0, oy = first / y.w, ox = first % y.w; i < count; ++i) {
        one.room.px[i] = one.codes_of(x) + (oy * s.stride_h + x.margin_h - s.pad_h) * in_row +
                         (ox * s.stride_w + x.margin_w - s.pad_w) * in_pixel;
        if (y.codes >= 0) one.room.codes[i] = one.code_at(y, oy, ox);
        if (++ox == y.w) ox = 0, ++oy;
    }
    alignas(64) float scale[4 * 16], bias[4 * 16];
    for (int64_t t0 = begin; t0 < end;) {
        int64_t n = 4;
        if (!k.depthwise) {  // parts of nearly equal size
            const int64_t own = k.rows_of_group / 16,
                          left = s.groups == 1 ? end - t0 : std::min(end - t0, own - t0 % own);
            const int64_t parts = (left + CHAIN_TILES - 1) / CHAIN_TILES;
            n = (left + parts - 1) / parts;
        }
        n = std::min(n, end - t0);
        start(one, k, x, t0, k.depthwise ? 4 : n);
        bool lanes = false;
        if (k.depthwise) lanes = depthwise(one, k, x, t0, n, first, count);
        else dense(one, k, t0, n, count);
        scales_of(s, *x.scale, t0, n, k.depthwise ? 4 : n, scale, bias);
        int64_t most = n;
        if (lanes && y.codes >= 0 && !one.numbers_of(y) && s.residual < 0) {
            exchange16(scale), exchange16(bias);
            most = 4;  // those that do not exist are not written
        } else if (lanes) {
            for (int64_t i = 0; i < count; ++i) exchange16(one.room.sums + CHAIN_ROW * i);
            lanes = false;
        }
        finish(one, k, y, scale, bias, t0, most, first, count, lanes);
        t0 += most;
    }
}

}  // namespace
