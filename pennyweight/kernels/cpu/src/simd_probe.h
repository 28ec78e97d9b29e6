// Loops of bandwidth_probe.h for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

// Number of independent sums: 2 units times a latency of 4 to 5 cycles, plus a margin.
constexpr int PROBE_SUMS = 12;

// Makes the value opaque to the compiler.
#if defined(__AVX2__)
#define PROBE_OPAQUE(v) asm volatile("" : "+v"(v))
#elif defined(__ARM_FEATURE_DOTPROD)
#define PROBE_OPAQUE(v) asm volatile("" : "+w"(v))
#endif

// Operations of `n` rounds of `sum[i] = step(sum[i], a, b)` with `ops` operations per step; two per product.
#define PROBE_LOOP(type, zero, one, ops, step)                                        \
    type sums[PROBE_SUMS], a = one, b = one;                                          \
    for (int i = 0; i < PROBE_SUMS; ++i) sums[i] = zero;                              \
    PROBE_OPAQUE(a);                                                                  \
    PROBE_OPAQUE(b);                                                                  \
    for (int64_t r = 0; r < n; ++r) {                                                 \
        _Pragma("GCC unroll 12") for (int i = 0; i < PROBE_SUMS; ++i) sums[i] = step; \
    }                                                                                 \
    for (int i = 0; i < PROBE_SUMS; ++i) PROBE_OPAQUE(sums[i]);                       \
    return (ops) * PROBE_SUMS * n

inline int64_t probe_int8(int64_t n) {
#if defined(__AVX512VNNI__)
    PROBE_LOOP(__m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), 128, _mm512_dpbusd_epi32(sums[i], a, b));
#elif defined(__AVX512BW__)
    const __m512i ones = _mm512_set1_epi16(1);
    PROBE_LOOP(
        __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), 128,
        _mm512_add_epi32(sums[i], _mm512_madd_epi16(_mm512_maddubs_epi16(a, _mm512_xor_si512(b, sums[i])), ones)));
#elif defined(__AVXVNNI__)
    PROBE_LOOP(__m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1), 64, _mm256_dpbusd_avx_epi32(sums[i], a, b));
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    PROBE_LOOP(
        __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1), 64,
        _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, _mm256_xor_si256(b, sums[i])), ones)));
#elif defined(__ARM_FEATURE_DOTPROD)
    PROBE_LOOP(int32x4_t, vdupq_n_s32(0), vdupq_n_s32(0x01010101), 32,
               vdotq_s32(sums[i], vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)));
#else
    (void)n;
    return 0;
#endif
}

inline int64_t probe_bf16(int64_t n) {
#if defined(__AVX512BF16__)
    PROBE_LOOP(__m512, _mm512_setzero_ps(), _mm512_castsi512_ps(_mm512_set1_epi16(0x3f80)), 64,
               _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    PROBE_LOOP(float32x4_t, vdupq_n_f32(0), vreinterpretq_f32_u16(vdupq_n_u16(0x3f80)), 16,
               vbfdotq_f32(sums[i], vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b)));
#else
    (void)n;
    return 0;
#endif
}

inline int64_t probe_f32(int64_t n) {
#if defined(__AVX512F__)
    PROBE_LOOP(__m512, _mm512_setzero_ps(), _mm512_set1_ps(1), 32, _mm512_fmadd_ps(a, b, sums[i]));
#elif defined(__AVX2__)
    PROBE_LOOP(__m256, _mm256_setzero_ps(), _mm256_set1_ps(1), 16, _mm256_fmadd_ps(a, b, sums[i]));
#elif defined(__ARM_FEATURE_DOTPROD)
    PROBE_LOOP(float32x4_t, vdupq_n_f32(0), vdupq_n_f32(1), 8, vfmaq_f32(sums[i], a, b));
#else
    (void)n;
    return 0;
#endif
}

// Reads whole 64-byte lines in four streams; returns the bytes read.
inline int64_t probe_read(const uint8_t* p, int64_t bytes) {
    const int64_t stream = bytes / 4 / 64 * 64;
#if defined(__AVX512F__)
    __m512i s[4] = {};
    for (int64_t at = 0; at < stream; at += 64)
        for (int i = 0; i < 4; ++i) {
            _mm_prefetch((const char*)p + i * stream + at + 1024, _MM_HINT_T0);
            s[i] = _mm512_add_epi64(s[i], _mm512_loadu_si512(p + i * stream + at));
        }
    for (int i = 0; i < 4; ++i) PROBE_OPAQUE(s[i]);
#elif defined(__AVX2__)
    __m256i s[8] = {};
    for (int64_t at = 0; at < stream; at += 64)
        for (int i = 0; i < 8; ++i) {
            const uint8_t* q = p + i / 2 * stream + at + i % 2 * 32;
            if (i % 2 == 0) _mm_prefetch((const char*)q + 1024, _MM_HINT_T0);
            s[i] = _mm256_add_epi64(s[i], _mm256_loadu_si256((const __m256i*)q));
        }
    for (int i = 0; i < 8; ++i) PROBE_OPAQUE(s[i]);
#elif defined(__ARM_FEATURE_DOTPROD)
    uint8x16_t s[16];
    for (int i = 0; i < 16; ++i) s[i] = vdupq_n_u8(0);
    for (int64_t at = 0; at < stream; at += 64)
        for (int i = 0; i < 16; ++i) s[i] = vaddq_u8(s[i], vld1q_u8(p + i / 4 * stream + at + i % 4 * 16));
    for (int i = 0; i < 16; ++i) PROBE_OPAQUE(s[i]);
#else
    uint64_t s = 0, word;
    for (int64_t at = 0; at < 4 * stream; at += 64) {
        memcpy(&word, p + at, 8);
        s += word;
    }
    asm volatile("" : : "r"(s));
#endif
    return 4 * stream;
}

#undef PROBE_LOOP
#undef PROBE_OPAQUE

}  // namespace
