// The pieces of y = x @ w.T + bias with integer codes: tiles of 16 rows of the weight times blocks of tokens, for the
// kernels in int_microkernel.h. int_linear.cpp divides a call into such units of work.
#pragma once

#include <algorithm>

#include "activation_limbs.h"
#include "int_microkernel.h"
#include "schedule.h"

namespace {

// What follows the sums of a tile: the per-row or per-tensor scale, the token scale and the bias.
struct Finish {
    F scale = fset(1), bias = fset(0);
    bool scaled, biased;

    Finish(const IntLinear& w, const LinearArgs& a, int64_t col) : scaled(w.group <= 0), biased(a.bias != nullptr) {
        alignas(64) char tail[64] = {0};
        if (w.group == 0) scale = part16({a.scale, w.scale}, col);
        if (w.group < 0) {
            memcpy(tail, a.scale, (size_t)size_of(w.scale));
            alignas(64) float f[16];
            fstore(f, part16({tail, w.scale}, 0));
            scale = fset(f[0]);
        }
        if (biased) {
            const int64_t width = std::min<int64_t>(16, w.n - col);
            const char* p = (const char*)a.bias + col * size_of(a.bias_kind);
            if (width < 16) p = (const char*)memcpy(tail, p, (size_t)(width * size_of(a.bias_kind)));
            bias = load16(p, a.bias_kind, 0);
        }
    }
    // Calls put(t, y) with y of each token t of a block, from its sums.
    template <class Put> PW_INLINE void each(const float* c, const Tokens& tok, int tokens, const Put& put) const {
        const F s = scale, b = bias;
        if (scaled && biased)
            for (int t = 0; t < tokens; ++t)
                put(t, fadd(fmul(fmul(fload(c + 16 * t), fset(tok.token_scale[t])), s), b));
        else if (scaled)
            for (int t = 0; t < tokens; ++t) put(t, fmul(fmul(fload(c + 16 * t), fset(tok.token_scale[t])), s));
        else if (biased)
            for (int t = 0; t < tokens; ++t) put(t, fadd(fmul(fload(c + 16 * t), fset(tok.token_scale[t])), b));
        else
            for (int t = 0; t < tokens; ++t) put(t, fmul(fload(c + 16 * t), fset(tok.token_scale[t])));
    }
};

// 16 numbers, or the first `width` of them, rounded to a kind.
PW_INLINE void store_columns(void* out, int kind, int64_t width, F y) {
    if (width == 16) return store16(out, kind, 0, y);
    alignas(64) char tail[64];
    store16(tail, kind, 0, y);
    memcpy(out, tail, (size_t)(width * size_of(kind)));
}

// Writes y [m, n] of a call.
struct WriteRows {
    const IntLinear& w;
    const LinearArgs& a;
    void operator()(const Finish& finish, const float* c, int64_t m, int tokens, int64_t col, const Tokens& tok) const {
        const int64_t width = std::min<int64_t>(16, w.n - col), step = w.n * size_of(w.x);
        char* out = (char*)a.y + (m * w.n + col) * size_of(w.x);
        if (width == 16 && w.x == F32)
            finish.each(c, tok, tokens, [&](int t, F y) { fstore((float*)(out + t * step), y); });
        else finish.each(c, tok, tokens, [&](int t, F y) { store_columns(out + t * step, w.x, width, y); });
    }
};

// Columns processed at a time for many rows: the tile and the limbs of the rows stay in the cache.
constexpr int64_t CHUNK = 4096;
// Bytes of limbs of the rows processed together with a tile: about the size of the L2 cache.
constexpr int64_t INPUT_BYTES = 512 << 10;

// State of one call, shared by its weights.
struct Work {
    const IntLinear& w;  // the first; the others differ only in their rows
    bool words;
    int limbs, most;       // limbs per token; maximum tokens per block
    int64_t token_blocks;  // the first `larger` have `size` tokens, then one may have `few`, the others `smaller`
    int64_t larger;
    int size, few, smaller;  // few: 0 if there is no such block
    int64_t blocks, chunk;   // blocks of columns, and how many of them are processed at a time
    const int8_t* ones;      // [kp] 1 per true column, if inputs have zero points; else null

