// Vectors of NEON with dot products, in quarters; included by simd.h, which describes the types.
#pragma once

#include <arm_neon.h>

namespace {

struct I {
    int32x4_t v[4];
};
struct F {
    float32x4_t v[4];
};
struct B {
    uint8x16_t v[4];
};
using X = int8x16_t;
constexpr int TOKENS[] = {4, 2, 1, 4};
constexpr bool PAIRS = false;
constexpr int FLOAT_ROWS = 4, DIRECT_ROWS = 2, FLOAT_TILES = 1, DIRECT_TILES = 2;
constexpr int CONV_TILES = 1, CONV_PIXELS = 6, DIRECT_PIXELS = 4;
constexpr int CHAIN_TILES = CONV_TILES, CHAIN_PIXELS[] = {CONV_PIXELS};
constexpr bool DEPTHWISE_ROWS = false;

#define PW_EACH(type, expr)                    \
    type r;                                    \
    for (int i = 0; i < 4; ++i) r.v[i] = expr; \
    return r
inline I iset(int32_t a) { PW_EACH(I, vdupq_n_s32(a)); }
inline I iload(const int32_t* p) { PW_EACH(I, vld1q_s32(p + 4 * i)); }
inline void istore(int32_t* p, I a) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}
inline I iadd(I a, I b) { PW_EACH(I, vaddq_s32(a.v[i], b.v[i])); }
inline I isub(I a, I b) { PW_EACH(I, vsubq_s32(a.v[i], b.v[i])); }
inline I imul(I a, I b) { PW_EACH(I, vmulq_s32(a.v[i], b.v[i])); }
inline I ishl8(I a) { PW_EACH(I, vshlq_n_s32(a.v[i], 8)); }
inline I ishr8(I a) { PW_EACH(I, vshrq_n_s32(a.v[i], 8)); }
inline int32_t imost(I a) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3]))); }
inline int32_t isum(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
inline void istore16(int16_t* p, I a) {
    for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(a.v[i]));
}
inline void istore8(int8_t* p, I a) {  // low bytes
    for (int i = 0; i < 2; ++i)
        vst1_s8(p + 8 * i, vmovn_s16(vcombine_s16(vmovn_s32(a.v[2 * i]), vmovn_s32(a.v[2 * i + 1]))));
}
inline I iload8s(const int8_t* p) {
    int32_t t[16];
    for (int i = 0; i < 16; ++i) t[i] = p[i];
    return iload(t);
}
inline I iload8u(const uint8_t* p) {
    int32_t t[16];
    for (int i = 0; i < 16; ++i) t[i] = p[i];
    return iload(t);
}

