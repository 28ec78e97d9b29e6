// y = x @ w.T + bias with integer codes. All sums over k are of small integers and exact, in blocks of columns; blocks
// are added in float32 in the order of the columns. So a result depends on nothing but its row of x and its row of w:
// not on the batch, the threads, or the instruction set.
//
//   I = sum_k X[k] * (u[n,k] - center - zero_point)         int32, one block
//   y[n] += I * scale[n,block] * 2**e[block] + offset[n,block] * sum_k x[k]
//
// One kernel serves one row and thousands: it runs down a tile of 16 columns of y with the codes as they are packed,
// decoded in registers for a few tokens at a time. For few rows memory sets the pace; for many, the tile
// stays in a near cache while the rows pass, and arithmetic does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "abi.h"
#include "input.h"
#include "pack.h"
#include "simd.h"

namespace {

// Loops over registers are unrolled before the compiler decides what lives in memory.
#define PW_UNROLL _Pragma("GCC unroll 32")
constexpr int AHEAD = 2304;  // bytes between what is read and what is fetched

struct Part {            // scales, zero points or offsets of a tile: 16 numbers per group
    const void* p;
    int32_t kind;
};

inline F part16(const Part& a, int64_t i) {
    switch (a.kind) {
        case BF16: return fload_bf16((const uint16_t*)a.p + i);
        case F16: return fload_f16((const uint16_t*)a.p + i);
        case E8M0: {  // 2**(byte - 127); byte 0 is 2**-127, a subnormal
            alignas(64) int32_t t[16];
            for (int j = 0; j < 16; ++j) {
                const uint32_t b = ((const uint8_t*)a.p)[i + j];
                t[j] = (int32_t)(b ? b << 23 : 1u << 22);
            }
            return bitcast(iload(t));
        }
        default: return fload((const float*)a.p + i);
    }
}
inline I zero16(const Part& a, int64_t i) {
    return a.kind == U8 ? iload8u((const uint8_t*)a.p + i) : iload8s((const int8_t*)a.p + i);
}

struct Tile {                 // 16 rows of the weight, from one block of columns on
    const uint8_t* codes;
    Part scale, zero, offset;
    int64_t per_scale;        // blocks that share a scale; 0: no scale inside the sum
    int64_t first, blocks;    // blocks of columns
    int64_t block, tail;      // columns of a block, and of the last one here
    int32_t center;
};

struct Rows {                 // a block of tokens, from the same column on
    const int8_t* digits;
    const int32_t* sums;
    const float* scale;
    const float* value;
};

// c[t] (+)= the blocks of a tile for T tokens of D digits, or (D = 0) of words. `fresh`: c is not read.
template <int BITS, int T, int D> void micro(const Tile& w, const Rows& x, float* c, bool fresh) {
    constexpr int R = D ? T * D : T;
    constexpr int CHAINS = R == 1 ? 4 : R <= 3 ? 2 : 1;  // independent sums hide the latency of dot4
    F sum[T];
    PW_UNROLL for (int t = 0; t < T; ++t) sum[t] = fresh ? fset(0) : fload(c + 16 * t);
    const int8_t* xs = x.digits;
    const uint8_t* codes = w.codes;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t group = w.per_scale ? (w.first + b) / w.per_scale * 16 : 0;
        I acc[CHAINS][R];
        PW_UNROLL for (int r = 0; r < R; ++r) {
            const int32_t s = x.sums[b * R + r];
            acc[0][r] = iset(-w.center * s);
            if (w.zero.kind) acc[0][r] = iadd(acc[0][r], imul(zero16(w.zero, group), iset(-s)));
            PW_UNROLL for (int h = 1; h < CHAINS; ++h) acc[h][r] = iset(0);
        }
        const int64_t steps = (b + 1 == w.blocks ? w.tail : w.block) / 32;
        for (int64_t s = 0; s < steps; ++s) {
            PW_UNROLL for (int j = 0; j < BITS; ++j) __builtin_prefetch(codes + AHEAD + 64 * j);
            if constexpr (D == 0) {
                const auto pair = [&](B u, int at) {
                    PW_UNROLL for (int r = 0; r < R; ++r)
                        acc[at % CHAINS][r] = dot2(acc[at % CHAINS][r], u, xload(xs + (at * R + r) * 4));
                };
                PW_UNROLL for (int j = 0; j < BITS; ++j) {
                    const B v = bload(codes + 64 * j);
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
                xs += 64 * R;
            } else {
                B u[8];
                if constexpr (BITS != 4 && BITS != 8) decode<BITS>(codes, u);
                PW_UNROLL for (int j = 0; j < 8; ++j) {
                    if constexpr (BITS == 8) u[j] = bload(codes + 64 * j);
                    if constexpr (BITS == 4) {  // as `decode` does, when it is needed
                        if (j % 2 == 0) {
                            const B two = bload(codes + 32 * j);
                            u[j] = bmask(two, 15);
                            u[j + 1] = bmask(bright(two, 4), 15);
                        }
                    }
                    PW_UNROLL for (int r = 0; r < R; ++r)
                        acc[j % CHAINS][r] = dot4<BITS == 8>(acc[j % CHAINS][r], u[j], xload(xs + (j * R + r) * 4));
                }
                xs += 32 * R;
            }
            codes += 64 * BITS;
        }
        F weight_scale = fset(1), weight_offset = fset(0);
        if (w.per_scale) weight_scale = part16(w.scale, group);
        if (w.offset.kind) weight_offset = part16(w.offset, group);
        PW_UNROLL for (int t = 0; t < T; ++t) {
            constexpr int DIGITS = D ? D : 1;
            I part[DIGITS];
            PW_UNROLL for (int d = 0; d < DIGITS; ++d) {
                part[d] = acc[0][t * DIGITS + d];
                PW_UNROLL for (int h = 1; h < CHAINS; ++h) part[d] = iadd(part[d], acc[h][t * DIGITS + d]);
            }
            F f;
            if constexpr (D <= 1) f = cvt(part[0]);
            else if constexpr (D == 2) f = cvt(iadd(ishl8(part[0]), part[1]));
            else f = fma(cvt(part[0]), fset(65536), cvt(iadd(ishl8(part[1]), part[2])));
            if (D != 1) {
                const F e = fset(x.scale[b * T + t]);
                sum[t] = fma(f, w.per_scale ? fmul(weight_scale, e) : e, sum[t]);
            } else {
                sum[t] = w.per_scale ? fma(f, weight_scale, sum[t]) : fadd(f, sum[t]);
            }
            if (w.offset.kind) sum[t] = fma(weight_offset, fset(x.value[b * T + t]), sum[t]);
        }
    }
    PW_UNROLL for (int t = 0; t < T; ++t) fstore(c + 16 * t, sum[t]);
}

using Micro = void (*)(const Tile&, const Rows&, float*, bool);

// The kernel for a number of bits, digits (0: words) and tokens; null where there is none.
template <int BITS, int D, int T = 1> Micro pick_tokens(int tokens) {
    if constexpr (T > TOKENS[D ? D - 1 : 3]) return nullptr;
    else return tokens == T ? &micro<BITS, T, D> : pick_tokens<BITS, D, T + 1>(tokens);
}
template <int BITS = 1> Micro pick(int bits, int digits, int tokens) {
    if constexpr (BITS > 8) {
        return nullptr;
    } else {
        if (bits != BITS) return pick<BITS + 1>(bits, digits, tokens);
        if constexpr (BITS == 4 || BITS == 8)
            if (digits == 0) return pick_tokens<BITS, 0>(tokens);
        return digits == 1   ? pick_tokens<BITS, 1>(tokens)
               : digits == 2 ? pick_tokens<BITS, 2>(tokens)
                             : pick_tokens<BITS, 3>(tokens);
    }
}

// y of one tile for token `from` of a block and those after it, m the row of the first: less the zero point times the
// row of ones, the scale of the row or of all, that of the token, bias, and one rounding.
void finish(const IntLinear& w, const LinearArgs& a, const float* c, const float* ones, int64_t m, int from, int tokens,
            int64_t col, const Tokens& tok) {
    const int64_t width = std::min<int64_t>(16, w.n - col);
    alignas(64) char tail[64] = {0};
    F scale = fset(1), bias = fset(0);
    if (w.group == 0) scale = part16({a.scale, w.scale}, col);
    if (w.group < 0) {
        memcpy(tail, a.scale, (size_t)size_of(w.scale));
        alignas(64) float f[16];
        fstore(f, part16({tail, w.scale}, 0));
        scale = fset(f[0]);
    }
    if (a.bias) {
        memcpy(tail, (const char*)a.bias + col * size_of(a.bias_kind), (size_t)(width * size_of(a.bias_kind)));
        bias = load16(tail, a.bias_kind, 0);
    }
    for (int t = from; t < tokens; ++t, ++m) {
        F y = fload(c + 16 * t);
        if (ones) y = fma(fload(ones), fset((float)-tok.token_zero[t]), y);
        y = fmul(y, fset(tok.token_scale[t]));
        if (w.group <= 0) y = fmul(y, scale);
        if (a.bias) y = fadd(y, bias);
        char* out = (char*)a.y + (m * w.n + col) * size_of(w.x);
        if (width == 16) {
            store16(out, w.x, 0, y);
        } else {
            store16(tail, w.x, 0, y);
            memcpy(out, tail, (size_t)(width * size_of(w.x)));
        }
    }
}

// Memory that a thread keeps from call to call; what is large is given back.
struct Workspace {
    char* data = nullptr;
    size_t size = 0;
    static constexpr size_t KEEP = 4u << 20;
    char* get(size_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + 4095) / 4096 * 4096;
            data = (char*)std::aligned_alloc(4096, size);
            if (!data) size = 0;
        }
        return data;
    }
    void trim() {
        if (size > KEEP) { std::free(data); data = nullptr; size = 0; }
    }
    ~Workspace() { std::free(data); }
};
thread_local Workspace workspace;

