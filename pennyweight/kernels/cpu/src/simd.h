// A 16-lane vector abstraction for every instruction set, so that each kernel is written once.
//
//   I  16 x int32      F  16 x float32      B  64 bytes: 16 columns x 4 consecutive k
//
// A file that includes this one is compiled once per instruction set (see setup.py). Everything is in an anonymous
// namespace: inline functions with external linkage would be merged across translation units, and AVX-512 code would
// run on a machine without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// For code in inner loops: if vectors are pairs of registers, compilers otherwise pass some of them through memory,
// which is ten times slower.
#define PW_INLINE __attribute__((always_inline)) inline

namespace {

#if defined(__AVX512F__)

struct I { __m512i v; };
struct F { __m512 v; };
struct B { __m512i v; };
using X = __m512i;  // four bytes of one input row, in every lane

// Tokens processed together per tile: with one, two and three limbs, and with 16-bit words.
constexpr int TOKENS[] = {8, 6, 4, 12};

inline I iset(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline I iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I isub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I imul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I ishl8(I a) { return {_mm512_slli_epi32(a.v, 8)}; }
inline I ishr8(I a) { return {_mm512_srai_epi32(a.v, 8)}; }
inline int32_t isum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void istore8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }  // low bytes
inline void istore16(int16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
inline I iload8s(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I iload8u(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }

inline F fset(float a) { return {_mm512_set1_ps(a)}; }
inline F fload(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void fstore(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F fadd(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F fmul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F cvt(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I iround(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
inline F fleast(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where a is NaN
inline F fmost(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float fleast(F a) { return _mm512_reduce_min_ps(a.v); }
inline float fmost(F a) { return _mm512_reduce_max_ps(a.v); }
inline F bitcast(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline F fload_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F fload_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void fstore_f16(uint16_t* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// To nearest, ties to even; NaN and subnormals are preserved.
inline void fstore_bf16(uint16_t* p, F a) {
    const __m512i b = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i r = _mm512_mask_or_epi32(up, nan, b, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}

inline B bload(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void bstore(uint8_t* p, B a) { _mm512_storeu_si512(p, a.v); }
inline B bmask(B a, uint8_t m) { return {_mm512_and_si512(a.v, _mm512_set1_epi8((char)m))}; }
inline B bor(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shifts of 16-bit lanes: the caller masks off bits that cross bytes.
inline B bright(B a, int n) { return {_mm512_srl_epi16(a.v, _mm_cvtsi32_si128(n))}; }
inline B bleft(B a, int n) { return {_mm512_sll_epi16(a.v, _mm_cvtsi32_si128(n))}; }
inline X xload(const int8_t* p) { int32_t a; memcpy(&a, p, 4); return _mm512_set1_epi32(a); }
// Bits [from, from + bits) of each 16-bit lane, and products of such lanes with two 16-bit inputs.
template <int FROM, int BITS> inline B words(B a) {
    const __m512i v = FROM ? _mm512_srli_epi16(a.v, FROM) : a.v;
    return {FROM + BITS == 16 ? v : _mm512_and_si512(v, _mm512_set1_epi16((1 << BITS) - 1))};
}

#if defined(__AVX512VNNI__)
constexpr bool SIGNED_BYTES = false;
inline I dot2(I acc, B w, X x) { return {_mm512_dpwssd_epi32(acc.v, w.v, x)}; }
template <bool ALL8> inline I dot4(I acc, B w, X x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x)}; }
#else
constexpr bool SIGNED_BYTES = false;
// acc + a, not reordered: otherwise the compiler computes all products of a loop first and spills them to memory.
inline void add_now(__m512i& acc, __m512i a) {
    acc = _mm512_add_epi32(acc, a);
    asm("" : "+v"(acc));
}
inline I dot2(I acc, B w, X x) { add_now(acc.v, _mm512_madd_epi16(w.v, x)); return acc; }
// Codes below 128 cannot saturate the 16-bit sums of maddubs (2 * 127 * 128 < 2**15); full bytes are widened.
template <bool ALL8> inline I dot4(I acc, B w, X x) {
    if (!ALL8) {
        add_now(acc.v, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, x), _mm512_set1_epi16(1)));
        return acc;
    }
    const __m512i xe = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), xo = _mm512_srai_epi16(x, 8);
    add_now(acc.v, _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(255)), xe));
    add_now(acc.v, _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), xo));
    return acc;
}
#endif

#elif defined(__AVX2__)

struct I { __m256i v[2]; };
struct F { __m256 v[2]; };
struct B { __m256i v[2]; };
using X = __m256i;
constexpr int TOKENS[] = {4, 2, 1, 4};

#define PW_EACH(type, expr) type r; for (int i = 0; i < 2; ++i) r.v[i] = expr; return r
inline I iset(int32_t a) { PW_EACH(I, _mm256_set1_epi32(a)); }
inline I iload(const int32_t* p) { PW_EACH(I, _mm256_loadu_si256((const __m256i*)(p + 8 * i))); }
inline void istore(int32_t* p, I a) { for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(p + 8 * i), a.v[i]); }
inline I iadd(I a, I b) { PW_EACH(I, _mm256_add_epi32(a.v[i], b.v[i])); }
inline I isub(I a, I b) { PW_EACH(I, _mm256_sub_epi32(a.v[i], b.v[i])); }
inline I imul(I a, I b) { PW_EACH(I, _mm256_mullo_epi32(a.v[i], b.v[i])); }
inline I ishl8(I a) { PW_EACH(I, _mm256_slli_epi32(a.v[i], 8)); }
inline I ishr8(I a) { PW_EACH(I, _mm256_srai_epi32(a.v[i], 8)); }
inline int32_t isum(I a) {
    const __m256i s = _mm256_add_epi32(a.v[0], a.v[1]);
    const __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    const __m128i u = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(u, _mm_shuffle_epi32(u, 0xb1)));
}
// The low 16 bits of 16 numbers.
inline __m256i low16(I a) {
    const __m256i m = _mm256_set1_epi32(0xffff);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(a.v[0], m), _mm256_and_si256(a.v[1], m));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void istore16(int16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, low16(a)); }
inline void istore8(int8_t* p, I a) {  // low bytes
    const __m256i b = _mm256_and_si256(low16(a), _mm256_set1_epi16(255));
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
}
inline I iload8s(const int8_t* p) { PW_EACH(I, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)))); }
inline I iload8u(const uint8_t* p) { PW_EACH(I, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)))); }