inline F fset(float a) { PW_EACH(F, vdupq_n_f32(a)); }
inline F fload(const float* p) { PW_EACH(F, vld1q_f32(p + 4 * i)); }
inline void fstore(float* p, F a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F fadd(F a, F b) { PW_EACH(F, vaddq_f32(a.v[i], b.v[i])); }
inline F fmul(F a, F b) { PW_EACH(F, vmulq_f32(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { PW_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
inline F cvt(I a) { PW_EACH(F, vcvtq_f32_s32(a.v[i])); }
inline I iround(F a) { PW_EACH(I, vcvtnq_s32_f32(a.v[i])); }            // ties to even
inline F fleast(F a, F b) { PW_EACH(F, vminnmq_f32(a.v[i], b.v[i])); }  // b where a is NaN
inline F fmost(F a, F b) { PW_EACH(F, vmaxnmq_f32(a.v[i], b.v[i])); }
inline F bitcast(I a) { PW_EACH(F, vreinterpretq_f32_s32(a.v[i])); }
inline F fload_bf16(const uint16_t* p) { PW_EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
inline F fload_f16(const uint16_t* p) { PW_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
inline void fstore_f16(uint16_t* p, F a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

inline B bload(const uint8_t* p) { PW_EACH(B, vld1q_u8(p + 16 * i)); }
inline void bstore(uint8_t* p, B a) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
inline B bmask(B a, uint8_t m) { PW_EACH(B, vandq_u8(a.v[i], vdupq_n_u8(m))); }
inline B bor(B a, B b) { PW_EACH(B, vorrq_u8(a.v[i], b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, vshlq_u8(a.v[i], vdupq_n_s8((int8_t)-n))); }
inline B bleft(B a, int n) { PW_EACH(B, vshlq_u8(a.v[i], vdupq_n_s8((int8_t)n))); }
inline X xload(const int8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(a));
}
template <int FROM, int BITS> inline B words(B a) {
    const int16x8_t down = vdupq_n_s16(-FROM);
    const uint16x8_t mask = vdupq_n_u16((1 << BITS) - 1);
    PW_EACH(B, vreinterpretq_u8_u16(vandq_u16(vshlq_u16(vreinterpretq_u16_u8(a.v[i]), down), mask)));
}
inline I dot2(I acc, B w, X x) {
    const int16x8_t v = vreinterpretq_s16_s8(x);
    for (int i = 0; i < 4; ++i) {
        const int16x8_t u = vreinterpretq_s16_u8(w.v[i]);
        const int32x4_t low = vmull_s16(vget_low_s16(u), vget_low_s16(v)), high = vmull_high_s16(u, v);
        acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(low, high));
    }
    return acc;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED_BYTES = false;
template <bool ALL8> inline I dot4(I acc, B w, X x) { PW_EACH(I, vusdotq_s32(acc.v[i], w.v[i], x)); }
#else
// Both operands are signed: a full byte u is used as u - 128, and the caller subtracts 128 less.
constexpr bool SIGNED_BYTES = true;
template <bool ALL8> inline I dot4(I acc, B w, X x) {
    const uint8x16_t top = vdupq_n_u8(ALL8 ? 0x80 : 0);
    PW_EACH(I, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], top)), x));
}
#endif

inline I lanes(B v) { PW_EACH(I, vreinterpretq_s32_u8(v.v[i])); }
inline B bytes(F a) { PW_EACH(B, vreinterpretq_u8_f32(a.v[i])); }
inline I bits(F a) { PW_EACH(I, vreinterpretq_s32_f32(a.v[i])); }
inline I iand(I a, I b) { PW_EACH(I, vandq_s32(a.v[i], b.v[i])); }
inline I ior(I a, I b) { PW_EACH(I, vorrq_s32(a.v[i], b.v[i])); }
inline I ixor(I a, I b) { PW_EACH(I, veorq_s32(a.v[i], b.v[i])); }
inline I umul(I a, I b) { return imul(a, b); }  // of words that wrap round
inline I uadd(I a, I b) { return iadd(a, b); }
inline I ishl(I a, int n) { PW_EACH(I, vshlq_s32(a.v[i], vdupq_n_s32(n))); }
inline I ishr(I a, int n) {
    PW_EACH(I, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[i]), vdupq_n_s32(-n))));
}
inline I imax(I a, I b) { PW_EACH(I, vmaxq_s32(a.v[i], b.v[i])); }
template <int N> inline I ishr(I a) { return ishr(a, N); }
inline F fmin(F a, F b) { PW_EACH(F, vminq_f32(a.v[i], b.v[i])); }
inline F special_above(F a, F limit) {
    const uint32x4_t full = vdupq_n_u32(0x7f800000);
    PW_EACH(F, vreinterpretq_f32_u32(
                   vorrq_u32(vreinterpretq_u32_f32(a.v[i]), vandq_u32(vcgtq_f32(a.v[i], limit.v[i]), full))));
}
struct Lookup16 {
    uint8x16x4_t t;
    explicit Lookup16(const float* values) {
        for (int i = 0; i < 4; ++i) t.val[i] = vreinterpretq_u8_f32(vld1q_f32(values + 4 * i));
    }
    F at(I index) const {  // the four bytes of entry n are 4n .. 4n + 3
        const uint32x4_t low = vdupq_n_u32(15), four = vdupq_n_u32(0x04040404), bytes = vdupq_n_u32(0x03020100);
        PW_EACH(
            F,
            vreinterpretq_f32_u8(vqtbl4q_u8(
                t, vreinterpretq_u8_u32(vmlaq_u32(bytes, vandq_u32(vreinterpretq_u32_s32(index.v[i]), low), four)))));
    }
};

inline F fsub(F a, F b) { PW_EACH(F, vsubq_f32(a.v[i], b.v[i])); }
inline F fdiv(F a, F b) { PW_EACH(F, vdivq_f32(a.v[i], b.v[i])); }
inline F fsqrt(F a) { PW_EACH(F, vsqrtq_f32(a.v[i])); }
inline F fclip(F a, F lo, F hi) { PW_EACH(F, vmaxq_f32(lo.v[i], vminq_f32(hi.v[i], a.v[i]))); }
inline F frint(F a) { PW_EACH(F, vrndnq_f32(a.v[i])); }
inline F fabove(F a, F b, F x, F y) { PW_EACH(F, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), x.v[i], y.v[i])); }
inline I iabove(I a, I b, I x, I y) { PW_EACH(I, vbslq_s32(vcgtq_s32(a.v[i], b.v[i]), x.v[i], y.v[i])); }
inline F round_f16(F a) { PW_EACH(F, vcvt_f32_f16(vcvt_f16_f32(a.v[i]))); }
inline F pick(const float* table, I a) {
    float t[16];
    int32_t at[16];
    istore(at, a);
    for (int i = 0; i < 16; ++i) t[i] = table[at[i]];
    return fload(t);
}
inline F pick16(const float* table, I a) { return pick(table, a); }
inline I stream16(const uint8_t* p, int bits) {
    const uint8x16_t all = vld1q_u8(p);
    const Stream& s = STREAMS[bits];
    PW_EACH(I, vandq_s32(vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(all, vld1q_u8(s.at + 16 * i))),
                                                         vnegq_s32(vld1q_s32(s.shift + 4 * i)))),
                         vdupq_n_s32((1 << bits) - 1)));
}

