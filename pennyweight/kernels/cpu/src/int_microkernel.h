// y = x @ w.T + bias with integer codes. Sums over a block of columns are exact integer sums; blocks are added in
// float32 in the order of the columns. So a result depends only on its row of x and its row of w: not on the batch, the
// threads, or the instruction set.
//
//   I = sum_k X[k] * (u[n,k] - center - zero_point)         int32, one block
//   y[n] += I * scale[n,block] * s[block] + offset[n,block] * sum_k x[k]
//
// s[block] is the scale of the block's limbs: a power of two for float inputs, the scale of the group of columns for
// inputs quantized per group. For inputs quantized per token it is 1, and y is multiplied once by the token's scale.
//
// One kernel serves any number of rows: it processes a tile of 16 columns of y with packed codes, decoded in registers
// for a few tokens at a time. With few rows it is memory-bound. With many rows the tile stays in the cache and it is
// compute-bound.
#pragma once

#include <algorithm>

#include "pack.h"
#include "simd.h"

namespace {

constexpr int AHEAD = 2304;  // prefetch distance in bytes

// 4- and 8-bit codes have a kernel for every number of tokens. Other widths have one for one token and two for more; in
// plain C++ they share one.
constexpr bool every_count(int bits) { return bits == 4 || bits == 8; }
constexpr int FEW[] = {4, 3, 2};                  // by limbs - 1
constexpr int LEAST_WORDS = (TOKENS[3] + 1) / 2;  // words are used for more tokens, in blocks of equal size (see plan)
// Codes of a width that is known only at run time, to registers.
PW_INLINE void decode_other(int bits, const uint8_t* codes, B* out) {
    switch (bits) {
        case 1: return decode<1>(codes, out);
        case 2: return decode<2>(codes, out);
        case 3: return decode<3>(codes, out);
        case 5: return decode<5>(codes, out);
        case 6: return decode<6>(codes, out);
        default: return decode<7>(codes, out);
    }
}

struct Part {  // scales, zero points or offsets of a tile: 16 numbers per group
    const void* p;
    int32_t kind;
};

inline F part16(const Part& a, int64_t i) {
    switch (a.kind) {
        case BF16: return fload_bf16((const uint16_t*)a.p + i);
        case F16: return fload_f16((const uint16_t*)a.p + i);
        case E8M0:  // 2**(byte - 127); byte 0 is 2**-127, a subnormal
            return bitcast(imax(ishl(iload8u((const uint8_t*)a.p + i), 23), iset(1 << 22)));
        default: return fload((const float*)a.p + i);
    }
}
inline I zero16(const Part& a, int64_t i) {
    return a.kind == U8 ? iload8u((const uint8_t*)a.p + i) : iload8s((const int8_t*)a.p + i);
}

// Decodes `count` groups of a tile, from group `first` on, whose scale codes have outer scales.
inline Part numbers_of(const Part& codes, const Part& outer, int64_t per_outer, int64_t first, int64_t count,
                       float* out) {
    for (int64_t i = 0; i < count; ++i)
        fstore(out + 16 * i, fmul(cvt(zero16(codes, (first + i) * 16)), part16(outer, (first + i) / per_outer * 16)));
    return {out, F32};
}

struct Tile {  // 16 rows of the weight, from one block of columns on
    const uint8_t* codes;
    Part scale, zero, offset;
    int64_t per_scale;      // blocks that share a scale; 0: no scale inside the sum
    int64_t first, blocks;  // blocks of columns
    int64_t block, tail;    // columns of a block, and of the last block
    int32_t bits, center;
    int64_t true_columns;  // from here on, without padding
    const int8_t* ones;    // 1 per true column, for inputs with a zero point; else null
    float* sums;           // [blocks][16] of the codes minus center and zero point, for such inputs
};

struct Rows {  // a block of tokens, from the same column on
    const int8_t* limbs;
    const int32_t* sums;
    const float* scale;  // [blocks][T]; null: no scale inside the sum
    const float* value;
    const float* zero;  // zero points, per token; [blocks][T] if there are scales
};

// The sums of a block in `micro`: of R tokens and limbs, in CHAINS independent parts that hide the latency of dot4.
// BITS 0: any width but 4 and 8, in plain C++; D 0: words instead of limbs.
template <int BITS, int T, int D> struct MicroShape {
    static constexpr int R = D ? T * D : T;
    static constexpr int CHAINS = R == 1 ? 4 : R <= 3 ? 2 : 1;
    // Vectors of codes per iteration of the innermost loop: enough products to hide its overhead, at most all.
    static constexpr int STEP = !every_count(BITS) || R < 8 ? 8 : 4;
    static constexpr int WORD_STEP = BITS == 8 ? (R < 8 ? 4 : 2) : R < 8 ? 2 : 1;
    using Sums = I[CHAINS][R];
};

// Sums of a block before its products: what center and zero point contribute.
template <class M>
PW_INLINE void begin_block(const Tile& w, const int32_t* sums, int64_t group, typename M::Sums& acc) {
    PW_UNROLL for (int r = 0; r < M::R; ++r) {
        const int32_t s = sums[r];
        acc[0][r] = iset(-w.center * s);
        if (w.zero.kind) acc[0][r] = iadd(acc[0][r], imul(zero16(w.zero, group), iset(-s)));
        PW_UNROLL for (int h = 1; h < M::CHAINS; ++h) acc[h][r] = iset(0);
    }
}

// Adds the products of 32 columns with words. Returns the input after them.
template <int BITS, class M>
PW_INLINE const int8_t* add_words(const uint8_t* codes, const int8_t* xs, typename M::Sums& acc) {
    const auto pair = [&](B u, int at) {
        PW_UNROLL for (int r = 0; r < M::R; ++r) {
            acc[at % M::CHAINS][r] = dot2(acc[at % M::CHAINS][r], u, xload(xs + (at * M::R + r) * 4));
        }
    };
    PW_ROLLED for (int at = 0; at < BITS; at += M::WORD_STEP) {
        PW_UNROLL for (int j = 0; j < M::WORD_STEP; ++j) {
            const B v = bload(codes + 64 * (at + j));
            if constexpr (BITS == 8) {
                pair(words<0, 8>(v), 2 * j);
                pair(words<8, 8>(v), 2 * j + 1);
            } else {
                pair(words<0, 4>(v), 4 * j);
                pair(words<8, 4>(v), 4 * j + 1);
                pair(words<4, 4>(v), 4 * j + 2);
                pair(words<12, 4>(v), 4 * j + 3);
            }
        }
        xs += 64 / BITS * M::WORD_STEP * M::R;
    }
    return xs;
}

// Adds the products of 32 columns with limbs. SUM: also those with `ones`. Returns the input after them.
template <int BITS, class M, bool SUM>
PW_INLINE const int8_t* add_limbs(const uint8_t* codes, int bits, const int8_t* xs, const int8_t*& ones,
                                  typename M::Sums& acc, I (&column)[2]) {
    B u[8];
    if constexpr (BITS == 0) decode_other(bits, codes, u);
    else if constexpr (!every_count(BITS)) decode<BITS>(codes, u);
    PW_ROLLED for (int at = 0; at < 8; at += M::STEP) {
        PW_UNROLL for (int j = 0; j < M::STEP; ++j) {
            if constexpr (BITS == 8) u[j] = bload(codes + 64 * (at + j));
            if constexpr (BITS == 4) {  // as in `decode`, but on demand
                if (j % 2 == 0) {
                    const B two = bload(codes + 32 * (at + j));
                    u[j] = bmask(two, 15);
                    u[j + 1] = bmask(bright(two, 4), 15);
                }
            }
            PW_UNROLL for (int r = 0; r < M::R; ++r) {
                acc[j % M::CHAINS][r] = dot4<BITS == 8>(acc[j % M::CHAINS][r], u[j], xload(xs + (j * M::R + r) * 4));
            }
            if (SUM) column[j % 2] = dot4<BITS == 8>(column[j % 2], u[j], xload(ones + 4 * j));
        }
        if (SUM) ones += 4 * M::STEP;
        xs += 4 * M::STEP * M::R;
    }
    return xs;
}

// The sum of the codes of block b minus center and zero point, from the products with ones.
PW_INLINE F sum_of_codes(const Tile& w, int64_t b, int64_t group, const I (&column)[2]) {
    const int32_t count = (int32_t)std::min(w.block, std::max<int64_t>(0, w.true_columns - b * w.block));
    I all = iadd(iadd(column[0], column[1]), iset(-w.center * count));
    if (w.zero.kind) all = iadd(all, imul(zero16(w.zero, group), iset(-count)));
    return cvt(all);
}

// The sum of token t in a block, of its limbs.
template <class M, int D> PW_INLINE F join_limbs(const typename M::Sums& acc, int t) {
    constexpr int LIMBS = D ? D : 1;
    I part[LIMBS];
    PW_UNROLL for (int d = 0; d < LIMBS; ++d) {
        part[d] = acc[0][t * LIMBS + d];
        PW_UNROLL for (int h = 1; h < M::CHAINS; ++h) part[d] = iadd(part[d], acc[h][t * LIMBS + d]);
    }
    if constexpr (D <= 1) return cvt(part[0]);
    else if constexpr (D == 2) return cvt(iadd(ishl8(part[0]), part[1]));
    else return fma(cvt(part[0]), fset(65536), cvt(iadd(ishl8(part[1]), part[2])));
}

// c[t] (+)= the blocks of a tile for T tokens of D limbs, or (D = 0) of words. `fresh`: c is not read. Inputs with a
// zero point need the sums of the codes: SUM computes and stores them, other calls for the tile read them.
template <int BITS, int T, int D, bool SUM> void micro(const Tile& w, const Rows& x, float* c, bool fresh) {
    using M = MicroShape<BITS, T, D>;
    F sum[T];
    PW_UNROLL for (int t = 0; t < T; ++t) sum[t] = fresh ? fset(0) : fload(c + 16 * t);
    const int8_t* xs = x.limbs;
    const int8_t* ones = w.ones;
    const uint8_t* codes = w.codes;
    const int bits = BITS ? BITS : w.bits;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t group = w.per_scale ? (w.first + b) / w.per_scale * 16 : 0;
        typename M::Sums acc;
        I column[2];
        if (SUM) column[0] = column[1] = iset(0);
        begin_block<M>(w, x.sums + b * M::R, group, acc);
        const int64_t steps = (b + 1 == w.blocks ? w.tail : w.block) / 32;
        for (int64_t s = 0; s < steps; ++s) {
            PW_UNROLL for (int j = 0; j < bits; ++j) __builtin_prefetch(codes + AHEAD + 64 * j);
            if constexpr (D == 0) xs = add_words<BITS, M>(codes, xs, acc);
            else xs = add_limbs<BITS, M, SUM>(codes, bits, xs, ones, acc, column);
            codes += 64 * bits;
        }
        F weight_scale = fset(1), weight_offset = fset(0), weight_sum = fset(0);
        if (SUM) {
            weight_sum = sum_of_codes(w, b, group, column);
            fstore(w.sums + 16 * b, weight_sum);
        } else if (D == 1 && w.ones) {
            weight_sum = fload(w.sums + 16 * b);
        }
        if (w.per_scale) weight_scale = part16(w.scale, group);
        if (w.offset.kind) weight_offset = part16(w.offset, group);
        const auto sum_of = [&](int t, const float* zero) {  // of a token in this block
            const F f = join_limbs<M, D>(acc, t);
            // exact: with a zero point, blocks are short enough for every term to fit a float
            return D == 1 && w.ones ? fma(weight_sum, fset(-zero[t]), f) : f;
        };
        if (D != 1 || x.scale) {
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const F e = fset(x.scale[b * T + t]);
                sum[t] =
                    fma(sum_of(t, D == 1 ? x.zero + b * T : x.zero), w.per_scale ? fmul(weight_scale, e) : e, sum[t]);
            }
        } else {
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const F f = sum_of(t, x.zero);
                sum[t] = w.per_scale ? fma(f, weight_scale, sum[t]) : fadd(f, sum[t]);
            }
        }
        if (w.offset.kind)
            PW_UNROLL for (int t = 0; t < T; ++t) sum[t] = fma(weight_offset, fset(x.value[b * T + t]), sum[t]);
    }
    PW_UNROLL for (int t = 0; t < T; ++t) fstore(c + 16 * t, sum[t]);
}

