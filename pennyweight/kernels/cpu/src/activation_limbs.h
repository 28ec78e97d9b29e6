// Inputs as integers: rows of x are split into int8 limbs, so that every product is an exact integer product.
//
//   act FLOAT       each block of `block` columns of x is X * 2**e, X with 15 bits and sign (two limbs) for bfloat16
//                   and float16, with 23 bits (three limbs) for float32; e is from the largest element of the block
//   act SYMMETRIC, ASYMMETRIC, STATIC   x = (q - zero_point) * scale per token: one limb
//
// Limbs are stored in the order in which the kernels read them: [k/4][R][4], row r = token * limbs + limb, the top limb
// first. Two limbs may be stored as one 16-bit word: [k/4][2][T][2], columns 0 and 2 of four before 1 and 3.
// Quantized inputs are bit-identical to core/qparams.py and core/numerics.py. In identifiers, `digits` are limbs.
#pragma once

#include "abi.h"
#include "simd.h"

namespace {

inline int digits_of(const IntLinear& w) { return w.act != FLOAT ? 1 : w.x == F32 ? 3 : 2; }

// A float rounded to a kind.
inline float round_to(int kind, float f) {
    if (kind == BF16) {
        uint32_t b = (uint32_t)narrow_bf16(f) << 16;
        memcpy(&f, &b, 4);
    } else if (kind == F16) {
        alignas(64) float t[16] = {f};
        alignas(64) uint16_t h[16];
        fstore_f16(h, fload(t));
        fstore(t, fload_f16(h));
        f = t[0];
    }
    return f;
}

constexpr float LARGEST[4] = {0, 3.40282346638528859812e+38f, 3.38953138925153547590e+38f, 65504.0f};
inline float clamp_to(float f, float lo, float hi) { return f < lo ? lo : f > hi ? hi : f; }  // NaN passes

// Largest |x| as bits; in this order NaN is above infinity, and infinity above every number.
inline uint32_t absmax_bits(const float* x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(x[i]) & 0x7fffffff;
        top = b > top ? b : top;
    }
    return top;
}

// Kernel input for a block of T tokens; R = T * digits rows.
struct Tokens {
    int8_t* digits;   // [kp/4][R][4]
    int32_t* sums;    // [blocks][R] sums of limbs
    float* scale;     // [blocks][T] act FLOAT: scale of the block
    float* value;     // [blocks][T] sum of the block as a float, in units of token_scale
    float token_scale[12];
    float token_zero[12];
};

inline void put(int8_t* digits, int R, int r, const int8_t* row, int64_t kp) {
    if (R == 1) { memcpy(digits, row, (size_t)kp); return; }
    for (int64_t q = 0; q < kp / 4; ++q) memcpy(digits + (q * R + r) * 4, row + 4 * q, 4);
}

// Scale and zero point of a dynamically quantized row; NaN if the row contains NaN or inf.
void choose_scale(const IntLinear& w, const float* x, float* scale, int32_t* zero) {
    *zero = 0;
    const uint32_t top = absmax_bits(x, w.k);
    if (top >= 0x7f800000) { *scale = float_of(0x7fc00000); return; }
    float s;
    if (w.act == SYMMETRIC) {
        s = clamp_to(round_to(w.x, float_of(top) / w.act_steps), w.act_floor, LARGEST[w.x]);
    } else {
        F least = fset(0), most = fset(0);  // padding is zero
        for (int64_t i = 0; i < w.kp; i += 16) least = fleast(fload(x + i), least), most = fmost(fload(x + i), most);
        const float lo = fleast(least), hi = fmost(most);
        const float span = round_to(w.x, hi - lo);
        s = round_to(w.x, span / w.act_steps);
        if (!(s <= LARGEST[w.x]))
            s = round_to(w.x, round_to(w.x, hi / w.act_steps) - round_to(w.x, lo / w.act_steps));
        s = clamp_to(s, w.act_floor, LARGEST[w.x]);
        const float steps = round_to(w.x, (float)w.act_lo - __builtin_rintf(round_to(w.x, lo / s)));
        *zero = (int32_t)clamp_to(steps, (float)w.act_lo, (float)w.act_hi);
    }
    s = round_to(w.act_scale, s);
    *scale = w.act_scale == w.x ? s : clamp_to(s, -LARGEST[w.act_scale], LARGEST[w.act_scale]);
}

// One limb per element, q = round(x * (1 / scale)) + zero_point, clamped, and the sum of each block.
void quantize_row(const IntLinear& w, const float* x, float scale, int32_t zero, int8_t* q, int32_t* sums, int step) {
    float reciprocal = 1.0f / scale;
    if (w.act_scale != F32) {
        const float rounded = round_to(w.act_scale, reciprocal);
        reciprocal = rounded <= LARGEST[w.act_scale] || w.act_scale == BF16 ? rounded : reciprocal;
    }
    if (!(reciprocal <= LARGEST[F32])) reciprocal = 0;
    const F factor = fset(reciprocal), lo = fset((float)(w.act_lo - zero)), hi = fset((float)(w.act_hi - zero));
    const int wide = w.x == w.act_scale ? w.x : F32;  // the dtype of x * reciprocal
    for (int64_t at = 0; at < w.kp; at += w.block, sums += step) {
        const int64_t end = at + w.block < w.kp ? at + w.block : w.kp;
        I sum = iset(0);
        for (int64_t i = at; i < end; i += 16) {
            F v = fmul(fload(x + i), factor);
            if (wide != F32) {
                alignas(64) uint16_t h[16];
                store16(h, wide, 0, v);
                v = load16(h, wide, 0);
            }
            // clamped before the conversion, which has no meaning beyond int32; NaN becomes lo: the scale, NaN, tells
            I code = iadd(iround(fleast(fmost(v, lo), hi)), iset(zero));
            if (i + 16 > w.k) {  // padding is 0, not the zero point
                alignas(64) int32_t t[16];
                istore(t, code);
                for (int64_t j = w.k > i ? w.k - i : 0; j < 16; ++j) t[j] = 0;
                code = iload(t);
            }
            sum = iadd(sum, code);
            istore8(q + i, code);
        }
        *sums = isum(sum);
    }
}