inline F fset(float a) { PW_EACH(F, _mm256_set1_ps(a)); }
inline F fload(const float* p) { PW_EACH(F, _mm256_loadu_ps(p + 8 * i)); }
inline void fstore(float* p, F a) { for (int i = 0; i < 2; ++i) _mm256_storeu_ps(p + 8 * i, a.v[i]); }
inline F fadd(F a, F b) { PW_EACH(F, _mm256_add_ps(a.v[i], b.v[i])); }
inline F fmul(F a, F b) { PW_EACH(F, _mm256_mul_ps(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { PW_EACH(F, _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
inline F cvt(I a) { PW_EACH(F, _mm256_cvtepi32_ps(a.v[i])); }
inline I iround(F a) { PW_EACH(I, _mm256_cvtps_epi32(a.v[i])); }  // ties to even
inline F fleast(F a, F b) { PW_EACH(F, _mm256_min_ps(a.v[i], b.v[i])); }  // b where a is NaN
inline F fmost(F a, F b) { PW_EACH(F, _mm256_max_ps(a.v[i], b.v[i])); }
inline F bitcast(I a) { PW_EACH(F, _mm256_castsi256_ps(a.v[i])); }
inline F fload_bf16(const uint16_t* p) {
    PW_EACH(F, _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8 * i))), 16)));
}
inline F fload_f16(const uint16_t* p) { PW_EACH(F, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i)))); }
inline void fstore_f16(uint16_t* p, F a) {
    for (int i = 0; i < 2; ++i)
        _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT));
}
// To nearest, ties to even; NaN and subnormals are preserved.
inline void fstore_bf16(uint16_t* p, F a) {
    I r;
    for (int i = 0; i < 2; ++i) {
        const __m256i b = _mm256_castps_si256(a.v[i]);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v[i], a.v[i], _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x400000));
        r.v[i] = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    }
    istore16((int16_t*)p, r);
}

