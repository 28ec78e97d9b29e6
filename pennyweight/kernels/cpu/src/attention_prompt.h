// Attention of many tokens. A unit of work goes once over the keys that its tokens see, in blocks: keys are packed
// transposed, in tiles of 16 keys [width][16], values in rows; scores and sums are products with blocks of registers.
// The maximum of a row may grow from block to block, and its sums are then scaled down (online softmax: Milakov and
// Gimelshein 2018).
#pragma once

#include "attention_cache.h"

namespace {
namespace attend {

struct PromptRoom : Pieces {
    int64_t q, sums, totals, tops, keys, values, wide, scores, bias;
    PromptRoom(const AttentionArgs& a, const AttentionPlan& p) {
        const int64_t rows = std::min(p.tokens, a.tokens) * p.group;
        q = take(rows * p.width), sums = take(rows * p.width), totals = take(rows * 16), tops = take(rows + 16);
        keys = take(p.block * p.width), values = take(p.block * p.width), wide = take(16 * p.width);
        scores = take(FLOAT_ROWS * p.block), bias = take(rows * p.block);
    }
};

// 16 rows of `width` floats, `step` floats apart, as [width][16].
inline void transpose16(const float* from, int64_t step, int64_t width, float* to) {
    for (int64_t c = 0; c < width; c += 4) {
        B v[4];
        PW_UNROLL for (int i = 0; i < 4; ++i) v[i] = bload4((const uint8_t*)(from + i * step + c), 16 * step);
        transpose4(v);
        PW_UNROLL for (int i = 0; i < 4; ++i) bstore((uint8_t*)(to + (c + i) * 16), v[i]);
    }
}
// Keys [key, key + n) as tiles; keys beyond are 0.
inline void pack_keys(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key, int64_t n,
                      float* wide, float* to) {
    for (int64_t j = 0; j < n; j += 16, to += 16 * p.width) {
        if (a.kind == F32 && a.size == p.width && j + 16 <= n && key + j >= a.past) {
            transpose16((const float*)key_at(a, b, shared, key + j), a.key_strides[2], p.width, to);
            continue;
        }
        for (int64_t i = 0; i < 16; ++i)
            if (j + i < n) widen_key(a, p, b, shared, key + j + i, wide + i * p.width);
            else memset(wide + i * p.width, 0, (size_t)p.width * 4);
        transpose16(wide, p.width, p.width, to);
    }
}
inline void pack_values(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key,
                        int64_t n, float* to) {
    for (int64_t j = 0; j < n; ++j) widen_value(a, p, b, shared, key + j, to + j * p.width);
}
inline bool all_finite(const float* x, int64_t n) {
    I top = iset(0);
    for (int64_t i = 0; i < n; i += 16) top = imax(top, iand(bits(fload(x + i)), iset(0x7fffffff)));
    return imost(top) < 0x7f800000;
}

// c[t][16 * n ..] = sum over k of x[t][k] * y[n][k][16] (+ c * factor[t], if there are factors) for R rows and T tiles.
// Rows are ldx and ldc floats apart, the tiles of y `tile` and their rows ldy.
template <int R, int T>
void multiply(const float* x, int64_t ldx, const float* y, int64_t ldy, int64_t tile, int64_t k, float* c, int64_t ldc,
              const float* factor) {
    F sum[R][T];
    PW_UNROLL for (int t = 0; t < R; ++t) PW_UNROLL for (int n = 0; n < T; ++n) sum[t][n] =
        factor ? fmul(fload(c + t * ldc + 16 * n), fset(factor[t])) : fset(0);
    PW_ROLLED for (int64_t i = 0; i < k; ++i, y += ldy, ++x) {
        F v[T];
        PW_UNROLL for (int n = 0; n < T; ++n) v[n] = fload(y + n * tile);
        PW_UNROLL for (int t = 0; t < R; ++t) {
            const F w = fset(x[t * ldx]);
            PW_UNROLL for (int n = 0; n < T; ++n) sum[t][n] = fma(w, v[n], sum[t][n]);
        }
    }
    PW_UNROLL for (int t = 0; t < R; ++t) PW_UNROLL for (int n = 0; n < T; ++n) fstore(c + t * ldc + 16 * n, sum[t][n]);
}
using Multiply = void (*)(const float*, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t,
                          const float*);
template <int T, int R = 1> Multiply multiply_of(int rows) {
    if constexpr (R == FLOAT_ROWS) return &multiply<R, T>;
    else return rows == R ? &multiply<R, T> : multiply_of<T, R + 1>(rows);
}

inline void prompt_unit(const AttentionArgs& a, const AttentionPlan& p, int64_t unit, char* space) {
    const PromptRoom room(a, p);
    const auto at = [&](int64_t piece) { return (float*)(space + piece); };
    float *q = at(room.q), *sums = at(room.sums), *totals = at(room.totals), *tops = at(room.tops);
    float *keys = at(room.keys), *values = at(room.values), *scores = at(room.scores);
    // The last tokens see most keys, and come first.
    const int64_t heads = a.batch * a.shared, s0 = (p.token_blocks - 1 - unit / heads) * p.tokens;
    const int64_t b = unit % heads / a.shared, shared = unit % heads % a.shared;
    const int64_t tokens = std::min(p.tokens, a.tokens - s0), rows = tokens * p.group;
    load_queries(a, p, b, shared, s0, tokens, q);
    memset(sums, 0, (size_t)(rows * p.width) * 4);
    memset(totals, 0, (size_t)rows * 64);
    for (int64_t r = 0; r < rows; ++r) tops[r] = NEVER;

    const Keys span = visible(a, s0, tokens), least = seen_by_all(a, s0, tokens);
    for (int64_t key = span.first / p.block * p.block; key < span.end; key += p.block) {
        const int64_t n = std::min(p.block, span.end - key);
        Bias bias;
        if (!take_bias(a, p, b, shared, s0, tokens, key, n, p.block, at(room.bias), &bias)) continue;
        pack_keys(a, p, b, shared, key, n, at(room.wide), keys);
        pack_values(a, p, b, shared, key, n, values);
        // Rows in registers together read the values that any of them sees; for the others these weigh 0. If they are
        // not finite each row is alone: it must not depend on others, nor on how many rows the registers have room for.
        const bool alone = (key < least.first || least.end < key + n) && !all_finite(values, n * p.width);
        const int most_rows = alone ? 1 : FLOAT_ROWS;
        for (int64_t r0 = 0; r0 < rows; r0 += most_rows) {
            const int R = (int)std::min<int64_t>(most_rows, rows - r0);
            const int64_t s = s0 + r0 / p.group;
            const Keys own = visible(a, s, (r0 + R - 1) / p.group - r0 / p.group + 1);
            const int64_t first = std::max<int64_t>(0, own.first - key) / 16 * 16, end = std::min(n, own.end - key);
            if (first >= end) continue;
            const int64_t lanes = (end - first + 15) / 16 * 16;
            for (int64_t j = 0; j < lanes;) {
                const int T = lanes - j >= 16 * FLOAT_TILES ? FLOAT_TILES : 1;
                (T == 1 ? multiply_of<1>(R) : multiply_of<FLOAT_TILES>(R))(
                    q + r0 * p.width, p.width, keys + (first + j) * p.width, 16, 16 * p.width, p.width, scores + j,
                    p.block, nullptr);
                j += 16 * T;
            }
            alignas(64) float factor[16];
            for (int t = 0; t < R; ++t) {
                float* x = scores + t * p.block;
                const float *more = bias.of(r0 + t), *add = more ? more + first : nullptr;
                const float most =
                    a.softcap > 0 ? finish_scores<true>(a, x, add, lanes) : finish_scores<false>(a, x, add, lanes);
                factor[t] = most > tops[r0 + t] ? most : tops[r0 + t];
            }
            {  // the new maxima take the place of the old ones
                alignas(64) float old[16];
                for (int t = 0; t < 16; ++t) old[t] = t < R ? tops[r0 + t] : 0;
                for (int t = 0; t < R; ++t) tops[r0 + t] = factor[t];
                for (int t = R; t < 16; ++t) factor[t] = 0;
                const F top = fload(factor), base = fabove(top, fset(NEVER), top, fset(0));
                fstore(factor, fexp(fsub(fload(old), base)));
            }
            for (int t = 0; t < R; ++t) {
                float* total = totals + (r0 + t) * 16;
                fstore(total,
                       take_weights(scores + t * p.block, tops[r0 + t], lanes, fmul(fload(total), fset(factor[t]))));
            }
            for (int64_t d = 0; d < p.width;) {
                const int T = p.width - d >= 16 * FLOAT_TILES ? FLOAT_TILES : 1;
                (T == 1 ? multiply_of<1>(R) : multiply_of<FLOAT_TILES>(R))(
                    scores, p.block, values + first * p.width + d, p.width, 16, end - first, sums + r0 * p.width + d,
                    p.width, factor);
                d += 16 * T;
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        store_output(a, p, b, s0 + r / p.group, shared * p.group + r % p.group, sums + r * p.width,
                     fsum(fload(totals + r * 16)));
}

}  // namespace attend
}  // namespace
