// Products of the chain of convolutions: codes of inputs are bytes q + 128, those of weights are u with the center 128.
//
//   dot4_bytes(acc, flip(u), x) = acc + sum of (x - BYTE_ZERO) * (u - 128) over four columns
//
// With unsigned inputs no sums of inputs are needed: what the zero point contributes is known from the weight alone.
#pragma once

#include "simd.h"

namespace {

#if defined(__AVX512VNNI__)
constexpr int BYTE_ZERO = 0;  // the byte that contributes nothing
inline B flip(B u) { return {_mm512_xor_si512(u.v, _mm512_set1_epi8((char)0x80))}; }
inline I dot4_bytes(I acc, B w, X x) { return {_mm512_dpbusd_epi32(acc.v, x, w.v)}; }
#elif defined(__AVX512F__)
constexpr int BYTE_ZERO = 0;
inline B flip(B u) { return {_mm512_xor_si512(u.v, _mm512_set1_epi8((char)0x80))}; }
inline I dot4_bytes(I acc, B w, X x) {
    const __m512i even = _mm512_and_si512(x, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(x, 8);
    add_now(acc.v, _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w.v, 8), 8), even));
    add_now(acc.v, _mm512_madd_epi16(_mm512_srai_epi16(w.v, 8), odd));
    return acc;
}
#elif defined(__AVX2__)
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
#elif defined(__ARM_FEATURE_DOTPROD)
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
#else
constexpr int BYTE_ZERO = 0;
inline B flip(B u) {
    for (int i = 0; i < 64; ++i) u.v[i] ^= 0x80;
    return u;
}
inline I dot4_bytes(I acc, B w, X x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += (int32_t)(int8_t)w.v[i] * (uint8_t)x.v[i % 4];
    return acc;
}
#endif

#if defined(__AVX512VNNI__)
// Four bytes of each of 64 channels side by side: out[j], lane l, word i: channel 16 l + 4 j + i of a, b, c and d.
inline void interleave(const __m512i a, const __m512i b, const __m512i c, const __m512i d, __m512i* out) {
    const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
    const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
    out[0] = _mm512_unpacklo_epi16(ab, cd);
    out[1] = _mm512_unpackhi_epi16(ab, cd);
    out[2] = _mm512_unpacklo_epi16(AB, CD);
    out[3] = _mm512_unpackhi_epi16(AB, CD);
}
// From that order to tiles of 16 channels, and back: it is its own inverse.
inline void exchange(__m512i* v) {
    const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);  // lanes 0 of all
    v[2] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[1] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

inline void exchange16(void* words) {  // 64 of them
    __m512i v[4];
    for (int j = 0; j < 4; ++j) v[j] = _mm512_loadu_si512((char*)words + 64 * j);
    exchange(v);
    for (int j = 0; j < 4; ++j) _mm512_storeu_si512((char*)words + 64 * j, v[j]);
}

// Depthwise sums of 64 channels for T neighbours of a row. w: [quads of kernel rows][KW][4][64] interleaved signed
// codes; rows: first input byte of each kernel row, in whole fours (the last repeated), for the first pixel. sums:
// [T][64] in that order, from `start` on.
template <int KW, int STRIDE, int T>
void depthwise_row(const uint8_t* w, int64_t quads, const uint8_t* const* rows, int64_t pixel, const int32_t* start,
                   int32_t* sums) {
    __m512i acc[T][4];
    PW_UNROLL for (int t = 0; t < T; ++t) PW_UNROLL for (int j = 0; j < 4; ++j) acc[t][j] =
        _mm512_loadu_si512(start + 16 * j);
    for (int64_t quad = 0; quad < quads; ++quad, rows += 4, w += KW * 256) {
        PW_UNROLL for (int at = 0; at < (T - 1) * STRIDE + KW; ++at) {
            __m512i v[4];
            const auto row = [&](int i) { return _mm512_loadu_si512(rows[i] + at * pixel); };
            interleave(row(0), row(1), row(2), row(3), v);
            PW_UNROLL for (int kx = 0; kx < KW; ++kx) {
                const int t = (at - kx) / STRIDE;
                if (at >= kx && (at - kx) % STRIDE == 0 && t < T) {
                    PW_UNROLL for (int j = 0; j < 4; ++j) acc[t][j] =
                        _mm512_dpbusd_epi32(acc[t][j], v[j], _mm512_loadu_si512(w + kx * 256 + j * 64));
                }
            }
        }
    }
    PW_UNROLL for (int t = 0; t < T; ++t) {
        PW_UNROLL for (int j = 0; j < 4; ++j) _mm512_storeu_si512(sums + 64 * t + 16 * j, acc[t][j]);
    }
}
using DepthwiseRow = void (*)(const uint8_t*, int64_t, const uint8_t* const*, int64_t, const int32_t*, int32_t*);
constexpr int DEPTHWISE_PIXELS = 4;
template <int KW, int STRIDE> DepthwiseRow pick_depthwise(int64_t pixels) {
    switch (pixels) {
        case 1: return &depthwise_row<KW, STRIDE, 1>;
        case 2: return &depthwise_row<KW, STRIDE, 2>;
        case 3: return &depthwise_row<KW, STRIDE, 3>;
        default: return &depthwise_row<KW, STRIDE, 4>;
    }
}
inline DepthwiseRow pick_depthwise(int64_t kw, int64_t stride, int64_t pixels) {
    if (kw == 3) return stride == 1 ? pick_depthwise<3, 1>(pixels) : pick_depthwise<3, 2>(pixels);
    return stride == 1 ? pick_depthwise<5, 1>(pixels) : pick_depthwise<5, 2>(pixels);
}
#endif

}  // namespace
