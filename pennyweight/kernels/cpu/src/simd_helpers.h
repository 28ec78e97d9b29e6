// Additions to simd.h for conversions between floats and codes.
#pragma once

#include <cmath>

#include "abi.h"
#include "float_simd.h"
#include "simd.h"

namespace {

// Positions of 16 codes of `bits` bits in 16 bytes: lane i begins at byte at[4 * i], bit shift[i].
struct Stream {
    alignas(64) uint8_t at[64];
    alignas(64) int32_t shift[16];
};
constexpr Stream stream_of(int bits) {
    Stream s = {};
    for (int i = 0; i < 16; ++i) {
        s.at[4 * i] = (uint8_t)(i * bits / 8);
        s.at[4 * i + 1] = (uint8_t)(i * bits / 8 + 1);
        s.at[4 * i + 2] = s.at[4 * i + 3] = 0x80;  // nothing
        s.shift[i] = i * bits % 8;
    }
    return s;
}
constexpr Stream STREAMS[8] = {stream_of(0), stream_of(1), stream_of(2), stream_of(3),
                               stream_of(4), stream_of(5), stream_of(6), stream_of(7)};

#if defined(__AVX512F__)

inline F fsub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F fdiv(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fsqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
inline F fclip(F a, F lo, F hi) { return {_mm512_max_ps(lo.v, _mm512_min_ps(hi.v, a.v))}; }  // NaN passes
inline F frint(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a > b ? x : y, lane by lane
inline F fabove(F a, F b, F x, F y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
inline I iabove(I a, I b, I x, I y) {
    return {_mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a.v, b.v), y.v, x.v)};
}
inline F round_f16(F a) {
    return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
inline F pick(const float* table, I i) { return {_mm512_i32gather_ps(i.v, table, 4)}; }
inline F pick16(const float* table, I i) { return {_mm512_permutexvar_ps(i.v, _mm512_loadu_ps(table))}; }
inline I stream16(const uint8_t* p, int bits) {
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    const __m512i two = _mm512_shuffle_epi8(all, _mm512_load_si512(STREAMS[bits].at));
    return {_mm512_and_si512(_mm512_srlv_epi32(two, _mm512_load_si512(STREAMS[bits].shift)),
                             _mm512_set1_epi32((1 << bits) - 1))};
}

// Minimum and maximum of n 16-bit floats as integers in the same order (see below); n is a multiple of 32.
inline __m512i ordered(__m512i v) { return _mm512_xor_si512(v, _mm512_srli_epi16(_mm512_srai_epi16(v, 15), 1)); }
inline uint32_t least_word(__m512i v) {
    const __m256i a = _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return (uint32_t)_mm_cvtsi128_si32(
        _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)))) & 0xffff;
}
inline void ends_of_words(const uint16_t* p, int64_t n, int16_t* lo, int16_t* hi) {
    __m512i least = _mm512_set1_epi16(0x7fff), most = _mm512_set1_epi16(-0x8000);
    for (int64_t i = 0; i < n; i += 32) {
        const __m512i v = ordered(_mm512_loadu_si512(p + i));
        least = _mm512_min_epi16(least, v);
        most = _mm512_max_epi16(most, v);
    }
    *lo = (int16_t)(least_word(_mm512_xor_si512(least, _mm512_set1_epi16(-0x8000))) ^ 0x8000);
    *hi = (int16_t)(least_word(_mm512_xor_si512(most, _mm512_set1_epi16(0x7fff))) ^ 0x7fff);
}

inline B badd(B a, uint8_t n) { return {_mm512_add_epi8(a.v, _mm512_set1_epi8((char)n))}; }
// 16 bytes each from and to four places.
inline B bload4(const uint8_t* p, int64_t step) {
    const auto at = [&](int i) { return _mm_loadu_si128((const __m128i*)(p + i * step)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1), 1)};
}
inline void bstore4(uint8_t* p, int64_t step, B a) {
    _mm_storeu_si128((__m128i*)p, _mm512_castsi512_si128(a.v));
    _mm_storeu_si128((__m128i*)(p + step), _mm512_extracti32x4_epi32(a.v, 1));
    _mm_storeu_si128((__m128i*)(p + 2 * step), _mm512_extracti32x4_epi32(a.v, 2));
    _mm_storeu_si128((__m128i*)(p + 3 * step), _mm512_extracti32x4_epi32(a.v, 3));
}
// In each quarter, transposes 4 x 4 words of 32 bits.
inline void transpose4(B* v) {
    const __m512i a = _mm512_unpacklo_epi32(v[0].v, v[1].v), b = _mm512_unpackhi_epi32(v[0].v, v[1].v);
    const __m512i c = _mm512_unpacklo_epi32(v[2].v, v[3].v), d = _mm512_unpackhi_epi32(v[2].v, v[3].v);
    v[0].v = _mm512_unpacklo_epi64(a, c);
    v[1].v = _mm512_unpackhi_epi64(a, c);
    v[2].v = _mm512_unpacklo_epi64(b, d);
    v[3].v = _mm512_unpackhi_epi64(b, d);
}

