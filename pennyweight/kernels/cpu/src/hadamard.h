// Rotation of rows by Hadamard matrices: each block of n channels, a power of two, times H(n) / sqrt(n), with
// Sylvester's H(2n) = [H(n) H(n); H(n) -H(n)]. The matrix is symmetric, so the rotation is its own inverse. Every
// instruction set gives the same bits.
#pragma once

#include "simd.h"

namespace {

// Within 16 channels: blocks of 1, 2, 4, 8 and 16 of them.
struct Sylvester16 {
    alignas(64) float rows[5][16][16];
};
constexpr Sylvester16 sylvester16() {
    Sylvester16 t = {};
    for (int log = 0; log < 5; ++log)
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 16; ++j) {
                int common = i & j & ((1 << log) - 1), odd = 0;
                for (; common; common >>= 1) odd ^= common & 1;
                t.rows[log][i][j] = (i >> log) != (j >> log) ? 0.0f : odd ? -1.0f : 1.0f;
            }
    return t;
}
constexpr Sylvester16 SYLVESTER16 = sylvester16();

// x [width, a multiple of 16], in place; channels beyond whole blocks are 0.
inline void rotate_blocks(float* x, int64_t width, int64_t block) {
    int log = 0;
    while (log < 4 && (2 << log) <= block) ++log;
    const float* rows = SYLVESTER16.rows[log][0];
    const F norm = fset(1 / std::sqrt((float)block));
    for (int64_t d = 0; d < width; d += 16) {
        F sum = fset(0);
        PW_UNROLL for (int i = 0; i < 16; ++i) sum = fma(fset(x[d + i]), fload(rows + 16 * i), sum);
        fstore(x + d, fmul(sum, norm));
    }
    for (int64_t half = 16; half < block; half *= 2)
        for (int64_t from = 0; from < width; from += 2 * half)
            for (int64_t d = from; d < from + half; d += 16) {
                const F a = fload(x + d), b = fload(x + d + half);
                fstore(x + d, fadd(a, b)), fstore(x + d + half, fsub(a, b));
            }
}

}  // namespace
