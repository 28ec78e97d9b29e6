// Products with the codes of a cache, for few tokens: of queries with keys, and of weights with values.
//
// The scales of a group of keys belong to their channels, and multiply the query; those of a value belong to a token, and
// multiply its weight. What remains is a product of float32 numbers with integer codes. The float32 numbers are rounded to
// 16 bits, relative to the largest of a head's channels or of a chunk's keys, and the sum is exact: products of bytes
// (two limbs of 8 bits) with codes, in integers. Codes count from the middle of their range, so that this rounding
// costs about 1/200 of what rounding the numbers to 8 bits cost. Offsets are summed up in float32.
#pragma once

#include "attention_cache.h"

namespace {
namespace attend {

// -- vectors ----------------------------------------------------------------------------------------------------------

// acc + products of unsigned and signed bytes, four for each lane. ALL8: w may have all bits set; if bytes are signed
// (SIGNED_BYTES) it then counts from 128.
#if defined(__AVX512F__)
template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) { return dot4<ALL8>(acc, w, x.v); }
PW_INLINE B same4(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
template <int K> PW_INLINE B spread(B a) { return {_mm512_shuffle_epi32(a.v, (_MM_PERM_ENUM)(K * 0x55))}; }
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
#elif defined(__AVX2__)
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
PW_INLINE B same4(const uint8_t* p) {
    const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {{v, v}};
}
template <int K> PW_INLINE B spread(B a) { return {{_mm256_shuffle_epi32(a.v[0], K * 0x55), _mm256_shuffle_epi32(a.v[1], K * 0x55)}}; }
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
#elif defined(__ARM_FEATURE_DOTPROD)
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
PW_INLINE B same4(const uint8_t* p) {
    const uint8x16_t v = vld1q_u8(p);
    return {{v, v, v, v}};
}
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
        const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(v[0].v[i], v[1].v[i])), b = vreinterpretq_u16_u8(vzip2q_u8(v[0].v[i], v[1].v[i]));
        const uint16x8_t c = vreinterpretq_u16_u8(vzip1q_u8(v[2].v[i], v[3].v[i])), d = vreinterpretq_u16_u8(vzip2q_u8(v[2].v[i], v[3].v[i]));
        v[0].v[i] = vreinterpretq_u8_u16(vzip1q_u16(a, c)), v[1].v[i] = vreinterpretq_u8_u16(vzip2q_u16(a, c));
        v[2].v[i] = vreinterpretq_u8_u16(vzip1q_u16(b, d)), v[3].v[i] = vreinterpretq_u8_u16(vzip2q_u16(b, d));
    }
}
#else
template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += (int32_t)w.v[i] * (int8_t)x.v[i];
    return acc;
}
// 16 bytes, four times.
PW_INLINE B same4(const uint8_t* p) { return bload4(p, 0); }
// Word K of each quarter, four times.
template <int K> PW_INLINE B spread(B a) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = a.v[i / 16 * 16 + 4 * K + i % 4];
    return r;
}
// 64 codes of 4 bits.
PW_INLINE B nibbles64(const uint8_t* p) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = (uint8_t)(p[i / 2] >> i % 2 * 4 & 15);
    return r;
}
// Four rows of 64 bytes: quarter q of v[t] becomes [byte 16 * q + 4 * t + 0 to 3][row].
PW_INLINE void interleave4(B* v) {
    B r[4];
    for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 64; ++i) r[t].v[i] = v[i % 4].v[i / 16 * 16 + 4 * t + i % 16 / 4];
    memcpy(v, r, sizeof r);
}
#endif

PW_INLINE F fabs16(F a) { return bitcast(iand(bits(a), iset(0x7fffffff))); }
PW_INLINE B bytes(I a) { return bytes(bitcast(a)); }

// -- which codes ------------------------------------------------------------------------------------------------------

constexpr int64_t MOST_CODED = 256;  // channels and keys: sums of so many products fit 32 bits
static_assert(CHUNK <= MOST_CODED);

// Whether codes are multiplied as they are: 8 or 4 bits in whole vectors, with one scale where one is wanted.
inline bool plain_keys(const AttentionArgs& a, const AttentionPlan& p) {
    return a.past && (a.past_keys->bits == 8 || a.past_keys->bits == 4) && a.size == p.width && p.width <= MOST_CODED && a.past_keys->tokens % 16 == 0 &&
           a.past_keys->channels == 1;
}
inline bool plain_values(const AttentionArgs& a, const AttentionPlan& p) {
    return a.past && (a.past_values->bits == 8 || a.past_values->bits == 4) && a.size == p.width && a.past_values->tokens == 1 &&
           (a.past_values->channels % 16 == 0 || a.past_values->channels >= a.size);
}