// Two tiles at once for T tokens of one limb: a product needs fewer loads, and more sums hide its latency. For weights
// without zero points and offsets, and inputs with one scale per token and no zero point. Same bits as `micro`.
template <int BITS, int T> void micro_pair(const Tile* w, const Rows& x, float* const* c, bool fresh) {
    F sum[2][T];
    PW_UNROLL for (int n = 0; n < 2; ++n) {
        PW_UNROLL for (int t = 0; t < T; ++t) sum[n][t] = fresh ? fset(0) : fload(c[n] + 16 * t);
    }
    const int8_t* xs = x.limbs;
    const uint8_t *one = w[0].codes, *two = w[1].codes;
    for (int64_t b = 0; b < w->blocks; ++b) {
        I acc[2][T];
        PW_UNROLL for (int t = 0; t < T; ++t) acc[0][t] = acc[1][t] = iset(-w->center * x.sums[b * T + t]);
        const int64_t steps = (b + 1 == w->blocks ? w->tail : w->block) / 32;
        const auto multiply = [&](B u, B v, const int8_t* at) {
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const X value = xload(at + 4 * t);
                acc[0][t] = dot4<BITS == 8>(acc[0][t], u, value);
                acc[1][t] = dot4<BITS == 8>(acc[1][t], v, value);
            }
        };
        for (int64_t s = 0; s < steps; ++s) {
            PW_UNROLL for (int j = 0; j < BITS; ++j) {
                __builtin_prefetch(one + AHEAD + 64 * j);
                __builtin_prefetch(two + AHEAD + 64 * j);
            }
            PW_ROLLED for (int at = 0; at < BITS; at += 2) {  // vectors of codes
                PW_UNROLL for (int j = 0; j < 2; ++j) {
                    const B u = bload(one + 64 * (at + j)), v = bload(two + 64 * (at + j));
                    if constexpr (BITS == 8) {
                        multiply(u, v, xs + 4 * T * j);
                    } else {
                        multiply(bmask(u, 15), bmask(v, 15), xs + 4 * T * 2 * j);
                        multiply(bmask(bright(u, 4), 15), bmask(bright(v, 4), 15), xs + 4 * T * (2 * j + 1));
                    }
                }
                xs += 16 / BITS * 4 * T;
            }
            one += 64 * BITS, two += 64 * BITS;
        }
        const int64_t group = w->per_scale ? (w->first + b) / w->per_scale * 16 : 0;
        PW_UNROLL for (int n = 0; n < 2; ++n) {
            const F scale = w->per_scale ? part16(w[n].scale, group) : fset(1);
            if (x.scale) {
                PW_UNROLL for (int t = 0; t < T; ++t) {
                    const F e = fset(x.scale[b * T + t]);
                    sum[n][t] = fma(cvt(acc[n][t]), w->per_scale ? fmul(scale, e) : e, sum[n][t]);
                }
            } else {
                PW_UNROLL for (int t = 0; t < T; ++t) {
                    sum[n][t] = w->per_scale ? fma(cvt(acc[n][t]), scale, sum[n][t]) : fadd(cvt(acc[n][t]), sum[n][t]);
                }
            }
        }
    }
    PW_UNROLL for (int n = 0; n < 2; ++n) { PW_UNROLL for (int t = 0; t < T; ++t) fstore(c[n] + 16 * t, sum[n][t]); }
}
constexpr int LEAST_PAIRED = 4;  // tokens of a block; with fewer a call is memory-bound

