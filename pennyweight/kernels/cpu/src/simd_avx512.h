// Vectors of AVX-512; included by simd.h, which describes the types.
#pragma once

#include <immintrin.h>

namespace {

struct I {
    __m512i v;
};
struct F {
    __m512 v;
};
struct B {
    __m512i v;
};
using X = __m512i;  // four bytes of one input row, in every lane

constexpr int TOKENS[] = {8, 6, 4, 12};
constexpr bool PAIRS = true;  // registers for the sums of two tiles of integer codes
constexpr int FLOAT_ROWS = 6, DIRECT_ROWS = 4, FLOAT_TILES = 2, DIRECT_TILES = 4;
constexpr int CONV_TILES = 4, CONV_PIXELS = 6, DIRECT_PIXELS = 8;
constexpr int CHAIN_TILES = 4, CHAIN_PIXELS[] = {14, 12, 8, 6};
#if defined(__AVX512VNNI__)
constexpr bool DEPTHWISE_ROWS = true;
#else
constexpr bool DEPTHWISE_ROWS = false;
#endif

inline I iset(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline I iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I isub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I imul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I ishl8(I a) { return {_mm512_slli_epi32(a.v, 8)}; }
inline I ishr8(I a) { return {_mm512_srai_epi32(a.v, 8)}; }
inline int32_t isum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t imost(I a) { return _mm512_reduce_max_epi32(a.v); }
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
inline I iround(F a) { return {_mm512_cvtps_epi32(a.v)}; }       // ties to even
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
inline X xload(const int8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return _mm512_set1_epi32(a);
}
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
inline I dot2(I acc, B w, X x) {
    add_now(acc.v, _mm512_madd_epi16(w.v, x));
    return acc;
}
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

inline I lanes(B v) { return {v.v}; }
inline B bytes(F a) { return {_mm512_castps_si512(a.v)}; }
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

inline F fsub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F fdiv(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fsqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
inline F fclip(F a, F lo, F hi) { return {_mm512_max_ps(lo.v, _mm512_min_ps(hi.v, a.v))}; }  // NaN passes
inline F frint(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a > b ? x : y, lane by lane
inline F fabove(F a, F b, F x, F y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
inline I iabove(I a, I b, I x, I y) { return {_mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a.v, b.v), y.v, x.v)}; }
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
               _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)))) &
           0xffff;
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
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low),
                               _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1), 1)};
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

template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) { return dot4<ALL8>(acc, w, x.v); }
PW_INLINE B limbs32(I a, I b) {
    const __m512i v = _mm512_packs_epi32(a.v, b.v),
                  high = _mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(128)), 8);
    return {_mm512_packs_epi16(high, _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8))};
}
PW_INLINE B low_longs(B a, B b) { return {_mm512_unpacklo_epi64(a.v, b.v)}; }
PW_INLINE B high_longs(B a, B b) { return {_mm512_unpackhi_epi64(a.v, b.v)}; }
PW_INLINE B same8(const uint8_t* p) {
    int64_t a;
    memcpy(&a, p, 8);
    return {_mm512_set1_epi64(a)};
}
template <int K> PW_INLINE B spread(B a) { return {_mm512_shuffle_epi32(a.v, (_MM_PERM_ENUM)(K * 0x55))}; }
template <int ORDER> PW_INLINE I shuffle(I a, I b) {
    return {_mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a.v), _mm512_castsi512_ps(b.v), ORDER))};
}
PW_INLINE I even_words(I a, I b) { return shuffle<0x88>(a, b); }
PW_INLINE I odd_words(I a, I b) { return shuffle<0xdd>(a, b); }
PW_INLINE I low_halves(I a, I b) { return {_mm512_shuffle_i64x2(a.v, b.v, 0x44)}; }
PW_INLINE I high_halves(I a, I b) { return {_mm512_shuffle_i64x2(a.v, b.v, 0xee)}; }
PW_INLINE B nibbles64(const uint8_t* p) {
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), _mm512_set1_epi8(15))};
}
PW_INLINE void interleave4(B* v) {
    const __m512i a = _mm512_unpacklo_epi8(v[0].v, v[1].v), b = _mm512_unpackhi_epi8(v[0].v, v[1].v);
    const __m512i c = _mm512_unpacklo_epi8(v[2].v, v[3].v), d = _mm512_unpackhi_epi8(v[2].v, v[3].v);
    v[0].v = _mm512_unpacklo_epi16(a, c), v[1].v = _mm512_unpackhi_epi16(a, c);
    v[2].v = _mm512_unpacklo_epi16(b, d), v[3].v = _mm512_unpackhi_epi16(b, d);
}

