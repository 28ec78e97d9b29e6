// y = x @ w.T + bias with float or table codes. Sums run over the columns in order, one chain per output and block of
// columns; blocks are scaled and added in float32. Every partition of the work keeps that order, so a result depends
// only on its row of x and its row of w. Products are in float32, or in bfloat16 if x is bfloat16 and the machine has
// such an instruction.
//
//   y[n] = sum over blocks of scale[n, block] * (sum over k in block of x[k] * values[code[n, k]])
//                             + offset[n, block] * (sum over k in block of x[k])
//
// One or two rows decode the codes directly (memory-bound); more rows read numbers that were decoded once for a chunk
// of columns (compute-bound). Both call `sweep`.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "float_codes.h"
#include "int_linear.h"

namespace {

struct FloatPanel {
    const uint8_t* codes;    // first tile at the first column
    int64_t stride;          // bytes from tile to tile
    const float* scales;     // [tile][blocks][16], or null: no scale inside the sum
    const float* offsets;    // [tile][blocks][16], or null
    const float* sums;       // [blocks][T] of x, if there are offsets
    int64_t blocks, block, tail;  // of this chunk; columns of a block and of the last one
};

// c[t][tile] (+)= the blocks of a panel, for T rows of x and NT tiles. x: [columns / 4][T][PER]. `first`: c is not read.
template <class P, class S, int T, int NT>
void sweep(const FloatLinear& w, const FloatPanel& p, const uint32_t* x, float* c, int64_t ldc, bool first) {
    const S source(w);
    F sum[T][NT];
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < NT; ++n) sum[t][n] = first ? fset(0) : fload(c + t * ldc + 16 * n);
    const uint8_t* codes = p.codes;
    int64_t half = 0;        // of the chunk
    for (int64_t b = 0; b < p.blocks; ++b) {
        F part[T][NT];
        for (int t = 0; t < T; ++t)
            for (int n = 0; n < NT; ++n) part[t][n] = fset(0);
        const int64_t end = half + (b + 1 == p.blocks ? p.tail : p.block) / 16;
        for (; half < end; ++half) {
            const int h = (int)(half & 1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                typename P::W v[NT][P::PER];
#pragma GCC unroll 4
                for (int n = 0; n < NT; ++n) source.quad(codes + n * p.stride, h, j, v[n]);
#pragma GCC unroll 4
                for (int i = 0; i < P::PER; ++i)
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const typename P::X xv = P::spread(x + (j * T + t) * P::PER + i);
#pragma GCC unroll 4
                        for (int n = 0; n < NT; ++n) part[t][n] = P::step(part[t][n], v[n][i], xv);
                    }
            }
            if (T <= DIRECT_ROWS)
                for (int n = 0; n < NT; ++n)
                    for (int at = 0; at < S::TILE / 2; at += 64)
                        __builtin_prefetch(codes + n * p.stride + h * (S::TILE / 2) + 1024 + at);
            if (h) codes += S::TILE;
            x += 4 * T * P::PER;
        }
        for (int n = 0; n < NT; ++n)
            for (int t = 0; t < T; ++t)
                sum[t][n] = p.scales ? fma(part[t][n], fload(p.scales + (n * p.blocks + b) * 16), sum[t][n])
                                     : fadd(part[t][n], sum[t][n]);
        if (p.offsets)
            for (int n = 0; n < NT; ++n)
                for (int t = 0; t < T; ++t)
                    sum[t][n] = fma(fload(p.offsets + (n * p.blocks + b) * 16), fset(p.sums[b * T + t]), sum[t][n]);
    }
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < NT; ++n) fstore(c + t * ldc + 16 * n, sum[t][n]);
}

// Codes of a tile as numbers, 16 columns at a time.
template <class P, class S> void expand(const FloatLinear& w, const uint8_t* codes, int64_t halves, uint8_t* out) {
    const S source(w);
    for (int64_t h = 0; h < halves; ++h)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            typename P::W v[P::PER];
            source.quad(codes + h / 2 * S::TILE, h & 1, j, v);
            for (int i = 0; i < P::PER; ++i, out += 64) P::store(out, v[i]);
        }
}

using Sweep = void (*)(const FloatLinear&, const FloatPanel&, const uint32_t*, float*, int64_t, bool);
using Expand = void (*)(const FloatLinear&, const uint8_t*, int64_t, uint8_t*);