// -- numbers in 16 bits -----------------------------------------------------------------------------------------------

constexpr float MOST16 = 127 * 256, LEAST16 = 1e-30f;  // below LEAST16 numbers are 0

// x is about round(x / step) * step; inverse: 1 / step, or 0.
struct Steps16 {
    float step, inverse;
    explicit Steps16(F most) {
        const float m = fmost(most);
        step = m / MOST16, inverse = m > LEAST16 ? MOST16 / m : 0;
    }
};
// Writes the limbs of 16 numbers: n = high * 256 + low, both signed.
PW_INLINE void store_limbs(I n, int8_t* high, int8_t* low) {
    istore8(low, n);
    istore8(high, ishr8(iadd(n, iset(128))));
}
PW_INLINE I of_limbs(I high, I low) { return iadd(ishl8(high), low); }

// The middle of codes, and the number from which dot_bytes counts less.
constexpr int middle(int bits) { return 1 << (bits - 1); }
constexpr int counted_from(int bits) { return SIGNED_BYTES && bits == 8 ? 0 : middle(bits); }

// -- queries with keys ------------------------------------------------------------------------------------------------

// Limbs of `rows` of q, four rows at a time: [channels / 16][limbs of the rows][16], the high ones first. Codes of 4 bits
// are multiplied in the order of their bytes: of 32 channels first the even, then the odd ones.
constexpr int64_t limb_width(int64_t width, int bits) { return bits == 4 ? (width + 31) / 32 * 32 : width; }
constexpr int limb_vectors(int64_t rows) { return rows > 2 ? 2 : 1; }  // of four rows or fewer: 64 bytes for 16 channels
struct QueryLimbs {
    uint8_t* limbs;          // [rows / 4][8 * limb_width]
    float *step, *base;      // [rows]: a score is (sum - less) * step + base
    int32_t* less;
};

inline void take_query_limbs(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key, const float* q, const QueryLimbs& to) {
    const CacheCodes& c = *a.past_keys;
    const char *scale = scale_at(c, b, shared, key), *offset = offset_at(c, b, shared, key);
    alignas(64) float scales[MOST_CODED], offsets[MOST_CODED], x[MOST_CODED];
    const int64_t wide = limb_width(p.width, c.bits);
    const F mid = fset((float)middle(c.bits));
    for (int64_t d = 0; d < p.width; d += 16) {
        const F s = load16(scale, c.kind, d);
        fstore(scales + d, s);
        fstore(offsets + d, fma(mid, s, load16(offset, c.kind, d)));
    }
    for (int64_t r = 0; r < p.rows; ++r) {
        const int vectors = limb_vectors(std::min<int64_t>(4, p.rows - r / 4 * 4)), row = (int)(r % 4), low = row + 2 * vectors;
        F most = fset(0), base = fset(0);
        for (int64_t d = 0; d < p.width; d += 16) {
            const F y = fload(q + r * p.width + d), z = fmul(y, fload(scales + d));
            fstore(x + d, z);
            most = fmost(fabs16(z), most);
            base = fma(y, fload(offsets + d), base);
        }
        const Steps16 s(most);
        const F inverse = fset(s.inverse);
        I sum = iset(0);
        uint8_t* limbs = to.limbs + r / 4 * 8 * wide;
        const auto place = [&](int64_t d, int limb) { return (int8_t*)limbs + d / 16 * 64 * vectors + limb / 4 * 64 + limb % 4 * 16; };
        if (c.bits == 8) {
            for (int64_t d = 0; d < wide; d += 16) {
                const I n = iround(fmul(fload(x + d), inverse));
                sum = iadd(sum, n);
                store_limbs(n, place(d, row), place(d, low));
            }
        } else {
            for (int64_t d = 0; d < wide; d += 32) {
                alignas(64) int8_t both[2][32];
                for (int i = 0; i < 2; ++i) {
                    const I n = d + 16 * i < p.width ? iround(fmul(fload(x + d + 16 * i), inverse)) : iset(0);
                    sum = iadd(sum, n);
                    store_limbs(n, both[0] + 16 * i, both[1] + 16 * i);
                }
                for (int limb = 0; limb < 2; ++limb)
                    for (int odd = 0; odd < 2; ++odd) {
                        int8_t* at = place(d + 16 * odd, limb ? low : row);
                        for (int i = 0; i < 16; ++i) at[i] = both[limb][2 * i + odd];
                    }
            }
        }
        to.step[r] = s.step, to.base[r] = fsum(base), to.less[r] = counted_from(c.bits) * isum(sum);
    }
}