    int64_t first_token(int64_t mb) const {
        if (mb <= larger) return mb * size;
        return larger * size + (few ? few + (mb - larger - 1) * smaller : (mb - larger) * smaller);
    }
    int tokens_in(int64_t mb) const { return mb < larger ? size : mb == larger && few ? few : smaller; }
    int rows(int tokens) const { return words ? tokens : tokens * limbs; }
    int64_t row_bytes(int tokens) const { return rows(tokens) * (words ? 2 : 1); }  // of limbs, per column
};

Work plan(const IntLinear& w, int64_t m) {
    const int limbs = limbs_of(w);
    // Words halve the number of sums to combine after each block, but need decoding to 16 bits, which many rows share.
    const bool words = limbs == 2 && every_count(w.bits) && m > TOKENS[1];
    Work k{w, words, limbs, TOKENS[words ? 3 : limbs - 1], 0, 0, 0, 0, 0, (w.kp + w.block - 1) / w.block, 0, nullptr};
    if (every_count(w.bits)) {
        k.token_blocks = (m + k.most - 1) / k.most;
        k.smaller = (int)(m / k.token_blocks);
        k.larger = m % k.token_blocks;
        k.size = k.smaller + 1;
    } else {
        k.size = k.most;
        k.smaller = 1;
        k.larger = m / k.most;
        const int64_t rest = m % k.most;
        if (rest >= FEW[limbs - 1]) k.few = FEW[limbs - 1];
        k.token_blocks = k.larger + (k.few ? 1 + rest - k.few : rest);
    }
    k.chunk = k.token_blocks > 1 || w.outer ? std::max<int64_t>(1, CHUNK / w.block) : k.blocks;
    return k;
}

// Tile `tile` of one weight from block b0 on. sums: scratch [chunk][16]; nested: scratch 2 [chunk + 1][16].
Tile tile_at(const Work& k, const LinearArgs& a, int64_t tile, int64_t b0, float* sums, float* nested) {
    const IntLinear& w = k.w;
    const int64_t at = b0 * w.block, columns = std::min(w.kp - at, k.chunk * w.block);
    const int64_t groups = w.group > 0 ? w.kp / w.group : 1, outers = w.outer ? (groups + w.outer - 1) / w.outer : 0;
    const int64_t numbers = (w.outer ? outers * w.outer : groups) * 16;
    auto part = [&](const void* base, int32_t kind) {
        return Part{(const char*)base + tile * numbers * size_of(kind), kind};
    };
    Tile p;
    p.codes = (const uint8_t*)a.codes + (tile * w.kp + at) / 32 * 64 * w.bits;
    p.scale = part(a.scale, w.scale);
    p.zero = part(a.zero_point, w.zero_point);
    p.offset = part(a.offset, w.offset);
    p.per_scale = w.group > 0 ? w.group / w.block : 0;
    p.first = b0;
    p.blocks = (columns + w.block - 1) / w.block;
    p.block = w.block;
    p.tail = columns - (p.blocks - 1) * w.block;
    p.bits = w.bits;
    p.center = w.center - (SIGNED_BYTES && w.bits == 8 && !k.words ? 128 : 0);
    p.true_columns = w.k - at;
    p.ones = k.ones ? k.ones + at : nullptr;
    p.sums = sums;
    if (w.outer) {  // micro gets decoded numbers of these columns only
        const int64_t first = b0 / p.per_scale, count = (b0 + p.blocks - 1) / p.per_scale - first + 1;
        auto outer = [&](const void* base) {
            return Part{(const char*)base + tile * outers * 16 * size_of(w.outer_kind), w.outer_kind};
        };
        p.scale = numbers_of(p.scale, outer(a.outer_scale), w.outer, first, count, nested);
        if (w.offset)
            p.offset = numbers_of(p.offset, outer(a.outer_offset), w.outer, first, count, nested + 16 * (k.chunk + 1));
        p.first = b0 % p.per_scale;
    }
    return p;
}

// Whether inputs have zero points: products then need the sums of the codes.
inline bool has_zero_points(const IntLinear& w, const LinearArgs& a) {
    return w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point);
}
// 1 for each true column, in `room` [kp].
inline const int8_t* fill_ones(const IntLinear& w, char* room) {
    memset(room, 0, (size_t)w.kp);
    memset(room, 1, (size_t)w.k);
    return (const int8_t*)room;
}

// Memory of the prepared inputs of a call: a table of token blocks, and their buffers. Per thread: scratch for one row.
struct InputRoom {
    int64_t limbs, sums, numbers, table, per_block, bytes, wide, row;

    explicit InputRoom(const Work& k) {
        limbs = whole_lines(k.w.kp * k.row_bytes(k.most)), sums = whole_lines(k.blocks * k.rows(k.most) * 4);
        numbers = whole_lines(k.blocks * k.most * 4), table = whole_lines((int64_t)sizeof(Tokens) * k.token_blocks);
        per_block = limbs + sums + 3 * numbers, bytes = table + per_block * k.token_blocks;
        wide = whole_lines(k.w.kp * 4), row = wide + whole_lines(k.w.kp * 3);
    }
    // Block mb, with its buffers, which are empty.
    Tokens& begin(char* base, int64_t mb) const {
        Tokens& tok = ((Tokens*)base)[mb];
        char* p = base + table + per_block * mb;
        tok.limbs = (int8_t*)p;
        tok.sums = (int32_t*)(p += limbs);
        tok.scale = (float*)(p += sums);
        tok.value = (float*)(p += numbers);
        tok.zero = (float*)(p += numbers);
        return tok;
    }
};

