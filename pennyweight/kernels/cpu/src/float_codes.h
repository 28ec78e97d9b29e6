// Decoding of codes that are not integers: tables of 16, small floats, tables of 256, and scales.
//
// A decoder takes a vector of 64 codes (16 rows x 4 columns, a byte or, with `shift`, a nibble each) and returns the
// numbers in vectors with one lane per row. In float32 there are 4, one per column. In bfloat16 there are 2 with a pair
// of columns per lane: (0, 2) and (1, 3), the order in which bytes become words with the fewest instructions.
#pragma once

#include "abi.h"
#include "simd.h"

namespace {

// Shifts sign, exponent and mantissa of a 5 to 8-bit code to those of a float32. Subnormals need no comparison: f has
// the implicit one that they lack, so they are 2f - 2**(1 - bias), which is less than f only for them.
struct SmallFloat {
    int left, right;
    I magnitude, bias, sign;
    F two, least, limit;
    SmallFloat(int exponent, int mantissa, float greatest)
        : left(31 - exponent - mantissa),
          right(8 - exponent),
          magnitude(iset(((1 << (exponent + mantissa)) - 1) << (23 - mantissa))),
          bias(iset((128 - (1 << (exponent - 1))) << 23)),
          sign(iset((int32_t)0x80000000)),
          two(fset(2)),
          least(fset(-float_of((uint32_t)(129 - (1 << (exponent - 1))) << 23))),
          limit(fset(greatest)) {}
    PW_INLINE F at(I code) const {  // of the low bits of each lane
        const I top = ishl(code, left);
        const F f = bitcast(iadd(iand(ishr(top, right), magnitude), bias));
        const F v = special_above(fmin(f, fma(f, two, least)), limit);
        return bitcast(ior(bits(v), iand(top, sign)));
    }
};

struct Float32 {  // products and sums in float32
    using W = F;
    using X = F;
    static constexpr int PER = 4;  // vectors for 4 columns
    static constexpr bool SMALL_ONLY = false;
    static W load(const uint8_t* p) { return fload((const float*)p); }
    static void store(uint8_t* p, W v) { fstore((float*)p, v); }
    static X spread(const uint32_t* p) { return fset(float_of(*p)); }
    static F step(F sum, W w, X x) { return fma(w, x, sum); }
    using Element = float;
    static void take(const float* x, uint32_t* out) { memcpy(out, x, 16); }

    struct Table16 {
        Lookup16 table;
        explicit Table16(const FloatLinear& w) : table(w.values) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            const I c = lanes(v);
            out[0] = table.at(ishr<S>(c)), out[1] = table.at(ishr<S + 8>(c));
            out[2] = table.at(ishr<S + 16>(c)), out[3] = table.at(ishr<S + 24>(c));
        }
    };
    struct Small {
        SmallFloat f;
        explicit Small(const FloatLinear& w) : f(w.exponent, w.mantissa, w.limit) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            const I c = lanes(v);
            out[0] = f.at(c), out[1] = f.at(ishr<8>(c)), out[2] = f.at(ishr<16>(c)), out[3] = f.at(ishr<24>(c));
        }
    };
    struct Table256 {
        const float* values;
        explicit Table256(const FloatLinear& w) : values(w.values) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            alignas(64) uint8_t code[64];
            alignas(64) float f[16];
            bstore(code, v);
            for (int i = 0; i < 4; ++i) {
                for (int r = 0; r < 16; ++r) f[r] = values[code[4 * r + i]];
                out[i] = fload(f);
            }
        }
    };
    struct Integer {
        F least;
        I byte;
        explicit Integer(const FloatLinear& w) : least(fset(w.values[0])), byte(iset(255)) {}
        template <int S> PW_INLINE void quad(B v, W* out) const {
            const I c = lanes(v);
            out[0] = fadd(cvt(iand(c, byte)), least), out[1] = fadd(cvt(iand(ishr<8>(c), byte)), least);
            out[2] = fadd(cvt(iand(ishr<16>(c), byte)), least), out[3] = fadd(cvt(ishr<24>(c)), least);
        }
    };
};

}  // namespace

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PW_BFLOAT16 1
#include "simd_bfloat16.h"
#endif

