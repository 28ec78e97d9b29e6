// Products with the codes of a cache, for few tokens: of queries with keys, and of weights with values.
//
// The scales of a group of keys belong to their channels, and multiply the query; those of a value belong to a token,
// and multiply its weight. What remains is a product of float32 numbers with integer codes. The float32 numbers are
// rounded to 16 bits, relative to the largest of a head's channels or of a chunk's keys, and the sum is exact: products
// of bytes (two limbs of 8 bits) with codes, in integers. Codes count from the middle of their range, so that this
// rounding costs about 1/200 of what rounding the numbers to 8 bits cost. What offsets add is summed up in float32.
#pragma once

#include "attention_cache.h"

namespace {
namespace attend {

PW_INLINE F fabs16(F a) { return bitcast(iand(bits(a), iset(0x7fffffff))); }
PW_INLINE B bytes(I a) { return bytes(bitcast(a)); }

// -- which codes ------------------------------------------------------------------------------------------------------

constexpr int64_t MOST_CODED = 256;  // channels and keys: sums of so many products fit 32 bits
static_assert(CHUNK <= MOST_CODED);

// Whether codes are multiplied as they are: 8 or 4 bits in whole vectors, with one scale where one is wanted.
inline bool plain_keys(const AttentionArgs& a, const AttentionPlan& p) {
    return a.past && (a.past_keys->bits == 8 || a.past_keys->bits == 4) && a.size == p.width && p.width <= MOST_CODED &&
           a.past_keys->tokens % 16 == 0 && a.past_keys->channels == 1;
}
inline bool plain_values(const AttentionArgs& a, const AttentionPlan& p) {
    return a.past && (a.past_values->bits == 8 || a.past_values->bits == 4) && a.size == p.width &&
           a.past_values->tokens == 1 && (a.past_values->channels % 16 == 0 || a.past_values->channels >= a.size);
}

// -- numbers in 16 bits -----------------------------------------------------------------------------------------------

constexpr float MOST16 = 127 * 256, LEAST16 = 1e-30f;  // below LEAST16 numbers are 0

// x is about round(x * inverse) * step for |x| up to `most`.
struct Steps16 {
    float step, inverse;
    explicit Steps16(float most) : step(most / MOST16), inverse(most > LEAST16 ? MOST16 / most : 0) {}
};
PW_INLINE I of_limbs(I high, I low) { return iadd(ishl8(high), low); }

// x rounded to n, and what is missing, added to `rest`. Products of codes with the rest are replaced by those of the
// middle of the codes. A NaN stays in the rest.
PW_INLINE I round16(F x, F* rest) {
    const I n = iround(fmost(fleast(x, fset(MOST16)), fset(-MOST16)));
    *rest = fadd(*rest, fsub(x, cvt(n)));
    return n;
}
constexpr float middle(int bits) { return (float)(1 << (bits - 1)); }
// What a sum of dot_bytes starts from: if bytes are signed, codes of 8 bits count from 128.
template <bool ALL8> PW_INLINE I begin_dots(I start, B x) {
    return SIGNED_BYTES && ALL8 ? isub(start, dot_bytes<true>(iset(0), bytes(iset(0)), x)) : start;
}

// -- queries with keys ------------------------------------------------------------------------------------------------

// Limbs of four rows: [channels / 8][high and low limbs of rows 0, 2, 1, 3][8]. Codes of 4 bits are multiplied in the
// order of their bytes: of 16 channels first the even, then the odd ones. Numbers are turned into limbs in the order of
// `limb_order`, in which they leave limbs32.
constexpr int64_t limb_width(int64_t width) { return (width + 31) / 32 * 32; }
inline void limb_order(const float* from, int bits, float* to) {  // of 32 channels
    if (bits == 8)
        for (int i = 0; i < 2; ++i) bstore((uint8_t*)(to + 16 * i), bload4((const uint8_t*)(from + 4 * i), 32));
    else
        for (int i = 0; i < 32; ++i) to[i] = from[i / 8 % 2 * 16 + i / 4 % 2 + 8 * (i / 16) + i % 4 * 2];
}
struct QueryLimbs {
    uint8_t* limbs;           // [groups of keys][rows / 4][8 * limb_width]
    float* base;              // [groups of keys][rows / 4][row][4]: a score is sum * step + base
    float* step;              // [rows / 4][row][4]
    float* scaled;            // [rows, in fours][limb_width]: q / step, in the order of limbs
    float *scales, *offsets;  // [groups of keys][limb_width], scales in the order of limbs
};
inline int64_t most_groups(const CacheCodes& c) { return CHUNK / c.tokens + 2; }  // of keys in a chunk

// The sum of the lanes of each of four vectors, in a fixed order: [vector][4].
inline void sum_lanes(const F* x, float* out) {
    B v[4];
    PW_UNROLL for (int i = 0; i < 4; ++i) v[i] = bytes(x[i]);
    transpose4(v);
    alignas(64) float t[16];
    fstore(t, fadd(fadd(bitcast(lanes(v[0])), bitcast(lanes(v[1]))), fadd(bitcast(lanes(v[2])), bitcast(lanes(v[3])))));
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) out[4 * i + j] = (t[i] + t[4 + i]) + (t[8 + i] + t[12 + i]);
}

// The limbs for keys [key, end), which are codes. Steps are for all of their groups.
inline void take_query_limbs(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key,
                             int64_t end, const float* q, const QueryLimbs& to) {
    const CacheCodes& c = *a.past_keys;
    const int64_t wide = limb_width(p.width), group0 = key / c.tokens,
                  groups = (end + c.tokens - 1) / c.tokens - group0, packs = (p.rows + 3) / 4;
    alignas(64) float most[MOST_CODED] = {0}, x[MOST_CODED] = {0};
    for (int64_t g = 0; g < groups; ++g) {
        const char *scale = scale_at(c, b, shared, (group0 + g) * c.tokens),
                   *offset = offset_at(c, b, shared, (group0 + g) * c.tokens);
        for (int64_t d = 0; d < p.width; d += 16) {
            const F s = load16(scale, c.kind, d);
            fstore(x + d, s);
            fstore(most + d, fmost(fabs16(s), fload(most + d)));
            fstore(to.offsets + g * wide + d, load16(offset, c.kind, d));
        }
        for (int64_t d = 0; d < wide; d += 32) limb_order(x + d, c.bits, to.scales + g * wide + d);
    }
    for (int64_t r = 0; r < 4 * packs; ++r) {
        F top = fset(0);
        const float* own = q + std::min(r, p.rows - 1) * p.width;
        for (int64_t d = 0; d < p.width; d += 16) top = fmost(fabs16(fmul(fload(own + d), fload(most + d))), top);
        const Steps16 s(fmost(top));
        for (int64_t d = 0; d < p.width; d += 16) fstore(x + d, fmul(fload(own + d), fset(s.inverse)));
        for (int64_t d = 0; d < wide; d += 32) limb_order(x + d, c.bits, to.scaled + r * wide + d);
        for (int i = 0; i < 4; ++i) to.step[4 * r + i] = s.step;
    }
    for (int64_t r = 0; r < packs; ++r) {
        const float *scaled = to.scaled + 4 * r * wide, *own = q + 4 * r * p.width;
        const int64_t next = 4 * r + 3 < p.rows ? p.width : 0;  // else the last rows are not used
        F middles[4];
        PW_UNROLL for (int i = 0; i < 4; ++i) middles[i] = fset(middle(c.bits) * to.step[16 * r + 4 * i]);
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* limbs = to.limbs + (g * packs + r) * 8 * wide;
            const float *scales = to.scales + g * wide, *offsets = to.offsets + g * wide;
            F rest[4];
            PW_UNROLL for (int i = 0; i < 4; ++i) rest[i] = fset(0);
            PW_ROLLED for (int64_t d = 0; d < wide; d += 32, limbs += 256) {
                B v[4];
                const F s = fload(scales + d), t = fload(scales + d + 16);
                PW_UNROLL for (int i = 0; i < 4; ++i) {
                    const I first = round16(fmul(fload(scaled + i * wide + d), s), &rest[i]);
                    v[i] = limbs32(first, round16(fmul(fload(scaled + i * wide + d + 16), t), &rest[i]));
                }
                bstore4(limbs, 64, low_longs(v[0], v[2])), bstore4(limbs + 16, 64, low_longs(v[1], v[3]));
                bstore4(limbs + 32, 64, high_longs(v[0], v[2])), bstore4(limbs + 48, 64, high_longs(v[1], v[3]));
            }
            PW_UNROLL for (int i = 0; i < 4; ++i) rest[i] = fmul(rest[i], middles[i]);
            PW_ROLLED for (int64_t d = 0; d < p.width; d += 16) {
                const F o = fload(offsets + d);
                PW_UNROLL for (int i = 0; i < 4; ++i) rest[i] =
                    fma(fload(own + (next || 4 * r + i < p.rows ? i : 0) * p.width + d), o, rest[i]);
            }
            sum_lanes(rest, to.base + (g * packs + r) * 16);
        }
    }
}

