// Helpers for decoding floats in addition to simd.h, for every instruction set.
#pragma once

#include "simd.h"

namespace {

// Rows of x processed per tile, the same for direct decoding, and tiles side by side for both.
#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 6, DIRECT_ROWS = 4, FLOAT_TILES = 2, DIRECT_TILES = 4;
#else
constexpr int FLOAT_ROWS = 4, DIRECT_ROWS = 2, FLOAT_TILES = 1, DIRECT_TILES = 2;
#endif

#if defined(__AVX512F__)

inline I lanes(B v) { return {v.v}; }
inline I bits(F a) { return {_mm512_castps_si512(a.v)}; }
inline I iand(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I ior(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I ixor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I umul(I a, I b) { return imul(a, b); }  // of words that wrap round
inline I uadd(I a, I b) { return iadd(a, b); }
inline I ishl(I a, int n) { return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline I ishr(I a, int n) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline I imax(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N> inline I ishr(I a) { return {_mm512_srli_epi32(a.v, N)}; }
inline F fmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
// Codes above the largest finite number of a small float are infinity and NaN: the same with a full exponent.
inline F special_above(F a, F limit) {
    const __m512i full = _mm512_set1_epi32(0x7f800000), v = _mm512_castps_si512(a.v);
    return {_mm512_castsi512_ps(_mm512_mask_or_epi32(v, _mm512_cmp_ps_mask(a.v, limit.v, _CMP_GT_OQ), v, full))};
}
struct Lookup16 {  // by the low 4 bits of each lane
    __m512 t;
    explicit Lookup16(const float* values) : t(_mm512_loadu_ps(values)) {}
    F at(I index) const { return {_mm512_permutexvar_ps(index.v, t)}; }
};

#elif defined(__AVX2__)

#define PW_EACH(type, expr) type r; for (int i = 0; i < 2; ++i) r.v[i] = expr; return r
inline I lanes(B v) { PW_EACH(I, v.v[i]); }
inline I bits(F a) { PW_EACH(I, _mm256_castps_si256(a.v[i])); }
inline I iand(I a, I b) { PW_EACH(I, _mm256_and_si256(a.v[i], b.v[i])); }
inline I ior(I a, I b) { PW_EACH(I, _mm256_or_si256(a.v[i], b.v[i])); }
inline I ixor(I a, I b) { PW_EACH(I, _mm256_xor_si256(a.v[i], b.v[i])); }
inline I umul(I a, I b) { return imul(a, b); }  // of words that wrap round
inline I uadd(I a, I b) { return iadd(a, b); }
inline I ishl(I a, int n) { PW_EACH(I, _mm256_sll_epi32(a.v[i], _mm_cvtsi32_si128(n))); }
inline I ishr(I a, int n) { PW_EACH(I, _mm256_srl_epi32(a.v[i], _mm_cvtsi32_si128(n))); }
inline I imax(I a, I b) { PW_EACH(I, _mm256_max_epi32(a.v[i], b.v[i])); }
template <int N> inline I ishr(I a) { PW_EACH(I, _mm256_srli_epi32(a.v[i], N)); }
inline F fmin(F a, F b) { PW_EACH(F, _mm256_min_ps(a.v[i], b.v[i])); }
inline F special_above(F a, F limit) {
    const __m256 full = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
    PW_EACH(F, _mm256_or_ps(a.v[i], _mm256_and_ps(_mm256_cmp_ps(a.v[i], limit.v[i], _CMP_GT_OQ), full)));
}
struct Lookup16 {
    __m256 low, high;
    explicit Lookup16(const float* values) : low(_mm256_loadu_ps(values)), high(_mm256_loadu_ps(values + 8)) {}
    F at(I index) const {
        PW_EACH(F, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index.v[i]), _mm256_permutevar8x32_ps(high, index.v[i]),
                                    _mm256_castsi256_ps(_mm256_slli_epi32(index.v[i], 28))));
    }
};
#undef PW_EACH

#elif defined(__ARM_FEATURE_DOTPROD)

#define PW_EACH(type, expr) type r; for (int i = 0; i < 4; ++i) r.v[i] = expr; return r
inline I lanes(B v) { PW_EACH(I, vreinterpretq_s32_u8(v.v[i])); }
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
    PW_EACH(F, vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a.v[i]),
                                               vandq_u32(vcgtq_f32(a.v[i], limit.v[i]), full))));
}
struct Lookup16 {
    uint8x16x4_t t;
    explicit Lookup16(const float* values) {
        for (int i = 0; i < 4; ++i) t.val[i] = vreinterpretq_u8_f32(vld1q_f32(values + 4 * i));
    }
    F at(I index) const {  // the four bytes of entry n are 4n .. 4n + 3
        const uint32x4_t low = vdupq_n_u32(15), four = vdupq_n_u32(0x04040404), bytes = vdupq_n_u32(0x03020100);
        PW_EACH(F, vreinterpretq_f32_u8(vqtbl4q_u8(t, vreinterpretq_u8_u32(
            vmlaq_u32(bytes, vandq_u32(vreinterpretq_u32_s32(index.v[i]), low), four)))));
    }
};
#undef PW_EACH

#else

#define PW_EACH(type, expr) type r; for (int i = 0; i < 16; ++i) r.v[i] = expr; return r
inline I lanes(B v) { I r; memcpy(&r, &v, 64); return r; }
inline I bits(F a) { I r; memcpy(&r, &a, 64); return r; }
inline I iand(I a, I b) { PW_EACH(I, a.v[i] & b.v[i]); }
inline I ior(I a, I b) { PW_EACH(I, a.v[i] | b.v[i]); }
inline I ixor(I a, I b) { PW_EACH(I, a.v[i] ^ b.v[i]); }
inline I umul(I a, I b) { PW_EACH(I, (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i])); }  // of words that wrap round
inline I uadd(I a, I b) { PW_EACH(I, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
inline I ishl(I a, int n) { PW_EACH(I, (int32_t)((uint32_t)a.v[i] << n)); }
inline I ishr(I a, int n) { PW_EACH(I, (int32_t)((uint32_t)a.v[i] >> n)); }
inline I imax(I a, I b) { PW_EACH(I, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int N> inline I ishr(I a) { return ishr(a, N); }
inline F fmin(F a, F b) { PW_EACH(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F special_above(F a, F limit) {
    I v = bits(a);
    for (int i = 0; i < 16; ++i) v.v[i] |= a.v[i] > limit.v[i] ? 0x7f800000 : 0;
    return bitcast(v);
}
struct Lookup16 {
    const float* t;
    explicit Lookup16(const float* values) : t(values) {}
    F at(I index) const { PW_EACH(F, t[index.v[i] & 15]); }
};
#undef PW_EACH

#endif

}  // namespace