template <class P, class S, int NT, int T = 1, int MOST = FLOAT_ROWS> Sweep find_rows(int rows) {
    if constexpr (T > MOST) return nullptr;
    else return rows == T ? &sweep<P, S, T, NT> : find_rows<P, S, NT, T + 1, MOST>(rows);
}
template <class P, class S> Sweep find_direct(int rows, bool one) {
    return one ? find_rows<P, S, 1, 1, DIRECT_ROWS>(rows) : find_rows<P, S, DIRECT_TILES, 1, DIRECT_ROWS>(rows);
}
template <class P> Sweep find_panel(int rows, bool one) {
    return one ? find_rows<P, Numbers<P>, 1>(rows) : find_rows<P, Numbers<P>, FLOAT_TILES>(rows);
}

// Precomputed parameters of one call.
struct FloatWork {
    const FloatLinear& w;
    const FloatArgs& a;
    int64_t columns, blocks, chunk_blocks, row_blocks;
    int T;                     // maximum rows of x per block of rows
    int tiles;                 // side by side
    bool direct, widen;        // widen: codes of odd widths are expanded to bytes first
    int64_t row_bytes;         // of one prepared row of x
    int64_t sums_at;           // where sums of x begin, [rows of a block of rows][blocks], after the rows
    Sweep (*find)(int rows, bool one);
    Expand expand;
    int64_t number_bytes;      // of 16 columns of a tile as numbers
    int64_t rows_at(int64_t rb) const { return rb * a.m / row_blocks; }
};

// Converts one row of x to the format of the products: row t of a block of T. padded: [columns]. sums: [blocks][T].
template <class P>
void take_floats(const FloatWork& k, int64_t row, int T, int t, float* padded, uint32_t* out, float* sums) {
    const char* x = (const char*)k.a.x + row * k.a.ldx * size_of(k.w.x);
    if (k.w.offset) {
        widen_row(x, k.w.x, k.w.k, k.columns, padded);
        for (int64_t b = 0; b < k.blocks; ++b) {
            alignas(64) float f[16];
            F all = fset(0);
            for (int64_t c = b * k.w.block; c < std::min(k.columns, (b + 1) * k.w.block); c += 16)
                all = fadd(all, fload(padded + c));
            fstore(f, all);
            for (int half = 8; half; half /= 2)
                for (int i = 0; i < half; ++i) f[i] += f[i + half];
            sums[b * T + t] = f[0];
        }
    }
    using Element = typename P::Element;
    const Element* from = (const Element*)x;
    if (sizeof(Element) != (size_t)size_of(k.w.x)) {
        widen_row(x, k.w.x, k.w.k, k.columns, padded);
        from = (const Element*)padded;
    } else if (k.w.k != k.columns) {
        memset(padded, 0, (size_t)k.columns * sizeof(Element));
        memcpy(padded, x, (size_t)k.w.k * sizeof(Element));
        from = (const Element*)padded;
    }
    for (int64_t q = 0; q < k.columns / 4; ++q) P::take(from + 4 * q, out + (q * T + t) * P::PER);
}

// y of one tile: applies the per-row or per-tensor scale and the bias, and rounds once.
void finish_floats(const FloatWork& k, const Scales& scales, const float* c, int64_t ldc, int64_t row, int rows, int64_t tile) {
    const FloatLinear& w = k.w;
    const int64_t col = tile * 16, width = std::min<int64_t>(16, w.n - col);
    if (width <= 0) return;
    const bool scaled = w.group <= 0 && w.scale != NONE;
    const F scale = scaled ? scales.at(tile, 0) : fset(1);
    F bias = fset(0);
    if (k.a.bias) {
        alignas(64) char tail[64] = {0};
        memcpy(tail, (const char*)k.a.bias + col * size_of(k.a.bias_kind), (size_t)(width * size_of(k.a.bias_kind)));
        bias = load16(tail, k.a.bias_kind, 0);
    }
    for (int t = 0; t < rows; ++t) {
        F y = fload(c + t * ldc);
        if (scaled) y = fmul(y, scale);
        if (k.a.bias) y = fadd(y, bias);
        char* out = (char*)k.a.y + ((row + t) * w.n + col) * size_of(w.x);
        if (width == 16) {
            store16(out, w.x, 0, y);
        } else {
            alignas(64) char tail[64];
            store16(tail, w.x, 0, y);
            memcpy(out, tail, (size_t)(width * size_of(w.x)));
        }
    }
}