// Scores of 16 keys for four rows.
template <int BITS>
void score_codes(const uint8_t* keys, int64_t step, const char* soon, int64_t soon_step, const uint8_t* limbs,
                 const float* steps, const float* bases, int64_t width, float* scores, int64_t ld) {
    constexpr bool ALL8 = BITS == 8;
    const F scale = fload(steps), base = fload(bases);
    I start = iset(0);
    if (SIGNED_BYTES && ALL8)
        for (int64_t d = 0; d < width; d += 8) start = begin_dots<ALL8>(start, bload(limbs + 8 * d));
    for (int i = 0; i < 4; ++i, soon += 4 * soon_step) {
        const uint8_t *k = keys + 4 * i * step, *x = limbs;
        if (soon_step)
            for (int j = 0; j < 4; ++j)
                for (int64_t at = 0; at < width * BITS / 8; at += 64)
                    __builtin_prefetch(k + (AHEAD + j) * step + at),
                        __builtin_prefetch(soon + j * soon_step + at, 0, 2);
        I sum[4];
        PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] = start;
        const auto add16 = [&] {  // channels
            B c[4];
            const B y = bload(x), z = bload(x + 64);
            PW_UNROLL for (int j = 0; j < 4; ++j) c[j] = same8(k + j * step);
            PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] = dot_bytes<ALL8>(sum[j], ALL8 ? c[j] : bmask(c[j], 15), y);
            if (ALL8) {
                k += 8;
                PW_UNROLL for (int j = 0; j < 4; ++j) c[j] = same8(k + j * step);
            }
            PW_UNROLL for (int j = 0; j < 4; ++j) sum[j] =
                dot_bytes<ALL8>(sum[j], ALL8 ? c[j] : bmask(bright(c[j], 4), 15), z);
            k += 8, x += 128;
        };
        int64_t d = 64;
        PW_ROLLED for (; d <= width; d += 64) add16(), add16(), add16(), add16();
        PW_ROLLED for (d -= 64; d < width; d += 16) add16();
        // The two words of a limb, then [limb][key].
        const I a = iadd(even_words(sum[0], sum[1]), odd_words(sum[0], sum[1])),
                b = iadd(even_words(sum[2], sum[3]), odd_words(sum[2], sum[3]));
        const I even = even_words(a, b), odd = odd_words(a, b);
        const I n = of_limbs(low_halves(even, odd), high_halves(even, odd));
        bstore4((uint8_t*)(scores + 4 * i), 4 * ld, bytes(fma(cvt(n), scale, base)));
    }
}
// Scores of 16 keys with codes, of a group: scores[r][16], `ld` apart, with room for a multiple of four rows. soon:
// rows of codes that are needed soon.
inline void score_codes(const AttentionPlan& p, int bits, const uint8_t* keys, int64_t step, const char* soon,
                        int64_t soon_step, const QueryLimbs& q, int64_t group, float* scores, int64_t ld) {
    const int64_t packs = (p.rows + 3) / 4, wide = limb_width(p.width);
    for (int64_t r = 0; r < packs; ++r)
        (bits == 8 ? &score_codes<8> : &score_codes<4>)(keys, step, soon, r ? 0 : soon_step,
                                                        q.limbs + (group * packs + r) * 8 * wide, q.step + 16 * r,
                                                        q.base + (group * packs + r) * 16, p.width, scores + 4 * r * ld,
                                                        ld);
}

