// Attention of few tokens, as in decoding: keys and values are read once, from where they are, for all query heads that
// share them. Chunks of keys give partial results, which are combined in order.
#pragma once

#include "attention_parts.h"

namespace {
namespace attend {

constexpr int FEW_ROWS = FLOAT_TILES == 2 ? 4 : 1;   // rows of q for four keys in registers
constexpr int FEW_TILES = FLOAT_TILES == 2 ? 4 : 1;  // vectors of channels of four rows of sums in registers
constexpr int64_t AHEAD = 2;                         // blocks of 16 keys to prefetch

struct FewRoom : Pieces {
    int64_t q, scores, bias, wide, part;
    FewRoom(const AttentionArgs& a, const AttentionPlan& p) {
        q = take(p.rows * p.width), scores = take(p.rows * CHUNK), bias = take(p.rows * CHUNK);
        wide = take(16 * p.width), part = take(2 * p.part_bytes() / 4);
        (void)a;
    }
};

// Partial result of some keys: sums [rows][width], total [rows], top [rows].
struct Partial {
    float *sums, *total, *top;
    Partial(const AttentionPlan& p, char* at) : sums((float*)at), total(sums + p.rows * p.width), top(total + p.rows) {}
};

// Scores of 16 keys `step` bytes apart for R rows of q: scores[r][16].
template <int KIND, int R> void score16(const char* keys, int64_t step, const float* q, int64_t width, float* scores, int64_t ld) {
    alignas(64) float parts[R][4][16];  // [row][quarter of the channels][key]
    for (int i = 0; i < 4; ++i) {
        const char* k = keys + 4 * i * step;
        F sum[4][R];
        PW_UNROLL for (int j = 0; j < 4; ++j)
            PW_UNROLL for (int r = 0; r < R; ++r) sum[j][r] = fset(0);
        PW_ROLLED for (int64_t d = 0; d < width; d += 16) {
            F x[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) x[j] = load_kind<KIND>(k + j * step + d * bytes_of(KIND));
            PW_UNROLL for (int r = 0; r < R; ++r) {
                const F y = fload(q + r * width + d);
                PW_UNROLL for (int j = 0; j < 4; ++j) sum[j][r] = fma(x[j], y, sum[j][r]);
            }
        }
        PW_UNROLL for (int r = 0; r < R; ++r) {
            B v[4];
            PW_UNROLL for (int j = 0; j < 4; ++j) v[j] = bytes(sum[j][r]);
            transpose4(v);  // in each quarter, word j is of key 4 * i + j
            const F low = fadd(bitcast(lanes(v[0])), bitcast(lanes(v[1]))), high = fadd(bitcast(lanes(v[2])), bitcast(lanes(v[3])));
            bstore4((uint8_t*)(parts[r][0] + 4 * i), 64, bytes(fadd(low, high)));
        }
    }
    PW_UNROLL for (int r = 0; r < R; ++r)
        fstore(scores + r * ld, fadd(fadd(fload(parts[r][0]), fload(parts[r][1])), fadd(fload(parts[r][2]), fload(parts[r][3]))));
}
// sums[r][16 * T] += sum over n keys of weights[r] * values
template <int KIND, int R, int T>
void weigh(const char* values, int64_t step, int64_t n, const float* weights, int64_t ldw, float* sums, int64_t lds) {
    F sum[R][T];
    PW_UNROLL for (int r = 0; r < R; ++r)
        PW_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = fload(sums + r * lds + 16 * t);
    PW_ROLLED for (int64_t j = 0; j < n; ++j, values += step, ++weights) {
        F v[T];
        PW_UNROLL for (int t = 0; t < T; ++t) v[t] = load_kind<KIND>(values + 16 * t * bytes_of(KIND));
        PW_UNROLL for (int r = 0; r < R; ++r) {
            const F w = fset(weights[r * ldw]);
            PW_UNROLL for (int t = 0; t < T; ++t) sum[r][t] = fma(w, v[t], sum[r][t]);
        }
    }
    PW_UNROLL for (int r = 0; r < R; ++r)
        PW_UNROLL for (int t = 0; t < T; ++t) fstore(sums + r * lds + 16 * t, sum[r][t]);
}

using Score16 = void (*)(const char*, int64_t, const float*, int64_t, float*, int64_t);
using Weigh = void (*)(const char*, int64_t, int64_t, const float*, int64_t, float*, int64_t);
template <int KIND, int R = 1> Score16 score_of(int rows) {
    if constexpr (R >= FEW_ROWS) return &score16<KIND, R>;
    else return rows == R ? &score16<KIND, R> : score_of<KIND, R + 1>(rows);
}
template <int KIND, int T, int R = 1> Weigh weigh_of(int rows) {
    if constexpr (R >= 4) return &weigh<KIND, R, T>;
    else return rows == R ? &weigh<KIND, R, T> : weigh_of<KIND, T, R + 1>(rows);
}
inline Score16 score_of(int kind, int rows) {
    return kind == BF16 ? score_of<BF16>(rows) : kind == F16 ? score_of<F16>(rows) : score_of<F32>(rows);
}
inline Weigh weigh_of(int kind, int rows, int tiles) {
    if (tiles == 1) return kind == BF16 ? weigh_of<BF16, 1>(rows) : kind == F16 ? weigh_of<F16, 1>(rows) : weigh_of<F32, 1>(rows);
    return kind == BF16 ? weigh_of<BF16, FEW_TILES>(rows) : kind == F16 ? weigh_of<F16, FEW_TILES>(rows) : weigh_of<F32, FEW_TILES>(rows);
}

inline void prefetch_rows(const char* p, int64_t step, int64_t bytes) {
    for (int i = 0; i < 16; ++i)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + i * step + at);
}

inline void start(const AttentionPlan& p, const Partial& part) {
    memset(part.sums, 0, (size_t)(p.rows * p.width) * 4);
    for (int64_t r = 0; r < p.rows; ++r) part.total[r] = 0, part.top[r] = NEVER;
}
// The partial result of keys [key, key + n), n at most CHUNK. q: rows as load_queries writes them.
inline void few_keys(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t key, int64_t n, const float* q,
                     char* space, const FewRoom& room, const Partial& part) {
    float *scores = (float*)(space + room.scores), *wide = (float*)(space + room.wide);
    const int64_t up = (n + 15) / 16 * 16, each = size_of(a.kind), bytes = a.size * each;
    start(p, part);
    Bias bias;
    if (!take_bias(a, p, b, shared, 0, a.tokens, key, n, CHUNK, (float*)(space + room.bias), &bias)) return;
    for (int64_t j = 0; j < up; j += 16) {
        const char* k = key_at(a, b, shared, key + j);
        int64_t step = a.key_strides[2] * each;
        int kind = a.kind;
        if (j + 16 * AHEAD < n) prefetch_rows(k + 16 * AHEAD * step, step, bytes);
        if (a.size != p.width || j + 16 > n) {
            for (int64_t i = 0; i < 16; ++i)
                if (j + i < n) widen_row(k + i * step, a.kind, a.size, p.width, wide + i * p.width);
                else memset(wide + i * p.width, 0, (size_t)p.width * 4);
            k = (const char*)wide, step = p.width * 4, kind = F32;
        }
        for (int64_t r = 0; r < p.rows; r += FEW_ROWS)
            score_of(kind, (int)std::min<int64_t>(FEW_ROWS, p.rows - r))(k, step, q + r * p.width, p.width, scores + r * CHUNK + j, CHUNK);
    }
    for (int64_t r = 0; r < p.rows; ++r) {
        float* x = scores + r * CHUNK;
        const float* add = bias.of(r);
        part.top[r] = a.softcap > 0 ? finish_scores<true>(a, x, add, up) : finish_scores<false>(a, x, add, up);
        part.total[r] = fsum(take_weights(x, part.top[r], up, fset(0)));
    }
    for (int64_t j = 0; j < n; j += 16) {
        const int64_t count = std::min<int64_t>(16, n - j);
        const char* v = value_at(a, b, shared, key + j);
        int64_t step = a.value_strides[2] * each;
        int kind = a.kind;
        if (j + 16 * AHEAD < n) prefetch_rows(v + 16 * AHEAD * step, step, bytes);
        if (a.size != p.width) {
            for (int64_t i = 0; i < count; ++i) widen_row(v + i * step, a.kind, a.size, p.width, wide + i * p.width);
            v = (const char*)wide, step = p.width * 4, kind = F32;
        }
        for (int64_t r = 0; r < p.rows; r += 4)
            for (int64_t d = 0; d < p.width;) {
                const int tiles = p.width - d >= 16 * FEW_TILES ? FEW_TILES : 1;
                weigh_of(kind, (int)std::min<int64_t>(4, p.rows - r), tiles)(v + d * size_of(kind), step, count, scores + r * CHUNK + j, CHUNK,
                                                                           part.sums + r * p.width + d, p.width);
                d += 16 * tiles;
            }
    }
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
        const F f = fexp(fsub(fset(to.top[r]), base)), g = fexp(fsub(fset(from.top[r] == NEVER ? 0 : from.top[r]), base));
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
inline void one_chunk(const AttentionArgs& a, const AttentionPlan& p, int64_t heads, int64_t chunk, char* space, const FewRoom& room, const Partial& part) {
    const int64_t key = (p.chunk0 + chunk) * CHUNK, end = visible(a, 0, a.tokens).end;
    few_keys(a, p, heads / a.shared, heads % a.shared, key, std::min(CHUNK, end - key), (const float*)(space + room.q), space, room, part);
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
