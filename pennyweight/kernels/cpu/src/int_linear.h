// y = x @ w.T + bias with integer codes. Sums over a block of columns are exact integer sums; blocks are added in
// float32 in the order of the columns. So a result depends only on its row of x and its row of w: not on the batch, the
// threads, or the instruction set.
//
//   I = sum_k X[k] * (u[n,k] - center - zero_point)         int32, one block
//   y[n] += I * scale[n,block] * 2**e[block] + offset[n,block] * sum_k x[k]
//
// One kernel serves any number of rows: it processes a tile of 16 columns of y with packed codes, decoded in registers
// for a few tokens at a time. With few rows it is memory-bound. With many rows the tile stays in the cache and it is
// compute-bound.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "abi.h"
#include "activation_limbs.h"
#include "pack.h"
#include "simd.h"

namespace {

// Loops over registers must be unrolled before the compiler allocates registers.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define PW_UNROLL _Pragma("GCC unroll 32")
#else
#define PW_UNROLL
#endif
constexpr int AHEAD = 2304;  // prefetch distance in bytes

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

// Decodes `count` groups of a tile, from group `first` on, whose scale codes have outer scales.
inline Part numbers_of(const Part& codes, const Part& outer, int64_t per_outer, int64_t first, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i)
        fstore(out + 16 * i, fmul(cvt(zero16(codes, (first + i) * 16)), part16(outer, (first + i) / per_outer * 16)));
    return {out, F32};
}

struct Tile {                 // 16 rows of the weight, from one block of columns on
    const uint8_t* codes;
    Part scale, zero, offset;
    int64_t per_scale;        // blocks that share a scale; 0: no scale inside the sum
    int64_t first, blocks;    // blocks of columns
    int64_t block, tail;      // columns of a block, and of the last block
    int32_t center;
    int64_t true_columns;     // from here on, without padding
    const int8_t* ones;       // 1 per true column, for inputs with a zero point; else null
    float* sums;              // [blocks][16] of the codes minus center and zero point, for such inputs
};

struct Rows {                 // a block of tokens, from the same column on
    const int8_t* digits;
    const int32_t* sums;
    const float* scale;
    const float* value;
    const float* token_zero;
};

// c[t] (+)= the blocks of a tile for T tokens of D limbs, or (D = 0) of words. `fresh`: c is not read. Inputs with a
// zero point need the sums of the codes: SUM computes and stores them, other calls for the tile read them.
template <int BITS, int T, int D, bool SUM> void micro(const Tile& w, const Rows& x, float* c, bool fresh) {
    constexpr int R = D ? T * D : T;
    constexpr int CHAINS = R == 1 ? 4 : R <= 3 ? 2 : 1;  // independent sums hide the latency of dot4
    F sum[T];
    PW_UNROLL for (int t = 0; t < T; ++t) sum[t] = fresh ? fset(0) : fload(c + 16 * t);
    const int8_t* xs = x.digits;
    const int8_t* ones = w.ones;
    const uint8_t* codes = w.codes;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t group = w.per_scale ? (w.first + b) / w.per_scale * 16 : 0;
        I acc[CHAINS][R], column[2];
        if (SUM) column[0] = column[1] = iset(0);
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
                    if constexpr (BITS == 4) {  // as in `decode`, but on demand
                        if (j % 2 == 0) {
                            const B two = bload(codes + 32 * j);
                            u[j] = bmask(two, 15);
                            u[j + 1] = bmask(bright(two, 4), 15);
                        }
                    }
                    PW_UNROLL for (int r = 0; r < R; ++r)
                        acc[j % CHAINS][r] = dot4<BITS == 8>(acc[j % CHAINS][r], u[j], xload(xs + (j * R + r) * 4));
                    if (SUM) column[j % 2] = dot4<BITS == 8>(column[j % 2], u[j], xload(ones + 4 * j));
                }
                if (SUM) ones += 32;
                xs += 32 * R;
            }
            codes += 64 * BITS;
        }
        F weight_scale = fset(1), weight_offset = fset(0), weight_sum = fset(0);
        if (SUM) {
            const int32_t count = (int32_t)std::min(w.block, std::max<int64_t>(0, w.true_columns - b * w.block));
            I all = iadd(iadd(column[0], column[1]), iset(-w.center * count));
            if (w.zero.kind) all = iadd(all, imul(zero16(w.zero, group), iset(-count)));
            weight_sum = cvt(all);
            fstore(w.sums + 16 * b, weight_sum);
        } else if (D == 1 && w.ones) {
            weight_sum = fload(w.sums + 16 * b);
        }
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
            // exact: with a zero point, blocks are short enough for every term to fit a float
            if (D == 1 && w.ones) f = fma(weight_sum, fset(-x.token_zero[t]), f);
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