// -- weights with values ----------------------------------------------------------------------------------------------

constexpr int64_t TILE = 64;  // channels that are summed up together

struct ValueRoom {
    uint8_t* codes;           // [keys / 4][4][64], as interleave4 leaves them
    uint8_t* limbs;           // [rows][keys / 32][as limbs32 leaves a quarter][quarter of the tile][16]
    float *scales, *offsets;  // [keys]
    float *step, *plus;       // [rows][4]: what a quarter adds is sum * step + plus
};

// Number `g` of each of n rows of `groups` numbers, `step` numbers apart.
template <int KIND>
inline void widen_column(const char* p, int64_t g, int64_t groups, int64_t step, int64_t n, float* to) {
    if (KIND == BF16 && groups == 2 && step == 2) {  // half of each word
        for (int64_t i = 0; i < n; i += 16) {
            const I two = iload((const int32_t*)p + i);
            fstore(to + i, bitcast(g ? iand(two, iset((int32_t)0xffff0000)) : ishl(two, 16)));
        }
        return;
    }
    alignas(64) char some[64];
    for (int64_t i = 0; i < n; i += 16) {
        for (int64_t j = 0; j < 16; ++j)
            memcpy(some + j * bytes_of(KIND), p + ((i + j) * step + g) * bytes_of(KIND), (size_t)bytes_of(KIND));
        fstore(to + i, load_kind<KIND>(some));
    }
}
inline void widen_column(const char* p, int kind, int64_t g, int64_t groups, int64_t step, int64_t n, float* to) {
    const auto run = kind == BF16 ? &widen_column<BF16> : kind == F16 ? &widen_column<F16> : &widen_column<F32>;
    run(p, g, groups, step, n, to);
}

