// Products of a chain of convolutions: codes of inputs are bytes q + 128, those of weights are u with the center 128.
//
//   dot4_bytes(acc, flip(u), x) = acc + sum of (x - BYTE_ZERO) * (u - 128) over four columns
//
// With unsigned inputs no sums of inputs are needed: what the zero point contributes is known from the weight alone.
#pragma once

#include "conv_microkernel.h"

namespace {

constexpr int64_t CHAIN_BLOCK = 56;  // most pixels of a unit of work

constexpr int64_t CHAIN_ROW = 64;  // sums of a pixel: four tiles

// As conv_micro, with sums [pixel][CHAIN_ROW] that begin with `start` [tile][16].
template <int TILES, int T>
void chain_micro(const uint8_t* w, int64_t tile_bytes, const Piece* pieces, int64_t count, const uint8_t* const* px,
                 const int32_t* start, int32_t* sums, bool fresh) {
    I acc[TILES][T];
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) acc[j][t] = iload(fresh ? start + 16 * j : sums + t * CHAIN_ROW + 16 * j);
    }
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
        const uint8_t* u = w + piece->column * 64;
        const uint8_t* x[T];
        PW_UNROLL for (int t = 0; t < T; ++t) x[t] = px[t] + piece->at;
        const int64_t bytes = 4 * piece->count;
        PW_ROLLED for (int64_t i = 0; i < bytes; i += 4, u += 64) {
            B v[TILES];
            PW_UNROLL for (int j = 0; j < TILES; ++j) v[j] = flip(bload(u + j * tile_bytes));
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const X four = xload((const int8_t*)x[t] + i);
                PW_UNROLL for (int j = 0; j < TILES; ++j) acc[j][t] = dot4_bytes(acc[j][t], v[j], four);
            }
        }
    }
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) istore(sums + t * CHAIN_ROW + 16 * j, acc[j][t]);
    }
}
using ChainMicro = void (*)(const uint8_t*, int64_t, const Piece*, int64_t, const uint8_t* const*, const int32_t*,
                            int32_t*, bool);
template <int TILES, int T = 1> ChainMicro pick_chain_pixels(int64_t pixels) {
    if constexpr (T > CHAIN_PIXELS[TILES - 1]) return nullptr;
    else return pixels == T ? &chain_micro<TILES, T> : pick_chain_pixels<TILES, T + 1>(pixels);
}
template <int TILES = 1> ChainMicro pick_chain(int64_t tiles, int64_t pixels) {
    if constexpr (TILES > CHAIN_TILES) return nullptr;
    else return tiles == TILES ? pick_chain_pixels<TILES>(pixels) : pick_chain<TILES + 1>(tiles, pixels);
}

// Sums of 16 channels that have one input channel each, for T pixels. w: [taps][..] numbers, `step` apart.
template <int T>
void depthwise_taps(const float* w, int64_t step, const int64_t* taps, int64_t count, const uint8_t* const* px,
                    int64_t channel, const int32_t* start, int32_t* sums) {
    F acc[T];
    PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fset(0);
    for (int64_t i = 0; i < count; ++i) {
        const F factor = fload(w + i * step);
        PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fma(cvt(iload8u(px[t] + taps[i] + channel)), factor, acc[t]);
    }
    PW_UNROLL for (int t = 0; t < T; ++t) istore(sums + t * CHAIN_ROW, iadd(iround(acc[t]), iload(start)));
}

// -- depthwise, where DEPTHWISE_ROWS ----------------------------------------------------------------------------------

// 64 words from tiles of 16 channels to the order of interleave4(), and back.
inline void exchange16(void* words) {
    B v[4];
    for (int j = 0; j < 4; ++j) v[j] = bload((const uint8_t*)words + 64 * j);
    exchange4(v);
    for (int j = 0; j < 4; ++j) bstore((uint8_t*)words + 64 * j, v[j]);
}

// Sums of 64 channels for T neighbours of a row. w: [quads of kernel rows][KW][4][64] interleaved signed codes; rows:
// first input byte of each kernel row, in whole fours (the last repeated), for the first pixel. sums: [T][64] in that
// order, from `start` on.
template <int KW, int STRIDE, int T>
void depthwise_row(const uint8_t* w, int64_t quads, const uint8_t* const* rows, int64_t pixel, const int32_t* start,
                   int32_t* sums) {
    I acc[T][4];
    PW_UNROLL for (int t = 0; t < T; ++t) { PW_UNROLL for (int j = 0; j < 4; ++j) acc[t][j] = iload(start + 16 * j); }
    for (int64_t quad = 0; quad < quads; ++quad, rows += 4, w += KW * 256) {
        PW_UNROLL for (int at = 0; at < (T - 1) * STRIDE + KW; ++at) {
            B v[4];
            PW_UNROLL for (int i = 0; i < 4; ++i) v[i] = bload(rows[i] + at * pixel);
            interleave4(v);
            PW_UNROLL for (int kx = 0; kx < KW; ++kx) {
                const int t = (at - kx) / STRIDE;
                if (at >= kx && (at - kx) % STRIDE == 0 && t < T) {
                    PW_UNROLL for (int j = 0; j < 4; ++j) {
                        acc[t][j] = dot_bytes<true>(acc[t][j], v[j], bload(w + kx * 256 + j * 64));
                    }
                }
            }
        }
    }
    PW_UNROLL for (int t = 0; t < T; ++t) {
        PW_UNROLL for (int j = 0; j < 4; ++j) istore(sums + 64 * t + 16 * j, acc[t][j]);
    }
}
using DepthwiseRow = void (*)(const uint8_t*, int64_t, const uint8_t* const*, int64_t, const int32_t*, int32_t*);
constexpr int DEPTHWISE_PIXELS = 4;
template <int KW, int STRIDE> DepthwiseRow pick_depthwise(int64_t pixels) {
    switch (pixels) {
        case 1: return &depthwise_row<KW, STRIDE, 1>;
        case 2: return &depthwise_row<KW, STRIDE, 2>;
        case 3: return &depthwise_row<KW, STRIDE, 3>;
        default: return &depthwise_row<KW, STRIDE, 4>;
    }
}
inline DepthwiseRow pick_depthwise(int64_t kw, int64_t stride, int64_t pixels) {
    if constexpr (DEPTHWISE_ROWS) {
        if (kw == 3) return stride == 1 ? pick_depthwise<3, 1>(pixels) : pick_depthwise<3, 2>(pixels);
        return stride == 1 ? pick_depthwise<5, 1>(pixels) : pick_depthwise<5, 2>(pixels);
    }
    (void)kw, (void)stride, (void)pixels;
    return nullptr;
}

}  // namespace
