// Elementary functions of 16 float32 lanes. Every instruction set gives the same bits.
#pragma once

#include "simd.h"

namespace {

// e**x for x up to 88.7, within 1 ulp; below -87.33 it is 0, so that no result is subnormal. NaN stays NaN.
//
// x = n * ln 2 + r with |r| <= ln 2 / 2. The polynomial is a minimax approximation with a relative error of 3e-9.
PW_INLINE F fexp(F x) {
    const F z = fmin(fset(88.72f), x);  // NaN passes
    constexpr float MAGIC = 12582912;   // 1.5 * 2**23: the low bits of the sum are n
    // n is at least -512. That is what NaN gives, too: it adds nothing to the exponent of p, whatever the bits of the
    // NaN, so that p stays NaN.
    const F t = fmost(fma(z, fset(1.44269504f), fset(MAGIC)), fset(MAGIC - 512)), n = fsub(t, fset(MAGIC));
    // ln 2 in two parts; n times the first one is exact.
    const F r = fma(n, fset(-1.42860677e-06f), fma(n, fset(-0.693145752f), z));
    F p = fma(r, fset(0.001381454018f), fset(0.008368745109f));
    p = fma(p, r, fset(0.04166839078f));
    p = fma(p, r, fset(0.166665204f));
    p = fma(p, r, fset(0.4999999343f));
    p = fma(fmul(r, r), p, r);
    p = fadd(p, fset(1));
    return fabove(fset(-87.33f), x, fset(0), bitcast(uadd(bits(p), ishl(bits(t), 23))));
}

// tanh x within 2 ulp. NaN stays NaN.
PW_INLINE F ftanh(F x) {
    const I sign = iand(bits(x), iset(INT32_MIN));
    const F a = bitcast(iand(bits(x), iset(INT32_MAX)));
    const F z = fmul(a, a);
    F p = fma(z, fset(-0.005704986993f), fset(0.02063908724f));
    p = fma(p, z, fset(-0.05373971509f));
    p = fma(p, z, fset(0.133314422f));
    p = fma(p, z, fset(-0.3333328194f));
    const F small = fma(fmul(z, p), a, a);
    const F large = fsub(fset(1), fdiv(fset(2), fadd(fexp(fclip(fadd(a, a), fset(0), fset(40))), fset(1))));
    return bitcast(ior(bits(fabove(a, fset(0.625f), large, small)), sign));
}

// The sum of the lanes, in a fixed order.
inline float fsum(F a) {
    alignas(64) float t[16];
    fstore(t, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
}

}  // namespace