// Columns run through at a time where many rows follow: the tile and the rows' digits stay in near caches.
constexpr int64_t CHUNK = 4096;
// Digits of rows that are taken through a tile together, in bytes: about what the second-level cache keeps.
constexpr int64_t INPUT_BYTES = 512 << 10;
// Fewer products than this are not worth waking a second thread for.
constexpr double PRODUCTS_PER_THREAD = 1 << 17;

// What one call works with. Token -1, the first of the first block, is a row of ones where inputs have zero points.
struct Work {
    const IntLinear& w;
    const LinearArgs& a;
    bool ones, words;
    int digits, most;            // per token; tokens in a block, at most
    int64_t tokens;              // the row of ones included
    int64_t token_blocks;        // of nearly equal size
    int64_t blocks, chunk;       // blocks of columns, and of those how many are run through at a time

    int64_t first_token(int64_t mb) const {
        return mb * (tokens / token_blocks) + std::min(mb, tokens % token_blocks) - ones;
    }
    int tokens_in(int64_t mb) const { return (int)(tokens / token_blocks + (mb < tokens % token_blocks)); }
    int rows(int tokens) const { return words ? tokens : tokens * digits; }
    int64_t row_bytes(int tokens) const { return rows(tokens) * (words ? 2 : 1); }  // of digits, per column
};