// Tiles [tile, tile + tiles) for row blocks [r0, r1). x: prepared rows.
void run_float_tiles(const FloatWork& k, const char* x, int64_t tile, int tiles, int64_t r0, int64_t r1, char* scratch) {
    const FloatLinear& w = k.w;
    FloatLinear offset_as = w;  // offsets are stored like scales
    FloatArgs offset_at = k.a;
    offset_as.scale = w.offset, offset_at.scale = k.a.offset;
    offset_at.outer_scale = k.a.offset_scale, offset_at.outer_offset = nullptr;
    if (size_of(w.offset) > 1) offset_as.outer = 0;
    const Scales scales{w, k.a}, offsets{offset_as, offset_at};
    const int64_t ldc = 16 * tiles, base = k.rows_at(r0), tile_bytes = w.kp / 32 * 64 * w.bits;
    float* c = (float*)scratch;
    float* inside = c + (k.rows_at(r1) - base) * ldc;
    float* inside_offset = inside + tiles * k.chunk_blocks * 16;
    uint8_t* bytes = (uint8_t*)(inside_offset + (w.offset ? tiles * k.chunk_blocks * 16 : 0));
    const int64_t most = k.chunk_blocks * w.block + 16;  // columns of a chunk, in whole tiles
    uint8_t* numbers = bytes + (k.widen ? tiles * most * 16 : 0);
    for (int64_t b0 = 0; b0 < k.blocks; b0 += k.chunk_blocks) {
        const int64_t first = b0 * w.block, columns = std::min(k.columns - first, k.chunk_blocks * w.block);
        FloatPanel p;
        p.blocks = (columns + w.block - 1) / w.block;
        p.block = w.block;
        p.tail = columns - (p.blocks - 1) * w.block;
        p.scales = w.group > 0 ? inside : nullptr;
        p.offsets = w.offset ? inside_offset : nullptr;
        if (w.group > 0)
            for (int n = 0; n < tiles; ++n)
                for (int64_t b = 0; b < p.blocks; ++b) {
                    const int64_t group = (first + b * w.block) / w.group;
                    fstore(inside + (n * p.blocks + b) * 16, scales.at(tile + n, group));
                    if (w.offset) fstore(inside_offset + (n * p.blocks + b) * 16, offsets.at(tile + n, group));
                }
        p.codes = (const uint8_t*)k.a.codes + tile * tile_bytes + first / 32 * 64 * w.bits;
        p.stride = tile_bytes;
        if (k.widen) {
            for (int n = 0; n < tiles; ++n)
                for (int64_t s = 0; s < (columns + 31) / 32; ++s) {
                    B v[8];
                    decode_any(w.bits, p.codes + n * tile_bytes + s * 64 * w.bits, v);
                    for (int j = 0; j < 8; ++j) bstore(bytes + n * most * 16 + s * 512 + 64 * j, v[j]);
                }
            p.codes = bytes;
            p.stride = most * 16;
        }
        if (!k.direct) {
            for (int n = 0; n < tiles; ++n)
                k.expand(w, p.codes + n * p.stride, columns / 16, numbers + n * (most / 16) * k.number_bytes);
            p.codes = numbers;
            p.stride = most / 16 * k.number_bytes;
        }
        for (int64_t rb = r0; rb < r1; ++rb) {
            const int64_t row = k.rows_at(rb);
            const int rows = (int)(k.rows_at(rb + 1) - row);
            const uint32_t* here = (const uint32_t*)(x + row * k.row_bytes) + first * rows * k.row_bytes / (4 * k.columns);
            float* out = c + (row - base) * ldc;
            p.sums = (const float*)(x + k.sums_at) + row * k.blocks + b0 * rows;
            k.find(rows, tiles == 1)(w, p, here, out, ldc, b0 == 0);
            if (b0 + k.chunk_blocks >= k.blocks)
                for (int n = 0; n < tiles; ++n) finish_floats(k, scales, out + 16 * n, ldc, row, rows, tile + n);
        }
    }
}

thread_local Workspace float_inputs, float_space;

// Columns decoded at a time: with two tiles they stay in the L1 or L2 cache.
constexpr int64_t FLOAT_CHUNK = 512;

template <class P> void choose_source(FloatWork& k) {
    const FloatLinear& w = k.w;
    using T16 = typename P::Table16;
    using Small = typename P::Small;
    auto use = [&](auto* source) {
        using S = std::remove_pointer_t<decltype(source)>;
        k.find = k.direct ? &find_direct<P, S> : &find_panel<P>;
        k.expand = &expand<P, S>;
    };
    if (w.bits == 4) use((Nibbles<P, T16>*)nullptr);
    else if (w.decode == TABLE16) use((Bytes<P, T16>*)nullptr);
    else if (w.decode == TABLE256) use((Bytes<P, typename P::Table256>*)nullptr);
    else if (w.decode == INTEGER && w.bits == 6) use((Sixes<P, typename P::Integer>*)nullptr);
    else if (w.decode == INTEGER) use((Bytes<P, typename P::Integer>*)nullptr);
    else if (w.bits == 6) use((Sixes<P, Small>*)nullptr);
    else use((Bytes<P, Small>*)nullptr);
    k.number_bytes = 4 * P::PER * 64;
    k.row_bytes = k.columns * P::PER;
    k.sums_at = (k.a.m * k.row_bytes + 63) / 64 * 64;
}

