// Weights as bfloat16 in AVX-512: codes to numbers, and their products; included by float_codes.h.
#pragma once

namespace {

struct Bfloat16 {  // products of bfloat16, two at a time, sums in float32
    using W = __m512i;
    using X = __m512i;
    static constexpr int PER = 2;
    static constexpr bool SMALL_ONLY = false;
    static W load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static void store(uint8_t* p, W v) { _mm512_storeu_si512(p, v); }
    static X spread(const uint32_t* p) { return _mm512_set1_epi32((int32_t)*p); }
    static F step(F sum, W w, X x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w, (__m512bh)x)}; }
    using Element = uint16_t;
    static void take(const uint16_t* x, uint32_t* out) {
        out[0] = x[0] | (uint32_t)x[2] << 16;
        out[1] = x[1] | (uint32_t)x[3] << 16;
    }

    // Low and high bytes of 64 numbers -> words of columns 0 and 2, and of 1 and 3.
    static void join(__m512i low, __m512i high, W* out) {
        const __m512i even = _mm512_set1_epi16(255);
        out[0] = _mm512_ternarylogic_epi32(even, low, _mm512_slli_epi16(high, 8), 0xca);
        out[1] = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(low, 8), high, 0xca);
    }
    struct Table16 {
        __m512i low, high;
        explicit Table16(const FloatLinear& w)
            : low(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)w.low))),
              high(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)w.high))) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            const __m512i code = _mm512_and_si512(S ? _mm512_srli_epi16(v.v, 4) : v.v, _mm512_set1_epi8(15));
            join(_mm512_shuffle_epi8(low, code), _mm512_shuffle_epi8(high, code), out);
        }
    };
    struct Small {  // 7 bits are looked up, the eighth is the sign
        __m512i low[2], high[2];
        explicit Small(const FloatLinear& w) {
            for (int i = 0; i < 2; ++i) low[i] = load(w.low + 64 * i), high[i] = load(w.high + 64 * i);
        }
        template <int S> PW_INLINE void quad(B v, W* out) const {
            const __m512i h = _mm512_permutex2var_epi8(high[0], v.v, high[1]);
            join(_mm512_permutex2var_epi8(low[0], v.v, low[1]),
                 _mm512_ternarylogic_epi32(h, v.v, _mm512_set1_epi8((char)0x80), 0xf8), out);
        }
    };
    struct Table256 {
        __m512i low[4], high[4];
        explicit Table256(const FloatLinear& w) {
            for (int i = 0; i < 4; ++i) low[i] = load(w.low + 64 * i), high[i] = load(w.high + 64 * i);
        }
        static __m512i look(const __m512i* t, __m512i v) {
            return _mm512_mask_blend_epi8(_mm512_movepi8_mask(v), _mm512_permutex2var_epi8(t[0], v, t[1]),
                                          _mm512_permutex2var_epi8(t[2], v, t[3]));
        }
        template <int S> PW_INLINE void quad(B v, W* out) const { join(look(low, v.v), look(high, v.v), out); }
    };
    struct Integer {  // 64 numbers that are exact in bfloat16, looked up
        __m512i low, high;
        explicit Integer(const FloatLinear& w) : low(load(w.low)), high(load(w.high)) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            join(_mm512_permutexvar_epi8(v.v, low), _mm512_permutexvar_epi8(v.v, high), out);
        }
    };
};

// Small floats are exact in bfloat16, so float32 uses the same bytes. Other codes are those of Float32.
struct Float32ByBytes : Float32 {
    static constexpr bool SMALL_ONLY = true;
    struct Small {
        Bfloat16::Small f;
        explicit Small(const FloatLinear& w) : f(w) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            __m512i pair[2];
            f.template quad<S>(v, pair);
            for (int i = 0; i < 2; ++i) {
                out[i] = {_mm512_castsi512_ps(_mm512_slli_epi32(pair[i], 16))};
                out[i + 2] = {_mm512_castsi512_ps(_mm512_and_si512(pair[i], _mm512_set1_epi32((int32_t)0xffff0000)))};
            }
        }
    };
};

}  // namespace