using MicroPair = void (*)(const Tile*, const Rows&, float* const*, bool);
template <int BITS, int T = LEAST_PAIRED> MicroPair pick_pair(int tokens) {
    if constexpr (!PAIRS || T > TOKENS[0]) return nullptr;
    else return tokens == T ? &micro_pair<BITS, T> : pick_pair<BITS, T + 1>(tokens);
}

using Micro = void (*)(const Tile&, const Rows&, float*, bool);

// The kernel for a number of limbs (0: words) and of tokens, from T on; null if there is none.
template <int BITS, int D, bool SUM, int T> Micro pick_tokens(int tokens) {
    if constexpr (T > TOKENS[D ? D - 1 : 3]) return nullptr;
    else return tokens == T ? &micro<BITS, T, D, SUM> : pick_tokens<BITS, D, SUM, T + 1>(tokens);
}
template <int BITS, int D, bool SUM = false> Micro pick_count(int tokens) {
    constexpr int MOST = TOKENS[D - 1], FEWER = std::min(FEW[D - 1], MOST);
    if constexpr (every_count(BITS)) return pick_tokens<BITS, D, SUM, 1>(tokens);
    else if constexpr (TOKENS[0] == 1) return &micro<0, 1, D, SUM>;  // plain C++
    else if constexpr (MOST == 1) return &micro<BITS, 1, D, SUM>;
    else if (tokens == 1) return &micro<BITS, 1, D, SUM>;
    else return tokens == MOST ? &micro<BITS, MOST, D, SUM> : &micro<BITS, FEWER, D, SUM>;
}
template <int BITS = 1> Micro pick(int bits, int limbs, bool sum, int tokens) {
    if constexpr (BITS > 8) {
        return nullptr;
    } else {
        if (bits != BITS) return pick<BITS + 1>(bits, limbs, sum, tokens);
        if constexpr (every_count(BITS))
            if (limbs == 0) return pick_tokens<BITS, 0, false, LEAST_WORDS>(tokens);
        return sum          ? pick_count<BITS, 1, true>(tokens)
               : limbs == 1 ? pick_count<BITS, 1>(tokens)
               : limbs == 2 ? pick_count<BITS, 2>(tokens)
                            : pick_count<BITS, 3>(tokens);
    }
}

}  // namespace