// Whether pairs of tiles are processed together; see micro_pair.
inline bool in_pairs(const Work& k) {
    const IntLinear& w = k.w;
    return PAIRS && every_count(w.bits) && w.act != FLOAT && !k.ones && !w.zero_point && !w.offset && !w.outer &&
           k.smaller >= LEAST_PAIRED;
}

// How a call is divided into units of work: `grain` tiles times `step` token blocks.
struct Units {
    int64_t tiles, grain, step, row_units, count;

    Units(const Work& k, int64_t tiles_, int threads) : tiles(tiles_) {
        grain = std::max<int64_t>(1, std::min<int64_t>(8, tiles / (threads * 8)));
        if (in_pairs(k)) grain = (grain + 1) / 2 * 2;
        const int64_t together = std::max<int64_t>(8, INPUT_BYTES / (k.row_bytes(k.most) * k.w.kp));
        step = std::min(k.token_blocks, together);
        row_units = (k.token_blocks + step - 1) / step;
        count = (tiles + grain - 1) / grain * row_units;
    }
    // Bytes of scratch of run_tiles.
    int64_t room(const Work& k) const {
        return (2 * step * k.most + k.chunk + (k.w.outer ? 2 * (k.chunk + 1) : 0)) * 64;
    }
    // Calls f(tile, mb0, mb1) for the tiles of unit u and its token blocks [mb0, mb1); f returns how many tiles it did,
    // which may be one more than the one that it gets.
    template <class Each> void each(const Work& k, int64_t u, const Each& f) const {
        const int64_t first = u / row_units * grain, mb0 = u % row_units * step,
                      mb1 = std::min(k.token_blocks, mb0 + step);
        const int64_t end = std::min(tiles, first + grain);
        for (int64_t tile = first; tile < end;) tile += f(tile, end, mb0, mb1);
    }
};

// Tile `tile` of a weight for token blocks [mb0, mb1), and the next one with it if it is before `end` and if pairs are
// possible. room: see Units::room. Calls write(finish, sums, first token, tokens, first column, token block) for each
// block and tile. Returns the number of tiles.
template <class Write>
int run_tiles(const Work& k, const IntLinear& w, const LinearArgs& a, const Tokens* tokens, int64_t tile, int64_t end,
              int64_t mb0, int64_t mb1, float* room, const Write& write) {
    const int64_t sums = (mb1 - mb0) * k.most * 16;
    float* c = room + (k.ones ? k.chunk * 16 : 0);
    const bool once = k.chunk >= k.blocks;  // then the sums of a block are used at once, and need not be kept
    const int count = in_pairs(k) && tile + 1 < end ? 2 : 1;
    const Finish finish[2] = {{w, a, tile * 16}, {w, a, (tile + count - 1) * 16}};
    Micro micro = nullptr;
    MicroPair pair = nullptr;
    for (int64_t b0 = 0; b0 < k.blocks; b0 += k.chunk) {
        const Tile p[2] = {tile_at(k, a, tile, b0, room, c + 2 * sums),
                           count == 2 ? tile_at(k, a, tile + 1, b0, room, c + 2 * sums) : Tile{}};
        for (int64_t mb = mb0, last = -1; mb < mb1; ++mb) {
            const Tokens& tok = tokens[mb];
            const int t = k.tokens_in(mb), r = k.rows(t);
            const Rows rows{tok.limbs + b0 * w.block * k.row_bytes(t), tok.sums + b0 * r,
                            w.act == FLOAT || w.act_group ? tok.scale + b0 * t : nullptr, tok.value + b0 * t,
                            w.act_group ? tok.zero + b0 * t : tok.token_zero};
            float* const here[2] = {c + (once ? 0 : mb - mb0) * k.most * 16,
                                    c + sums + (once ? 0 : mb - mb0) * k.most * 16};
            if (t != last || k.ones) {
                if (count == 2) pair = w.bits == 8 ? pick_pair<8>(t) : pick_pair<4>(t);
                else micro = pick(w.bits, k.words ? 0 : k.limbs, k.ones && mb == mb0, t);
                last = t;
            }
            if (count == 2) pair(p, rows, here, b0 == 0);
            else micro(*p, rows, *here, b0 == 0);
            if (b0 + k.chunk >= k.blocks)
                for (int n = 0; n < count; ++n) write(finish[n], here[n], k.first_token(mb), t, (tile + n) * 16, tok);
        }
    }
    return count;
}

// Tile `tile` of several weights counted together: the weight, its own tile, and the end of its tiles or of `end`.
struct Place {
    int weight;
    int64_t tile, end;
    Place(const IntLinear* weights, int64_t at, int64_t end_) : weight(0), tile(at), end(end_) {
        for (int64_t own; tile >= (own = (weights[weight].n + 15) / 16); ++weight) tile -= own, end -= own;
        end = std::min(end, (weights[weight].n + 15) / 16);
    }
};

}  // namespace