inline B badd(B a, uint8_t n) { PW_EACH(B, vaddq_u8(a.v[i], vdupq_n_u8(n))); }
inline B bload4(const uint8_t* p, int64_t step) { PW_EACH(B, vld1q_u8(p + i * step)); }
inline void bstore4(uint8_t* p, int64_t step, B a) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + i * step, a.v[i]);
}
inline void transpose4(B* v) {
    for (int i = 0; i < 4; ++i) {
        uint32x4_t w[4];
        for (int j = 0; j < 4; ++j) w[j] = vreinterpretq_u32_u8(v[j].v[i]);
        const uint32x4x2_t a = vtrnq_u32(w[0], w[1]), b = vtrnq_u32(w[2], w[3]);
        v[0].v[i] = vreinterpretq_u8_u32(vcombine_u32(vget_low_u32(a.val[0]), vget_low_u32(b.val[0])));
        v[1].v[i] = vreinterpretq_u8_u32(vcombine_u32(vget_low_u32(a.val[1]), vget_low_u32(b.val[1])));
        v[2].v[i] = vreinterpretq_u8_u32(vcombine_u32(vget_high_u32(a.val[0]), vget_high_u32(b.val[0])));
        v[3].v[i] = vreinterpretq_u8_u32(vcombine_u32(vget_high_u32(a.val[1]), vget_high_u32(b.val[1])));
    }
}
#undef PW_EACH

template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) {
    for (int i = 0; i < 4; ++i) {
        const int8x16_t y = vreinterpretq_s8_u8(x.v[i]);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        acc.v[i] = vusdotq_s32(acc.v[i], w.v[i], y);
#else
        acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(ALL8 ? 0x80 : 0))), y);