inline B bload(const uint8_t* p) { PW_EACH(B, _mm256_loadu_si256((const __m256i*)(p + 32 * i))); }
inline void bstore(uint8_t* p, B a) { for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(p + 32 * i), a.v[i]); }
inline B bmask(B a, uint8_t m) { PW_EACH(B, _mm256_and_si256(a.v[i], _mm256_set1_epi8((char)m))); }
inline B bor(B a, B b) { PW_EACH(B, _mm256_or_si256(a.v[i], b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, _mm256_srl_epi16(a.v[i], _mm_cvtsi32_si128(n))); }
inline B bleft(B a, int n) { PW_EACH(B, _mm256_sll_epi16(a.v[i], _mm_cvtsi32_si128(n))); }
inline X xload(const int8_t* p) { int32_t a; memcpy(&a, p, 4); return _mm256_set1_epi32(a); }
template <int FROM, int BITS> inline B words(B a) {
    PW_EACH(B, _mm256_and_si256(_mm256_srli_epi16(a.v[i], FROM), _mm256_set1_epi16((1 << BITS) - 1)));
}

constexpr bool SIGNED_BYTES = false;
#if defined(__AVXVNNI__)
inline I dot2(I acc, B w, X x) { PW_EACH(I, _mm256_dpwssd_avx_epi32(acc.v[i], w.v[i], x)); }
template <bool ALL8> inline I dot4(I acc, B w, X x) { PW_EACH(I, _mm256_dpbusd_avx_epi32(acc.v[i], w.v[i], x)); }
#else
// acc + a, not reordered: otherwise the compiler computes all products of a loop first and spills them to memory.
inline void add_now(__m256i& acc, __m256i a) {
    acc = _mm256_add_epi32(acc, a);
    asm("" : "+x"(acc));
}
inline I dot2(I acc, B w, X x) {
    for (int i = 0; i < 2; ++i) add_now(acc.v[i], _mm256_madd_epi16(w.v[i], x));
    return acc;
}
template <bool ALL8> inline I dot4(I acc, B w, X x) {
    if (!ALL8) {
        for (int i = 0; i < 2; ++i)
            add_now(acc.v[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w.v[i], x), _mm256_set1_epi16(1)));
        return acc;
    }
    const __m256i xe = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), xo = _mm256_srai_epi16(x, 8);
    for (int i = 0; i < 2; ++i) {
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_and_si256(w.v[i], _mm256_set1_epi16(255)), xe));
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_srli_epi16(w.v[i], 8), xo));
    }
    return acc;
}
#endif
#undef PW_EACH

#elif defined(__ARM_FEATURE_DOTPROD)

struct I { int32x4_t v[4]; };
struct F { float32x4_t v[4]; };
struct B { uint8x16_t v[4]; };
using X = int8x16_t;
constexpr int TOKENS[] = {4, 2, 1, 4};

#define PW_EACH(type, expr) type r; for (int i = 0; i < 4; ++i) r.v[i] = expr; return r
inline I iset(int32_t a) { PW_EACH(I, vdupq_n_s32(a)); }
inline I iload(const int32_t* p) { PW_EACH(I, vld1q_s32(p + 4 * i)); }
inline void istore(int32_t* p, I a) { for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]); }
inline I iadd(I a, I b) { PW_EACH(I, vaddq_s32(a.v[i], b.v[i])); }
inline I isub(I a, I b) { PW_EACH(I, vsubq_s32(a.v[i], b.v[i])); }
inline I imul(I a, I b) { PW_EACH(I, vmulq_s32(a.v[i], b.v[i])); }
inline I ishl8(I a) { PW_EACH(I, vshlq_n_s32(a.v[i], 8)); }
inline I ishr8(I a) { PW_EACH(I, vshrq_n_s32(a.v[i], 8)); }
inline int32_t isum(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
inline void istore16(int16_t* p, I a) { for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(a.v[i])); }
inline void istore8(int8_t* p, I a) {  // low bytes
    for (int i = 0; i < 2; ++i)
        vst1_s8(p + 8 * i, vmovn_s16(vcombine_s16(vmovn_s32(a.v[2 * i]), vmovn_s32(a.v[2 * i + 1]))));
}
inline I iload8s(const int8_t* p) { int32_t t[16]; for (int i = 0; i < 16; ++i) t[i] = p[i]; return iload(t); }
inline I iload8u(const uint8_t* p) { int32_t t[16]; for (int i = 0; i < 16; ++i) t[i] = p[i]; return iload(t); }