Work plan(const IntLinear& w, const LinearArgs& a) {
    const bool ones = w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point);
    const int digits = digits_of(w);
    // Words halve the sums to join after each block, at the price of decoding to 16 bits, which many rows share.
    const bool words = digits == 2 && (w.bits == 4 || w.bits == 8) && a.m > TOKENS[1];
    Work k{w, a, ones, words, digits, TOKENS[words ? 3 : digits - 1], a.m + ones, 0, (w.kp + w.block - 1) / w.block, 0};
    k.token_blocks = (k.tokens + k.most - 1) / k.most;
    k.chunk = k.token_blocks > 1 ? std::max<int64_t>(1, CHUNK / w.block) : k.blocks;
    return k;
}

// Tile `tile` from block b0 on.
Tile tile_at(const Work& k, int64_t tile, int64_t b0) {
    const IntLinear& w = k.w;
    const int64_t at = b0 * w.block, columns = std::min(w.kp - at, k.chunk * w.block);
    const int64_t numbers = (w.group > 0 ? w.kp / w.group : 1) * 16;
    auto part = [&](const void* base, int32_t kind) {
        return Part{(const char*)base + tile * numbers * size_of(kind), kind};
    };
    Tile p;
    p.codes = (const uint8_t*)k.a.codes + (tile * w.kp + at) / 32 * 64 * w.bits;
    p.scale = part(k.a.scale, w.scale);
    p.zero = part(k.a.zero_point, w.zero_point);
    p.offset = part(k.a.offset, w.offset);
    p.per_scale = w.group > 0 ? w.group / w.block : 0;
    p.first = b0;
    p.blocks = (columns + w.block - 1) / w.block;
    p.block = w.block;
    p.tail = columns - (p.blocks - 1) * w.block;
    p.center = w.center - (SIGNED_BYTES && w.bits == 8 && !k.words ? 128 : 0);
    return p;
}