#elif defined(__AVX2__)

#define PW_EACH(type, expr) type r; for (int i = 0; i < 2; ++i) r.v[i] = expr; return r
inline F fsub(F a, F b) { PW_EACH(F, _mm256_sub_ps(a.v[i], b.v[i])); }
inline F fdiv(F a, F b) { PW_EACH(F, _mm256_div_ps(a.v[i], b.v[i])); }
inline F fsqrt(F a) { PW_EACH(F, _mm256_sqrt_ps(a.v[i])); }
inline F fclip(F a, F lo, F hi) { PW_EACH(F, _mm256_max_ps(lo.v[i], _mm256_min_ps(hi.v[i], a.v[i]))); }
inline F frint(F a) { PW_EACH(F, _mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F fabove(F a, F b, F x, F y) {
    PW_EACH(F, _mm256_blendv_ps(y.v[i], x.v[i], _mm256_cmp_ps(a.v[i], b.v[i], _CMP_GT_OQ)));
}
inline I iabove(I a, I b, I x, I y) { PW_EACH(I, _mm256_blendv_epi8(y.v[i], x.v[i], _mm256_cmpgt_epi32(a.v[i], b.v[i]))); }
inline F round_f16(F a) { PW_EACH(F, _mm256_cvtph_ps(_mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT))); }
inline F pick(const float* table, I a) { PW_EACH(F, _mm256_i32gather_ps(table, a.v[i], 4)); }
inline F pick16(const float* table, I a) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    PW_EACH(F, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, a.v[i]), _mm256_permutevar8x32_ps(high, a.v[i]),
                                _mm256_castsi256_ps(_mm256_slli_epi32(a.v[i], 28))));
}
inline I stream16(const uint8_t* p, int bits) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    const __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
    const Stream& s = STREAMS[bits];
    PW_EACH(I, _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_shuffle_epi8(all, _mm256_load_si256((const __m256i*)(s.at + 32 * i))),
                          _mm256_load_si256((const __m256i*)(s.shift + 8 * i))), mask));
}

inline uint32_t least_word(__m256i a) {
    return (uint32_t)_mm_cvtsi128_si32(
        _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)))) & 0xffff;
}
inline void ends_of_words(const uint16_t* p, int64_t n, int16_t* lo, int16_t* hi) {
    __m256i least = _mm256_set1_epi16(0x7fff), most = _mm256_set1_epi16(-0x8000);
    for (int64_t i = 0; i < n; i += 16) {
        const __m256i w = _mm256_loadu_si256((const __m256i*)(p + i));
        const __m256i v = _mm256_xor_si256(w, _mm256_srli_epi16(_mm256_srai_epi16(w, 15), 1));
        least = _mm256_min_epi16(least, v);
        most = _mm256_max_epi16(most, v);
    }
    *lo = (int16_t)(least_word(_mm256_xor_si256(least, _mm256_set1_epi16(-0x8000))) ^ 0x8000);
    *hi = (int16_t)(least_word(_mm256_xor_si256(most, _mm256_set1_epi16(0x7fff))) ^ 0x7fff);
}

inline B badd(B a, uint8_t n) { PW_EACH(B, _mm256_add_epi8(a.v[i], _mm256_set1_epi8((char)n))); }
inline B bload4(const uint8_t* p, int64_t step) {
    PW_EACH(B, _mm256_loadu2_m128i((const __m128i*)(p + (2 * i + 1) * step), (const __m128i*)(p + 2 * i * step)));
}
inline void bstore4(uint8_t* p, int64_t step, B a) {
    for (int i = 0; i < 2; ++i)
        _mm256_storeu2_m128i((__m128i*)(p + (2 * i + 1) * step), (__m128i*)(p + 2 * i * step), a.v[i]);
}
inline void transpose4(B* v) {
    for (int i = 0; i < 2; ++i) {
        const __m256i a = _mm256_unpacklo_epi32(v[0].v[i], v[1].v[i]), b = _mm256_unpackhi_epi32(v[0].v[i], v[1].v[i]);
        const __m256i c = _mm256_unpacklo_epi32(v[2].v[i], v[3].v[i]), d = _mm256_unpackhi_epi32(v[2].v[i], v[3].v[i]);
        v[0].v[i] = _mm256_unpacklo_epi64(a, c);
        v[1].v[i] = _mm256_unpackhi_epi64(a, c);
        v[2].v[i] = _mm256_unpacklo_epi64(b, d);
        v[3].v[i] = _mm256_unpackhi_epi64(b, d);
    }
}
#undef PW_EACH