// Sums of 16 keys for the limbs of four rows or fewer: [limb][16].
template <int BITS, int V> void dot_keys(const uint8_t* keys, int64_t step, int64_t ahead, const uint8_t* limbs, int64_t width, int32_t* sums) {
    constexpr int64_t CODES = 128 / BITS;  // in 16 bytes
    for (int i = 0; i < 4; ++i) {
        const uint8_t* k = keys + 4 * i * step;
        if (ahead)
            for (int j = 0; j < 4; ++j)
                for (int64_t at = 0; at < width * BITS / 8; at += 64) __builtin_prefetch(k + j * step + ahead + at);
        I sum[4][V];
        PW_UNROLL for (int j = 0; j < 4; ++j)
            PW_UNROLL for (int v = 0; v < V; ++v) sum[j][v] = iset(0);
        const uint8_t* x = limbs;
        PW_ROLLED for (int64_t d = 0; d < width; d += CODES, k += 16, x += CODES / 16 * 64 * V) {
            B c[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) c[j] = same4(k + j * step);
            PW_UNROLL for (int v = 0; v < V; ++v) {
                const B y = bload(x + 64 * v);
                PW_UNROLL for (int j = 0; j < 4; ++j) sum[j][v] = dot_bytes<BITS == 8>(sum[j][v], BITS == 8 ? c[j] : bmask(c[j], 15), y);
            }
            if (BITS == 4) {
                PW_UNROLL for (int j = 0; j < 4; ++j) c[j] = bmask(bright(c[j], 4), 15);
                PW_UNROLL for (int v = 0; v < V; ++v) {
                    const B y = bload(x + 64 * (V + v));
                    PW_UNROLL for (int j = 0; j < 4; ++j) sum[j][v] = dot_bytes<false>(sum[j][v], c[j], y);
                }
            }
        }
        PW_UNROLL for (int v = 0; v < V; ++v) {
            B t[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) t[j] = bytes(sum[j][v]);
            transpose4(t);  // in each quarter, which is a limb, word j is of key 4 * i + j
            bstore4((uint8_t*)(sums + 64 * v + 4 * i), 64, bytes(iadd(iadd(lanes(t[0]), lanes(t[1])), iadd(lanes(t[2]), lanes(t[3])))));
        }
    }
}
// Scores of 16 keys with codes: scores[r][16], `ld` apart.
inline void score_codes(const AttentionPlan& p, int bits, const uint8_t* keys, int64_t step, int64_t ahead, const QueryLimbs& q, float* scores, int64_t ld) {
    const int64_t wide = limb_width(p.width, bits);
    for (int64_t r = 0; r < p.rows; r += 4) {
        const int64_t rows = std::min<int64_t>(4, p.rows - r);
        const int vectors = limb_vectors(rows);
        alignas(64) int32_t sums[8 * 16];
        const auto run = bits == 8 ? (vectors == 2 ? &dot_keys<8, 2> : &dot_keys<8, 1>) : (vectors == 2 ? &dot_keys<4, 2> : &dot_keys<4, 1>);
        run(keys, step, r ? 0 : ahead, q.limbs + r / 4 * 8 * wide, wide, sums);
        for (int64_t i = 0; i < rows; ++i) {
            const I n = isub(of_limbs(iload(sums + 16 * i), iload(sums + 16 * (i + 2 * vectors))), iset(q.less[r + i]));
            fstore(scores + (r + i) * ld, fma(cvt(n), fset(q.step[r + i]), fset(q.base[r + i])));
        }
    }
}

// -- weights with values ----------------------------------------------------------------------------------------------

constexpr int64_t TILE = 64;  // channels that are summed up together

struct ValueRoom {
    uint8_t* codes;  // [keys / 4][4][64], as interleave4 leaves them
    int8_t* limbs;   // [rows][2][keys / 16][quarter of the tile][16]
    float *scales, *offsets, *weights;  // [keys]
    float *step, *plus;                 // [rows][4]: what a quarter adds is (sum - less) * step + plus
    int32_t* less;
};

