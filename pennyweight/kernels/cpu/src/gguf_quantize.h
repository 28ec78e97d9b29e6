// Floats to blocks of GGUF files: the formulas of the types with one scale, and the scale search of the others.
//
// Bit-identical to io/gguf/quantize.py and algorithms/solvers/kquant_search.py, whose functions have the same names. In
// the search a lane is a sub-block of 16 or 32 elements; sums over a sub-block are pairwise, halves first. A piece of
// GGUF_PIECE elements depends only on itself, so results do not depend on threads.
#pragma once

#include <algorithm>

#include "platform.h"

#include "abi.h"
#include "optimizer.h"  // read_floats
#include "simd.h"

namespace {

constexpr float TINY = 1e-30f;  // squares below this count as zero
constexpr int LANE = 16;

// What a type needs. size: elements of a sub-block; top: the largest code (about zero: the smallest is -top - 1);
// scale_top: the largest code of a scale, 0: scales are float16; the rest as in kquant_search.py.
struct Search {
    int size, top, scale_top;
    double start, step;
    int tries;
    bool affine, table;
};
template <int TYPE> constexpr Search search_of() {
    switch (TYPE) {
        case GGUF_Q4_0: return {32, 7, 0, 8.0, 0.1, 9, false, false};
        case GGUF_Q5_0: return {32, 15, 0, 16.0, 0.1, 9, false, false};
        case GGUF_Q4_1: return {32, 15, 0, -1.0, 0.1, 21, true, false};
        case GGUF_Q5_1: return {32, 31, 0, -0.5, 0.1, 16, true, false};
        case GGUF_Q2_K: return {16, 3, 15, -0.5, 0.1, 16, true, false};
        case GGUF_Q4_K: return {32, 15, 63, -1.0, 0.1, 21, true, false};
        case GGUF_Q5_K: return {32, 31, 63, -0.5, 0.1, 16, true, false};
        case GGUF_Q3_K: return {16, 3, 31, 4.0, 0.1, 9, false, false};
        case GGUF_Q6_K: return {16, 31, 127, 32.0, 0.1, 9, false, false};
        case GGUF_IQ4_NL: return {32, 15, 0, 120.0, 4.0, 9, false, true};
        default: return {32, 15, 31, 120.0, 4.0, 9, false, true};  // IQ4_XS
    }
}

// -- bytes of a block -------------------------------------------------------------------------------------------------

inline uint16_t half_bits(float d) {  // of a number that is one of float16
    alignas(64) uint16_t out[LANE];
    fstore_f16(out, fset(d));
    return out[0];
}
inline void put_half(uint8_t* p, float d) {
    const uint16_t b = half_bits(d);
    memcpy(p, &b, 2);
}
inline void nibbles(const uint8_t* c, int run, uint8_t* out) {  // of 2 * run codes, the upper bits cut off
    for (int j = 0; j < run; ++j) out[j] = (uint8_t)((c[j] & 15) | c[run + j] << 4);
}
inline void pairs(const uint8_t* c, uint8_t* out) {  // the two low bits of 128 codes
    for (int j = 0; j < 32; ++j)
        out[j] = (uint8_t)((c[j] & 3) | (c[32 + j] & 3) << 2 | (c[64 + j] & 3) << 4 | c[96 + j] << 6);
}
inline void single_bits(const uint8_t* c, int shift, uint8_t* out) {  // one bit of 256 codes, 32 apart
    for (int j = 0; j < 32; ++j) {
        int b = 0;
        for (int i = 0; i < 8; ++i) b |= ((c[32 * i + j] >> shift) & 1) << i;
        out[j] = (uint8_t)b;
    }
}
inline void fifth_bits(const uint8_t* c, uint8_t* out) {  // of 32 codes, in order
    for (int i = 0; i < 4; ++i) {
        uint64_t eight;
        memcpy(&eight, c + 8 * i, 8);
        out[i] = (uint8_t)((((eight >> 4) & 0x0101010101010101u) * 0x0102040810204080u) >> 56);  // byte j to bit j
    }
}

// One block. codes: of its elements, from 0 on; scale, offset: codes of its sub-blocks, from 0 on; d, m: its numbers.
template <int TYPE>
void pack_block(const uint8_t* c, const uint8_t* scale, const uint8_t* offset, float d, float m, uint8_t* out) {
    if constexpr (TYPE == GGUF_Q2_K) {
        for (int i = 0; i < 16; ++i) out[i] = (uint8_t)(scale[i] | offset[i] << 4);
        pairs(c, out + 16), pairs(c + 128, out + 48);
        put_half(out + 80, d), put_half(out + 82, m);
    } else if constexpr (TYPE == GGUF_Q3_K) {
        single_bits(c, 2, out);
        pairs(c, out + 32), pairs(c + 128, out + 64);
        for (int j = 0; j < 8; ++j) out[96 + j] = (uint8_t)((scale[j] & 15) | (scale[8 + j] & 15) << 4);
        for (int j = 0; j < 4; ++j)
            out[104 + j] =
                (uint8_t)(scale[j] >> 4 | scale[4 + j] >> 4 << 2 | scale[8 + j] >> 4 << 4 | scale[12 + j] >> 4 << 6);
        put_half(out + 108, d);
    } else if constexpr (TYPE == GGUF_Q4_K || TYPE == GGUF_Q5_K) {
        put_half(out, d), put_half(out + 2, m);
        for (int j = 0; j < 4; ++j) {
            out[4 + j] = (uint8_t)(scale[j] | scale[4 + j] >> 4 << 6);
            out[8 + j] = (uint8_t)(offset[j] | offset[4 + j] >> 4 << 6);
            out[12 + j] = (uint8_t)((scale[4 + j] & 15) | (offset[4 + j] & 15) << 4);
        }
        out += 16;
        if constexpr (TYPE == GGUF_Q5_K) single_bits(c, 4, out), out += 32;
        for (int i = 0; i < 4; ++i) nibbles(c + 64 * i, 32, out + 32 * i);
    } else if constexpr (TYPE == GGUF_Q6_K) {
        for (int i = 0; i < 2; ++i) {
            nibbles(c + 128 * i, 64, out + 64 * i);
            for (int j = 0; j < 32; ++j)
                out[128 + 32 * i + j] = (uint8_t)(c[128 * i + j] >> 4 | c[128 * i + 32 + j] >> 4 << 2 |
                                                  c[128 * i + 64 + j] >> 4 << 4 | c[128 * i + 96 + j] >> 4 << 6);
        }
        for (int i = 0; i < 16; ++i) out[192 + i] = (uint8_t)(scale[i] - 128);
        put_half(out + 208, d);
    } else if constexpr (TYPE == GGUF_IQ4_XS) {
        put_half(out, d);
        for (int i = 0; i < 2; ++i)
            out[2 + i] = (uint8_t)(scale[4 * i] >> 4 | scale[4 * i + 1] >> 4 << 2 | scale[4 * i + 2] >> 4 << 4 |
                                   scale[4 * i + 3] >> 4 << 6);
        for (int i = 0; i < 4; ++i) out[4 + i] = (uint8_t)((scale[2 * i] & 15) | (scale[2 * i + 1] & 15) << 4);
        for (int i = 0; i < 8; ++i) nibbles(c + 32 * i, 16, out + 8 + 16 * i);
    } else {  // one scale for 32 elements
        put_half(out, d), out += 2;
        if constexpr (TYPE == GGUF_Q4_1 || TYPE == GGUF_Q5_1) put_half(out, m), out += 2;
        if constexpr (TYPE == GGUF_Q5_0 || TYPE == GGUF_Q5_1) fifth_bits(c, out), out += 4;
        nibbles(c, 16, out);
    }
}

// -- search -----------------------------------------------------------------------------------------------------------

// 16 sub-blocks, one in each lane: values, weights of their squared errors, and the product of both.
template <int N> struct Columns {
    F x[N], w[N], wx[N];
};

inline F ratio(F a, F b) { return fabove(b, fset(TINY), fdiv(a, b), fset(0)); }
inline F size_of(F a) { return bitcast(iand(bits(a), iset(0x7fffffff))); }
inline F signed_ratio(F a, F b) { return fabove(size_of(b), fset(TINY), fdiv(a, b), fset(0)); }
inline F round_to(F a, F lo, F hi) { return fclip(frint(a), lo, hi); }

// Sums over the N elements of each sub-block of the K numbers that term(i, out) gives.
template <int N, int K, class Term> PW_INLINE void sum_columns(const Term& term, F* out) {
    F t[K][N / 4];
    PW_ROLLED
    for (int i = 0; i < N / 4; ++i) {
        F a[K], b[K], c[K], d[K];
        term(i, a), term(i + N / 4, b), term(i + N / 2, c), term(i + 3 * N / 4, d);
        for (int k = 0; k < K; ++k) t[k][i] = fadd(fadd(a[k], c[k]), fadd(b[k], d[k]));
    }
    for (int k = 0; k < K; ++k) {
        for (int n = N / 8; n > 0; n /= 2)
            for (int j = 0; j < n; ++j) t[k][j] = fadd(t[k][j], t[k][j + n]);
        out[k] = t[k][0];
    }
}

template <int N> void affine(const Columns<N>& s, const Search& p, F& best_scale, F& best_least) {
    F lo = s.x[0], hi = s.x[0];
    for (int i = 1; i < N; ++i) lo = fleast(s.x[i], lo), hi = fmost(s.x[i], hi);
    const F zero = fset(0), top = fset((float)p.top);
    lo = fleast(lo, zero);
    const F span = fsub(hi, lo);
    F sums[3];
    sum_columns<N, 2>([&](int i, F* t) { t[0] = s.w[i], t[1] = s.wx[i]; }, sums);
    const F sw = sums[0], swx = sums[1];
    const auto error = [&](F scale, F least, F sl, F sll, F sxl) {
        const F a = fmul(fmul(scale, scale), sll), b = fmul(fmul(fset(2), scale), fsub(fmul(least, sl), sxl));
        return fadd(fadd(a, b), fmul(least, fsub(fmul(least, sw), fmul(fset(2), swx))));
    };
    F above[N];
    for (int i = 0; i < N; ++i) above[i] = fsub(s.x[i], lo);
    const auto sums_above = [&](F by) {  // codes of numbers that are not negative
        sum_columns<N, 3>(
            [&](int i, F* t) {
                const F code = fleast(frint(fmul(above[i], by)), top);
                t[0] = fmul(s.w[i], code), t[1] = fmul(t[0], code), t[2] = fmul(s.wx[i], code);
            },
            sums);
    };
    best_scale = fdiv(span, top), best_least = lo;
    sums_above(ratio(top, span));
    F best = error(best_scale, best_least, sums[0], sums[1], sums[2]);
    for (int i = 0; i <= p.tries; ++i) {
        if (i < p.tries) {
            sums_above(ratio(fset((float)(p.top + p.start + p.step * i)), span));
        } else {  // the best again: its codes may change with the new offset
            const F by = ratio(fset(1), best_scale), from = best_least;
            sum_columns<N, 3>(
                [&](int k, F* t) {
                    const F code = round_to(fmul(fsub(s.x[k], from), by), zero, top);
                    t[0] = fmul(s.w[k], code), t[1] = fmul(t[0], code), t[2] = fmul(s.wx[k], code);
                },
                sums);
        }
        const F sl = sums[0], sll = sums[1], sxl = sums[2];
        const F det = fsub(fmul(sw, sll), fmul(sl, sl)), alone = ratio(sxl, sll);
        F scale = ratio(fsub(fmul(sw, sxl), fmul(swx, sl)), det),
          least = ratio(fsub(fmul(sll, swx), fmul(sl, sxl)), det);
        scale = fabove(det, fset(TINY), fabove(least, zero, alone, scale), alone);
        least = fabove(det, fset(TINY), fabove(least, zero, zero, least), zero);
        const F e = error(scale, least, sl, sll, sxl), limit = fabove(scale, zero, best, fset(-INFINITY));
        best_scale = fabove(limit, e, scale, best_scale);
        best_least = fabove(limit, e, least, best_least);
        best = fabove(limit, e, e, best);
    }
}

// IQ4's values, and for intervals of 16 from -135 on: codes below, and the one or two boundaries within. The first and
// the last have none, however large x is: it can be thousands where importance is about 0, and there is no code 16.
alignas(64) constexpr float IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(64) constexpr float IQ4_BELOW[16] = {0, 0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr float IQ4_FIRST[16] = {INFINITY, -115.5f, -93.5f, -74,   -57, -42, -28.5f, -16,
                                             -4.5f,    19,      31.5f,  45.5f, 61,  79,  101,    INFINITY};

// Codes of the nearest values, and these values.
template <bool TABLE> PW_INLINE F numbers(F x, F lo, F hi, F& value) {
    if constexpr (!TABLE) {
        value = round_to(x, lo, hi);
        return value;
    } else {
        const F one = fset(1), zero = fset(0), near = fmost(fleast(x, fset(113)), fset(-127));
        const I at = iround(fsub(fmul(fadd(near, fset(135)), fset(0.0625f)), fset(0.5f)));
        F code = fadd(pick16(IQ4_BELOW, at), fabove(x, pick16(IQ4_FIRST, at), one, zero));
        code = fabove(x, fset(7), fmost(code, fset(9)), code);  // the second boundary of the interval from -7 to 9
        value = pick16(IQ4, iround(code));
        return code;
    }
}

template <int N, bool TABLE> F centred(const Columns<N>& s, const Search& p) {
    F largest = s.x[0], reach = size_of(largest);
    for (int i = 1; i < N; ++i) {
        const F size = size_of(s.x[i]);
        largest = fabove(size, reach, s.x[i], largest), reach = fmost(size, reach);
    }
    const F lo = fset((float)(-p.top - 1)), hi = fset((float)p.top);
    F best_scale = fset(0), best = fset(0);
    for (int i = -p.tries; i < p.tries + 2; ++i) {
        const F by = i <= p.tries ? signed_ratio(fset((float)-(p.start + p.step * i)), largest)
                                  : signed_ratio(fset(1), best_scale);
        F sums[2];
        sum_columns<N, 2>(
            [&](int k, F* t) {
                F q;
                numbers<TABLE>(fmul(s.x[k], by), lo, hi, q);
                t[0] = fmul(s.wx[k], q), t[1] = fmul(fmul(s.w[k], q), q);
            },
            sums);
        const F scale = ratio(sums[0], sums[1]), gain = fmul(sums[0], scale);
        best_scale = fabove(gain, best, scale, best_scale);
        best = fabove(gain, best, gain, best);
    }
    return best_scale;
}

struct GgufJob {
    int type, kind;    // of the blocks, of x
    int64_t count, k;  // elements, columns
    const char* x;
    const float* importance;  // [k] or null
    uint8_t* out;
    double* sums;  // [pieces, 2]
};

// 16 sub-blocks from element `at` on, of which `lanes` are there. Returns false if a scale is beyond float16.
template <int TYPE> bool search_group(const GgufJob& j, int64_t at, int lanes, double* sums) {
    constexpr Search P = search_of<TYPE>();
    constexpr int N = P.size, BLOCK = gguf_block(TYPE).elements, PER = BLOCK / N, BLOCKS = LANE / PER;
    alignas(64) float room[LANE * N], weights[LANE * N];
    alignas(64) int32_t index[LANE];
    for (int l = 0; l < LANE; ++l) index[l] = l * N;
    const I lane = iload(index);
    const int64_t n = (int64_t)lanes * N;
    read_any(j.kind, j.x, at, n, room);
    for (int64_t i = n; i < LANE * N; ++i) room[i] = 0;
    if (j.importance)
        for (int64_t i = 0; i < LANE * N;) {
            const int64_t column = (at + i) % j.k, some = std::min<int64_t>(j.k - column, LANE * N - i);
            memcpy(weights + i, j.importance + column, (size_t)some * 4);
            i += some;
        }
    Columns<N> s;
    F t[2];
    for (int i = 0; i < N; ++i) s.x[i] = pick(room + i, lane);
    sum_columns<N, 1>([&](int i, F* out) { out[0] = fmul(s.x[i], s.x[i]); }, t);
    const F squares = t[0];
    // of each block: the root of the mean square, for each of its sub-blocks
    alignas(64) float part[LANE], rms[LANE];
    fstore(part, squares);
    for (int b = 0; b < BLOCKS; ++b) {
        float sum[PER];
        for (int i = 0; i < PER; ++i) sum[i] = part[b * PER + i];
        for (int half = PER / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
        for (int i = 0; i < PER; ++i) rms[b * PER + i] = sum[0] / BLOCK;
    }
    const F sigma = fsqrt(fload(rms)), twice = fmul(fset(2), fmul(sigma, sigma));
    for (int i = 0; i < N; ++i) {
        const F x = s.x[i];
        s.w[i] = j.importance ? fmul(pick(weights + i, lane), fsqrt(fadd(twice, fmul(x, x)))) : fadd(sigma, size_of(x));
        s.wx[i] = fmul(s.w[i], x);
    }

    alignas(64) float d[LANE], m[LANE], scale[LANE], least[LANE];
    alignas(64) uint8_t codes[LANE * N], scale_codes[LANE], offset_codes[LANE], row[LANE];
    const F zero = fset(0), one = fset(1), reach = fset(65504);
    const auto largest = [&](const float* from, float* out) {  // of each block, the first of the largest magnitude
        for (int b = 0; b < BLOCKS; ++b) {
            float best = from[b * PER];
            for (int i = 1; i < PER; ++i)
                if (std::fabs(from[b * PER + i]) > std::fabs(best)) best = from[b * PER + i];
            for (int i = 0; i < PER; ++i) out[b * PER + i] = best;
        }
    };
    bool fits = true;
    const auto half = [&](F a) {
        alignas(64) float over[LANE];
        fstore(over, fabove(size_of(a), reach, one, zero));
        for (int l = 0; l < LANE; ++l) fits &= over[l] == 0;
        return round_f16(a);
    };
    const auto store = [&](int i, F code) {
        istore8((int8_t*)row, iround(code));
        for (int l = 0; l < LANE; ++l) codes[l * N + i] = row[l];
    };
    F noise = zero;
    if constexpr (P.affine) {
        const F top = fset((float)P.top), scale_top = fset((float)P.scale_top);
        F by, from;
        affine<N>(s, P, by, from);
        F final_scale, final_least;
        if constexpr (P.scale_top == 0) {
            final_scale = half(fadd(by, zero)), final_least = half(fadd(from, zero));
            fstore(d, final_scale), fstore(m, final_least);
            const F inverse = ratio(one, final_scale);
            for (int i = 0; i < N; ++i) {
                const F code = round_to(fmul(fsub(s.x[i], final_least), inverse), zero, top);
                const F off = fsub(fadd(fmul(code, final_scale), final_least), s.x[i]);
                noise = fadd(noise, fmul(off, off));
                store(i, code);
            }
        } else {
            fstore(scale, size_of(by)), fstore(least, size_of(from));
            largest(scale, d), largest(least, m);
            const F dd = half(fdiv(fload(d), scale_top)), dm = half(fdiv(fload(m), scale_top));
            fstore(d, dd), fstore(m, dm);
            const F sc0 = round_to(fmul(fload(scale), ratio(one, dd)), zero, scale_top);
            const F mn0 = round_to(fmul(fload(least), ratio(one, dm)), zero, scale_top);
            const auto error = [&](F sc, F mn) {
                const F size = fmul(dd, sc), minus = fmul(dm, mn), inverse = ratio(one, size);
                F e[1];
                sum_columns<N, 1>(
                    [&](int i, F* out) {
                        const F code = round_to(fmul(fadd(s.x[i], minus), inverse), zero, top);
                        const F off = fsub(fsub(fmul(code, size), minus), s.x[i]);
                        out[0] = fmul(s.w[i], fmul(off, off));
                    },
                    e);
                return e[0];
            };
            F sc = sc0, mn = mn0, best = error(sc, mn);
            for (int up = -1; up <= 1; ++up)
                for (int down = -1; down <= 1; ++down) {
                    if (!up && !down) continue;
                    const F a = fclip(fadd(sc0, fset((float)up)), zero, scale_top);
                    const F b = fclip(fadd(mn0, fset((float)down)), zero, scale_top), e = error(a, b);
                    sc = fabove(best, e, a, sc), mn = fabove(best, e, b, mn), best = fabove(best, e, e, best);
                }
            const F size = fmul(dd, sc), minus = fmul(dm, mn), inverse = ratio(one, size);
            for (int i = 0; i < N; ++i) {
                const F code = round_to(fmul(fadd(s.x[i], minus), inverse), zero, top);
                const F off = fsub(fsub(fmul(code, size), minus), s.x[i]);
                noise = fadd(noise, fmul(off, off));
                store(i, code);
            }
            istore8((int8_t*)scale_codes, iround(sc)), istore8((int8_t*)offset_codes, iround(mn));
        }
    } else {
        constexpr bool TABLE = P.table;
        const F lo = fset((float)(-P.top - 1)), hi = fset((float)P.top);
        const F by = centred<N, TABLE>(s, P);
        F size;
        if constexpr (P.scale_top == 0) {
            size = half(by);
            fstore(d, size);
        } else {
            const F bottom = fset((float)(-P.scale_top - 1)), top = fset((float)P.scale_top);
            fstore(scale, by);
            largest(scale, d);
            const F dd = half(fdiv(fload(d), bottom));
            fstore(d, dd);
            const auto error = [&](F sc) {
                const F size = fmul(dd, sc), inverse = signed_ratio(one, size);
                F e[1];
                sum_columns<N, 1>(
                    [&](int i, F* out) {
                        F q;
                        numbers<TABLE>(fmul(s.x[i], inverse), lo, hi, q);
                        const F off = fsub(fmul(q, size), s.x[i]);
                        out[0] = fmul(s.w[i], fmul(off, off));
                    },
                    e);
                return e[0];
            };
            F sc = round_to(fmul(by, signed_ratio(one, dd)), bottom, top), best = error(sc);
            for (int step = -1; step <= 1; step += 2) {
                const F a = fclip(fadd(sc, fset((float)step)), bottom, top), e = error(a);
                sc = fabove(best, e, a, sc), best = fabove(best, e, e, best);
            }
            size = fmul(dd, sc);
            istore8((int8_t*)scale_codes, iround(fsub(sc, bottom)));
        }
        const F inverse = signed_ratio(one, size), base = TABLE ? zero : lo;
        for (int i = 0; i < N; ++i) {
            F q;
            const F code = numbers<TABLE>(fmul(s.x[i], inverse), lo, hi, q), off = fsub(fmul(q, size), s.x[i]);
            noise = fadd(noise, fmul(off, off));
            store(i, fsub(code, base));
        }
    }
    alignas(64) float lost[LANE];
    fstore(lost, noise);
    for (int l = 0; l < lanes; ++l) sums[0] += part[l], sums[1] += lost[l];
    uint8_t* out = j.out + at / BLOCK * gguf_block(TYPE).bytes;
    for (int b = 0; b < lanes / PER; ++b, out += gguf_block(TYPE).bytes)
        pack_block<TYPE>(codes + b * BLOCK, scale_codes + b * PER, offset_codes + b * PER, d[b * PER],
                         P.affine ? m[b * PER] : 0, out);
    return fits;
}

// -- formulas ---------------------------------------------------------------------------------------------------------

inline F truncated(F a) {  // of a number that is not negative
    const F r = frint(a);
    return fabove(r, a, fsub(r, fset(1)), r);
}
inline float lane_sum(F a) {
    alignas(64) float t[LANE];
    fstore(t, a);
    for (int half = LANE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
}

// One block of 32 elements by the formula of its type; see io/gguf/quantize.py.
template <int TYPE> bool formula_block(const float* x, uint8_t* out, double* sums) {
    const F a = fload(x), b = fload(x + LANE), zero = fset(0);
    const F size_a = size_of(a), size_b = size_of(b);
    alignas(64) uint8_t codes[32];
    F qa, qb;  // codes as they multiply the scale
    float d, m = 0;
    if constexpr (TYPE == GGUF_Q8_0) {
        d = fmost(fmost(size_a, size_b)) / 127;
        const float over = 1 / d;
        const F by = fset(std::isfinite(over) ? over : 0);
        const auto away = [&](F v, F s) {  // to the nearest, halves away from zero
            const F y = fmul(s, by), r = frint(y), up = fabove(fsub(y, r), fset(0.49999997f), fadd(r, fset(1)), r);
            return fabove(zero, v, fsub(zero, up), up);
        };
        qa = away(a, size_a), qb = away(b, size_b);
        istore8((int8_t*)codes, iround(qa)), istore8((int8_t*)codes + LANE, iround(qb));
    } else if constexpr (TYPE == GGUF_Q4_0 || TYPE == GGUF_Q5_0) {
        constexpr int MID = TYPE == GGUF_Q4_0 ? 8 : 16;
        const float reach = fmost(fmost(size_a, size_b));
        float largest = x[0];
        for (int i = 0; i < 32; ++i)
            if (std::fabs(x[i]) == reach) {
                largest = x[i];
                break;
            }
        d = largest / -MID;
        const float over = 1 / d;
        const F by = fset(std::isfinite(over) ? over : 0), half = fset(MID + 0.5f), top = fset(2 * MID - 1);
        qa = fleast(truncated(fadd(fmul(a, by), half)), top), qb = fleast(truncated(fadd(fmul(b, by), half)), top);
        istore8((int8_t*)codes, iround(qa)), istore8((int8_t*)codes + LANE, iround(qb));
        qa = fsub(qa, fset(MID)), qb = fsub(qb, fset(MID));
    } else {
        constexpr int TOP = TYPE == GGUF_Q4_1 ? 15 : 31;
        m = fleast(fleast(a, b)) + 0.0f;
        d = (fmost(fmost(a, b)) - m) / TOP + 0.0f;
        const float over = 1 / d;
        const F by = fset(std::isfinite(over) ? over : 0), half = fset(0.5f), top = fset(TOP), from = fset(m);
        qa = fleast(truncated(fadd(fmul(fsub(a, from), by), half)), top);
        qb = fleast(truncated(fadd(fmul(fsub(b, from), by), half)), top);
        istore8((int8_t*)codes, iround(qa)), istore8((int8_t*)codes + LANE, iround(qb));
    }
    const bool fits = std::fabs(d) <= 65504 && std::fabs(m) <= 65504;
    alignas(64) uint16_t bits16[LANE];
    fstore_f16(bits16, fset(d));
    const F scale = round_f16(fset(d)), offset = round_f16(fset(m));
    const F off_a = fsub(fadd(fmul(qa, scale), offset), a), off_b = fsub(fadd(fmul(qb, scale), offset), b);
    sums[0] += lane_sum(fadd(fmul(a, a), fmul(b, b)));
    sums[1] += lane_sum(fadd(fmul(off_a, off_a), fmul(off_b, off_b)));
    if constexpr (TYPE == GGUF_Q8_0) {
        memcpy(out, bits16, 2);
        memcpy(out + 2, codes, 32);
    } else {
        pack_block<TYPE>(codes, nullptr, nullptr, d, m, out);
    }
    return fits;
}

// -- all of it --------------------------------------------------------------------------------------------------------

template <int TYPE> bool gguf_piece(const GgufJob& j, int64_t at, int64_t n, double* sums) {
    bool fits = true;
    if constexpr (TYPE == GGUF_Q4_0 || TYPE == GGUF_Q4_1 || TYPE == GGUF_Q5_0 || TYPE == GGUF_Q5_1 || TYPE == GGUF_Q8_0)
        if (TYPE == GGUF_Q8_0 || !j.importance) {
            alignas(64) float room[32 * LANE];
            for (int64_t i = 0; i < n; i += 32 * LANE) {
                const int64_t some = std::min<int64_t>(n - i, 32 * LANE);
                read_any(j.kind, j.x, at + i, some, room);
                for (int64_t b = 0; b < some; b += 32)
                    fits &= formula_block<TYPE>(room + b, j.out + (at + i + b) / 32 * gguf_block(TYPE).bytes, sums);
            }
            return fits;
        }
    if constexpr (TYPE != GGUF_Q8_0) {
        constexpr int N = search_of<TYPE>().size;
        for (int64_t i = 0; i < n; i += LANE * N)
            fits &= search_group<TYPE>(j, at + i, (int)std::min<int64_t>(LANE, (n - i) / N), sums);
    }
    return fits;
}

inline bool gguf_piece(const GgufJob& j, int64_t at, int64_t n, double* sums) {
    switch (j.type) {
        case GGUF_Q4_0: return gguf_piece<GGUF_Q4_0>(j, at, n, sums);
        case GGUF_Q4_1: return gguf_piece<GGUF_Q4_1>(j, at, n, sums);
        case GGUF_Q5_0: return gguf_piece<GGUF_Q5_0>(j, at, n, sums);
        case GGUF_Q5_1: return gguf_piece<GGUF_Q5_1>(j, at, n, sums);
        case GGUF_Q8_0: return gguf_piece<GGUF_Q8_0>(j, at, n, sums);
        case GGUF_Q2_K: return gguf_piece<GGUF_Q2_K>(j, at, n, sums);
        case GGUF_Q3_K: return gguf_piece<GGUF_Q3_K>(j, at, n, sums);
        case GGUF_Q4_K: return gguf_piece<GGUF_Q4_K>(j, at, n, sums);
        case GGUF_Q5_K: return gguf_piece<GGUF_Q5_K>(j, at, n, sums);
        case GGUF_Q6_K: return gguf_piece<GGUF_Q6_K>(j, at, n, sums);
        case GGUF_IQ4_NL: return gguf_piece<GGUF_IQ4_NL>(j, at, n, sums);
        default: return gguf_piece<GGUF_IQ4_XS>(j, at, n, sums);
    }
}

// Returns 1 if a scale is beyond float16: the blocks are then not valid.
int gguf_quantize(int type, const void* x, int kind, int64_t count, int64_t k, const float* importance, uint8_t* out,
                  double* sums, int threads) {
    const GgufJob j = {type, kind, count, k, (const char*)x, importance, out, sums};
    const int64_t pieces = (count + GGUF_PIECE - 1) / GGUF_PIECE;
    int over = 0;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) reduction(| : over) if (threads > 1)
    for (int64_t u = 0; u < pieces; ++u) {
        const int64_t at = u * GGUF_PIECE;
        double two[2] = {0, 0};
        over |= !gguf_piece(j, at, std::min<int64_t>(GGUF_PIECE, count - at), two);
        sums[2 * u] = two[0], sums[2 * u + 1] = two[1];
    }
    return over;
}

}  // namespace