// Limbs of the weights [rows][ld] of n keys times the scales of the values, for quarters [first, end) of a tile, which
// have the same scales. Weights are at most 1, and in a chunk one is 1.
inline void take_weight_limbs(const AttentionPlan& p, int bits, int64_t n, const float* weights, int64_t ld, int first,
                              int end, const ValueRoom& room) {
    F most = fset(0);
    for (int64_t j = 0; j < n; j += 16) most = fmost(fabs16(fload(room.scales + j)), most);
    const Steps16 s(fmost(most));
    for (int64_t j = 0; j < n; j += 16) fstore(room.scales + j, fmul(fload(room.scales + j), fset(s.inverse)));
    for (int64_t r = 0; r < p.rows; ++r) {
        F plus = fset(0), rest = fset(0);
        uint8_t* to = room.limbs + r * CHUNK * 8;
        const auto take = [&](int64_t j) {
            const F w = fload(weights + r * ld + j);
            plus = fma(w, fload(room.offsets + j), plus);
            return round16(fmul(w, fload(room.scales + j)), &rest);
        };
        PW_ROLLED for (int64_t j = 0; j < n; j += 32) {
            const I x = take(j), y = j + 16 < n ? take(j + 16) : iset(0);
            const B v = limbs32(x, y);
            for (int i = first; i < end; ++i) bstore4(to + 8 * j + 16 * i, 64, v);
        }
        const float more = fsum(fma(rest, fset(middle(bits) * s.step), plus));
        for (int i = first; i < end; ++i) room.step[4 * r + i] = s.step, room.plus[4 * r + i] = more;
    }
}
// Codes of `channels` channels of n values, up to a multiple of 32; those beyond are 0.
template <int BITS>
inline void interleave_codes(const uint8_t* values, int64_t step, int64_t channels, int64_t n, uint8_t* to) {
    const size_t bytes = (size_t)(channels * BITS / 8);
    for (int64_t j = 0; j < n; j += 4, values += 4 * step, to += 256) {
        B v[4];
        PW_UNROLL for (int i = 0; i < 4; ++i) {
            const uint8_t* from = values + i * step;
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
    if (n % 32) memset(to, 0, 1024);
}
// Sums over n keys for the limbs of R rows: [row][limb][channel of the tile].
template <bool ALL8, int R> void dot_values(const uint8_t* codes, const uint8_t* limbs, int64_t n, int32_t* sums) {
    I sum[R][2][4];
    PW_UNROLL for (int r = 0; r < R; ++r) PW_UNROLL for (int l = 0; l < 2; ++l) PW_UNROLL for (int t = 0; t < 4; ++t)
        sum[r][l][t] = iset(0);
    if (SIGNED_BYTES && ALL8)
        for (int r = 0; r < R; ++r)
            for (int64_t j = 0; j < n; j += 8) {
                const B x = bload(limbs + r * CHUNK * 8 + 8 * j);
                const I high = begin_dots<ALL8>(begin_dots<ALL8>(iset(0), spread<0>(x)), spread<1>(x));
                const I low = begin_dots<ALL8>(begin_dots<ALL8>(iset(0), spread<2>(x)), spread<3>(x));
                for (int t = 0; t < 4; ++t)
                    sum[r][0][t] = iadd(sum[r][0][t], high), sum[r][1][t] = iadd(sum[r][1][t], low);
            }
    const auto four = [&](const B(&x)[R][2], const uint8_t* from) {
        B c[4];
        PW_UNROLL for (int t = 0; t < 4; ++t) c[t] = bload(from + 64 * t);
        PW_UNROLL for (int r = 0; r < R; ++r) PW_UNROLL for (int l = 0; l < 2; ++l)
            PW_UNROLL for (int t = 0; t < 4; ++t) sum[r][l][t] = dot_bytes<ALL8>(sum[r][l][t], c[t], x[r][l]);
    };
    PW_ROLLED for (int64_t j = 0; j < n; j += 32, codes += 1024)
        PW_ROLLED for (int i = 0; i < 4; ++i, codes += 256, limbs += 64) {  // the keys of a quarter of limbs32
        B all[R], x[R][2];
        PW_UNROLL for (int r = 0; r < R; ++r) all[r] = bload(limbs + r * CHUNK * 8);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<0>(all[r]), x[r][1] = spread<2>(all[r]);
        four(x, codes);
        PW_UNROLL for (int r = 0; r < R; ++r) x[r][0] = spread<1>(all[r]), x[r][1] = spread<3>(all[r]);
        four(x, codes + 1024);
    }
    PW_UNROLL for (int r = 0; r < R; ++r) PW_UNROLL for (int l = 0; l < 2; ++l) PW_UNROLL for (int t = 0; t < 4; ++t)
        bstore4((uint8_t*)(sums + 64 * (2 * r + l) + 4 * t), 64, bytes(sum[r][l][t]));
}
constexpr int VALUE_ROWS = FLOAT_TILES == 2 ? 2 : 1;  // rows whose sums fit registers

// Adds weights [rows][ld] times n values with codes from `key` on to the sums [rows][width]; n is a multiple of 16.
inline void add_coded_values(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key,
                             int64_t n, const float* weights, int64_t ld, const ValueRoom& room, float* sums) {
    const CacheCodes& c = *a.past_values;
    const int64_t channels = std::min<int64_t>(c.channels, p.width), groups = (p.width + channels - 1) / channels,
                  step = c.code_strides[2];
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
        (c.bits == 8 ? &interleave_codes<8> : &interleave_codes<4>)(codes + d * c.bits / 8, step, 16 * quarters, n,
                                                                    room.codes);
        for (int64_t r = 0; r < p.rows; r += VALUE_ROWS) {
            const int rows = (int)std::min<int64_t>(VALUE_ROWS, p.rows - r);
            alignas(64) int32_t found[VALUE_ROWS * 2 * 64];
            const auto run = c.bits == 8 ? (rows == 1 ? &dot_values<true, 1> : &dot_values<true, VALUE_ROWS>)
                                         : (rows == 1 ? &dot_values<false, 1> : &dot_values<false, VALUE_ROWS>);
            run(room.codes, room.limbs + r * CHUNK * 8, n, found);
            for (int i = 0; i < rows; ++i)
                for (int t = 0; t < quarters; ++t) {
                    const int64_t at = 4 * (r + i) + t;
                    const int32_t* sum = found + 128 * i + 16 * t;
                    const I x = of_limbs(iload(sum), iload(sum + 64));
                    float* to = sums + (r + i) * p.width + d + 16 * t;
                    fstore(to, fadd(fload(to), fma(cvt(x), fset(room.step[at]), fset(room.plus[at]))));
                }
        }
    }
}

}  // namespace attend
}  // namespace
