// Inner loops of a convolution: 16 output channels of several tiles for a few output pixels.
//
// A kernel is an implicit matrix product: the columns of a row of the weight are (set, kernel row, kernel column,
// channel), and those of an output pixel lie in the padded input as pieces without gaps, at the same distances from the
// pixel's first byte for every pixel. So inputs are read where they are, four channels at a time.
#pragma once

#include <algorithm>

#include "pack.h"
#include "simd.h"

namespace {

constexpr int64_t CONV_BLOCK = 48;  // most pixels of a unit of work
constexpr int64_t CONV_CHUNK = 64;  // fours of columns processed at a time: with the pixels they stay in the L1 cache

// Columns that lie without gaps in the input.
struct Piece {
    int64_t at;      // bytes from the first byte of an output pixel
    int64_t column;  // fours of columns before it
    int64_t count;   // fours of columns
};

// sums[tile][pixel][16] (+)= the pieces of a kernel. w: codes of the first tile, one byte each, [columns / 4][16][4];
// px: the first byte of each pixel; step: numbers from one tile to the next in sums.
template <bool ALL8, int TILES, int T>
void conv_micro(const uint8_t* w, int64_t tile_bytes, const Piece* pieces, int64_t count, const int8_t* const* px,
                int32_t* sums, int64_t step, bool fresh) {
    I acc[TILES][T];
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) acc[j][t] = fresh ? iset(0) : iload(sums + j * step + 16 * t);
    }
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
        const uint8_t* u = w + piece->column * 64;
        const int8_t* x[T];
        PW_UNROLL for (int t = 0; t < T; ++t) x[t] = px[t] + piece->at;
        const int64_t bytes = 4 * piece->count;
        PW_ROLLED for (int64_t i = 0; i < bytes; i += 4, u += 64) {
            B v[TILES];
            PW_UNROLL for (int j = 0; j < TILES; ++j) v[j] = bload(u + j * tile_bytes);
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const X four = xload(x[t] + i);
                PW_UNROLL for (int j = 0; j < TILES; ++j) acc[j][t] = dot4<ALL8>(acc[j][t], v[j], four);
            }
        }
    }
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) istore(sums + j * step + 16 * t, acc[j][t]);
    }
}

using ConvMicro = void (*)(const uint8_t*, int64_t, const Piece*, int64_t, const int8_t* const*, int32_t*, int64_t,
                           bool);
template <bool ALL8, int TILES, int T> ConvMicro pick_pixels(int64_t pixels) {
    if constexpr (T > CONV_PIXELS) return nullptr;
    else return pixels == T ? &conv_micro<ALL8, TILES, T> : pick_pixels<ALL8, TILES, T + 1>(pixels);
}
template <bool ALL8, int TILES = 1> ConvMicro pick_conv(int64_t tiles, int64_t pixels) {
    if constexpr (TILES > CONV_TILES) return nullptr;
    else return tiles == TILES ? pick_pixels<ALL8, TILES, 1>(pixels) : pick_conv<ALL8, TILES + 1>(tiles, pixels);
}

// sums[pixel][16] of 16 channels that have one input channel each; exact in float32. w: [taps][..], `step` numbers
// apart, without center and zero point; taps: where each lies, from the first byte of a pixel.
template <int T>
void direct_micro(const float* w, int64_t step, const int64_t* taps, int64_t count, const int8_t* const* px,
                  int64_t channel, I zero, float* sums) {
    F acc[T];
    PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fset(0);
    for (int64_t i = 0; i < count; ++i) {
        const F factor = fload(w + i * step);
        const int64_t at = taps[i] + channel;
        PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fma(cvt(isub(iload8s(px[t] + at), zero)), factor, acc[t]);
    }
    PW_UNROLL for (int t = 0; t < T; ++t) fstore(sums + 16 * t, acc[t]);
}

// The same for T neighbours of a row, `pixel` bytes apart, whose inputs are converted once. rows: of the kernel, `row`
// bytes apart.
template <int T, int KW, int STRIDE>
void direct_row(const float* w, int64_t step, int64_t rows, int64_t row, const int8_t* px, int64_t pixel, I zero,
                float* sums) {
    F acc[T];
    PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fset(0);
    for (int64_t ky = 0; ky < rows; ++ky, px += row, w += KW * step) {
        F factor[KW];
        PW_UNROLL for (int kx = 0; kx < KW; ++kx) factor[kx] = fload(w + kx * step);
        PW_UNROLL for (int at = 0; at < (T - 1) * STRIDE + KW; ++at) {
            const F v = cvt(isub(iload8s(px + at * pixel), zero));
            PW_UNROLL for (int kx = 0; kx < KW; ++kx) {
                const int t = (at - kx) / STRIDE;
                if (at >= kx && (at - kx) % STRIDE == 0 && t < T) acc[t] = fma(v, factor[kx], acc[t]);
            }
        }
    }
    PW_UNROLL for (int t = 0; t < T; ++t) fstore(sums + 16 * t, acc[t]);
}
using DirectRow = void (*)(const float*, int64_t, int64_t, int64_t, const int8_t*, int64_t, I, float*);
inline DirectRow pick_direct(int64_t kw, int64_t stride, int64_t dilation) {
    if (dilation != 1 || (kw != 3 && kw != 5) || (stride != 1 && stride != 2)) return nullptr;
    if (kw == 3) return stride == 1 ? &direct_row<DIRECT_PIXELS, 3, 1> : &direct_row<DIRECT_PIXELS, 3, 2>;
    return stride == 1 ? &direct_row<DIRECT_PIXELS, 5, 1> : &direct_row<DIRECT_PIXELS, 5, 2>;
}

// The same for output channels that do not have the input channel of their own number: `source` gives it.
inline void direct_micro(const float* w, int64_t step, const int64_t* taps, int64_t count, const int8_t* px,
                         const int32_t* source, I zero, float* sums) {
    F acc = fset(0);
    for (int64_t i = 0; i < count; ++i) {
        alignas(16) int8_t q[16];
        for (int lane = 0; lane < 16; ++lane) q[lane] = px[taps[i] + source[lane]];
        acc = fma(cvt(isub(iload8s(q), zero)), fload(w + i * step), acc);
    }
    fstore(sums, acc);
}

}  // namespace
