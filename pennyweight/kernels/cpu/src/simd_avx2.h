// Vectors of AVX2, in halves; included by simd.h, which describes the types.
#pragma once

#include <immintrin.h>

namespace {

struct I {
    __m256i v[2];
};
struct F {
    __m256 v[2];
};
struct B {
    __m256i v[2];
};
using X = __m256i;
constexpr int TOKENS[] = {4, 2, 1, 4};
constexpr bool PAIRS = false;
constexpr int FLOAT_ROWS = 4, DIRECT_ROWS = 2, FLOAT_TILES = 1, DIRECT_TILES = 2;
constexpr int CONV_TILES = 1, CONV_PIXELS = 4, DIRECT_PIXELS = 3;
constexpr int CHAIN_TILES = CONV_TILES, CHAIN_PIXELS[] = {CONV_PIXELS};
constexpr bool DEPTHWISE_ROWS = false;

// One expression of i for each of the two halves. Written out, because loops cost compile time.
#define PW_EACH(type, expr)  \
    type r;                  \
    {                        \
        constexpr int i = 0; \
        r.v[i] = expr;       \
    }                        \
    {                        \
        constexpr int i = 1; \
        r.v[i] = expr;       \
    }                        \
    return r
inline I iset(int32_t a) { PW_EACH(I, _mm256_set1_epi32(a)); }
inline I iload(const int32_t* p) { PW_EACH(I, _mm256_loadu_si256((const __m256i*)(p + 8 * i))); }
inline void istore(int32_t* p, I a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(p + 8 * i), a.v[i]);
}
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
inline int32_t imost(I a) {
    const __m256i s = _mm256_max_epi32(a.v[0], a.v[1]);
    const __m128i t = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    const __m128i u = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(u, _mm_shuffle_epi32(u, 0xb1)));
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
inline void fstore(float* p, F a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(p + 8 * i, a.v[i]);
}
inline F fadd(F a, F b) { PW_EACH(F, _mm256_add_ps(a.v[i], b.v[i])); }
inline F fmul(F a, F b) { PW_EACH(F, _mm256_mul_ps(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { PW_EACH(F, _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
inline F cvt(I a) { PW_EACH(F, _mm256_cvtepi32_ps(a.v[i])); }
inline I iround(F a) { PW_EACH(I, _mm256_cvtps_epi32(a.v[i])); }          // ties to even
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
inline void bstore(uint8_t* p, B a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(p + 32 * i), a.v[i]);
}
inline B bmask(B a, uint8_t m) { PW_EACH(B, _mm256_and_si256(a.v[i], _mm256_set1_epi8((char)m))); }
inline B bor(B a, B b) { PW_EACH(B, _mm256_or_si256(a.v[i], b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, _mm256_srl_epi16(a.v[i], _mm_cvtsi32_si128(n))); }
inline B bleft(B a, int n) { PW_EACH(B, _mm256_sll_epi16(a.v[i], _mm_cvtsi32_si128(n))); }
inline X xload(const int8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return _mm256_set1_epi32(a);
}
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

inline I lanes(B v) { PW_EACH(I, v.v[i]); }
inline B bytes(F a) { PW_EACH(B, _mm256_castps_si256(a.v[i])); }
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
        PW_EACH(F,
                _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index.v[i]), _mm256_permutevar8x32_ps(high, index.v[i]),
                                 _mm256_castsi256_ps(_mm256_slli_epi32(index.v[i], 28))));
    }
};

inline F fsub(F a, F b) { PW_EACH(F, _mm256_sub_ps(a.v[i], b.v[i])); }
inline F fdiv(F a, F b) { PW_EACH(F, _mm256_div_ps(a.v[i], b.v[i])); }
inline F fsqrt(F a) { PW_EACH(F, _mm256_sqrt_ps(a.v[i])); }
inline F fclip(F a, F lo, F hi) { PW_EACH(F, _mm256_max_ps(lo.v[i], _mm256_min_ps(hi.v[i], a.v[i]))); }
inline F frint(F a) { PW_EACH(F, _mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F fabove(F a, F b, F x, F y) {
    PW_EACH(F, _mm256_blendv_ps(y.v[i], x.v[i], _mm256_cmp_ps(a.v[i], b.v[i], _CMP_GT_OQ)));
}
inline I iabove(I a, I b, I x, I y) {
    PW_EACH(I, _mm256_blendv_epi8(y.v[i], x.v[i], _mm256_cmpgt_epi32(a.v[i], b.v[i])));
}
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
                                     _mm256_load_si256((const __m256i*)(s.shift + 8 * i))),
                   mask));
}

