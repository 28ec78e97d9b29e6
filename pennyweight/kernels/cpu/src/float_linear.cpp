// y = x @ w.T + bias with float or table codes: divides a call into tiles of the weight and blocks of rows for the
// kernels in float_microkernel.h.
#include <algorithm>
#include <type_traits>

#include "bandwidth_probe.h"
#include "float_microkernel.h"
#include "pack.h"
#include "schedule.h"
#include "vtable.h"

namespace {

// Precomputed parameters of one call.
struct FloatWork {
    const FloatLinear& w;
    const FloatArgs& a;
    int64_t columns, blocks, chunk_blocks, row_blocks;
    int T;               // maximum rows of x per block of rows
    int tiles;           // side by side
    bool direct, widen;  // widen: codes of odd widths are expanded to bytes first
    int64_t row_bytes;   // of one prepared row of x
    int64_t sums_at;     // where sums of x begin, [rows of a block of rows][blocks], after the rows
    Sweep (*find)(int rows, bool one);
    Expand expand;
    int64_t number_bytes;  // of 16 columns of a tile as numbers
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
void finish_floats(const FloatWork& k, const Scales& scales, const float* c, int64_t ldc, int64_t row, int rows,
                   int64_t tile) {
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
void run_float_tiles(const FloatWork& k, const char* x, int64_t tile, int tiles, int64_t r0, int64_t r1, char* room) {
    const FloatLinear& w = k.w;
    FloatLinear offset_as = w;  // offsets are stored like scales
    FloatArgs offset_at = k.a;
    offset_as.scale = w.offset, offset_at.scale = k.a.offset;
    offset_at.outer_scale = k.a.offset_scale, offset_at.outer_offset = nullptr;
    if (size_of(w.offset) > 1) offset_as.outer = 0;
    const Scales scales{w, k.a}, offsets{offset_as, offset_at};
    const int64_t ldc = 16 * tiles, base = k.rows_at(r0), tile_bytes = w.kp / 32 * 64 * w.bits;
    float* c = (float*)room;
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
            const uint32_t* here =
                (const uint32_t*)(x + row * k.row_bytes) + first * rows * k.row_bytes / (4 * k.columns);
            float* out = c + (row - base) * ldc;
            p.sums = (const float*)(x + k.sums_at) + row * k.blocks + b0 * rows;
            k.find(rows, tiles == 1)(w, p, here, out, ldc, b0 == 0);
            if (b0 + k.chunk_blocks >= k.blocks)
                for (int n = 0; n < tiles; ++n) finish_floats(k, scales, out + 16 * n, ldc, row, rows, tile + n);
        }
    }
}

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
    if (w.decode == SMALL_FLOAT) {
        if (w.bits == 6) use((Sixes<P, Small>*)nullptr);
        else use((Bytes<P, Small>*)nullptr);
    } else if constexpr (!P::SMALL_ONLY) {
        if (w.bits == 4) use((Nibbles<P, T16>*)nullptr);
        else if (w.decode == TABLE16) use((Bytes<P, T16>*)nullptr);
        else if (w.decode == TABLE256) use((Bytes<P, typename P::Table256>*)nullptr);
        else if (w.bits == 6) use((Sixes<P, typename P::Integer>*)nullptr);
        else use((Bytes<P, typename P::Integer>*)nullptr);
    }
    k.number_bytes = 4 * P::PER * 64;
    k.row_bytes = k.columns * P::PER;
    k.sums_at = (k.a.m * k.row_bytes + 63) / 64 * 64;
}

template <class P> int run_floats(const FloatLinear& w, const FloatArgs& a) {
    FloatWork k{w,       a, (w.k + 15) / 16 * 16, 0, 0, 0, FLOAT_ROWS, 0, a.m <= DIRECT_ROWS, false, 0, 0, nullptr,
                nullptr, 0};
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
    const int copies = k.row_blocks == 1 ? threads : 1;
    const int64_t one_copy = k.sums_at + (w.offset ? whole_lines(a.m * k.blocks * 4) : 0),
                  wide = whole_lines(k.columns * 4);
    char* space = inputs.get((size_t)(one_copy * copies + wide * threads));
    if (!space) return 1;

    int64_t step = k.direct ? 1 : std::min<int64_t>(k.row_blocks, 240 / k.T);  // row blocks of a unit of work
    if (ranges < 4 * threads) step = std::min(step, std::max<int64_t>(8, k.row_blocks * ranges / (4 * threads)));
    const int64_t row_units = (k.row_blocks + step - 1) / step;
    const int64_t grain = k.row_blocks > 1 ? 1 : std::max<int64_t>(1, std::min<int64_t>(4, ranges / (threads * 8)));
    const int64_t units = (ranges + grain - 1) / grain * row_units;
    const int64_t most = k.chunk_blocks * w.block + 16;
    const size_t scratch_size = (size_t)(k.tiles * (step * k.T * 64 + k.chunk_blocks * 64 * (w.offset ? 2 : 1) +
                                                    most * 16 + most / 16 * k.number_bytes) +
                                         64);
    std::atomic<int> failed{0};
    const auto base_of = [&](int id) { return space + (copies > 1 ? one_copy * id : 0); };
    const auto prepare = [&](int id, int64_t rb) {
        const int64_t row = k.rows_at(rb);
        const int rows = (int)(k.rows_at(rb + 1) - row);
        float* own = (float*)(space + one_copy * copies + wide * id);
        for (int t = 0; t < rows; ++t)
            take_floats<P>(k, row + t, rows, t, own, (uint32_t*)(base_of(id) + row * k.row_bytes),
                           (float*)(base_of(id) + k.sums_at) + row * k.blocks);
    };
    const auto run = [&](int id, int64_t u) {
        char* room = scratch.get(scratch_size);
        if (!room) {
            failed = 1;
            return;
        }
        const int64_t r0 = u % row_units * step, r1 = std::min(k.row_blocks, r0 + step);
        for (int64_t g = u / row_units * grain; g < std::min(ranges, (u / row_units + 1) * grain); ++g) {
            const int64_t tile = g * k.tiles;
            if (tile + k.tiles <= tiles) run_float_tiles(k, base_of(id), tile, k.tiles, r0, r1, room);
            else
                for (int64_t one = tile; one < tiles; ++one) run_float_tiles(k, base_of(id), one, 1, r0, r1, room);
        }
    };
    run_units(threads, copies > 1, k.row_blocks, units, prepare, run);
    return failed;
}

#if defined(PW_BFLOAT16)
// Compiled only for what bfloat16 instructions make faster; the kernel of AVX-512 does the rest.
decltype(Table::float_linear) lesser;
#endif

int float_linear(const FloatLinear* weight, const FloatArgs* args) {
    if (args->m == 0 || weight->n == 0) return 0;
#if defined(PW_BFLOAT16)
    if (weight->x == BF16) return run_floats<Bfloat16>(*weight, *args);
    return weight->decode == SMALL_FLOAT ? run_floats<Float32ByBytes>(*weight, *args) : lesser(weight, args);
#else
    return run_floats<Float32>(*weight, *args);
#endif
}

}  // namespace

PW_PART(float_linear) {
#if defined(PW_BFLOAT16)
    lesser = table->float_linear;
#endif
    table->float_linear = float_linear;
    table->probe[PROBE_BF16] = probe_threads<probe_bf16>;
}
