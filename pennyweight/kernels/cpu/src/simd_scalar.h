// Vectors in plain C++, for any machine; the reference in tests of the others; included by simd.h, which describes the
// types.
#pragma once

namespace {

struct I {
    int32_t v[16];
};
struct F {
    float v[16];
};
struct B {
    uint8_t v[64];
};
struct X {
    int8_t v[4];
};
constexpr int TOKENS[] = {1, 1, 1, 1};
constexpr bool PAIRS = false;
constexpr int FLOAT_ROWS = 4, DIRECT_ROWS = 1, FLOAT_TILES = 1, DIRECT_TILES = 1;
constexpr int CONV_TILES = 1, CONV_PIXELS = 1, DIRECT_PIXELS = 1;
constexpr int CHAIN_TILES = CONV_TILES, CHAIN_PIXELS[] = {CONV_PIXELS};
constexpr bool DEPTHWISE_ROWS = false;
constexpr bool SIGNED_BYTES = false;

#define PW_EACH(type, n, expr)                 \
    type r;                                    \
    for (int i = 0; i < n; ++i) r.v[i] = expr; \
    return r
inline I iset(int32_t a) { PW_EACH(I, 16, a); }
inline I iload(const int32_t* p) { PW_EACH(I, 16, p[i]); }
inline void istore(int32_t* p, I a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline I iadd(I a, I b) { PW_EACH(I, 16, a.v[i] + b.v[i]); }
inline I isub(I a, I b) { PW_EACH(I, 16, a.v[i] - b.v[i]); }
inline I imul(I a, I b) { PW_EACH(I, 16, a.v[i] * b.v[i]); }
inline I ishl8(I a) { PW_EACH(I, 16, a.v[i] * 256); }
inline I ishr8(I a) { PW_EACH(I, 16, a.v[i] >> 8); }
inline int32_t imost(I a) {
    int32_t most = a.v[0];
    for (int i = 1; i < 16; ++i) most = a.v[i] > most ? a.v[i] : most;
    return most;
}
inline int32_t isum(I a) {
    int32_t s = 0;
    for (int i = 0; i < 16; ++i) s += a.v[i];
    return s;
}
inline void istore8(int8_t* p, I a) {
    for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i];
}  // low bytes
inline void istore16(int16_t* p, I a) {
    for (int i = 0; i < 16; ++i) p[i] = (int16_t)a.v[i];
}
inline I iload8s(const int8_t* p) { PW_EACH(I, 16, p[i]); }
inline I iload8u(const uint8_t* p) { PW_EACH(I, 16, p[i]); }

inline F fset(float a) { PW_EACH(F, 16, a); }
inline F fload(const float* p) { PW_EACH(F, 16, p[i]); }
inline void fstore(float* p, F a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline F fadd(F a, F b) { PW_EACH(F, 16, a.v[i] + b.v[i]); }
inline F fmul(F a, F b) { PW_EACH(F, 16, a.v[i] * b.v[i]); }
inline F fma(F a, F b, F c) { PW_EACH(F, 16, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F cvt(I a) { PW_EACH(F, 16, (float)a.v[i]); }
// Ties to even. What is no int32 gives the least one, as x86's instruction does: a cast of it is not defined.
inline int32_t round_int(float a) {
    return a >= -2147483648.0f && a < 2147483648.0f ? (int32_t)__builtin_rintf(a) : INT32_MIN;
}
inline I iround(F a) { PW_EACH(I, 16, round_int(a.v[i])); }
inline F fleast(F a, F b) { PW_EACH(F, 16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }  // b where a is NaN
inline F fmost(F a, F b) { PW_EACH(F, 16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F bitcast(I a) {
    F r;
    memcpy(&r, &a, 64);
    return r;
}
inline float widen_bf16(uint16_t h) {
    uint32_t b = (uint32_t)h << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}
inline F fload_bf16(const uint16_t* p) { PW_EACH(F, 16, widen_bf16(p[i])); }
inline float widen_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    uint32_t b;
    if (e == 31) b = sign | 0x7f800000 | m << 13;
    else if (e) b = sign | (e + 112) << 23 | m << 13;
    else {
        const float f = (float)m * 5.9604644775390625e-08f;
        memcpy(&b, &f, 4);
        b |= sign;
    }
    float f;
    memcpy(&f, &b, 4);
    return f;
}
inline uint16_t narrow_f16(float f) {  // to nearest, ties to even
    uint32_t b;
    memcpy(&b, &f, 4);
    const uint16_t sign = (uint16_t)((b >> 16) & 0x8000);
    b &= 0x7fffffff;
    if (b > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (b >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (b < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
        float a;
        memcpy(&a, &b, 4);
        a += 0.5f;
        memcpy(&b, &a, 4);
        return (uint16_t)(sign | (b - 0x3f000000));
    }
    return (uint16_t)(sign | ((b - 0x38000000 + 0xfff + ((b >> 13) & 1)) >> 13));
}
inline F fload_f16(const uint16_t* p) { PW_EACH(F, 16, widen_f16(p[i])); }
inline void fstore_f16(uint16_t* p, F a) {
    for (int i = 0; i < 16; ++i) p[i] = narrow_f16(a.v[i]);
}

inline B bload(const uint8_t* p) { PW_EACH(B, 64, p[i]); }
inline void bstore(uint8_t* p, B a) { memcpy(p, a.v, 64); }
inline B bmask(B a, uint8_t m) { PW_EACH(B, 64, (uint8_t)(a.v[i] & m)); }
inline B bor(B a, B b) { PW_EACH(B, 64, (uint8_t)(a.v[i] | b.v[i])); }
inline B bright(B a, int n) { PW_EACH(B, 64, (uint8_t)(a.v[i] >> n)); }
inline B bleft(B a, int n) { PW_EACH(B, 64, (uint8_t)(a.v[i] << n)); }
inline X xload(const int8_t* p) {
    X r;
    memcpy(r.v, p, 4);
    return r;
}
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

inline I lanes(B v) {
    I r;
    memcpy(&r, &v, 64);
    return r;
}
inline B bytes(F a) {
    B r;
    memcpy(&r, &a, 64);
    return r;
}
inline I bits(F a) {
    I r;
    memcpy(&r, &a, 64);
    return r;
}
inline I iand(I a, I b) { PW_EACH(I, 16, a.v[i] & b.v[i]); }
inline I ior(I a, I b) { PW_EACH(I, 16, a.v[i] | b.v[i]); }
inline I ixor(I a, I b) { PW_EACH(I, 16, a.v[i] ^ b.v[i]); }
inline I umul(I a, I b) { PW_EACH(I, 16, (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i])); }  // of words that wrap round
inline I uadd(I a, I b) { PW_EACH(I, 16, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
inline I ishl(I a, int n) { PW_EACH(I, 16, (int32_t)((uint32_t)a.v[i] << n)); }
inline I ishr(I a, int n) { PW_EACH(I, 16, (int32_t)((uint32_t)a.v[i] >> n)); }
inline I imax(I a, I b) { PW_EACH(I, 16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int N> inline I ishr(I a) { return ishr(a, N); }
inline F fmin(F a, F b) { PW_EACH(F, 16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F special_above(F a, F limit) {
    I v = bits(a);
    for (int i = 0; i < 16; ++i) v.v[i] |= a.v[i] > limit.v[i] ? 0x7f800000 : 0;
    return bitcast(v);
}
struct Lookup16 {
    const float* t;
    explicit Lookup16(const float* values) : t(values) {}
    F at(I index) const { PW_EACH(F, 16, t[index.v[i] & 15]); }
};

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
    PW_EACH(I, 16,
            (int32_t)(((p[s.at[4 * i]] | (uint32_t)p[s.at[4 * i + 1]] << 8) >> s.shift[i]) & ((1u << bits) - 1)));
}

inline B badd(B a, uint8_t n) { PW_EACH(B, 64, (uint8_t)(a.v[i] + n)); }
inline B bload4(const uint8_t* p, int64_t step) {
    B r;
    for (int i = 0; i < 4; ++i) memcpy(r.v + 16 * i, p + i * step, 16);
    return r;
}
inline void bstore4(uint8_t* p, int64_t step, B a) {
    for (int i = 0; i < 4; ++i) memcpy(p + i * step, a.v + 16 * i, 16);
}
inline void transpose4(B* v) {
    B t[4];
    for (int q = 0; q < 4; ++q)
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) memcpy(t[i].v + 16 * q + 4 * j, v[j].v + 16 * q + 4 * i, 4);
    memcpy(v, t, sizeof t);
}
#undef PW_EACH

// acc + products of unsigned and signed bytes, four for each lane. ALL8: w may have all bits set; if bytes are signed
// (SIGNED_BYTES) it then counts from 128.
template <bool ALL8> PW_INLINE I dot_bytes(I acc, B w, B x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += (int32_t)w.v[i] * (int8_t)x.v[i];
    return acc;
}
// Limbs of numbers of at most 16 bits: in each quarter the high ones of four lanes of a, of four of b, and the low
// ones.
PW_INLINE B limbs32(I a, I b) {
    B r;
    for (int i = 0; i < 32; ++i) {
        const int32_t n = (i % 8 < 4 ? a : b).v[i / 8 * 4 + i % 4];
        r.v[i / 8 * 16 + i % 8] = (uint8_t)((n + 128) >> 8), r.v[i / 8 * 16 + 8 + i % 8] = (uint8_t)n;
    }
    return r;
}
// In each quarter, the first, or the last, 8 bytes of a, then of b.
PW_INLINE B low_longs(B a, B b) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = (i % 16 < 8 ? a : b).v[i / 16 * 16 + i % 8];
    return r;
}
PW_INLINE B high_longs(B a, B b) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = (i % 16 < 8 ? a : b).v[i / 16 * 16 + 8 + i % 8];
    return r;
}
// 8 bytes, eight times.
PW_INLINE B same8(const uint8_t* p) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = p[i % 8];
    return r;
}
// In each quarter, words 0 and 2, or 1 and 3, of a, then of b.
PW_INLINE I even_words(I a, I b) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = (i % 4 < 2 ? a : b).v[i / 4 * 4 + i % 2 * 2];
    return r;
}
PW_INLINE I odd_words(I a, I b) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = (i % 4 < 2 ? a : b).v[i / 4 * 4 + i % 2 * 2 + 1];
    return r;
}
// The lower, or the upper, halves of a and b.
PW_INLINE I low_halves(I a, I b) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = (i < 8 ? a : b).v[i % 8];
    return r;
}
PW_INLINE I high_halves(I a, I b) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = (i < 8 ? a : b).v[i % 8 + 8];
    return r;
}
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

// flip(u) of a code u with the center 128, and acc + sums of (x - BYTE_ZERO) * (u - 128) over four columns.
constexpr int BYTE_ZERO = 0;  // the byte that contributes nothing
inline B flip(B u) {
    for (int i = 0; i < 64; ++i) u.v[i] ^= 0x80;
    return u;
}
inline I dot4_bytes(I acc, B w, X x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += (int32_t)(int8_t)w.v[i] * (uint8_t)x.v[i % 4];
    return acc;
}

}  // namespace