// Number `g` of each of n rows of `groups` numbers, `step` numbers apart.
template <int KIND> inline void widen_column(const char* p, int64_t g, int64_t groups, int64_t step, int64_t n, float* to) {
    if (KIND == BF16 && groups == 2 && step == 2) {  // half of each word
        for (int64_t i = 0; i < n; i += 16) {
            const I two = iload((const int32_t*)p + i);
            fstore(to + i, bitcast(g ? iand(two, iset((int32_t)0xffff0000)) : ishl(two, 16)));
        }
        return;
    }
    alignas(64) char some[64];
    for (int64_t i = 0; i < n; i += 16) {
        for (int64_t j = 0; j < 16; ++j) memcpy(some + j * bytes_of(KIND), p + ((i + j) * step + g) * bytes_of(KIND), (size_t)bytes_of(KIND));
        fstore(to + i, load_kind<KIND>(some));
    }
}
inline void widen_column(const char* p, int kind, int64_t g, int64_t groups, int64_t step, int64_t n, float* to) {
    const auto run = kind == BF16 ? &widen_column<BF16> : kind == F16 ? &widen_column<F16> : &widen_column<F32>;
    run(p, g, groups, step, n, to);
}

// Limbs of the weights [rows][ld] of n keys times the scales of the values, for quarters [first, end) of a tile, which
// have the same scales.
inline void take_weight_limbs(const AttentionPlan& p, int bits, int64_t n, const float* weights, int64_t ld, int first, int end, const ValueRoom& room) {
    const F mid = fset((float)middle(bits));
    for (int64_t j = 0; j < n; j += 16) fstore(room.offsets + j, fma(mid, fload(room.scales + j), fload(room.offsets + j)));
    for (int64_t r = 0; r < p.rows; ++r) {
        F most = fset(0), plus = fset(0);
        PW_ROLLED for (int64_t j = 0; j < n; j += 16) {
            const F w = fload(weights + r * ld + j), x = fmul(w, fload(room.scales + j));
            fstore(room.weights + j, x);
            most = fmost(fabs16(x), most);
            plus = fma(w, fload(room.offsets + j), plus);
        }
        const Steps16 s(most);
        const F inverse = fset(s.inverse);
        I sum = iset(0);
        int8_t *high = room.limbs + r * 2 * CHUNK * 4, *low = high + CHUNK * 4;
        PW_ROLLED for (int64_t j = 0; j < n; j += 16) {
            const I x = iround(fmul(fload(room.weights + j), inverse)), up = ishr8(iadd(x, iset(128)));
            sum = iadd(sum, x);
            for (int i = first; i < end; ++i) istore8(low + 4 * j + 16 * i, x), istore8(high + 4 * j + 16 * i, up);
        }
        const float more = fsum(plus);
        const int32_t less = counted_from(bits) * isum(sum);
        for (int i = first; i < end; ++i) room.step[4 * r + i] = s.step, room.plus[4 * r + i] = more, room.less[4 * r + i] = less;
    }
}
// Codes of `channels` channels of n values; channels beyond them are 0.
template <int BITS> inline void interleave_codes(const uint8_t* values, int64_t step, int64_t ahead, int64_t channels, int64_t n, uint8_t* to) {
    const size_t bytes = (size_t)(channels * BITS / 8);
    for (int64_t j = 0; j < n; j += 4, values += 4 * step, to += 256) {
        B v[4];
        PW_UNROLL for (int i = 0; i < 4; ++i) {
            const uint8_t* from = values + i * step;
            __builtin_prefetch(from + ahead);
            alignas(64) uint8_t some[64];
            if (channels < TILE) {
                memset(some, 0, sizeof some);
                memcpy(some, from, bytes);
                from = some;
            }
            v[i] = BITS == 8 ? bload(from) : nibbles64(from);
        }
        interleave4(v);
        PW_UNROLL for (int i = 0; i < 4; ++i) bstore(to + 64 * i, v[i]);
    }
}
// Sums over n keys for the limbs of R rows: [row][limb][channel of the tile].
template <bool ALL8, int R> void dot_values(const uint8_t* codes, const int8_t* limbs, int64_t n, int32_t* sums) {
    I sum[R][2][4];
    PW_UNROLL for (int r = 0; r < R; ++r)
        PW_UNROLL for (int l = 0; l < 2; ++l)
            PW_UNROLL for (int t = 0; t < 4; ++t) sum[r][l][t] = iset(0);
    const auto four = [&](const B(&x)[R][2], const uint8_t* from) {
        B c[4];
        PW_UNROLL for (int t = 0; t < 4; ++t) c[t] = bload(from + 64 * t);
        PW_UNROLL for (int r = 0; r < R; ++r)
            PW_UNROLL for (int l = 0; l < 2; ++l)
                PW_UNROLL for (int t = 0; t < 4; ++t) sum[r][l][t] = dot_bytes<ALL8>(sum[r][l][t], c[t], x[r][l]);
    };
    PW_ROLLED for (int64_t j = 0; j < n; j += 16, codes += 1024, limbs += 64) {
        B all[R][2], x[R][2];
        PW_UNROLL for (int r = 0; r < R; ++r)
            PW_UNROLL for (int l = 0; l < 2; ++l) all[r][l] = bload((const uint8_t*)limbs + (2 * r + l) * CHUNK * 4);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<0>(all[r][0]), x[r][1] = spread<0>(all[r][1]);
        four(x, codes);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<1>(all[r][0]), x[r][1] = spread<1>(all[r][1]);
        four(x, codes + 256);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<2>(all[r][0]), x[r][1] = spread<2>(all[r][1]);
        four(x, codes + 512);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<3>(all[r][0]), x[r][1] = spread<3>(all[r][1]);
        four(x, codes + 768);
    }
    PW_UNROLL for (int r = 0; r < R; ++r)
        PW_UNROLL for (int l = 0; l < 2; ++l)
            PW_UNROLL for (int t = 0; t < 4; ++t) bstore4((uint8_t*)(sums + 64 * (2 * r + l) + 4 * t), 64, bytes(sum[r][l][t]));
}
constexpr int VALUE_ROWS = FLOAT_TILES == 2 ? 2 : 1;  // rows whose sums fit registers

