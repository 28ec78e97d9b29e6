// y = x @ w.T + bias with float or table codes. Sums run over the columns in order, one chain per output and block of
// columns; blocks are scaled and added in float32. Every partition of the work keeps that order, so a result depends
// only on its row of x and its row of w. Products are in float32, or in bfloat16 if x is bfloat16 and the machine has
// such an instruction.
//
//   y[n] = sum over blocks of scale[n, block] * (sum over k in block of x[k] * values[code[n, k]])
//                             + offset[n, block] * (sum over k in block of x[k])
//
// One or two rows decode the codes directly (memory-bound); more rows read numbers that were decoded once for a chunk
// of columns (compute-bound). Both call `sweep`.
#pragma once

#include "float_codes.h"

namespace {

struct FloatPanel {
    const uint8_t* codes;         // first tile at the first column
    int64_t stride;               // bytes from tile to tile
    const float* scales;          // [tile][blocks][16], or null: no scale inside the sum
    const float* offsets;         // [tile][blocks][16], or null
    const float* sums;            // [blocks][T] of x, if there are offsets
    int64_t blocks, block, tail;  // of this chunk; columns of a block and of the last one
};

// c[t][tile] (+)= the blocks of a panel, for T rows of x and NT tiles. x: [columns / 4][T][PER]. `first`: c is not
// read.
template <class P, class S, int T, int NT>
void sweep(const FloatLinear& w, const FloatPanel& p, const uint32_t* x, float* c, int64_t ldc, bool first) {
    // Quads per iteration of the innermost loop: enough products to hide its overhead.
    constexpr int STEP = T * NT < 4 ? 4 : S::STEP;
    const S source(w);
    F sum[T][NT];
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < NT; ++n) sum[t][n] = first ? fset(0) : fload(c + t * ldc + 16 * n);
    const uint8_t* codes = p.codes;
    int64_t half = 0;  // of the chunk
    for (int64_t b = 0; b < p.blocks; ++b) {
        F part[T][NT];
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < NT; ++n) part[t][n] = fset(0);
        const int64_t end = half + (b + 1 == p.blocks ? p.tail : p.block) / 16;
        for (; half < end; ++half) {
            const int h = (int)(half & 1);
            PW_ROLLED for (int at = 0; at < 4; at += STEP) {
                PW_UNROLL for (int j = 0; j < STEP; ++j) {
                    typename P::W v[NT][P::PER];
                    PW_UNROLL for (int n = 0; n < NT; ++n) source.quad(codes + n * p.stride, h, at + j, v[n]);
                    PW_UNROLL for (int i = 0; i < P::PER; ++i) PW_UNROLL for (int t = 0; t < T; ++t) {
                        const typename P::X xv = P::spread(x + (j * T + t) * P::PER + i);
                        PW_UNROLL for (int n = 0; n < NT; ++n) part[t][n] = P::step(part[t][n], v[n][i], xv);
                    }
                }
                x += STEP * T * P::PER;
            }
            if (T <= DIRECT_ROWS)
                for (int n = 0; n < NT; ++n)
                    for (int at = 0; at < S::TILE / 2; at += 64)
                        __builtin_prefetch(codes + n * p.stride + h * (S::TILE / 2) + 1024 + at);
            if (h) codes += S::TILE;
        }
        for (int n = 0; n < NT; ++n)
            for (int t = 0; t < T; ++t)
                sum[t][n] = p.scales ? fma(part[t][n], fload(p.scales + (n * p.blocks + b) * 16), sum[t][n])
                                     : fadd(part[t][n], sum[t][n]);
        if (p.offsets)
            for (int n = 0; n < NT; ++n)
                for (int t = 0; t < T; ++t)
                    sum[t][n] = fma(fload(p.offsets + (n * p.blocks + b) * 16), fset(p.sums[b * T + t]), sum[t][n]);
    }
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < NT; ++n) fstore(c + t * ldc + 16 * n, sum[t][n]);
}

// Codes of a tile as numbers, 16 columns at a time.
template <class P, class S> void expand(const FloatLinear& w, const uint8_t* codes, int64_t halves, uint8_t* out) {
    const S source(w);
    for (int64_t h = 0; h < halves; ++h) PW_UNROLL for (int j = 0; j < 4; ++j) {
            typename P::W v[P::PER];
            source.quad(codes + h / 2 * S::TILE, h & 1, j, v);
            for (int i = 0; i < P::PER; ++i, out += 64) P::store(out, v[i]);
        }
}

using Sweep = void (*)(const FloatLinear&, const FloatPanel&, const uint32_t*, float*, int64_t, bool);
using Expand = void (*)(const FloatLinear&, const uint8_t*, int64_t, uint8_t*);

template <class P, class S, int NT, int T = 1, int MOST = FLOAT_ROWS> Sweep find_rows(int rows) {
    if constexpr (T > MOST) return nullptr;
    else return rows == T ? &sweep<P, S, T, NT> : find_rows<P, S, NT, T + 1, MOST>(rows);
}
template <class P, class S> Sweep find_direct(int rows, bool one) {
    return one ? find_rows<P, S, 1, 1, DIRECT_ROWS>(rows) : find_rows<P, S, DIRECT_TILES, 1, DIRECT_ROWS>(rows);
}
template <class P> Sweep find_panel(int rows, bool one) {
    return one ? find_rows<P, Numbers<P>, 1>(rows) : find_rows<P, Numbers<P>, FLOAT_TILES>(rows);
}

}  // namespace
