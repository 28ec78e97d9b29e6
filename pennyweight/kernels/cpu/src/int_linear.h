// y = x @ w.T + bias with integer codes. All sums over k are of small integers and exact, in blocks of columns; blocks
// are added in float32 in the order of the columns. So a result depends on nothing but its row of x and its row of w:
// not on the batch, the threads, or the instruction set.
//
//   I = sum_k X[k] * (u[n,k] - center - zero_point)         int32, one block
//   y[n] += I * scale[n,block] * 2**e[block] + offset[n,block] * sum_k x[k]
//
// Few rows run tile by tile straight from the packed codes (memory sets the pace), many rows in panels whose codes are
// widened to bytes once per chunk of columns (arithmetic sets it). Both call `micro`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "abi.h"
#include "input.h"
#include "pack.h"
#include "simd.h"

namespace {

struct Part {            // scales, zero points or offsets of a tile: 16 numbers per group
    const void* p;
    int32_t kind;
    int64_t stride;      // elements from one tile to the next
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

struct Panel {
    const uint8_t* codes;     // first tile at the first column of this chunk
    int64_t stride;           // bytes from tile to tile
    Part scale, zero, offset;
    int64_t per_scale;        // blocks that share a scale; 0: no scale inside the sum
    int64_t first_block, blocks;  // of this chunk
    int64_t block, tail;      // columns of a block, and of the last one here
    int32_t center;
    const int32_t* column_sums;   // [tile][blocks][16] sums of u - center - zero_point, for asymmetric inputs; or null
};

struct Rows {                 // a block of tokens at this chunk
    const int8_t* digits;
    const int32_t* sums;
    const float* scale;
    const float* value;
    const int32_t* token_zero;
};

// c[t][tile] (+)= the blocks of a panel for R = T * D rows of digits and NT tiles. `first`: c is not read.
// BITS: 4 or 8 as packed; 7: bytes known to be below 128.
template <int BITS, int R, int NT, int D>
void micro(const Panel& w, const Rows& x, float* c, int64_t ldc, bool first) {
    constexpr int T = R / D;
    constexpr int CHAINS = R * NT == 1 ? 4 : R * NT <= 3 ? 2 : 1;  // independent sums hide the latency of dot4
    constexpr int BYTES = (BITS == 4 ? 4 : 8) * 64;
    constexpr bool KEEP = T * NT + R * NT * CHAINS <= 26 && sizeof(F) == 64;  // float sums stay in registers
    F sum[T][NT];
    if (KEEP || first)
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < NT; ++n) sum[t][n] = first ? fset(0) : fload(c + t * ldc + 16 * n);
    if (!KEEP && first)
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < NT; ++n) fstore(c + t * ldc + 16 * n, sum[t][n]);
    const int8_t* xs = x.digits;
    const uint8_t* codes = w.codes;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t group = w.per_scale ? (w.first_block + b) / w.per_scale * 16 : 0;
        I acc[CHAINS][R][NT];
        for (int r = 0; r < R; ++r) {
            const int32_t s = x.sums[b * R + r];
            const I seed = iset(-w.center * s);
            for (int n = 0; n < NT; ++n) {
                acc[0][r][n] = seed;
                if (w.zero.kind) acc[0][r][n] = iadd(seed, imul(zero16(w.zero, n * w.zero.stride + group), iset(-s)));
                if (w.column_sums && r % D == D - 1)
                    acc[0][r][n] = iadd(acc[0][r][n], imul(iload(w.column_sums + (n * w.blocks + b) * 16),
                                                           iset(-x.token_zero[r / D])));
                for (int h = 1; h < CHAINS; ++h) acc[h][r][n] = iset(0);
            }
        }
        const int64_t steps = (b + 1 == w.blocks ? w.tail : w.block) / 32;
        for (int64_t s = 0; s < steps; ++s) {
            if constexpr (BITS == 4) {
                B u[NT][8];
                for (int n = 0; n < NT; ++n) {
                    decode<4>(codes + n * w.stride, u[n]);
                    if (R <= 3) __builtin_prefetch(codes + n * w.stride + 2304), __builtin_prefetch(codes + n * w.stride + 2368),
                        __builtin_prefetch(codes + n * w.stride + 2432), __builtin_prefetch(codes + n * w.stride + 2496);
                }
                for (int j = 0; j < 8; ++j)
                    for (int r = 0; r < R; ++r) {
                        const X v = xload(xs + (j * R + r) * 4);
                        for (int n = 0; n < NT; ++n)
                            acc[j % CHAINS][r][n] = dot4<false>(acc[j % CHAINS][r][n], u[n][j], v);
                    }
            } else {
                for (int j = 0; j < 8; ++j) {
                    B u[NT];
                    for (int n = 0; n < NT; ++n) {
                        u[n] = bload(codes + n * w.stride + 64 * j);
                        if (NT == 1 && R <= 3) __builtin_prefetch(codes + 64 * j + 4096);
                    }
                    for (int r = 0; r < R; ++r) {
                        const X v = xload(xs + (j * R + r) * 4);
                        for (int n = 0; n < NT; ++n)
                            acc[j % CHAINS][r][n] = dot4<BITS == 8>(acc[j % CHAINS][r][n], u[n], v);
                    }
                }
            }
            codes += BYTES;
            xs += 32 * R;
        }
        for (int n = 0; n < NT; ++n) {
            F weight_scale = fset(1);
            if (w.per_scale) weight_scale = part16(w.scale, n * w.scale.stride + group);
            for (int t = 0; t < T; ++t) {
                I part[D];
                for (int d = 0; d < D; ++d) {
                    part[d] = acc[0][t * D + d][n];
                    for (int h = 1; h < CHAINS; ++h) part[d] = iadd(part[d], acc[h][t * D + d][n]);
                }
                F f;
                if constexpr (D == 1) f = cvt(part[0]);
                else if constexpr (D == 2) f = cvt(iadd(ishl8(part[0]), part[1]));
                else f = fma(cvt(part[0]), fset(65536), cvt(iadd(ishl8(part[1]), part[2])));
                F old = KEEP ? sum[t][n] : fload(c + t * ldc + 16 * n);
                if (D > 1) {
                    const F e = fset(x.scale[b * T + t]);
                    old = fma(f, w.per_scale ? fmul(weight_scale, e) : e, old);
                } else {
                    old = w.per_scale ? fma(f, weight_scale, old) : fadd(f, old);
                }
                if (w.offset.kind)
                    old = fma(part16(w.offset, n * w.offset.stride + group), fset(x.value[b * T + t]), old);
                if (KEEP) sum[t][n] = old;
                else fstore(c + t * ldc + 16 * n, old);
            }
        }
    }
    if (KEEP)
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < NT; ++n) fstore(c + t * ldc + 16 * n, sum[t][n]);
}