namespace {

// Sources of codes: packed in 4, 6 or 8 bits, or numbers decoded before. A tile of 32 columns is TILE bytes; quad j of
// half h is columns 16h + 4j .. 16h + 4j + 3. STEP: quads whose instructions differ.
template <class P, class D> struct Nibbles {
    static constexpr int TILE = 256, STEP = 2;
    D d;
    explicit Nibbles(const FloatLinear& w) : d(w) {}
    PW_INLINE void quad(const uint8_t* p, int h, int j, typename P::W* out) const {
        const B v = bload(p + 128 * h + 64 * (j / 2));
        if (j % 2) d.template quad<4>(v, out);
        else d.template quad<0>(v, out);
    }
};
template <class P, class D> struct Sixes {
    static constexpr int TILE = 384, STEP = 4;
    D d;
    explicit Sixes(const FloatLinear& w) : d(w) {}
    PW_INLINE void quad(const uint8_t* p, int h, int j, typename P::W* out) const {
        const B four = bload(p + 128 * h + 64 * (j / 2)), two = bload(p + 256 + 64 * h);
        const B high = j == 0 ? bleft(two, 4) : j == 1 ? bleft(two, 2) : j == 2 ? two : bright(two, 2);
        d.template quad<0>(bor(bmask(j % 2 ? bright(four, 4) : four, 15), bmask(high, 48)), out);
    }
};
template <class P, class D> struct Bytes {
    static constexpr int TILE = 512, STEP = 1;
    D d;
    explicit Bytes(const FloatLinear& w) : d(w) {}
    PW_INLINE void quad(const uint8_t* p, int h, int j, typename P::W* out) const {
        d.template quad<0>(bload(p + 256 * h + 64 * j), out);
    }
};
template <class P> struct Numbers {
    static constexpr int TILE = 8 * P::PER * 64, STEP = 1;
    explicit Numbers(const FloatLinear&) {}
    PW_INLINE void quad(const uint8_t* p, int h, int j, typename P::W* out) const {
        for (int i = 0; i < P::PER; ++i) out[i] = P::load(p + TILE / 2 * h + 64 * (j * P::PER + i));
    }
};

// Scales of the 16 rows of a tile, or offsets, which are stored the same way.
struct Scales {
    const FloatLinear& w;
    const FloatArgs& a;
    SmallFloat e4m3{4, 3, 448};

    static float one(const void* p, int kind, int64_t i) {
        alignas(64) char raw[64] = {0};
        alignas(64) float f[16];
        memcpy(raw, (const char*)p + i * size_of(kind), (size_t)size_of(kind));
        fstore(f, load16(raw, kind, 0));
        return f[0];
    }
    F outer(const void* p, int kind, int64_t tile, int64_t group) const {
        if (w.outer < 0) return fset(one(p, kind, 0));
        return load16(p, kind, (tile * w.outer_groups + group / w.outer) * 16);
    }
    F at(int64_t tile, int64_t group) const {
        if (w.scale == NONE) return fset(1);
        if (w.group < 0) return fset(one(a.scale, w.scale, 0));
        if (w.row_block) return fset(one(a.scale, w.scale, tile * 16 / w.row_block * w.scale_groups + group));
        const int64_t i = (tile * w.scale_groups + group) * 16;
        F s;
        if (w.scale == E8M0) {  // 2**(byte - 127); byte 0 is a subnormal, 255 is NaN
            const F power = bitcast(imax(ishl(iload8u((const uint8_t*)a.scale + i), 23), iset(1 << 22)));
            s = fma(power, fset(0), power);
        } else if (w.scale == E4M3) {
            s = e4m3.at(iload8u((const uint8_t*)a.scale + i));
        } else if (w.scale == I8) {
            s = cvt(iload8s((const int8_t*)a.scale + i));
        } else if (w.scale == U8) {
            s = cvt(iload8u((const uint8_t*)a.scale + i));
        } else {
            s = load16(a.scale, w.scale, i);
        }
        if (w.outer) s = fmul(s, outer(a.outer_scale, w.outer_kind, tile, group));
        if (a.outer_offset) s = fadd(s, outer(a.outer_offset, F32, tile, group));
        return s;
    }
};

}  // namespace
