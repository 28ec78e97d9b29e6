// Inputs as integers: rows of x are split into int8 limbs, so that every product is an exact integer product.
//
//   act FLOAT       each block of `block` columns of x is X * 2**e, X with 15 bits and sign (two limbs) for bfloat16
//                   and float16, with 23 bits (three limbs) for float32; e is from the largest element of the block
//   act SYMMETRIC, ASYMMETRIC, STATIC   x = (q - zero_point) * scale per token, or per group of columns of a token: one
//                   limb
//
// Limbs are stored in the order in which the kernels read them: [k/4][R][4], row r = token * limbs + limb, the top limb
// first. Two limbs may be stored as one 16-bit word: [k/4][2][T][2], columns 0 and 2 of four before 1 and 3.
// Quantized inputs are bit-identical to core/qparams.py and core/numerics.py.
#pragma once

#include "abi.h"
#include "simd.h"

namespace {

inline int limbs_of(const IntLinear& w) { return w.act != FLOAT ? 1 : w.x == F32 ? 3 : 2; }

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

// Kernel input for a block of T tokens; R = T * limbs rows.
struct Tokens {
    int8_t* limbs;  // [kp/4][R][4]
    int32_t* sums;  // [blocks][R] sums of limbs
    float* scale;   // [blocks][T] act FLOAT and act_group: scale of the block
    float* zero;    // [blocks][T] act_group: zero point of the block
    float* value;   // [blocks][T] sum of the block as a float, in units of token_scale
    float token_scale[12];
    float token_zero[12];
};

inline void put(int8_t* limbs, int R, int r, const int8_t* row, int64_t kp) {
    if (R == 1) {
        memcpy(limbs, row, (size_t)kp);
        return;
    }
    for (int64_t q = 0; q < kp / 4; ++q) memcpy(limbs + (q * R + r) * 4, row + 4 * q, 4);
}

// Scales and zero points of up to 16 groups of columns that are quantized dynamically.
struct Chosen {
    alignas(64) int32_t least[16], most[16];  // the range with zero, as bits of -minimum and maximum; SYMMETRIC: of |x|
    alignas(64) float scale[16];              // NaN if the group contains NaN or inf
    alignas(64) float factor[16];             // its reciprocal
    alignas(64) int32_t zero[16];
};

// Range of the columns from x to `end`, a multiple of 16: padding is zero, which is within every range.
inline void range_of(const IntLinear& w, const float* x, const float* end, Chosen& g, int64_t i) {
    I least = iset(0), most = iset(0);
    if (w.act == SYMMETRIC) {
        for (; x < end; x += 16) most = imax(most, iand(bits(fload(x)), iset(0x7fffffff)));
        g.least[i] = 0;
    } else {
        for (; x < end; x += 16) {  // a NaN is above every number of its sign
            const I b = bits(fload(x));
            most = imax(most, b);
            least = imax(least, ixor(b, iset((int32_t)0x80000000)));
        }
        g.least[i] = imost(least);
    }
    g.most[i] = imost(most);
}

// The multiplier of x for a scale, in float32: the reciprocal rounded to the kind of the scale; 0 if it overflows.
inline F factor_of(const IntLinear& w, F scale) {
    F factor = fdiv(fset(1), scale);
    if (w.act_scale == BF16) factor = round_kind<BF16>(factor);
    if (w.act_scale == F16) {
        const F rounded = round_f16(factor);
        factor = fabove(rounded, fset(LARGEST[F16]), factor, rounded);
    }
    return fabove(factor, fset(LARGEST[F32]), fset(0), factor);
}

// Chooses the scales and zero points of 16 groups from their ranges.
inline void choose_scales(const IntLinear& w, Chosen& g) {
    const auto round = [&](F a) { return round_kind(w.x, a); };
    const auto within = [](F a, float lo, float hi) { return fleast(fmost(a, fset(lo)), fset(hi)); };
    const I least = iload(g.least), most = iload(g.most);
    const F hi = bitcast(most), lo = fsub(fset(0), bitcast(least)), steps = fset(w.act_steps);
    F s;
    if (w.act == SYMMETRIC) {
        s = within(round(fdiv(hi, steps)), w.act_floor, LARGEST[w.x]);
    } else {
        const F span = round(fdiv(round(fsub(hi, lo)), steps));
        s = fabove(span, fset(LARGEST[w.x]), round(fsub(round(fdiv(hi, steps)), round(fdiv(lo, steps)))), span);
        s = within(s, w.act_floor, LARGEST[w.x]);
        const F zero = round(fsub(fset((float)w.act_lo), frint(round(fdiv(lo, s)))));
        istore(g.zero, iround(within(zero, (float)w.act_lo, (float)w.act_hi)));
    }
    s = round_kind(w.act_scale, s);
    if (w.act_scale != w.x) s = within(s, -LARGEST[w.act_scale], LARGEST[w.act_scale]);
    const I finite = iset(0x7f7fffff), top = imax(least, most);
    fstore(g.factor, bitcast(iabove(top, finite, iset(0), bits(factor_of(w, s)))));
    fstore(g.scale, bitcast(iabove(top, finite, iset(0x7fc00000), bits(s))));
    if (w.act == SYMMETRIC) istore(g.zero, iset(0));
    else istore(g.zero, iabove(top, finite, iset(0), iload(g.zero)));
}

// One limb for each column from `from` to `to`, q = round(x * factor) + zero_point, clamped, and the sum of each block
// from that of column `from` on.
void quantize_columns(const IntLinear& w, const float* x, int64_t from, int64_t to, float factor, int32_t zero,
                      int8_t* q, int32_t* sums, int step) {
    const F by = fset(factor), lo = fset((float)(w.act_lo - zero)), hi = fset((float)(w.act_hi - zero));
    const int wide = w.x == w.act_scale ? w.x : F32;  // the dtype of x * factor
    const int64_t block = w.block, k = w.k;
    for (int64_t at = from; at < to; at += block, sums += step) {
        const int64_t end = at + block < to ? at + block : to;
        I sum = iset(0);
        for (int64_t i = at; i < end; i += 16) {
            F v = fmul(fload(x + i), by);
            if (wide != F32) v = round_kind(wide, v);
            // clamped before the conversion, which has no meaning beyond int32; NaN becomes lo: the scale, NaN, tells
            I code = iadd(iround(fleast(fmost(v, lo), hi)), iset(zero));
            if (i + 16 > k) {  // padding is 0, not the zero point
                alignas(64) int32_t t[16];
                istore(t, code);
                for (int64_t j = k > i ? k - i : 0; j < 16; ++j) t[j] = 0;
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
inline void take_wide_row(const IntLinear& w, const LinearArgs& a, const float* wide, Tokens& tok, int T, int t,
                          bool words, int8_t* bytes) {
    const int D = words ? 1 : limbs_of(w), R = T * D;
    int8_t* row[3] = {bytes, bytes + w.kp, bytes + 2 * w.kp};
    tok.token_scale[t] = 1;
    tok.token_zero[t] = 0;
    if (w.act != FLOAT) {
        const int64_t group = w.act_group ? w.act_group : w.kp, groups = (w.kp + group - 1) / group;
        const auto end_of = [&](int64_t g) { return (g + 1) * group < w.kp ? (g + 1) * group : w.kp; };
        Chosen chosen;
        for (int64_t first = 0, b = 0; first < groups; first += 16) {
            const int64_t count = groups - first < 16 ? groups - first : 16;
            if (w.act == STATIC) {
                const float scale = *(const float*)a.act_scale;
                const bool finite = absmax_bits(wide, w.k) < 0x7f800000;
                chosen.scale[0] = finite ? scale : float_of(0x7fc00000);
                alignas(64) float factor[16];
                fstore(factor, factor_of(w, fset(scale)));
                chosen.factor[0] = finite ? factor[0] : 0;
                chosen.zero[0] = a.act_zero_point;
            } else {
                for (int64_t g = 0; g < count; ++g)
                    range_of(w, wide + (first + g) * group, wide + end_of(first + g), chosen, g);
                for (int64_t g = count; g < 16; ++g) chosen.least[g] = chosen.most[g] = 0;
                choose_scales(w, chosen);
            }
            for (int64_t g = 0; g < count; ++g) {
                const int64_t at = (first + g) * group, end = end_of(first + g);
                const float scale = chosen.scale[g];
                const int32_t zero = chosen.zero[g];
                quantize_columns(w, wide, at, end, chosen.factor[g], zero, row[0], tok.sums + b * T + t, T);
                if (!w.act_group) {
                    tok.token_scale[t] = scale;
                    tok.token_zero[t] = (float)zero;
                }
                if (!w.act_group && !w.offset) continue;
                for (; b * w.block < end; ++b) {
                    const float sum = (float)(tok.sums[b * T + t] - zero * true_columns(w, b));
                    tok.value[b * T + t] = w.act_group ? sum * scale : sum;
                    if (!w.act_group) continue;
                    tok.scale[b * T + t] = scale;
                    tok.zero[b * T + t] = (float)zero;
                }
            }
        }
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
    if (words) put_words(tok.limbs, T, t, (const int16_t*)bytes, w.kp);
    else
        for (int d = 0; d < D; ++d) put(tok.limbs, R, t * D + d, row[d], w.kp);
}

// Row m of x as token t of T. Scratch: wide, float [kp]; bytes, [3 * kp].
inline void take_row(const IntLinear& w, const LinearArgs& a, int64_t m, Tokens& tok, int T, int t, bool words,
                     float* wide, int8_t* bytes) {
    const char* x = (const char*)a.x + m * a.ldx * size_of(w.x);
    const bool as_is = w.x == F32 && w.k == w.kp;
    if (!as_is) widen_row(x, w.x, w.k, w.kp, wide);
    take_wide_row(w, a, as_is ? (const float*)x : wide, tok, T, t, words, bytes);
}

}  // namespace