template <class P> int run_floats(const FloatLinear& w, const FloatArgs& a) {
    FloatWork k{w, a, (w.k + 15) / 16 * 16, 0, 0, 0, FLOAT_ROWS, 0, a.m <= DIRECT_ROWS, false, 0, 0, nullptr, nullptr, 0};
    k.widen = w.bits != 4 && w.bits != 8 && (w.bits != 6 || w.decode == TABLE256);
    k.blocks = (k.columns + w.block - 1) / w.block;
    k.chunk_blocks = std::max<int64_t>(1, FLOAT_CHUNK / w.block);
    if (k.chunk_blocks * w.block % 32) ++k.chunk_blocks;  // chunks begin with a whole tile of columns
    k.row_blocks = (a.m + k.T - 1) / k.T;
    k.tiles = k.direct ? DIRECT_TILES : FLOAT_TILES;
    choose_source<P>(k);
    const int64_t tiles = (w.n + 15) / 16, ranges = (tiles + k.tiles - 1) / k.tiles;
    const double products = (double)a.m * (double)w.n * (double)w.kp;
    const int threads = (int)std::min<double>(a.threads, 1 + products / PRODUCTS_PER_THREAD);

    // The input. For few rows each thread makes its own copy, which is cheaper than waiting for another thread.
    auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int copies = k.row_blocks == 1 ? threads : 1;
    const int64_t one_copy = k.sums_at + (w.offset ? up(a.m * k.blocks * 4) : 0), wide = up(k.columns * 4);
    char* space = float_inputs.get((size_t)(one_copy * copies + wide * threads));
    if (!space) return 1;

    int64_t step = k.direct ? 1 : std::min<int64_t>(k.row_blocks, 240 / k.T);  // row blocks of a unit of work
    if (ranges < 4 * threads) step = std::min(step, std::max<int64_t>(8, k.row_blocks * ranges / (4 * threads)));
    const int64_t row_units = (k.row_blocks + step - 1) / step;
    const int64_t grain = k.row_blocks > 1 ? 1 : std::max<int64_t>(1, std::min<int64_t>(4, ranges / (threads * 8)));
    const int64_t units = (ranges + grain - 1) / grain * row_units;
    const int64_t most = k.chunk_blocks * w.block + 16;
    const size_t scratch_size =
        (size_t)(k.tiles * (step * k.T * 64 + k.chunk_blocks * 64 * (w.offset ? 2 : 1) + most * 16 + most / 16 * k.number_bytes) + 64);
    std::atomic<int64_t> next_row{0}, next_unit{0};
    std::atomic<int> failed{0};

    auto take = [&](char* base, int64_t rb, float* own) {
        const int64_t row = k.rows_at(rb);
        const int rows = (int)(k.rows_at(rb + 1) - row);
        for (int t = 0; t < rows; ++t)
            take_floats<P>(k, row + t, rows, t, own, (uint32_t*)(base + row * k.row_bytes),
                           (float*)(base + k.sums_at) + row * k.blocks);
    };
    auto body = [&](int id, int team) {
        char* base = space + (copies > 1 ? one_copy * id : 0);
        float* own = (float*)(space + one_copy * copies + wide * id);
        if (copies > 1 || team == 1) for (int64_t rb = 0; rb < k.row_blocks; ++rb) take(base, rb, own);
        else {
            for (int64_t rb; (rb = next_row.fetch_add(1)) < k.row_blocks;) take(base, rb, own);
#if defined(_OPENMP)
#pragma omp barrier
#endif
        }
        char* scratch = float_space.get(scratch_size);
        if (!scratch) { failed = 1; return; }
        for (int64_t u; (u = next_unit.fetch_add(1)) < units;) {
            const int64_t r0 = u % row_units * step, r1 = std::min(k.row_blocks, r0 + step);
            for (int64_t g = u / row_units * grain; g < std::min(ranges, (u / row_units + 1) * grain); ++g) {
                const int64_t tile = g * k.tiles;
                if (tile + k.tiles <= tiles) run_float_tiles(k, base, tile, k.tiles, r0, r1, scratch);
                else for (int64_t one = tile; one < tiles; ++one) run_float_tiles(k, base, one, 1, r0, r1, scratch);
            }
        }
        float_space.trim();
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    } else
#endif
        body(0, 1);
    float_inputs.trim();
    return failed;
}

int float_linear(const FloatLinear* weight, const FloatArgs* args) {
    if (args->m == 0 || weight->n == 0) return 0;
#if defined(PW_BFLOAT16)
    if (weight->x == BF16) return run_floats<Bfloat16>(*weight, *args);
#endif
    return run_floats<Single>(*weight, *args);
}

}  // namespace
