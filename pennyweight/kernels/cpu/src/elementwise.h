// Functions of float32 vectors for the steps of a block: the activation functions of feed-forward layers, and
// the normalization of rows. Every operation rounds as IEEE 754 requires and sums have a fixed order, so every
// instruction set gives the same bits.
#pragma once

#include <type_traits>

#include "abi.h"
#include "vector_math.h"

namespace {

// c[0] + c[1] x + ... + c[n - 1] x**(n - 1)
template <int N> PW_INLINE F polynomial(F x, const float (&c)[N]) {
    F p = fset(c[N - 1]);
    PW_UNROLL for (int i = N - 2; i >= 0; --i) p = fma(p, x, fset(c[i]));
    return p;
}

// erf(x / sqrt(2)), within 4e-7.
PW_INLINE F ferf_of_normal(F x) {
    constexpr float P[] = {0.79788452f,    0.069011614f,    0.0088286810f, 3.0936699e-04f,
                           6.0568741e-06f, -4.2939565e-08f, 2.2222070e-10f};
    constexpr float Q[] = {1.0f, 0.25315952f, 0.028259628f, 0.0017433105f, 5.6700912e-05f};
    x = fclip(x, fset(-5.5f), fset(5.5f));
    const F t = fmul(x, x);
    return fclip(fdiv(fmul(x, polynomial(t, P)), polynomial(t, Q)), fset(-1), fset(1));
}

// x / (1 + e**-z), with -z given.
PW_INLINE F fgate(F x, F minus_z) { return fdiv(x, fadd(fexp(minus_z), fset(1))); }

// The activation function FUNCTION. Both GELUs within 1e-6 and 2 ulps, the others within 16 ulps. NaN passes.
template <int FUNCTION> PW_INLINE F apply(F v) {
    if constexpr (FUNCTION == RELU) return fabove(fset(0), v, fset(0), v);
    if constexpr (FUNCTION == GELU) {
        const F half = fmul(fabove(fset(-5.5f), v, fset(-5.5f), v), fset(0.5f));  // 1 + erf is 0 only nearly
        return fma(half, ferf_of_normal(v), half);
    }
    if constexpr (FUNCTION == GELU_TANH) {  // 1 + tanh(u) = 2 / (1 + e**-2u), u = sqrt(2 / pi) * (x + 0.044715 x**3)
        return fgate(v, fmul(v, fma(fmul(v, v), fset(-0.07135481283f), fset(-1.595769122f))));
    }
    if constexpr (FUNCTION == QUICK_GELU) return fgate(v, fmul(v, fset(-1.702f)));
    if constexpr (FUNCTION == SILU) return fgate(v, fmul(v, fset(-1)));
    if constexpr (FUNCTION == RELU6) return fclip(v, fset(0), fset(6));
    if constexpr (FUNCTION == HARDSWISH) return fdiv(fmul(v, fclip(fadd(v, fset(3)), fset(0), fset(6))), fset(6));
    return v;
}

// Calls run with the function as a template argument: run(std::integral_constant<int, FUNCTION>).
template <class Run> inline void with_function(int function, const Run& run) {
    switch (function) {
        case RELU: return run(std::integral_constant<int, RELU>());
        case GELU: return run(std::integral_constant<int, GELU>());
        case GELU_TANH: return run(std::integral_constant<int, GELU_TANH>());
        case QUICK_GELU: return run(std::integral_constant<int, QUICK_GELU>());
        case SILU: return run(std::integral_constant<int, SILU>());
        case RELU6: return run(std::integral_constant<int, RELU6>());
        case HARDSWISH: return run(std::integral_constant<int, HARDSWISH>());
        default: return run(std::integral_constant<int, IDENTITY>());
    }
}

// In place for 16 * n floats.
inline void activate(int function, float* x, int64_t n) {
    if (function == IDENTITY) return;
    with_function(function, [&](auto f) {
        PW_ROLLED for (int64_t i = 0; i < n; ++i) fstore(x + 16 * i, apply<decltype(f)::value>(fload(x + 16 * i)));
    });
}

// Sum of f(x[i..i + 15]) for i below n, a multiple of 16: four sums, because an addition waits for
// the one before.
template <class Each> PW_INLINE float sum_of_row(const float* x, int64_t n, const Each& f) {
    F s[4] = {fset(0), fset(0), fset(0), fset(0)};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) PW_UNROLL for (int j = 0; j < 4; ++j) s[j] = f(fload(x + i + 16 * j), s[j]);
    for (; i < n; i += 16) s[0] = f(fload(x + i), s[0]);
    return fsum(fadd(fadd(s[0], s[1]), fadd(s[2], s[3])));
}

// Elements [i, i + 16) of n, of a kind; 0 beyond.
inline F load_part(const void* p, int kind, int64_t i, int64_t n) {
    if (i + 16 <= n) return load16(p, kind, i);
    alignas(64) char tail[64] = {0};
    if (i < n) memcpy(tail, (const char*)p + i * size_of(kind), (size_t)((n - i) * size_of(kind)));
    return load16(tail, kind, 0);
}
inline void store_part(void* p, int kind, int64_t i, int64_t n, F v) {
    if (i + 16 <= n) return store16(p, kind, i, v);
    alignas(64) char tail[64];
    store16(tail, kind, 0, v);
    if (i < n) memcpy((char*)p + i * size_of(kind), tail, (size_t)((n - i) * size_of(kind)));
}

// Lanes of v whose column i + lane is below n; 0 in the others.
inline F keep_columns(F v, int64_t i, int64_t n) {
    if (i + 16 <= n) return v;
    alignas(64) float t[16];
    fstore(t, v);
    for (int64_t j = n > i ? n - i : 0; j < 16; ++j) t[j] = 0;
    return fload(t);
}

// A row [k] in place, with zeros beyond it up to a multiple of 16, which stay zero.
//
//   LAYER_NORM   (x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias
//   RMS_NORM     x / sqrt(mean(x**2) + eps) * (weight + offset) + bias
inline void normalize(const RowNorm& norm, int64_t k, float* out) {
    if (norm.kind == NO_NORM) return;
    const int64_t whole = (k + 15) / 16 * 16;
    if (norm.kind == LAYER_NORM) {
        const F mean = fset(sum_of_row(out, whole, [](F v, F s) { return fadd(s, v); }) / (float)k);
        for (int64_t i = 0; i < whole; i += 16) fstore(out + i, keep_columns(fsub(fload(out + i), mean), i, k));
    }
    const float squares = sum_of_row(out, whole, [](F v, F s) { return fma(v, v, s); });
    const F factor = fset(1 / __builtin_sqrtf(squares / (float)k + norm.eps)), offset = fset(norm.offset);
    for (int64_t i = 0; i < whole; i += 16) {
        F y = fmul(fload(out + i), factor);
        if (norm.weight) y = fmul(y, fadd(load_part(norm.weight, norm.weight_kind, i, k), offset));
        if (norm.bias) y = fadd(y, load_part(norm.bias, norm.bias_kind, i, k));
        fstore(out + i, keep_columns(y, i, k));
    }
}

// A row of k numbers of a kind to float32 out [kp], normalized, zero beyond k. kp: a multiple of 16.
inline void take_normalized(const RowNorm& norm, const void* x, int kind, int64_t k, int64_t kp, float* out) {
    widen_row(x, kind, k, kp, out);
    normalize(norm, k, out);
}

}  // namespace