constexpr int BYTE_ZERO = 0;
inline B flip(B u) { return {_mm512_xor_si512(u.v, _mm512_set1_epi8((char)0x80))}; }
#if defined(__AVX512VNNI__)
inline I dot4_bytes(I acc, B w, X x) { return {_mm512_dpbusd_epi32(acc.v, x, w.v)}; }
#else
inline I dot4_bytes(I acc, B w, X x) {
    const __m512i even = _mm512_and_si512(x, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(x, 8);
    add_now(acc.v, _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w.v, 8), 8), even));
    add_now(acc.v, _mm512_madd_epi16(_mm512_srai_epi16(w.v, 8), odd));
    return acc;
}
#endif

// Transposes 4 x 4 quarters of four vectors.
inline void exchange4(B* v) {
    const __m512i a = _mm512_shuffle_i32x4(v[0].v, v[1].v, 0x88), b = _mm512_shuffle_i32x4(v[0].v, v[1].v, 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[2].v, v[3].v, 0x88), d = _mm512_shuffle_i32x4(v[2].v, v[3].v, 0xdd);
    v[0].v = _mm512_shuffle_i32x4(a, c, 0x88);
    v[2].v = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[1].v = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3].v = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// -- parts of vectors, which only this instruction set has ------------------------------------------------------------

#define PW_MASKS 1
using Mask16 = __mmask16;
using Mask64 = __mmask64;
inline Mask64 first64(int64_t n) { return n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1; }
inline Mask16 first16(int64_t n) { return (Mask16)first64(n < 16 ? n : 16); }
inline F fload(const float* p, Mask16 there) { return {_mm512_maskz_loadu_ps(there, p)}; }
inline void fstore(float* p, F a, Mask16 there) { _mm512_mask_storeu_ps(p, there, a.v); }
// `written` bytes, of which those that are not valid are 0.
inline void bstore(uint8_t* p, B a, Mask64 written, Mask64 valid) {
    _mm512_mask_storeu_epi8(p, written, _mm512_maskz_mov_epi8(valid, a.v));
}
// Four vectors of integers q -> bytes q + zero within first to last. quarters: the bytes of the first quarters of all
// vectors come first, as interleave4() leaves them; else those of the first vector.
struct Narrow {
    __m512i zero, first, last, order;
    Narrow(int32_t z, uint8_t least, uint8_t most, bool quarters)
        : zero(_mm512_set1_epi16((short)z)),
          first(_mm512_set1_epi8((char)least)),
          last(_mm512_set1_epi8((char)most)),
          order(quarters ? _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                         : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)) {}
    // Of the first N vectors; those after are any.
    template <int N> PW_INLINE B of(I* q) const {
        PW_UNROLL for (int t = N; t < 4; ++t) q[t] = q[0];
        const __m512i a = _mm512_adds_epi16(_mm512_packs_epi32(q[0].v, q[1].v), zero);
        const __m512i b = N > 2 ? _mm512_adds_epi16(_mm512_packs_epi32(q[2].v, q[3].v), zero) : a;
        const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
        return {_mm512_max_epu8(_mm512_min_epu8(bytes, last), first)};
    }
};

}  // namespace