// 4- and 8-bit codes have a kernel for every number of tokens. Other widths have two, for one token and for a few,
// which halves the build time.
constexpr bool every_count(int bits) { return bits == 4 || bits == 8; }
constexpr int FEW[] = {4, 3, 2};
constexpr int most_tokens(int bits, int digits) {  // digits: limbs; 0: words
    const int most = TOKENS[digits ? digits - 1 : 3];
    return every_count(bits) || most <= FEW[digits - 1] ? most : FEW[digits - 1];
}

// The kernel for a number of bits, limbs (0: words) and tokens; null if there is none.
template <int BITS, int D, bool SUM, int T = 1> Micro pick_tokens(int tokens) {
    constexpr int MOST = most_tokens(BITS, D), NEXT = every_count(BITS) || T == MOST ? T + 1 : MOST;
    if constexpr (T > MOST) return nullptr;
    else return tokens == T ? &micro<BITS, T, D, SUM> : pick_tokens<BITS, D, SUM, NEXT>(tokens);
}
template <int BITS = 1> Micro pick(int bits, int digits, bool sum, int tokens) {
    if constexpr (BITS > 8) {
        return nullptr;
    } else {
        if (bits != BITS) return pick<BITS + 1>(bits, digits, sum, tokens);
        if constexpr (every_count(BITS))
            if (digits == 0) return pick_tokens<BITS, 0, false>(tokens);
        return sum           ? pick_tokens<BITS, 1, true>(tokens)
               : digits == 1 ? pick_tokens<BITS, 1, false>(tokens)
               : digits == 2 ? pick_tokens<BITS, 2, false>(tokens)
                             : pick_tokens<BITS, 3, false>(tokens);
    }
}