inline F fset(float a) { PW_EACH(F, vdupq_n_f32(a)); }
inline F fload(const float* p) { PW_EACH(F, vld1q_f32(p + 4 * i)); }
inline void fstore(float* p, F a) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
inline F fadd(F a, F b) { PW_EACH(F, vaddq_f32(a.v[i], b.v[i])); }
inline F fmul(F a, F b) { PW_EACH(F, vmulq_f32(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { PW_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
inline F cvt(I a) { PW_EACH(F, vcvtq_f32_s32(a.v[i])); }
inline I iround(F a) { PW_EACH(I, vcvtnq_s32_f32(a.v[i])); }  // ties to even
inline F fleast(F a, F b) { PW_EACH(F, vminnmq_f32(a.v[i], b.v[i])); }  // b where a is NaN
inline F fmost(F a, F b) { PW_EACH(F, vmaxnmq_f32(a.v[i], b.v[i])); }
inline F bitcast(I a) { PW_EACH(F, vreinterpretq_f32_s32(a.v[i])); }
inline F fload_bf16(const uint16_t* p) {
    PW_EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
inline F fload_f16(const uint16_t* p) { PW_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
inline void fstore_f16(uint16_t* p, F a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

inline B bload(const uint8_t* p) { PW_EACH(B, vld1q_u8(p + 16 * i)); }
inline void bstore(uint8_t* p, B a) { for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]); }
inline B bmask(B a, uint8_t m) { PW_EACH(B, vandq_u8(a.v[i], vdupq_n_u8(m))); }
inline B bor(B a, B b) { PW_EACH(B, vorrq_u8(a.v[i], b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, vshlq_u8(a.v[i], vdupq_n_s8((int8_t)-n))); }
inline B bleft(B a, int n) { PW_EACH(B, vshlq_u8(a.v[i], vdupq_n_s8((int8_t)n))); }
inline X xload(const int8_t* p) { int32_t a; memcpy(&a, p, 4); return vreinterpretq_s8_s32(vdupq_n_s32(a)); }
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
#undef PW_EACH

#else

// Plain C++, for any machine; the reference in tests of the others.
struct I { int32_t v[16]; };
struct F { float v[16]; };
struct B { uint8_t v[64]; };
struct X { int8_t v[4]; };
constexpr int TOKENS[] = {1, 1, 1, 1};
constexpr bool SIGNED_BYTES = false;

#define PW_EACH(type, n, expr) type r; for (int i = 0; i < n; ++i) r.v[i] = expr; return r
inline I iset(int32_t a) { PW_EACH(I, 16, a); }
inline I iload(const int32_t* p) { PW_EACH(I, 16, p[i]); }
inline void istore(int32_t* p, I a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline I iadd(I a, I b) { PW_EACH(I, 16, a.v[i] + b.v[i]); }
inline I isub(I a, I b) { PW_EACH(I, 16, a.v[i] - b.v[i]); }
inline I imul(I a, I b) { PW_EACH(I, 16, a.v[i] * b.v[i]); }
inline I ishl8(I a) { PW_EACH(I, 16, a.v[i] * 256); }
inline I ishr8(I a) { PW_EACH(I, 16, a.v[i] >> 8); }
inline int32_t isum(I a) { int32_t s = 0; for (int i = 0; i < 16; ++i) s += a.v[i]; return s; }
inline void istore8(int8_t* p, I a) { for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i]; }  // low bytes
inline void istore16(int16_t* p, I a) { for (int i = 0; i < 16; ++i) p[i] = (int16_t)a.v[i]; }
inline I iload8s(const int8_t* p) { PW_EACH(I, 16, p[i]); }
inline I iload8u(const uint8_t* p) { PW_EACH(I, 16, p[i]); }

inline F fset(float a) { PW_EACH(F, 16, a); }
inline F fload(const float* p) { PW_EACH(F, 16, p[i]); }
inline void fstore(float* p, F a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline F fadd(F a, F b) { PW_EACH(F, 16, a.v[i] + b.v[i]); }
inline F fmul(F a, F b) { PW_EACH(F, 16, a.v[i] * b.v[i]); }
inline F fma(F a, F b, F c) { PW_EACH(F, 16, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F cvt(I a) { PW_EACH(F, 16, (float)a.v[i]); }
inline I iround(F a) { PW_EACH(I, 16, (int32_t)__builtin_rintf(a.v[i])); }  // ties to even
inline F fleast(F a, F b) { PW_EACH(F, 16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }  // b where a is NaN
inline F fmost(F a, F b) { PW_EACH(F, 16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F bitcast(I a) { F r; memcpy(&r, &a, 64); return r; }
inline float widen_bf16(uint16_t h) { uint32_t b = (uint32_t)h << 16; float f; memcpy(&f, &b, 4); return f; }
inline F fload_bf16(const uint16_t* p) { PW_EACH(F, 16, widen_bf16(p[i])); }
inline float widen_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    uint32_t b;
    if (e == 31) b = sign | 0x7f800000 | m << 13;
    else if (e) b = sign | (e + 112) << 23 | m << 13;
    else { const float f = (float)m * 5.9604644775390625e-08f; memcpy(&b, &f, 4); b |= sign; }
    float f; memcpy(&f, &b, 4); return f;
}
inline uint16_t narrow_f16(float f) {  // to nearest, ties to even
    uint32_t b; memcpy(&b, &f, 4);
    const uint16_t sign = (uint16_t)((b >> 16) & 0x8000);
    b &= 0x7fffffff;
    if (b > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (b >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (b < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
        float a; memcpy(&a, &b, 4); a += 0.5f; memcpy(&b, &a, 4);
        return (uint16_t)(sign | (b - 0x3f000000));
    }
    return (uint16_t)(sign | ((b - 0x38000000 + 0xfff + ((b >> 13) & 1)) >> 13));
}
inline F fload_f16(const uint16_t* p) { PW_EACH(F, 16, widen_f16(p[i])); }
inline void fstore_f16(uint16_t* p, F a) { for (int i = 0; i < 16; ++i) p[i] = narrow_f16(a.v[i]); }

inline B bload(const uint8_t* p) { PW_EACH(B, 64, p[i]); }
inline void bstore(uint8_t* p, B a) { memcpy(p, a.v, 64); }
inline B bmask(B a, uint8_t m) { PW_EACH(B, 64, (uint8_t)(a.v[i] & m)); }
inline B bor(B a, B b) { PW_EACH(B, 64, (uint8_t)(a.v[i] | b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, 64, (uint8_t)(a.v[i] >> n)); }
inline B bleft(B a, int n) { PW_EACH(B, 64, (uint8_t)(a.v[i] << n)); }
inline X xload(const int8_t* p) { X r; memcpy(r.v, p, 4); return r; }
template <int FROM, int BITS> inline B words(B a) {
    uint16_t h[32];
    memcpy(h, a.v, 64);
    for (int i = 0; i < 32; ++i) h[i] = (uint16_t)((h[i] >> FROM) & ((1 << BITS) - 1));
    memcpy(a.v, h, 64);
    return a;
}
inline I dot2(I acc, B w, X x) {
    int16_t u[32], v[2];
    memcpy(u, w.v, 64);
    memcpy(v, x.v, 4);
    for (int i = 0; i < 32; ++i) acc.v[i / 2] += (int32_t)u[i] * v[i % 2];
    return acc;
}
template <bool ALL8> inline I dot4(I acc, B w, X x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += (int32_t)w.v[i] * x.v[i % 4];
    return acc;
}
#undef PW_EACH

#endif

// bfloat16 to nearest, ties to even; NaN stays NaN.
inline uint16_t narrow_bf16(float f) {
    uint32_t b; memcpy(&b, &f, 4);
    if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)((b >> 16) | 0x40);
    return (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
#if !defined(__AVX2__)
inline void fstore_bf16(uint16_t* p, F a) {
    float t[16];
    fstore(t, a);
    for (int i = 0; i < 16; ++i) p[i] = narrow_bf16(t[i]);
}
#endif
#if !defined(__AVX512F__)
inline float fleast(F a) {
    float t[16];
    fstore(t, a);
    for (int i = 1; i < 16; ++i) t[0] = t[i] < t[0] ? t[i] : t[0];
    return t[0];
}
inline float fmost(F a) {
    float t[16];
    fstore(t, a);
    for (int i = 1; i < 16; ++i) t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
}
#endif

}  // namespace
