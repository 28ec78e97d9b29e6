// What attention of prompts and of few tokens have in common: how a call is divided, which keys a token sees, masks,
// and the weights of a row. Included by attention.h, which describes the result.
#pragma once

#include <algorithm>

#include "schedule.h"
#include "vector_math.h"

namespace {
namespace attend {

constexpr int64_t FEW_TOKENS = 4;    // calls with so many tokens read keys and values once, directly
constexpr int64_t CHUNK = 256;       // keys of a unit of work for few tokens
constexpr int64_t AHEAD = 24;        // keys from what is read to what is prefetched
constexpr int64_t SPLIT_BELOW = 64;  // chunks are units of their own if there are fewer sequences times shared heads
constexpr float NEVER = -__builtin_inff();

struct Keys {
    int64_t first, end;
};

// The keys that query token s sees without the mask.
inline Keys visible(const AttentionArgs& a, int64_t s) {
    const int64_t at = a.length - a.tokens + s;
    const int64_t first = a.window ? std::max<int64_t>(0, at - a.window + 1) : 0;
    const int64_t end = a.causal ? std::min(a.length, at + 1) : a.length;
    return {std::min(first, std::max<int64_t>(0, end)), std::max<int64_t>(0, end)};
}
inline Keys visible(const AttentionArgs& a, int64_t s, int64_t tokens) {
    return {visible(a, s).first, visible(a, s + tokens - 1).end};
}
// Those that all of them see.
inline Keys seen_by_all(const AttentionArgs& a, int64_t s, int64_t tokens) {
    return {visible(a, s + tokens - 1).first, visible(a, s).end};
}

// How a call is divided. Depends on its sizes only.
struct AttentionPlan {
    int64_t group;  // query heads that share their keys
    int64_t width;  // channels of a head, in whole vectors
    bool few;       // few tokens
    // Few tokens: chunks of keys, counted from the first that is seen.
    int64_t rows, chunk0, chunks;
    bool split;  // chunks are units of work
    // Prompts: blocks of keys, and of query tokens.
    int64_t block, tokens, token_blocks;