using Micro = void (*)(const Panel&, const Rows&, float*, int64_t, bool);

// The kernel for T tokens of D digits.
template <int BITS, int NT, int D, int T> Micro pick_tokens(int tokens) {
    if constexpr (T * D > ROWS) return nullptr;
    else return tokens == T ? &micro<BITS, T * D, NT, D> : pick_tokens<BITS, NT, D, T + 1>(tokens);
}
template <int BITS, int NT> Micro pick(int digits, int tokens) {
    return digits == 1   ? pick_tokens<BITS, NT, 1, 1>(tokens)
           : digits == 2 ? pick_tokens<BITS, NT, 2, 1>(tokens)
                         : pick_tokens<BITS, NT, 3, 1>(tokens);
}

// y rows of one tile row range: the scale of the row or of all, that of the token, bias, and one rounding.
void finish(const IntLinear& w, const LinearArgs& a, const float* c, int64_t ldc, int64_t m, int tokens, int64_t n0,
            int tiles, const Tokens& tok) {
    for (int n = 0; n < tiles; ++n) {
        const int64_t col = n0 + 16 * n, width = std::min<int64_t>(16, w.n - col);
        if (width <= 0) return;
        F scale = fset(1), bias = fset(0);
        if (w.group == 0) scale = part16({a.scale, w.scale, 0}, col);
        if (w.group < 0) {
            alignas(64) char one[64] = {0};
            memcpy(one, a.scale, (size_t)size_of(w.scale));
            alignas(64) float f[16];
            fstore(f, part16({one, w.scale, 0}, 0));
            scale = fset(f[0]);
        }
        if (a.bias) {
            alignas(64) char tail[64] = {0};
            memcpy(tail, (const char*)a.bias + col * size_of(a.bias_kind), (size_t)(width * size_of(a.bias_kind)));
            bias = load16(tail, a.bias_kind, 0);
        }
        for (int t = 0; t < tokens; ++t) {
            F y = fmul(fload(c + t * ldc + 16 * n), fset(tok.token_scale[t]));
            if (w.group <= 0) y = fmul(y, scale);
            if (a.bias) y = fadd(y, bias);
            char* out = (char*)a.y + ((m + t) * w.n + col) * size_of(w.x);
            if (width == 16) {
                store16(out, w.x, 0, y);
            } else {
                alignas(64) char tail[64];
                store16(tail, w.x, 0, y);
                memcpy(out, tail, (size_t)(width * size_of(w.x)));
            }
        }
    }
}