// One tile for blocks of tokens [mb0, mb1). c: [mb1 - mb0][most][16], after 16 sums of rows.
void run_tile(const Work& k, const Tokens* tokens, int64_t tile, int64_t mb0, int64_t mb1, float* c) {
    const IntLinear& w = k.w;
    float* ones = nullptr;
    if (k.ones) {
        ones = c;
        c += 16;
    }
    for (int64_t b0 = 0; b0 < k.blocks; b0 += k.chunk) {
        const Tile p = tile_at(k, tile, b0);
        const bool last = b0 + k.chunk >= k.blocks;
        if (ones && mb0) {  // the row of ones is in the first block of tokens, which another unit of work has
            const Tokens& tok = tokens[k.token_blocks];
            const Rows row{tok.digits + b0 * w.block, tok.sums + b0, tok.scale + b0, tok.value + b0};
            pick(w.bits, 1, 1)(p, row, ones, b0 == 0);
        }
        for (int64_t mb = mb0; mb < mb1; ++mb) {
            const Tokens& tok = tokens[mb];
            const int t = k.tokens_in(mb), r = k.rows(t), from = k.ones && mb == 0;
            const Rows rows{tok.digits + b0 * w.block * k.row_bytes(t), tok.sums + b0 * r, tok.scale + b0 * t, tok.value + b0 * t};
            float* here = c + (mb - mb0) * k.most * 16;
            pick(w.bits, k.words ? 0 : k.digits, t)(p, rows, here, b0 == 0);
            if (last && from) memcpy(ones, here, 64);
            if (last) finish(w, k.a, here, ones, k.first_token(mb) + from, from, t, tile * 16, tok);
        }
    }
}

int int_linear(const IntLinear* weight, const LinearArgs* args) {
    const IntLinear& w = *weight;
    const LinearArgs& a = *args;
    if (a.m == 0 || w.n == 0) return 0;
    const Work k = plan(w, a);
    const double products = (double)a.m * (double)w.n * (double)w.kp;
    const int threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);

    // Units of work: tiles x ranges of blocks of tokens, taken by whoever is free.
    const int64_t tiles = (w.n + 15) / 16;
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(8, tiles / (threads * 8)));
    const int64_t together = std::max<int64_t>(8, INPUT_BYTES / (k.row_bytes(k.most) * w.kp));
    const int64_t step = std::min(k.token_blocks, together);
    const int64_t row_units = (k.token_blocks + step - 1) / step;
    const int64_t units = (tiles + grain - 1) / grain * row_units;

    // Memory: per copy of the input a table of blocks of tokens (and one of the row of ones alone) and what each of them
    // holds; per thread, room for one row and for sums. Of one or two tokens each thread makes its own copy: that costs
    // less than waiting for another.
    auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int copies = a.m <= 2 ? threads : 1;
    const int64_t held = k.token_blocks + k.ones;
    const int64_t digits = up(w.kp * k.row_bytes(k.most)), sums = up(k.blocks * k.rows(k.most) * 4);
    const int64_t numbers = up(k.blocks * k.most * 4), per_block = digits + sums + 2 * numbers;
    const int64_t table = up((int64_t)sizeof(Tokens) * held), one_copy = table + per_block * held;
    const int64_t row_room = up(w.kp * 4) + up(w.kp * 3), per_thread = row_room + (step * k.most + 1) * 64;
    char* space = workspace.get((size_t)(one_copy * copies + per_thread * threads));
    if (!space) return 1;

    auto take = [&](char* base, int64_t mb, char* room) {
        Tokens& tok = ((Tokens*)base)[mb];
        char* p = base + table + per_block * mb;
        tok.digits = (int8_t*)p;
        tok.sums = (int32_t*)(p += digits);
        tok.scale = (float*)(p += sums);
        tok.value = (float*)(p += numbers);
        int8_t* bytes = (int8_t*)(room + up(w.kp * 4));
        if (mb == k.token_blocks) return take_ones(w, tok, 1, 0, bytes);
        const int t = k.tokens_in(mb);
        for (int i = 0; i < t; ++i)
            if (k.first_token(mb) + i < 0) take_ones(w, tok, t, i, bytes);
            else take_row(w, a, k.first_token(mb) + i, tok, t, i, k.words, (float*)room, bytes);
    };
    std::atomic<int64_t> next_row{0}, next_unit{0};
    auto body = [&](int id, int team) {
        char* room = space + one_copy * copies + per_thread * id;
        char* base = space + (copies > 1 ? one_copy * id : 0);
        if (copies > 1 || team == 1) {
            for (int64_t mb = 0; mb < held; ++mb) take(base, mb, room);
        } else {
            for (int64_t mb; (mb = next_row.fetch_add(1)) < held;) take(base, mb, room);
#if defined(_OPENMP)
#pragma omp barrier
#endif
        }
        for (int64_t u; (u = next_unit.fetch_add(1)) < units;) {
            const int64_t tile0 = u / row_units * grain, mb0 = u % row_units * step;
            for (int64_t tile = tile0; tile < std::min(tiles, tile0 + grain); ++tile)
                run_tile(k, (Tokens*)base, tile, mb0, std::min(k.token_blocks, mb0 + step), (float*)(room + row_room));
        }
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    } else
#endif
        body(0, 1);
    workspace.trim();
    return 0;
}

}  // namespace