    explicit AttentionPlan(const AttentionArgs& a) {
        group = a.heads / a.shared;
        width = (a.size + 15) / 16 * 16;
        few = a.tokens <= FEW_TOKENS;
        rows = a.tokens * group;
        const Keys keys = visible(a, 0, a.tokens);
        chunk0 = keys.first / CHUNK;
        chunks = keys.end > keys.first ? (keys.end + CHUNK - 1) / CHUNK - chunk0 : 0;
        split = chunks > 1 && a.batch * a.shared < SPLIT_BELOW;
        block = width <= 128 ? 64 : 32;
        tokens = std::max<int64_t>(1, (width <= 64 ? 128 : 64) / group);
        token_blocks = (a.tokens + tokens - 1) / tokens;
    }
    // A partial result: rows of sums of weighted values, then sums of weights, then maxima.
    int64_t part_bytes() const { return whole_lines(rows * (width + 2) * 4); }
};

// Divides memory into pieces that begin with a line.
struct Pieces {
    int64_t bytes = 0;
    int64_t take(int64_t floats) {
        const int64_t at = bytes;
        bytes += whole_lines(floats * 4);
        return at;
    }
};

// Rows of q of `tokens` tokens from s on for the heads of a group: [tokens][group][width] float32, times the scale.
inline void load_queries(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t s,
                         int64_t tokens, float* out) {
    const F scale = fset(a.scale);
    const int64_t each = size_of(a.q_kind);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t g = 0; g < p.group; ++g, out += p.width) {
            const int64_t at = b * a.q_strides[0] + (s + t) * a.q_strides[1] + (shared * p.group + g) * a.q_strides[2];
            widen_row((const char*)a.q + at * each, a.q_kind, a.size, p.width, out);
            for (int64_t d = 0; d < p.width; d += 16) fstore(out + d, fmul(fload(out + d), scale));
        }
}
// Writes sums / total as the output of a row.
inline void store_output(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t s, int64_t head,
                         const float* sums, float total) {
    const int64_t each = size_of(a.out_kind);
    char* out = (char*)a.out + (b * a.out_strides[0] + s * a.out_strides[1] + head * a.out_strides[2]) * each;
    const F part = fdiv(fset(1), fset(total == 0 ? 1.0f : total));
    for (int64_t d = 0; d < p.width; d += 16) {
        const F y = fmul(fload(sums + d), part);
        if (d + 16 <= a.size) {
            store16(out, a.out_kind, d, y);
        } else {
            alignas(64) char tail[64];
            store16(tail, a.out_kind, 0, y);
            memcpy(out + d * each, tail, (size_t)((a.size - d) * each));
        }
    }
}
// What is added to the scores of a block of keys: the mask, and -inf for a key that is not seen.
struct Bias {
    const float* rows;  // null: nothing
    int64_t stride;     // floats from row to row; 0: one row for all
    int64_t per;        // query rows of a row of it
    const float* of(int64_t row) const { return rows ? rows + row / per * stride : nullptr; }
};

// 16 numbers of the mask, from key j on; of the last `n` < 16 keys only these are read.
inline F mask16(const AttentionArgs& a, const char* row, int64_t j, int64_t n) {
    const int64_t each = size_of(a.mask_kind), step = a.mask_strides[3];
    alignas(64) char some[64];
    const char* from = row + j * each;
    if (step != 1 || n < 16) {
        memset(some, 0, sizeof some);
        for (int64_t i = 0; i < std::min<int64_t>(16, n); ++i)
            memcpy(some + i * each, row + (j + i) * step * each, (size_t)each);
        from = some;
    }
    if (a.mask_kind != U8) return load16(from, a.mask_kind, 0);
    return bitcast(iabove(iload8u((const uint8_t*)from), iset(0), iset(0), bits(fset(NEVER))));
}

// The bias of keys [key, key + n), n at most `ld`, for tokens [s, s + tokens) of a group of heads; `room` has a row of
// `ld` floats for each of their rows. Returns whether any of the keys is seen by any of the rows.
inline bool take_bias(const AttentionArgs& a, const AttentionPlan& p, int64_t b, int64_t shared, int64_t s,
                      int64_t tokens, int64_t key, int64_t n, int64_t ld, float* room, Bias* out) {
    alignas(64) static constexpr int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Keys least = seen_by_all(a, s, tokens);
    const bool all = least.first <= key && key + n <= least.end;
    *out = {nullptr, 0, 1};
    if (!a.mask && all && n % 16 == 0) return true;
    const bool by_head = a.mask && a.mask_strides[1] != 0 && p.group > 1;
    const bool one = all && !by_head && (!a.mask || a.mask_strides[2] == 0);
    const int64_t heads = by_head ? p.group : 1, each = size_of(a.mask_kind);
    const I lanes = iload(LANES), never = bits(fset(NEVER));
    I seen = iset(0);
    float* to = room;
    for (int64_t t = 0; t < (one ? 1 : tokens); ++t) {
        const Keys keys = visible(a, s + t);
        const int64_t end = std::min(keys.end, key + n);
        for (int64_t g = 0; g < heads; ++g, to += ld) {
            const char* row =
                !a.mask ? nullptr
                        : (const char*)a.mask + (b * a.mask_strides[0] + (shared * p.group + g) * a.mask_strides[1] +
                                                 (s + t) * a.mask_strides[2]) *
                                                    each;
            for (int64_t j = 0; j < n; j += 16) {
                const int64_t at = key + j;
                F v = row ? mask16(a, row, at, key + n - at) : fset(0);
                if (at < keys.first || end < at + 16) {
                    const I first = iset((int32_t)std::min<int64_t>(16, keys.first - std::min(at, keys.first)));
                    const I last = iset((int32_t)std::min<int64_t>(16, end - std::min(at, end)) - 1);
                    v = bitcast(iabove(lanes, last, never, iabove(first, lanes, never, bits(v))));
                }
                seen = ior(seen, ixor(bits(v), never));
                fstore(to + j, v);
            }
        }
    }
    *out = {room, one ? 0 : ld, one ? 1 : by_head ? 1 : p.group};
    int32_t any[16];
    istore(any, seen);
    for (int i = 1; i < 16; ++i) any[0] |= any[i];
    return any[0] != 0;
}

// Scores [n, a multiple of 16] of a row with the softcap and the bias; returns their maximum.
template <bool CAP> inline float finish_scores(const AttentionArgs& a, float* scores, const float* bias, int64_t n) {
    const F cap = fset(a.softcap), part = fset(CAP ? 1 / a.softcap : 0);
    F most = fset(NEVER);
    PW_ROLLED for (int64_t j = 0; j < n; j += 16) {
        F x = fload(scores + j);
        if (CAP) x = fmul(cap, ftanh(fmul(x, part)));
        if (bias) {  // whatever the score of a key that is not seen
            const F more = fload(bias + j);
            x = fabove(fset(-3.4028235e38f), more, fset(NEVER), fadd(x, more));
        }
        if (CAP || bias) fstore(scores + j, x);
        most = fmost(x, most);
    }
    return fmost(most);
}
// Replaces scores by exp(scores - top) and returns `sum` with these added, lane by lane. top -inf is taken as 0.
inline F take_weights(float* scores, float top, int64_t n, F sum) {
    const F base = fset(top == NEVER ? 0 : top);
    PW_ROLLED for (int64_t j = 0; j < n; j += 16) {
        const F w = fexp(fsub(fload(scores + j), base));
        fstore(scores + j, w);
        sum = fadd(sum, w);
    }
    return sum;
}

}  // namespace attend
}  // namespace