// Sums over the true columns of u - center - zero_point, per block: what an input zero point is multiplied by.
template <bool ALL8> void sum_columns(const Panel& w, int tiles, const int8_t* ones, int center, int32_t* out) {
    for (int n = 0; n < tiles; ++n) {
        const uint8_t* codes = w.codes + n * w.stride;
        const int8_t* one = ones;
        for (int64_t b = 0; b < w.blocks; ++b) {
            const int64_t columns = b + 1 == w.blocks ? w.tail : w.block;
            const int64_t group = w.per_scale ? (w.first_block + b) / w.per_scale * 16 : 0;
            I acc = iset(0);
            for (int64_t q = 0; q < columns / 4; ++q, codes += 64, one += 4) acc = dot4<ALL8>(acc, bload(codes), xload(one));
            int32_t count = 0;
            for (int64_t i = -columns; i < 0; ++i) count += one[i];
            acc = iadd(acc, iset(-center * count));
            if (w.zero.kind) acc = iadd(acc, imul(zero16(w.zero, n * w.zero.stride + group), iset(-count)));
            istore(out + (n * w.blocks + b) * 16, acc);
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
thread_local Workspace inputs_space, panel_space;

// Columns of a panel widened at a time: with two or four tiles these stay in the second-level cache.
constexpr int64_t CHUNK = 2048;
// From this many blocks of tokens on, widening a panel once is cheaper than decoding it for each block.
constexpr int64_t PANEL_BLOCKS = 3;
// Fewer products than this are not worth waking a second thread for.
constexpr double PRODUCTS_PER_THREAD = 1 << 17;

struct Work {
    const IntLinear& w;
    const LinearArgs& a;
    int D, T;                    // digits per token, tokens per block
    int64_t token_blocks, blocks, chunk_blocks;
    int64_t tokens_in(int64_t mb) const { return std::min<int64_t>(T, a.m - mb * T); }
    int64_t groups() const { return w.group > 0 ? w.kp / w.group : 1; }
};

// The chunk of a tile range that starts at block b0. scratch: [tiles][chunk/32][512] bytes, for codes that are widened.
Panel panel_at(const Work& k, int64_t tile, int tiles, int64_t b0, bool widen, uint8_t* scratch) {
    const IntLinear& w = k.w;
    Panel p;
    const int64_t columns0 = b0 * w.block;
    const int64_t columns = std::min(w.kp - columns0, k.chunk_blocks * w.block);
    const int64_t stride = w.kp / 32 * 64 * w.bits;
    p.codes = (const uint8_t*)k.a.codes + tile * stride + columns0 / 32 * 64 * w.bits;
    p.stride = stride;
    if (widen) {
        for (int n = 0; n < tiles; ++n)
            for (int64_t c = 0; c < columns / 32; ++c) {
                B v[8];
                decode_any(w.bits, p.codes + n * stride + c * 64 * w.bits, v);
                for (int j = 0; j < 8; ++j) bstore(scratch + n * columns * 16 + c * 512 + 64 * j, v[j]);
            }
        p.codes = scratch;
        p.stride = columns * 16;
    }
    const int64_t per_tile = k.groups() * 16;
    const bool inside = w.group > 0;
    auto part = [&](const void* base, int32_t kind, int64_t bytes) {
        return Part{(const char*)base + tile * per_tile * bytes, kind, per_tile};
    };
    p.scale = part(k.a.scale, w.scale, w.scale == E8M0 ? 1 : size_of(w.scale));
    p.zero = part(k.a.zero_point, w.zero_point, 1);
    p.offset = part(k.a.offset, w.offset, size_of(w.offset));
    p.per_scale = inside ? w.group / w.block : 0;
    p.first_block = b0;
    p.blocks = (columns + w.block - 1) / w.block;
    p.block = w.block;
    p.tail = columns - (p.blocks - 1) * w.block;
    p.center = w.center - (SIGNED_BYTES && w.bits == 8 ? 128 : 0);
    p.column_sums = nullptr;
    return p;
}

// Tiles [tile, tile + tiles) for token blocks [mb0, mb1). tiles: NT of the kernels found by `find`.
void run_tiles(const Work& k, const Tokens* tokens, const int8_t* ones, int64_t tile, int tiles, int64_t mb0, int64_t mb1,
               bool widen, Micro (*find)(int, int), char* scratch) {
    const IntLinear& w = k.w;
    const int64_t ldc = 16 * tiles;
    float* c = (float*)scratch;                                  // [mb1 - mb0][T][tiles][16]
    int32_t* sums = (int32_t*)(c + (mb1 - mb0) * k.T * ldc);     // [tiles][chunk_blocks][16]
    uint8_t* wide = (uint8_t*)(sums + tiles * k.chunk_blocks * 16);
    for (int64_t b0 = 0; b0 < k.blocks; b0 += k.chunk_blocks) {
        Panel p = panel_at(k, tile, tiles, b0, widen, wide);
        if (ones) {
            const int8_t* here = ones + b0 * w.block;
            if (w.bits == 8) sum_columns<true>(p, tiles, here, p.center, sums);
            else if (widen) sum_columns<false>(p, tiles, here, p.center, sums);
            else {  // packed codes: widened for this alone, while they are near
                Panel q = panel_at(k, tile, tiles, b0, true, wide);
                sum_columns<false>(q, tiles, here, p.center, sums);
            }
            p.column_sums = sums;
        }
        for (int64_t mb = mb0; mb < mb1; ++mb) {
            const int t = (int)k.tokens_in(mb), r = t * k.D;
            const Tokens& tok = tokens[mb];
            const Rows rows{tok.digits + b0 * w.block * r, tok.sums + b0 * r, tok.scale + b0 * t, tok.value + b0 * t,
                            tok.token_zero};
            float* here = c + (mb - mb0) * k.T * ldc;
            find(k.D, t)(p, rows, here, ldc, b0 == 0);
            if (b0 + k.chunk_blocks >= k.blocks) finish(w, k.a, here, ldc, mb * k.T, t, tile * 16, tiles, tok);
        }
    }
}

size_t scratch_bytes(const Work& k, int tiles, int64_t token_blocks) {
    return (size_t)(token_blocks * k.T * tiles * 16 * 4 + tiles * k.chunk_blocks * 64 +
                    tiles * k.chunk_blocks * k.w.block * 16 + 4096);
}

int int_linear(const IntLinear* weight, const LinearArgs* args) {
    const IntLinear& w = *weight;
    const LinearArgs& a = *args;
    if (a.m == 0 || w.n == 0) return 0;
    Work k{w, a, digits_of(w), 0, 0, 0, 0};
    k.T = ROWS / k.D;
    k.token_blocks = (a.m + k.T - 1) / k.T;
    k.blocks = (w.kp + w.block - 1) / w.block;
    k.chunk_blocks = std::max<int64_t>(1, CHUNK / w.block);
    const int64_t tiles = (w.n + 15) / 16;
    const bool panels = k.token_blocks >= PANEL_BLOCKS;
    const bool sums_inside = w.group > 0 || k.D > 1;
    const int wide = !panels ? 1 : sums_inside ? BLOCK_TILES : WIDE_TILES;
    const bool widen = w.bits != 8 && (panels || w.bits != 4);
    if (!widen && !panels) k.chunk_blocks = k.blocks;  // straight through all columns
    Micro (*find)(int, int) = w.bits == 8 ? (panels ? (sums_inside ? pick<8, BLOCK_TILES> : pick<8, WIDE_TILES>) : pick<8, 1>)
                              : widen     ? (panels ? (sums_inside ? pick<7, BLOCK_TILES> : pick<7, WIDE_TILES>) : pick<7, 1>)
                                          : pick<4, 1>;
    Micro (*find_one)(int, int) = w.bits == 8 ? pick<8, 1> : widen ? pick<7, 1> : pick<4, 1>;

    int threads = a.threads;
    const double products = (double)a.m * (double)w.n * (double)w.kp;
    threads = (int)std::min<double>(threads, 1 + products / PRODUCTS_PER_THREAD);

    // The input. Of one or two tokens each thread makes its own copy, which costs less than waiting for another.
    const int copies = k.token_blocks == 1 && a.m <= 2 ? threads : 1;
    auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t R = k.T * k.D;
    const int64_t per_block = up(w.kp * R) + up(k.blocks * R * 4) + 2 * up(k.blocks * k.T * 4);
    const int64_t table = up((int64_t)sizeof(Tokens) * k.token_blocks), one_copy = table + per_block * k.token_blocks;
    const int64_t per_thread = up(w.kp * 4) + up(w.kp * 3);
    const bool asymmetric = w.act == ASYMMETRIC || (w.act == STATIC && a.act_zero_point);
    char* space = inputs_space.get((size_t)(one_copy * copies + per_thread * threads + (asymmetric ? up(w.kp) : 0)));
    if (!space) return 1;
    int8_t* ones = nullptr;
    if (asymmetric) {
        ones = (int8_t*)(space + one_copy * copies + per_thread * threads);
        memset(ones, 0, (size_t)w.kp);
        memset(ones, 1, (size_t)w.k);
    }
    auto take = [&](char* base, int64_t mb, char* own) {
        Tokens& tok = ((Tokens*)base)[mb];
        char* p = base + table + per_block * mb;
        tok.digits = (int8_t*)p;
        tok.sums = (int32_t*)(p += up(w.kp * R));
        tok.scale = (float*)(p += up(k.blocks * R * 4));
        tok.value = (float*)(p += up(k.blocks * k.T * 4));
        const int t = (int)k.tokens_in(mb);
        for (int i = 0; i < t; ++i) take_row(w, a, mb * k.T + i, tok, t, i, (float*)own, (int8_t*)(own + up(w.kp * 4)));
    };

    // Units of work: tile ranges x ranges of token blocks, taken by whoever is free.
    const int64_t groups_of_tiles = (tiles + wide - 1) / wide;
    const int64_t grain = panels ? 1 : std::max<int64_t>(1, std::min<int64_t>(8, tiles / (threads * 8)));
    int64_t block_step = panels ? std::max<int64_t>(1, 240 / k.T) : k.token_blocks;
    if (panels && groups_of_tiles < 4 * threads)  // few columns: cut the rows as well
        block_step = std::max<int64_t>(8, std::min(block_step, k.token_blocks / (4 * threads)));
    const int64_t row_units = (k.token_blocks + block_step - 1) / block_step;
    const int64_t units = (groups_of_tiles + grain - 1) / grain * row_units;
    std::atomic<int64_t> next_row{0}, next_unit{0};
    std::atomic<int> failed{0};

    auto body = [&](int id, int team) {
        char* own = space + one_copy * copies + per_thread * id;
        char* base = space + (copies > 1 ? one_copy * id : 0);
        if (copies > 1 || team == 1) for (int64_t mb = 0; mb < k.token_blocks; ++mb) take(base, mb, own);
        else {
            for (int64_t mb; (mb = next_row.fetch_add(1)) < k.token_blocks;) take(base, mb, own);
#if defined(_OPENMP)
#pragma omp barrier
#endif
        }
        char* scratch = panel_space.get(scratch_bytes(k, wide, block_step));
        if (!scratch) { failed = 1; return; }
        for (int64_t u; (u = next_unit.fetch_add(1)) < units;) {
            const int64_t mb0 = u % row_units * block_step, mb1 = std::min(k.token_blocks, mb0 + block_step);
            for (int64_t g = u / row_units * grain; g < std::min(groups_of_tiles, (u / row_units + 1) * grain); ++g) {
                const int64_t tile = g * wide;
                if (tile + wide <= tiles)
                    run_tiles(k, (Tokens*)base, ones, tile, wide, mb0, mb1, widen, find, scratch);
                else
                    for (int64_t one = tile; one < tiles; ++one)
                        run_tiles(k, (Tokens*)base, ones, one, 1, mb0, mb1, widen, find_one, scratch);
            }
        }
        panel_space.trim();
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    } else
#endif
        body(0, 1);
    inputs_space.trim();
    return failed;
}

}  // namespace