// Adds weights [rows][ld] times n values with codes from `key` on to the sums [rows][width]; n is a multiple of 16.
inline void add_coded_values(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key, int64_t n, const float* weights,
                             int64_t ld, const ValueRoom& room, float* sums) {
    const CacheCodes& c = *a.past_values;
    const int64_t channels = std::min<int64_t>(c.channels, p.width), groups = (p.width + channels - 1) / channels, step = c.code_strides[2];
    const uint8_t* codes = codes_at(c, b, shared, key);
    const char *scale = scale_at(c, b, shared, key), *offset = offset_at(c, b, shared, key);
    int64_t taken = -1;  // the group of channels that all quarters of the limbs are of
    for (int64_t d = 0; d < p.width; d += TILE) {
        const int quarters = (int)std::min<int64_t>(4, (p.width - d) / 16);
        for (int i = 0; i < quarters;) {
            const int64_t g = (d + 16 * i) / channels;
            const int end = (int)std::min<int64_t>(quarters, ((g + 1) * channels - d) / 16);
            if (g != taken || i != 0 || end != quarters) {
                widen_column(scale, c.kind, g, groups, c.scale_strides[2], n, room.scales);
                widen_column(offset, c.kind, g, groups, c.offset_strides[2], n, room.offsets);
                take_weight_limbs(p, c.bits, n, weights, ld, i, end, room);
            }
            taken = i == 0 && end == quarters ? g : -1;
            i = end;
        }
        (c.bits == 8 ? &interleave_codes<8> : &interleave_codes<4>)(codes + d * c.bits / 8, step, AHEAD * step, 16 * quarters, n, room.codes);
        for (int64_t r = 0; r < p.rows; r += VALUE_ROWS) {
            const int rows = (int)std::min<int64_t>(VALUE_ROWS, p.rows - r);
            alignas(64) int32_t found[VALUE_ROWS * 2 * 64];
            const auto run = c.bits == 8 ? (rows == 1 ? &dot_values<true, 1> : &dot_values<true, VALUE_ROWS>)
                                         : (rows == 1 ? &dot_values<false, 1> : &dot_values<false, VALUE_ROWS>);
            run(room.codes, room.limbs + r * 2 * CHUNK * 4, n, found);
            for (int i = 0; i < rows; ++i)
                for (int t = 0; t < quarters; ++t) {
                    const int64_t at = 4 * (r + i) + t;
                    const int32_t* sum = found + 128 * i + 16 * t;
                    const I x = isub(of_limbs(iload(sum), iload(sum + 64)), iset(room.less[at]));
                    float* to = sums + (r + i) * p.width + d + 16 * t;
                    fstore(to, fadd(fload(to), fma(cvt(x), fset(room.step[at]), fset(room.plus[at]))));
                }
        }
    }
}

}  // namespace attend
}  // namespace