// Limbs of one block of a float row, the top limb first, and their sums (D = 1: words); returns the scale 2**e, NaN
// if the block contains NaN or inf.
template <int D> float split_block(const float* x, int64_t n, int8_t* const* out, int32_t* sums) {
    constexpr int BITS = D == 3 ? 22 : 14;
    const uint32_t top = absmax_bits(x, n);
    if (top == 0 || top >= 0x7f800000) {
        for (int d = 0; d < D; ++d) {
            memset(out[d], 0, (size_t)n * (D == 1 ? 2 : 1));
            sums[d] = 0;
        }
        return top ? float_of(0x7fc00000) : 0;
    }
    const int e = top < 0x00800000 ? -126 : (int)(top >> 23) - 126;  // |x| < 2**e
    // 2**(BITS - e) in two factors, because it may overflow float32
    const int half = (BITS - e) / 2, rest = BITS - e - half;
    const F a = fset(float_of((uint32_t)(half + 127) << 23)), b = fset(float_of((uint32_t)(rest + 127) << 23));
    I sum[3] = {iset(0), iset(0), iset(0)};
    for (int64_t i = 0; i < n; i += 16) {
        I v = iround(fmul(fmul(fload(x + i), a), b));
        for (int d = D - 1; d > 0; --d) {  // the low byte, signed, and the rest
            const I high = ishr8(iadd(v, iset(128)));
            istore8(out[d] + i, v);
            sum[d] = iadd(sum[d], isub(v, ishl8(high)));
            v = high;
        }
        if (D == 1) istore16((int16_t*)out[0] + i, v);
        else istore8(out[0] + i, v);
        sum[0] = iadd(sum[0], v);
    }
    for (int d = 0; d < D; ++d) sums[d] = isum(sum[d]);
    const int p = e - BITS;  // 2**p, subnormal below -126
    return p >= -126 ? float_of((uint32_t)(p + 127) << 23) : float_of(1u << (149 + p));
}

inline void put_words(int8_t* out, int T, int t, const int16_t* row, int64_t kp) {
    for (int64_t q = 0; q < kp / 4; ++q)
        for (int h = 0; h < 2; ++h) {
            const int16_t two[2] = {row[4 * q + h], row[4 * q + h + 2]};
            memcpy(out + ((2 * q + h) * T + t) * 4, two, 4);
        }
}

inline int32_t true_columns(const IntLinear& w, int64_t b) {  // of a block, without padding
    const int64_t left = w.k - b * w.block;
    return (int32_t)(left < 0 ? 0 : left < w.block ? left : w.block);
}

// A row, float32 [kp] with zeros beyond k, as token t of T. Scratch: bytes, [3 * kp].
void take_wide_row(const IntLinear& w, const LinearArgs& a, const float* wide, Tokens& tok, int T, int t, bool words,
                   int8_t* bytes) {
    const int D = words ? 1 : digits_of(w), R = T * D;
    int8_t* row[3] = {bytes, bytes + w.kp, bytes + 2 * w.kp};
    tok.token_scale[t] = 1;
    tok.token_zero[t] = 0;
    if (w.act != FLOAT) {
        float scale;
        int32_t zero;
        if (w.act == STATIC) {
            zero = a.act_zero_point;
            scale = absmax_bits(wide, w.k) >= 0x7f800000 ? float_of(0x7fc00000) : *(const float*)a.act_scale;
        } else {
            choose_scale(w, wide, &scale, &zero);
        }
        quantize_row(w, wide, scale, zero, row[0], tok.sums + t, R);
        tok.token_scale[t] = scale;
        tok.token_zero[t] = (float)zero;
        for (int64_t b = 0; b * w.block < w.kp; ++b)
            tok.value[b * T + t] = (float)(tok.sums[b * T + t] - zero * true_columns(w, b));
    } else {
        for (int64_t b = 0, at = 0; at < w.kp; ++b, at += w.block) {
            const int64_t n = w.kp - at < w.block ? w.kp - at : w.block;
            int32_t* sums = tok.sums + b * R + t * D;
            int8_t* here[3] = {row[0] + at * (words ? 2 : 1), row[1] + at, row[2] + at};
            const float s = D == 1   ? split_block<1>(wide + at, n, here, sums)
                            : D == 2 ? split_block<2>(wide + at, n, here, sums)
                                     : split_block<3>(wide + at, n, here, sums);
            tok.scale[b * T + t] = s;
            tok.value[b * T + t] = s * (D == 1   ? (float)sums[0]
                                        : D == 2 ? (float)(sums[0] * 256 + sums[1])
                                                 : 65536.0f * (float)sums[0] + (float)(sums[1] * 256 + sums[2]));
        }
    }
    if (words) put_words(tok.digits, T, t, (const int16_t*)bytes, w.kp);
    else for (int d = 0; d < D; ++d) put(tok.digits, R, t * D + d, row[d], w.kp);
}

// Row m of x as token t of T. Scratch: wide, float [kp]; bytes, [3 * kp].
void take_row(const IntLinear& w, const LinearArgs& a, int64_t m, Tokens& tok, int T, int t, bool words, float* wide,
              int8_t* bytes) {
    widen_row((const char*)a.x + m * a.ldx * size_of(w.x), w.x, w.k, w.kp, wide);
    take_wide_row(w, a, wide, tok, T, t, words, bytes);
}

}  // namespace
