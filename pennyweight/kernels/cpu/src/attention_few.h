// Attention of few tokens, as in decoding: keys and values are read once, from where they are, for all query heads that
// share them. Chunks of keys give partial results, which are combined in order.
#pragma once

#include "attention_quantized.h"

namespace {
namespace attend {

constexpr int FEW_ROWS = FLOAT_TILES == 2 ? 4 : 1;   // rows of q for four keys in registers
constexpr int FEW_TILES = FLOAT_TILES == 2 ? 4 : 1;  // vectors of channels of four rows of sums in registers
struct FewRoom : Pieces {
    int64_t q, scores, bias, wide, part;
    int64_t limbs, base, step, scaled, scales, values, value_limbs, value_numbers, found;  // only for a past of codes
    int64_t turned;                                                                        // q for rotated keys
    FewRoom(const AttentionArgs& a, const AttentionPlan& p) {
        q = take(p.rows * p.width), scores = take((p.rows + 3) / 4 * 4 * CHUNK), bias = take(p.rows * CHUNK);
        wide = take(16 * p.width), part = take(2 * p.part_bytes() / 4);
        const bool keys = plain_keys(a, p), sums = plain_values(a, p);
        const int64_t packs = keys ? (p.rows + 3) / 4 : 0, groups = keys ? most_groups(*a.past_keys) : 0,
                      wide = limb_width(p.width);
        limbs = take(groups * packs * 2 * wide), base = take(groups * packs * 16), step = take(packs * 16);
        scaled = take(packs * 4 * wide), scales = take(2 * groups * wide);
        turned = take(keys && a.past_keys->hadamard ? p.rows * p.width : 0);
        values = take(sums ? TILE * CHUNK / 4 : 0), value_limbs = take(sums ? p.rows * 2 * CHUNK : 0);
        value_numbers = take(sums ? 2 * CHUNK : 0), found = take(sums ? 8 * p.rows : 0);
    }
    QueryLimbs queries(const AttentionArgs& a, const AttentionPlan& p, char* space) const {
        const auto at = [&](int64_t piece) { return (float*)(space + piece); };
        return {(uint8_t*)space + limbs,
                at(base),
                at(step),
                at(scaled),
                at(scales),
                at(scales) + most_groups(*a.past_keys) * limb_width(p.width)};
    }
    ValueRoom of_values(char* space, int64_t rows) const {
        float *f = (float*)(space + value_numbers), *g = (float*)(space + found);
        return {(uint8_t*)space + values, (uint8_t*)space + value_limbs, f, f + CHUNK, g, g + 4 * rows};
    }
};

// Partial result of some keys: sums [rows][width], total [rows], top [rows].
struct Partial {
    float *sums, *total, *top;
    Partial(const AttentionPlan& p, char* at) : sums((float*)at), total(sums + p.rows * p.width), top(total + p.rows) {}
};

PW_INLINE void prefetch_row(const char* p, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}
// Scores of 16 keys `step` bytes apart for R rows of q: scores[r][16]. ahead: bytes to what is prefetched, or 0.
template <int KIND, int R>
void score16(const char* keys, int64_t step, int64_t ahead, const float* q, int64_t width, float* scores, int64_t ld) {
    alignas(64) float parts[R][4][16];  // [row][quarter of the channels][key]
    for (int i = 0; i < 4; ++i) {
        const char* k = keys + 4 * i * step;
        if (ahead)
            for (int j = 0; j < 4; ++j) prefetch_row(k + j * step + ahead, width / 16 * 16 * bytes_of(KIND));
        F sum[4][R];
        PW_UNROLL for (int j = 0; j < 4; ++j) PW_UNROLL for (int r = 0; r < R; ++r) sum[j][r] = fset(0);
        PW_ROLLED for (int64_t d = 0; d < width; d += 16) {
            F x[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) x[j] = load_kind<KIND>(k + j * step + d / 16 * 16 * bytes_of(KIND));
            PW_UNROLL for (int r = 0; r < R; ++r) {
                const F y = fload(q + r * width + d);
                PW_UNROLL for (int j = 0; j < 4; ++j) sum[j][r] = fma(x[j], y, sum[j][r]);
            }
        }
        PW_UNROLL for (int r = 0; r < R; ++r) {
            B v[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) v[j] = bytes(sum[j][r]);
            transpose4(v);  // in each quarter, word j is of key 4 * i + j
            const F low = fadd(bitcast(lanes(v[0])), bitcast(lanes(v[1]))),
                    high = fadd(bitcast(lanes(v[2])), bitcast(lanes(v[3])));
            bstore4((uint8_t*)(parts[r][0] + 4 * i), 64, bytes(fadd(low, high)));
        }
    }
    PW_UNROLL for (int r = 0; r < R; ++r) fstore(scores + r * ld, fadd(fadd(fload(parts[r][0]), fload(parts[r][1])),
                                                                       fadd(fload(parts[r][2]), fload(parts[r][3]))));
}
// sums[r][16 * T] += sum over n keys of weights[r] * values
template <int KIND, int R, int T>
void weigh(const char* values, int64_t step, int64_t ahead, int64_t n, const float* weights, int64_t ldw, float* sums,
           int64_t lds) {
    F sum[R][T];
    PW_UNROLL for (int r = 0; r < R; ++r) PW_UNROLL for (int t = 0; t < T; ++t) sum[r][t] =
        fload(sums + r * lds + 16 * t);
    PW_ROLLED for (int64_t j = 0; j < n; ++j, values += step, ++weights) {
        F v[T];
        if (ahead) prefetch_row(values + ahead, T * 16 * bytes_of(KIND));
        PW_UNROLL for (int t = 0; t < T; ++t) v[t] = load_kind<KIND>(values + t * 16 * bytes_of(KIND));
        PW_UNROLL for (int r = 0; r < R; ++r) {
            const F w = fset(weights[r * ldw]);
            PW_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = fma(w, v[t], sum[r][t]);
        }
    }
    PW_UNROLL for (int r = 0; r < R; ++r) PW_UNROLL for (int t = 0; t < T; ++t)
        fstore(sums + r * lds + 16 * t, sum[r][t]);
}

using Score16 = void (*)(const char*, int64_t, int64_t, const float*, int64_t, float*, int64_t);
using Weigh = void (*)(const char*, int64_t, int64_t, int64_t, const float*, int64_t, float*, int64_t);
template <int KIND, int R = 1> Score16 score_of(int rows) {
    if constexpr (R >= FEW_ROWS) return &score16<KIND, R>;
    else return rows == R ? &score16<KIND, R> : score_of<KIND, R + 1>(rows);
}
template <int KIND, int T, int R = 1> Weigh weigh_of(int rows) {
    if constexpr (R >= 4) return &weigh<KIND, R, T>;
    else return rows == R ? &weigh<KIND, R, T> : weigh_of<KIND, T, R + 1>(rows);
}
inline Score16 score_of(int kind, int rows) {
    switch (kind) {
        case BF16: return score_of<BF16>(rows);
        case F16: return score_of<F16>(rows);
        default: return score_of<F32>(rows);
    }
}
template <int T> Weigh weigh_of(int kind, int rows) {
    switch (kind) {
        case BF16: return weigh_of<BF16, T>(rows);
        case F16: return weigh_of<F16, T>(rows);
        default: return weigh_of<F32, T>(rows);
    }
}
// Adds weights [rows][16], `ldw` apart, times `count` rows of values to `width` channels of sums.
inline void add_values(const AttentionPlan& p, int kind, const char* values, int64_t step, int64_t ahead, int64_t count,
                       const float* weights, int64_t ldw, float* sums, int64_t width) {
    for (int64_t r = 0; r < p.rows; r += 4) {
        const int rows = (int)std::min<int64_t>(4, p.rows - r);
        for (int64_t d = 0; d < width;) {
            const int tiles = width - d >= 16 * FEW_TILES ? FEW_TILES : width - d >= 32 && FEW_TILES > 2 ? 2 : 1;
            (tiles == 1   ? weigh_of<1>(kind, rows)
             : tiles == 2 ? weigh_of<std::min(2, FEW_TILES)>(kind, rows)
                          : weigh_of<FEW_TILES>(kind, rows))(values + d / 16 * 16 * size_of(kind), step, r ? 0 : ahead,
                                                             count, weights + r * ldw, ldw, sums + r * p.width + d,
                                                             p.width);
            d += 16 * tiles;
        }
    }
}

inline void start(const AttentionPlan& p, const Partial& part) {
    memset(part.sums, 0, (size_t)(p.rows * p.width) * 4);
    for (int64_t r = 0; r < p.rows; ++r) part.total[r] = 0, part.top[r] = NEVER;
}
// What the two passes over a chunk of keys have in common: keys [key, key + n) of one shared head, n at most CHUNK.
struct FewKeys {
    const AttentionArgs& a;
    const AttentionPlan& p;
    const FewRoom& room;
    char* space;
    int64_t b, shared, key, n;
    float* at(int64_t piece) const { return (float*)(space + piece); }
    bool coded(int64_t j) const { return key + j + 16 <= a.past; }  // 16 keys
};

// Scores [rows][CHUNK] of the keys.
inline void few_scores(const FewKeys& k, const float* q, float* scores) {
    const AttentionArgs& a = k.a;
    const AttentionPlan& p = k.p;
    float* wide = k.at(k.room.wide);
    int64_t j = 0;
    if (plain_keys(a, p) && k.coded(0)) {
        const CacheCodes &c = *a.past_keys, &v = *a.past_values;
        const QueryLimbs limbs = k.room.queries(a, p, k.space);
        const float* turned = q;  // a score is the same if q and the key are both rotated
        if (c.hadamard) {
            float* to = k.at(k.room.turned);
            memcpy(to, q, (size_t)(p.rows * p.width) * 4);
            for (int64_t r = 0; r < p.rows; ++r) rotate_blocks(to + r * p.width, p.width, c.hadamard);
            turned = to;
        }
        take_query_limbs(a, p, k.b, k.shared, k.key, std::min(k.key + k.n, a.past), turned, limbs);
        for (; j < k.n && k.coded(j); j += 16) {
            const int64_t key = k.key + j;
            score_codes(p, c.bits, codes_at(c, k.b, k.shared, key), c.code_strides[2],
                        (const char*)codes_at(v, k.b, k.shared, key), v.code_strides[2], limbs,
                        key / c.tokens - k.key / c.tokens, scores + j, CHUNK);
        }
    }
    for (; j < k.n; j += 16) {
        const int64_t key = k.key + j;
        int kind = F32;
        int64_t step = p.width * 4, ahead = 0;
        const char* from = (const char*)wide;
        if (a.size == p.width && j + 16 <= k.n && key >= a.past) {
            kind = a.kind, from = key_at(a, k.b, k.shared, key), step = a.key_strides[2] * size_of(kind),
            ahead = AHEAD * step;
            const char* soon = value_at(a, k.b, k.shared, key);
            for (int64_t i = 0; i < 16; ++i, soon += a.value_strides[2] * size_of(kind))
                for (int64_t at = 0; at < p.width * size_of(kind); at += 64) __builtin_prefetch(soon + at, 0, 2);
        } else {
            for (int64_t i = 0; i < 16; ++i)
                if (j + i < k.n) widen_key(a, p, k.b, k.shared, key + i, wide + i * p.width);
                else memset(wide + i * p.width, 0, (size_t)p.width * 4);
        }
        for (int64_t r = 0; r < p.rows; r += FEW_ROWS)
            score_of(kind, (int)std::min<int64_t>(FEW_ROWS, p.rows - r))(from, step, r ? 0 : ahead, q + r * p.width,
                                                                         p.width, scores + r * CHUNK + j, CHUNK);
    }
}
inline void few_values(const FewKeys& k, const float* scores, float* sums) {
    const AttentionArgs& a = k.a;
    const AttentionPlan& p = k.p;
    float* wide = k.at(k.room.wide);
    int64_t j = 0;
    if (plain_values(a, p) && k.coded(0)) {
        j = std::min(CHUNK, (a.past - k.key) / 16 * 16);
        add_coded_values(a, p, k.b, k.shared, k.key, j, scores, CHUNK, k.room.of_values(k.space, p.rows), sums);
        if (const int64_t block = a.past_values->hadamard)  // so far, the sums are of rotated values only
            for (int64_t r = 0; r < p.rows; ++r) rotate_blocks(sums + r * p.width, p.width, block);
    }
    for (; j < k.n; j += 16) {
        const int64_t count = std::min<int64_t>(16, k.n - j), key = k.key + j;
        if (a.size == p.width && key >= a.past) {
            const int64_t step = a.value_strides[2] * size_of(a.kind);
            add_values(p, a.kind, value_at(a, k.b, k.shared, key), step, AHEAD * step, count, scores + j, CHUNK, sums,
                       p.width);
        } else {
            for (int64_t i = 0; i < count; ++i) widen_value(a, p, k.b, k.shared, key + i, wide + i * p.width);
            add_values(p, F32, (const char*)wide, p.width * 4, 0, count, scores + j, CHUNK, sums, p.width);
        }
    }
}

// The partial result of the keys. q: rows as load_queries writes them.
inline void few_keys(const FewKeys& k, const float* q, const Partial& part) {
    const AttentionArgs& a = k.a;
    float* scores = k.at(k.room.scores);
    start(k.p, part);
    Bias bias;
    if (!take_bias(a, k.p, k.b, k.shared, 0, a.tokens, k.key, k.n, CHUNK, k.at(k.room.bias), &bias)) return;
    few_scores(k, q, scores);
    const int64_t up = (k.n + 15) / 16 * 16;
    for (int64_t r = 0; r < k.p.rows; ++r) {
        float* x = scores + r * CHUNK;
        const float* add = bias.of(r);
        part.top[r] = a.softcap > 0 ? finish_scores<true>(a, x, add, up) : finish_scores<false>(a, x, add, up);
        part.total[r] = fsum(take_weights(x, part.top[r], up, fset(0)));
    }
    few_values(k, scores, part.sums);
}

inline float flane(F a) {
    alignas(64) float t[16];
    fstore(t, a);
    return t[0];
}
// to += from
inline void combine(const AttentionPlan& p, const Partial& to, const Partial& from) {
    for (int64_t r = 0; r < p.rows; ++r) {
        if (from.top[r] == NEVER && from.total[r] == 0) continue;  // none of its keys is seen
        const float top = from.top[r] > to.top[r] ? from.top[r] : to.top[r];
        const F base = fset(top == NEVER ? 0 : top);
        const F f = fexp(fsub(fset(to.top[r]), base)),
                g = fexp(fsub(fset(from.top[r] == NEVER ? 0 : from.top[r]), base));
        to.total[r] = to.total[r] * flane(f) + from.total[r] * flane(g);
        to.top[r] = top;
        for (int64_t d = r * p.width; d < (r + 1) * p.width; d += 16)
            fstore(to.sums + d, fma(f, fload(to.sums + d), fmul(g, fload(from.sums + d))));
    }
}
inline void few_output(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, const Partial& part) {
    for (int64_t r = 0; r < p.rows; ++r)
        store_output(a, p, b, r / p.group, shared * p.group + r % p.group, part.sums + r * p.width, part.total[r]);
}
inline void one_chunk(const AttentionArgs& a, const AttentionPlan& p, int64_t heads, int64_t chunk, char* space,
                      const FewRoom& room, const Partial& part) {
    const int64_t key = (p.chunk0 + chunk) * CHUNK, end = visible(a, 0, a.tokens).end;
    const FewKeys k{a, p, room, space, heads / a.shared, heads % a.shared, key, std::min(CHUNK, end - key)};
    few_keys(k, k.at(room.q), part);
}

// Both phases at once, for one shared head of one sequence.
inline void few_unit(const AttentionArgs& a, const AttentionPlan& p, int64_t unit, char* space) {
    const FewRoom room(a, p);
    const Partial all(p, space + room.part), part(p, space + room.part + p.part_bytes());
    load_queries(a, p, unit / a.shared, unit % a.shared, 0, a.tokens, (float*)(space + room.q));
    start(p, all);
    for (int64_t c = 0; c < p.chunks; ++c) {
        one_chunk(a, p, unit, c, space, room, part);
        combine(p, all, part);
    }
    few_output(a, p, unit / a.shared, unit % a.shared, all);
}
inline void few_chunk(const AttentionArgs& a, const AttentionPlan& p, int64_t unit, char* space, char* shared) {
    const FewRoom room(a, p);
    const int64_t heads = unit / p.chunks;
    load_queries(a, p, heads / a.shared, heads % a.shared, 0, a.tokens, (float*)(space + room.q));
    one_chunk(a, p, heads, unit % p.chunks, space, room, Partial(p, shared + unit * p.part_bytes()));
}
inline void few_combine(const AttentionArgs& a, const AttentionPlan& p, int64_t unit, char* space, char* shared) {
    const FewRoom room(a, p);
    const Partial all(p, space + room.part);
    start(p, all);
    for (int64_t c = 0; c < p.chunks; ++c) combine(p, all, Partial(p, shared + (unit * p.chunks + c) * p.part_bytes()));
    few_output(a, p, unit / a.shared, unit % a.shared, all);
}

}  // namespace attend
}  // namespace