// y of one tile: applies the per-row or per-tensor scale, the token scale and the bias, and rounds once.
void finish(const IntLinear& w, const LinearArgs& a, const float* c, int64_t m, int tokens, int64_t col, const Tokens& tok) {
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
    for (int t = 0; t < tokens; ++t, ++m) {
        F y = fmul(fload(c + 16 * t), fset(tok.token_scale[t]));
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

// Thread-local memory kept between calls; large buffers are freed.
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

// Columns processed at a time for many rows: the tile and the limbs of the rows stay in the cache.
constexpr int64_t CHUNK = 4096;
// Bytes of limbs of the rows processed together with a tile: about the size of the L2 cache.
constexpr int64_t INPUT_BYTES = 512 << 10;
// Minimum number of products for a second thread.
constexpr double PRODUCTS_PER_THREAD = 1 << 17;

// State of one call, shared by its weights.
struct Work {
    const IntLinear& w;          // the first; the others differ only in their rows
    bool words;
    int digits, most;            // limbs per token; maximum tokens per block
    int64_t token_blocks;        // the first `larger` have `size` tokens, the others `smaller`
    int64_t larger;
    int size, smaller;
    int64_t blocks, chunk;       // blocks of columns, and how many of them are processed at a time
    const int8_t* ones;          // [kp] 1 per true column, if inputs have zero points; else null

    int64_t first_token(int64_t mb) const { return mb * size - std::max<int64_t>(0, mb - larger) * (size - smaller); }
    int tokens_in(int64_t mb) const { return mb < larger ? size : smaller; }
    int rows(int tokens) const { return words ? tokens : tokens * digits; }
    int64_t row_bytes(int tokens) const { return rows(tokens) * (words ? 2 : 1); }  // of limbs, per column
};

Work plan(const IntLinear& w, const LinearArgs& a) {
    const int digits = digits_of(w);
    // Words halve the number of sums to combine after each block, but need decoding to 16 bits, which many rows share.
    const bool words = digits == 2 && every_count(w.bits) && a.m > TOKENS[1];
    Work k{w, words, digits, most_tokens(w.bits, words ? 0 : digits), 0, 0, 0, 0, (w.kp + w.block - 1) / w.block, 0, nullptr};
    if (every_count(w.bits)) {
        k.token_blocks = (a.m + k.most - 1) / k.most;
        k.smaller = (int)(a.m / k.token_blocks);
        k.larger = a.m % k.token_blocks;
        k.size = k.smaller + 1;
    } else {
        k.larger = a.m / k.most;
        k.token_blocks = k.larger + a.m % k.most;
        k.size = k.most;
        k.smaller = 1;
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
        if (w.offset) p.offset = numbers_of(p.offset, outer(a.outer_offset), w.outer, first, count, nested + 16 * (k.chunk + 1));
        p.first = b0 % p.per_scale;
    }
    return p;
}

// One tile of a weight for token blocks [mb0, mb1). room: float [chunk][16], [mb1 - mb0][most][16], 2 [chunk + 1][16].
void run_tile(const Work& k, const IntLinear& w, const LinearArgs& a, const Tokens* tokens, int64_t tile, int64_t mb0,
              int64_t mb1, float* room) {
    float* c = room + (k.ones ? k.chunk * 16 : 0);
    for (int64_t b0 = 0; b0 < k.blocks; b0 += k.chunk) {
        const Tile p = tile_at(k, a, tile, b0, room, c + (mb1 - mb0) * k.most * 16);
        for (int64_t mb = mb0; mb < mb1; ++mb) {
            const Tokens& tok = tokens[mb];
            const int t = k.tokens_in(mb), r = k.rows(t);
            const Rows rows{tok.digits + b0 * w.block * k.row_bytes(t), tok.sums + b0 * r, tok.scale + b0 * t,
                            tok.value + b0 * t, tok.token_zero};
            float* here = c + (mb - mb0) * k.most * 16;
            pick(w.bits, k.words ? 0 : k.digits, k.ones && mb == mb0, t)(p, rows, here, b0 == 0);
            if (b0 + k.chunk >= k.blocks) finish(w, a, here, k.first_token(mb), t, tile * 16, tok);
        }
    }
}

// Several weights that differ only in their number of rows, with the same input (x, m, ldx, threads and activation
// parameters are those of the first): the input is split into limbs once, and threads synchronize once.
int int_linear(const IntLinear* weights, const LinearArgs* args, int count) {
    const IntLinear& w = *weights;
    const LinearArgs& a = *args;
    int64_t tiles = 0;
    for (int i = 0; i < count; ++i) tiles += (weights[i].n + 15) / 16;
    if (a.m == 0 || tiles == 0) return 0;
    Work k = plan(w, a);
    const double products = (double)a.m * (double)(16 * tiles) * (double)w.kp;
    const int threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);

    // Units of work: tiles x ranges of token blocks, scheduled dynamically.
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(8, tiles / (threads * 8)));
    const int64_t together = std::max<int64_t>(8, INPUT_BYTES / (k.row_bytes(k.most) * w.kp));
    const int64_t step = std::min(k.token_blocks, together);
    const int64_t row_units = (k.token_blocks + step - 1) / step;
    const int64_t units = (tiles + grain - 1) / grain * row_units;

    // Memory: per copy of the input, a table of token blocks and their buffers; per thread, scratch for one row and for
    // sums. For one or two tokens each thread makes its own copy, which is cheaper than waiting for another thread.
    auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int copies = a.m <= 2 ? threads : 1;
    const int64_t digits = up(w.kp * k.row_bytes(k.most)), sums = up(k.blocks * k.rows(k.most) * 4);
    const int64_t numbers = up(k.blocks * k.most * 4), per_block = digits + sums + 2 * numbers;
    const int64_t table = up((int64_t)sizeof(Tokens) * k.token_blocks), one_copy = table + per_block * k.token_blocks;
    const int64_t row_room = up(w.kp * 4) + up(w.kp * 3), per_thread = row_room + (step * k.most + k.chunk + (w.outer ? 2 * (k.chunk + 1) : 0)) * 64;
    char* space = workspace.get((size_t)(one_copy * copies + per_thread * threads + up(w.kp)));
    if (!space) return 1;
    if (w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point)) {
        int8_t* ones = (int8_t*)(space + one_copy * copies + per_thread * threads);
        memset(ones, 0, (size_t)w.kp);
        memset(ones, 1, (size_t)w.k);
        k.ones = ones;
    }
    auto take = [&](char* base, int64_t mb, char* room) {
        Tokens& tok = ((Tokens*)base)[mb];
        char* p = base + table + per_block * mb;
        tok.digits = (int8_t*)p;
        tok.sums = (int32_t*)(p += digits);
        tok.scale = (float*)(p += sums);
        tok.value = (float*)(p += numbers);
        const int t = k.tokens_in(mb);
        for (int i = 0; i < t; ++i)
            take_row(w, a, k.first_token(mb) + i, tok, t, i, k.words, (float*)room, (int8_t*)(room + up(w.kp * 4)));
    };
    std::atomic<int64_t> next_row{0}, next_unit{0};
    auto body = [&](int id, int team) {
        char* room = space + one_copy * copies + per_thread * id;
        char* base = space + (copies > 1 ? one_copy * id : 0);
        if (copies > 1 || team == 1) {
            for (int64_t mb = 0; mb < k.token_blocks; ++mb) take(base, mb, room);
        } else {
            for (int64_t mb; (mb = next_row.fetch_add(1)) < k.token_blocks;) take(base, mb, room);
#if defined(_OPENMP)
#pragma omp barrier
#endif
        }
        for (int64_t u; (u = next_unit.fetch_add(1)) < units;) {
            const int64_t tile0 = u / row_units * grain, mb0 = u % row_units * step;
            for (int64_t at = tile0; at < std::min(tiles, tile0 + grain); ++at) {
                int64_t tile = at, i = 0;
                for (int64_t own; tile >= (own = (weights[i].n + 15) / 16); ++i) tile -= own;
                run_tile(k, weights[i], args[i], (Tokens*)base, tile, mb0, std::min(k.token_blocks, mb0 + step),
                         (float*)(room + row_room));
            }
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