inline uint32_t least_word(__m256i a) {
    return (uint32_t)_mm_cvtsi128_si32(
               _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)))) &
           0xffff;
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

template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) {
    for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
        acc.v[i] = _mm256_dpbusd_avx_epi32(acc.v[i], w.v[i], x.v[i]);
#else
        if (!ALL8) {
            add_now(acc.v[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w.v[i], x.v[i]), _mm256_set1_epi16(1)));
            continue;
        }
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x.v[i], 8), 8), odd = _mm256_srai_epi16(x.v[i], 8);
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_and_si256(w.v[i], _mm256_set1_epi16(255)), even));
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_srli_epi16(w.v[i], 8), odd));
#endif
    }
    return acc;
}
PW_INLINE B limbs32(I a, I b) {
    B r;
    for (int i = 0; i < 2; ++i) {
        const __m256i v = _mm256_packs_epi32(a.v[i], b.v[i]),
                      high = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(128)), 8);
        r.v[i] = _mm256_packs_epi16(high, _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
    }
    return r;
}
PW_INLINE B low_longs(B a, B b) {
    return {{_mm256_unpacklo_epi64(a.v[0], b.v[0]), _mm256_unpacklo_epi64(a.v[1], b.v[1])}};
}
PW_INLINE B high_longs(B a, B b) {
    return {{_mm256_unpackhi_epi64(a.v[0], b.v[0]), _mm256_unpackhi_epi64(a.v[1], b.v[1])}};
}
PW_INLINE B same8(const uint8_t* p) {
    int64_t a;
    memcpy(&a, p, 8);
    return {{_mm256_set1_epi64x(a), _mm256_set1_epi64x(a)}};
}
template <int ORDER> PW_INLINE I shuffle(I a, I b) {
    for (int i = 0; i < 2; ++i)
        a.v[i] =
            _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a.v[i]), _mm256_castsi256_ps(b.v[i]), ORDER));
    return a;
}
PW_INLINE I even_words(I a, I b) { return shuffle<0x88>(a, b); }
PW_INLINE I odd_words(I a, I b) { return shuffle<0xdd>(a, b); }
PW_INLINE I low_halves(I a, I b) { return {{a.v[0], b.v[0]}}; }
PW_INLINE I high_halves(I a, I b) { return {{a.v[1], b.v[1]}}; }
template <int K> PW_INLINE B spread(B a) {
    return {{_mm256_shuffle_epi32(a.v[0], K * 0x55), _mm256_shuffle_epi32(a.v[1], K * 0x55)}};
}
PW_INLINE B nibbles64(const uint8_t* p) {
    B r;
    for (int i = 0; i < 2; ++i) {
        const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
        r.v[i] = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
    }
    return r;
}
PW_INLINE void interleave4(B* v) {
    for (int i = 0; i < 2; ++i) {
        const __m256i a = _mm256_unpacklo_epi8(v[0].v[i], v[1].v[i]), b = _mm256_unpackhi_epi8(v[0].v[i], v[1].v[i]);
        const __m256i c = _mm256_unpacklo_epi8(v[2].v[i], v[3].v[i]), d = _mm256_unpackhi_epi8(v[2].v[i], v[3].v[i]);
        v[0].v[i] = _mm256_unpacklo_epi16(a, c), v[1].v[i] = _mm256_unpackhi_epi16(a, c);
        v[2].v[i] = _mm256_unpacklo_epi16(b, d), v[3].v[i] = _mm256_unpackhi_epi16(b, d);
    }
}

constexpr int BYTE_ZERO = 0;
inline B flip(B u) {
    for (int i = 0; i < 2; ++i) u.v[i] = _mm256_xor_si256(u.v[i], _mm256_set1_epi8((char)0x80));
    return u;
}
#if defined(__AVXVNNI__)
inline I dot4_bytes(I acc, B w, X x) {
    for (int i = 0; i < 2; ++i) acc.v[i] = _mm256_dpbusd_avx_epi32(acc.v[i], x, w.v[i]);
    return acc;
}
#else
inline I dot4_bytes(I acc, B w, X x) {
    const __m256i even = _mm256_and_si256(x, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(x, 8);
    for (int i = 0; i < 2; ++i) {
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(w.v[i], 8), 8), even));
        add_now(acc.v[i], _mm256_madd_epi16(_mm256_srai_epi16(w.v[i], 8), odd));
    }
    return acc;
}
#endif

}  // namespace