#endif
    }
    return acc;
}
PW_INLINE B limbs32(I a, I b) {
    B r;
    for (int i = 0; i < 4; ++i) {
        const int16x8_t v = vcombine_s16(vmovn_s32(a.v[i]), vmovn_s32(b.v[i]));
        const int8x8_t high = vmovn_s16(vshrq_n_s16(vaddq_s16(v, vdupq_n_s16(128)), 8));
        r.v[i] = vreinterpretq_u8_s8(vcombine_s8(high, vmovn_s16(v)));
    }
    return r;
}
PW_INLINE B low_longs(B a, B b) {
    for (int i = 0; i < 4; ++i)
        a.v[i] = vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a.v[i]), vreinterpretq_u64_u8(b.v[i])));
    return a;
}
PW_INLINE B high_longs(B a, B b) {
    for (int i = 0; i < 4; ++i)
        a.v[i] = vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a.v[i]), vreinterpretq_u64_u8(b.v[i])));
    return a;
}
PW_INLINE B same8(const uint8_t* p) {
    const uint8x16_t v = vcombine_u8(vld1_u8(p), vld1_u8(p));
    return {{v, v, v, v}};
}
PW_INLINE I even_words(I a, I b) {
    for (int i = 0; i < 4; ++i) a.v[i] = vuzp1q_s32(a.v[i], b.v[i]);
    return a;
}
PW_INLINE I odd_words(I a, I b) {
    for (int i = 0; i < 4; ++i) a.v[i] = vuzp2q_s32(a.v[i], b.v[i]);
    return a;
}
PW_INLINE I low_halves(I a, I b) { return {{a.v[0], a.v[1], b.v[0], b.v[1]}}; }
PW_INLINE I high_halves(I a, I b) { return {{a.v[2], a.v[3], b.v[2], b.v[3]}}; }
template <int K> PW_INLINE B spread(B a) {
    for (int i = 0; i < 4; ++i) a.v[i] = vreinterpretq_u8_u32(vdupq_laneq_u32(vreinterpretq_u32_u8(a.v[i]), K));
    return a;
}
PW_INLINE B nibbles64(const uint8_t* p) {
    B r;
    for (int i = 0; i < 2; ++i) {
        const uint8x16_t v = vld1q_u8(p + 16 * i), low = vandq_u8(v, vdupq_n_u8(15)), high = vshrq_n_u8(v, 4);
        r.v[2 * i] = vzip1q_u8(low, high), r.v[2 * i + 1] = vzip2q_u8(low, high);
    }
    return r;
}
PW_INLINE void interleave4(B* v) {
    for (int i = 0; i < 4; ++i) {
        const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(v[0].v[i], v[1].v[i])),
                         b = vreinterpretq_u16_u8(vzip2q_u8(v[0].v[i], v[1].v[i]));
        const uint16x8_t c = vreinterpretq_u16_u8(vzip1q_u8(v[2].v[i], v[3].v[i])),
                         d = vreinterpretq_u16_u8(vzip2q_u8(v[2].v[i], v[3].v[i]));
        v[0].v[i] = vreinterpretq_u8_u16(vzip1q_u16(a, c)), v[1].v[i] = vreinterpretq_u8_u16(vzip2q_u16(a, c));
        v[2].v[i] = vreinterpretq_u8_u16(vzip1q_u16(b, d)), v[3].v[i] = vreinterpretq_u8_u16(vzip2q_u16(b, d));
    }
}

inline B flip(B u) {
    for (int i = 0; i < 4; ++i) u.v[i] = veorq_u8(u.v[i], vdupq_n_u8(0x80));
    return u;
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int BYTE_ZERO = 0;
inline I dot4_bytes(I acc, B w, X x) {
    for (int i = 0; i < 4; ++i) acc.v[i] = vusdotq_s32(acc.v[i], vreinterpretq_u8_s8(x), vreinterpretq_s8_u8(w.v[i]));
    return acc;
}
#else
constexpr int BYTE_ZERO = 128;
inline I dot4_bytes(I acc, B w, X x) {
    const int8x16_t q = vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s8(x), vdupq_n_u8(0x80)));
    for (int i = 0; i < 4; ++i) acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), q);
    return acc;
}
#endif

}  // namespace