#elif defined(__ARM_FEATURE_DOTPROD)

#define PW_EACH(type, expr) type r; for (int i = 0; i < 4; ++i) r.v[i] = expr; return r
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
inline void bstore4(uint8_t* p, int64_t step, B a) { for (int i = 0; i < 4; ++i) vst1q_u8(p + i * step, a.v[i]); }
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

#else

#define PW_EACH(type, n, expr) type r; for (int i = 0; i < n; ++i) r.v[i] = expr; return r
inline F fsub(F a, F b) { PW_EACH(F, 16, a.v[i] - b.v[i]); }
inline F fdiv(F a, F b) { PW_EACH(F, 16, a.v[i] / b.v[i]); }
inline F fsqrt(F a) { PW_EACH(F, 16, __builtin_sqrtf(a.v[i])); }
inline F fclip(F a, F lo, F hi) { PW_EACH(F, 16, a.v[i] > hi.v[i] ? hi.v[i] : a.v[i] < lo.v[i] ? lo.v[i] : a.v[i]); }
inline F frint(F a) { PW_EACH(F, 16, __builtin_rintf(a.v[i])); }
inline F fabove(F a, F b, F x, F y) { PW_EACH(F, 16, a.v[i] > b.v[i] ? x.v[i] : y.v[i]); }
inline I iabove(I a, I b, I x, I y) { PW_EACH(I, 16, a.v[i] > b.v[i] ? x.v[i] : y.v[i]); }
inline F round_f16(F a) { PW_EACH(F, 16, widen_f16(narrow_f16(a.v[i]))); }
inline F pick(const float* table, I a) { PW_EACH(F, 16, table[a.v[i]]); }
inline F pick16(const float* table, I a) { return pick(table, a); }
inline I stream16(const uint8_t* p, int bits) {
    const Stream& s = STREAMS[bits];
    PW_EACH(I, 16, (int32_t)(((p[s.at[4 * i]] | (uint32_t)p[s.at[4 * i + 1]] << 8) >> s.shift[i]) & ((1u << bits) - 1)));
}

inline B badd(B a, uint8_t n) { PW_EACH(B, 64, (uint8_t)(a.v[i] + n)); }
inline B bload4(const uint8_t* p, int64_t step) { B r; for (int i = 0; i < 4; ++i) memcpy(r.v + 16 * i, p + i * step, 16); return r; }
inline void bstore4(uint8_t* p, int64_t step, B a) { for (int i = 0; i < 4; ++i) memcpy(p + i * step, a.v + 16 * i, 16); }
inline void transpose4(B* v) {
    B t[4];
    for (int q = 0; q < 4; ++q)
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) memcpy(t[i].v + 16 * q + 4 * j, v[j].v + 16 * q + 4 * i, 4);
    memcpy(v, t, sizeof t);
}
#undef PW_EACH

#endif

// Rounded to a kind; a NaN may become an infinity.
template <int KIND> inline F round_kind(F a) {
    if constexpr (KIND == BF16) {
        const I b = bits(a), up = iadd(iset(0x7fff), iand(ishr<16>(b), iset(1)));
        return bitcast(iand(iadd(b, up), iset((int32_t)0xffff0000)));
    }
    if constexpr (KIND == F16) return round_f16(a);
    return a;
}
inline F round_kind(int kind, F a) {
    return kind == BF16 ? round_kind<BF16>(a) : kind == F16 ? round_kind<F16>(a) : a;
}
template <int KIND> inline F load_kind(const void* p) {
    if constexpr (KIND == BF16) return fload_bf16((const uint16_t*)p);
    if constexpr (KIND == F16) return fload_f16((const uint16_t*)p);
    return fload((const float*)p);
}
template <int KIND> inline void store_kind(void* p, F a) {
    if constexpr (KIND == BF16) fstore_bf16((uint16_t*)p, a);
    else if constexpr (KIND == F16) fstore_f16((uint16_t*)p, a);
    else fstore((float*)p, a);
}
// A 16-bit float as a signed integer in the same order, and back; -0 is below 0.
inline int16_t ordered(uint16_t w) { return (int16_t)(w ^ (uint16_t)((int16_t)w < 0 ? 0x7fff : 0)); }
#if !defined(__AVX2__)
// Minimum and maximum of n 16-bit floats as such integers; n is a multiple of 32.
inline void ends_of_words(const uint16_t* p, int64_t n, int16_t* lo, int16_t* hi) {
    int16_t least = 0x7fff, most = -0x8000;
    for (int64_t i = 0; i < n; ++i) {
        const int16_t v = ordered(p[i]);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    *lo = least;
    *hi = most;
}
#endif
constexpr int64_t bytes_of(int kind) { return kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : 1; }

}  // namespace
