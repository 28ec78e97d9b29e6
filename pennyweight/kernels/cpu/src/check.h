// Argument rules of each exported function: consistent sizes, known kinds, and memory of the size that they require.
// Each function here returns whether all rules hold; see arguments.h for what happens if not. Extents are exact: only
// memory that a function reads or writes is required.
#pragma once

#include "arguments.h"

namespace check {

constexpr int64_t MOST = (int64_t)1 << 40;  // of rows, columns and strides, so that sums of a few fit int64
constexpr int MOST_THREADS = 1 << 12;

inline bool within(int64_t x, int64_t lo, int64_t hi) { return lo <= x && x <= hi; }
inline bool size(int64_t n) { return within(n, 0, MOST); }
inline int64_t over(int64_t n, int64_t step) { return (n + step - 1) / step; }
inline bool is_float(int kind) { return within(kind, F32, F16); }
inline bool is_integer(int kind) { return kind == I8 || kind == U8; }
// Elements from the first to the last of m rows of k with stride ldx. Rows may overlap, as after expand().
inline int64_t span(int64_t m, int64_t k, int64_t ldx) {
    const int64_t before = m > 1 ? times({m - 1, ldx}) : 0;
    return m <= 0 ? 0 : before > TOO_MUCH - MOST ? TOO_MUCH : before + k;
}
inline bool threads(Arguments& c, int64_t count) { return c.must(within(count, 1, MOST_THREADS), "1 to 4096 threads"); }
inline void input(Arguments& c, const void* x, int64_t m, int64_t k, int64_t ldx, int kind) {
    c.memory("x", x, span(m, k, ldx), bytes_of(kind));
}
inline bool rows(Arguments& c, int64_t m, int64_t ldx) {
    return c.must(size(m), "m from 0 to 2**40") && c.must(m <= 1 || size(ldx), "ldx from 0 to 2**40");
}
inline bool bias_kind(Arguments& c, const void* bias, int kind) {
    return c.must(!bias || is_float(kind), "bias float32, bfloat16 or float16");
}

// -- linear layers ----------------------------------------------------------------------------------------------------

inline bool same_but_rows(IntLinear a, IntLinear b) {
    a.n = b.n = 0;
    return __builtin_memcmp(&a, &b, sizeof a) == 0;
}

inline bool int_weight(Arguments& c, const IntLinear& w) {
    const bool outer = w.outer != 0;
    // Sums of a block are exact: of words in int32, with a zero point of the input in float32.
    const int most = w.act == FLOAT ? 128 : w.act == SYMMETRIC ? 2048 : w.act == ASYMMETRIC ? 512 : 2048;
    return c.must(size(w.n) && size(w.k) && size(w.kp), "n, k and kp from 0 to 2**40") &&
           c.must(w.kp > 0 && w.kp % 32 == 0 && w.kp >= w.k, "kp a multiple of 32 and not below k") &&
           c.must(within(w.bits, 1, 8), "1 to 8 bits") &&
           c.must(within(w.center, -256, 256), "center from -256 to 256") &&
           c.must(w.group >= -1, "group from -1 on") &&
           c.must(w.block % 32 == 0 && within(w.block, 32, most), "block a multiple of 32 within the exact sums") &&
           c.must(w.group <= 0 || (w.group % w.block == 0 && w.kp % w.group == 0), "block divides group divides kp") &&
           c.must(is_float(w.x) && is_float(w.act_scale), "x and scales of activations of a float kind") &&
           c.must(within(w.act, FLOAT, STATIC), "act FLOAT to STATIC") &&
           c.must(w.act_group == 0 || (within(w.act_group, 1, MOST) && w.act_group % w.block == 0 &&
                                       (w.act == SYMMETRIC || w.act == ASYMMETRIC)),
                  "groups of a dynamic activation, of whole blocks") &&
           c.must(w.act == FLOAT || (within(w.act_lo, -128, 127) && within(w.act_hi, w.act_lo, 127)),
                  "act_lo to act_hi within int8") &&
           c.must(w.outer >= 0 && (outer ? is_integer(w.scale) && w.group > 0 && !w.zero_point
                                         : is_float(w.scale) || w.scale == E8M0),
                  "scales of a float kind or E8M0, or integers in groups under outer numbers") &&
           c.must(!outer || is_float(w.outer_kind), "outer numbers of a float kind") &&
           c.must(w.zero_point == NONE || is_integer(w.zero_point), "zero points I8 or U8") &&
           c.must(w.offset == NONE || (w.group > 0 && (outer ? is_integer(w.offset) : is_float(w.offset))),
                  "offsets in groups, as scales") &&
           c.must(w.group >= 0 || (!w.zero_point && w.scale != E8M0), "one scale in all: of a float kind, alone");
}

inline void int_parts(Arguments& c, const IntLinear& w, const LinearArgs& a) {
    const int64_t tiles = over(w.n, 16), groups = w.group > 0 ? w.kp / w.group : 1,
                  outers = w.outer ? over(groups, w.outer) : 0;
    const int64_t each = w.outer ? outers * w.outer : groups, parts = times({tiles, each, 16});
    const int outer = w.outer ? w.outer_kind : (int)NONE;
    c.part("codes", a.codes, U8, times({tiles, w.kp / 32, 64 * w.bits}));
    c.part("scale", a.scale, w.scale, w.group < 0 ? (tiles > 0) : parts);
    c.part("zero_point", a.zero_point, w.zero_point, parts);
    c.part("offset", a.offset, w.offset, parts);
    c.part("scale of the scale", a.outer_scale, outer, times({tiles, outers, 16}));
    c.part("scale of the offset", a.outer_offset, w.offset ? outer : (int)NONE, times({tiles, outers, 16}));
    if (a.bias) c.memory("bias", a.bias, w.n, bytes_of(a.bias_kind));
}

inline bool int_linears(const char* function, const IntLinear* weights, const LinearArgs* args, int count) {
    Arguments c(function);
    if (!c.must(count >= 0, "a count from 0 on")) return false;
    c.memory("weights", weights, count, sizeof *weights);
    c.memory("args", args, count, sizeof *args);
    if (!c.fit() || count == 0) return c.fit();
    const LinearArgs& a = *args;
    if (!int_weight(c, *weights) || !rows(c, a.m, a.ldx) || !threads(c, a.threads)) return false;
    if (!c.must(weights->act != STATIC || !a.act_zero_point || weights->block <= 512,
                "block 512 at most beside a zero point"))
        return false;
    input(c, a.x, a.m, weights->k, a.ldx, weights->x);
    if (weights->act == STATIC) c.memory("act_scale", a.act_scale, 1, 4);
    for (int i = 0; i < count; ++i) {
        if (!c.must(same_but_rows(*weights, weights[i]), "weights that differ in n only") ||
            !c.must(size(weights[i].n), "n from 0 to 2**40") || !bias_kind(c, args[i].bias, args[i].bias_kind))
            return false;
        int_parts(c, weights[i], args[i]);
        c.memory("y", args[i].y, times({a.m, weights[i].n}), bytes_of(weights[i].x));
    }
    return c.fit();
}

inline bool float_weight(Arguments& c, const FloatLinear& w) {
    const bool packed = w.scale == E8M0 || w.scale == E4M3 || is_integer(w.scale);
    const int64_t columns = over(w.k, 16) * 16;
    if (!(c.must(size(w.n) && within(w.k, 1, MOST) && size(w.kp), "n and kp from 0 to 2**40, k from 1") &&
          c.must(w.kp % 32 == 0 && w.kp >= w.k, "kp a multiple of 32 and not below k") &&
          c.must(w.group >= -1 && (w.group <= 0 || w.group % 16 == 0), "group -1, 0 or a multiple of 16") &&
          c.must(w.block > 0 && w.block % 16 == 0 && (w.group <= 0 || w.group % w.block == 0),
                 "block a multiple of 16 that divides the group") &&
          c.must(size(w.scale_groups) && size(w.outer_groups), "scale_groups and outer_groups from 0 to 2**40") &&
          c.must(w.row_block >= 0 && w.row_block % 16 == 0, "row_block a multiple of 16") &&
          c.must(is_float(w.x), "x of a float kind") &&
          c.must(w.decode == TABLE16       ? within(w.bits, 1, 4)
                 : w.decode == SMALL_FLOAT ? within(w.bits, 5, 8) && w.exponent > 0 && w.mantissa >= 0 &&
                                                 w.exponent + w.mantissa == w.bits - 1
                 : w.decode == TABLE256    ? within(w.bits, 5, 8)
                                           : w.decode == INTEGER && within(w.bits, 5, 6),
                 "bits and decode that go together") &&
          c.must(w.scale == NONE || is_float(w.scale) || packed, "scales of a known kind") &&
          c.must(!packed || (w.group >= 0 && !w.row_block), "scales of a byte for each row") &&
          c.must(w.outer >= -1 && (w.outer == 0 || (packed && is_float(w.outer_kind))),
                 "outer numbers of a float kind above scales of a byte") &&
          c.must(w.offset == NONE ||
                     (w.group > 0 && !w.row_block && (is_float(w.offset) || (is_integer(w.offset) && w.outer))),
                 "offsets in groups, of a float kind or integers under outer numbers")))
        return false;
    const int64_t groups = w.group > 0 ? over(columns, w.group) : 1;
    const bool stored = w.scale != NONE || w.offset != NONE;
    return c.must(!stored || w.group <= 0 || w.scale_groups >= groups, "scale_groups for every column") &&
           c.must(!stored || w.group != 0 || w.scale_groups >= 1, "a scale for each row") &&
           c.must(w.outer <= 0 || w.outer_groups >= over(groups, w.outer), "outer_groups for every scale");
}

inline void float_parts(Arguments& c, const FloatLinear& w, const FloatArgs& a) {
    const int64_t tiles = over(w.n, 16), each = times({tiles, w.scale_groups, 16});
    const int64_t parts = w.group < 0   ? (tiles > 0)
                          : w.row_block ? times({over(w.n, w.row_block), w.scale_groups})
                                        : each;
    const int64_t outers = w.outer < 0 ? (tiles > 0) : w.outer ? times({tiles, w.outer_groups, 16}) : 0;
    c.part("codes", a.codes, U8, times({tiles, w.kp / 32, 64 * w.bits}));
    c.part("scale", a.scale, w.scale, parts);
    c.part("scale of the scale", a.outer_scale, w.outer ? w.outer_kind : (int)NONE, outers);
    c.part("offset of the scale", a.outer_offset, a.outer_offset ? (int)F32 : (int)NONE, outers);
    c.part("offset", a.offset, w.offset, parts);
    c.part("scale of the offset", a.offset_scale, is_integer(w.offset) ? w.outer_kind : (int)NONE, outers);
}

inline bool float_linear(const char* function, const FloatLinear* weight, const FloatArgs& a) {
    Arguments c(function);
    c.memory("weight", weight, 1, sizeof *weight);
    if (!c.fit()) return false;
    const FloatLinear& w = *weight;
    if (!float_weight(c, w) || !rows(c, a.m, a.ldx) || !threads(c, a.threads) || !bias_kind(c, a.bias, a.bias_kind) ||
        !c.must(!a.outer_offset || w.outer, "an outer offset beside an outer scale only"))
        return false;
    input(c, a.x, a.m, w.k, a.ldx, w.x);
    c.memory("y", a.y, times({a.m, w.n}), bytes_of(w.x));
    if (a.bias) c.memory("bias", a.bias, w.n, bytes_of(a.bias_kind));
    c.memory("values", w.values, 256, 4);
    c.memory("low", w.low, 256);
    c.memory("high", w.high, 256);
    float_parts(c, w, a);
    return c.fit();
}

// -- convolutions -----------------------------------------------------------------------------------------------------

// Size of the output of a convolution along one axis; at most 0 if the kernel is larger than the padded input.
inline int64_t conv_size(int64_t n, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    const int64_t rest = n + 2 * pad - dilation * (kernel - 1) - 1;
    return rest < 0 ? 0 : rest / stride + 1;
}

inline int64_t conv_columns(const Conv& w) { return times({w.c / w.channels, w.kh, w.kw, over(w.channels, 4) * 4}); }

inline bool conv_weight(Arguments& c, const Conv& w) {
    constexpr int64_t SIDE = (int64_t)1 << 31, COLUMNS = 1 << 15;  // sums of COLUMNS products of bytes fit int32
    return c.must(within(w.o, 0, SIDE) && within(w.c, 1, SIDE) && within(w.kh, 1, COLUMNS) && within(w.kw, 1, COLUMNS),
                  "o, c and a kernel of sizes below 2**31") &&
           c.must(within(w.channels, 1, COLUMNS) && w.c % w.channels == 0 && (w.channels == w.c || w.channels % 4 == 0),
                  "channels that divide c, all or a multiple of 4") &&
           c.must(times({w.kh, w.kw, over(w.channels, 4) * 4}) <= COLUMNS, "at most 2**15 columns in a sum") &&
           c.must(within(w.bits, 1, 8) && within(w.center, 0, 255), "1 to 8 bits, center from 0 to 255") &&
           c.must(is_float(w.scale), "scales of a float kind") &&
           c.must(w.zero_point == NONE || is_integer(w.zero_point), "zero points I8 or U8") &&
           c.must(within(w.one_scale, 0, 1) && (!w.one_scale || (w.channels == w.c && !w.zero_point)),
                  "one scale alone, or scales of rows") &&
           c.must(is_float(w.x) && is_float(w.act_scale), "x and scales of activations of a float kind") &&
           c.must(within(w.act, FLOAT, STATIC), "act FLOAT to STATIC") &&
           c.must(w.act != FLOAT || (w.x == F32 && w.c > 1), "act FLOAT for float32 and several input channels") &&
           c.must(w.act == FLOAT || (within(w.act_lo, -128, 127) && within(w.act_hi, w.act_lo, 127)),
                  "act_lo to act_hi within int8") &&
           c.must(w.c == 1 || w.kp == over(conv_columns(w), 32) * 32, "kp of all columns in blocks of 32");
}

inline void conv_parts(Arguments& c, const Conv& w, const void* codes, const void* scale, const void* zero_point) {
    const int64_t tiles = over(w.o, 16), each = times({tiles, w.c / w.channels, 16});
    c.part("codes", codes, U8, w.c == 1 ? times({w.kh, w.kw, tiles, 16}) : times({tiles, w.kp / 32, 64 * w.bits}));
    c.part("scale", scale, w.scale, w.one_scale ? (tiles > 0) : each);
    c.part("zero_point", zero_point, w.zero_point, each);
}

inline bool convolution(const char* function, const Conv* conv, const ConvArgs* args) {
    Arguments c(function);
    c.memory("conv", conv, 1, sizeof *conv);
    c.memory("args", args, 1, sizeof *args);
    if (!c.fit()) return false;
    const Conv& w = *conv;
    const ConvArgs& a = *args;
    constexpr int64_t SIDE = (int64_t)1 << 31;
    if (!conv_weight(c, w) ||
        !c.must(within(a.n, 0, SIDE) && within(a.h, 0, SIDE) && within(a.w, 0, SIDE) && within(a.groups, 1, SIDE),
                "n, h, w and groups from 0 to 2**31") ||
        !c.must(w.o % a.groups == 0, "groups that divide o") ||
        !c.must(within(a.stride_h, 1, SIDE) && within(a.stride_w, 1, SIDE) && within(a.dilation_h, 1, SIDE) &&
                    within(a.dilation_w, 1, SIDE),
                "strides and dilations from 1 to 2**31") ||
        !c.must(within(a.pad_h, 0, SIDE) && within(a.pad_w, 0, SIDE), "padding from 0 to 2**31") ||
        !c.must(within(a.act_zero_point, -128, 127), "a zero point of int8") ||
        !c.must(within(a.function, IDENTITY, HARDSWISH), "function IDENTITY to HARDSWISH") ||
        !c.must(within(a.x_last, 0, 1) && within(a.y_last, 0, 1), "memory formats 0 or 1") ||
        !bias_kind(c, a.bias, a.bias_kind) || !threads(c, a.threads) ||
        !c.must(a.oh >= 1 && a.oh == conv_size(a.h, w.kh, a.stride_h, a.pad_h, a.dilation_h), "oh of a convolution") ||
        !c.must(a.ow >= 1 && a.ow == conv_size(a.w, w.kw, a.stride_w, a.pad_w, a.dilation_w), "ow of a convolution") ||
        !c.must(times({a.h + 2 * a.pad_h, a.w + 2 * a.pad_w, a.groups, w.c + 3, 4}) <= MOST,
                "a padded sample below 2**40 bytes") ||
        !c.must(times({a.n, w.o, a.oh, a.ow}) <= MOST, "an output below 2**40"))
        return false;
    c.memory("x", a.x, times({a.n, a.groups, w.c, a.h, a.w}), bytes_of(w.x));
    c.memory("y", a.y, times({a.n, w.o, a.oh, a.ow}), bytes_of(w.x));
    if (a.bias) c.memory("bias", a.bias, w.o, bytes_of(a.bias_kind));
    conv_parts(c, w, a.codes, a.scale, a.zero_point);
    if (w.act == STATIC) c.memory("act_scale", a.act_scale, 1, 4);
    return c.fit();
}

// -- codes ------------------------------------------------------------------------------------------------------------

inline bool tiled(Arguments& c, int64_t n, int64_t k, int64_t kp, int bits, const void* tiles, int count) {
    if (!c.must(size(n) && size(k) && size(kp), "n, k and kp from 0 to 2**40") ||
        !c.must(kp % 32 == 0 && kp >= k, "kp a multiple of 32 and not below k") ||
        !c.must(within(bits, 1, 8), "1 to 8 bits") || !threads(c, count))
        return false;
    c.memory("tiles", tiles, times({over(n, 16), kp / 32, 64 * bits}));
    return true;
}
inline bool packing(const char* function, const void* plain, int64_t n, int64_t k, int64_t kp, int bits,
                    const void* tiles, int count) {
    Arguments c(function);
    if (!tiled(c, n, k, kp, bits, tiles, count)) return false;
    c.memory("codes", plain, times({n, k}));
    return c.fit();
}
inline bool streaming(const char* function, const void* stream, int64_t n, int64_t k, int64_t kp, int bits, int pad,
                      const void* tiles, int count) {
    Arguments c(function);
    if (!tiled(c, n, k, kp, bits, tiles, count) || !c.must(within(pad, 0, (1 << bits) - 1), "padding of these bits"))
        return false;
    c.memory("stream", stream, times({n, over(k * bits, 8)}));
    return c.fit();
}

inline bool matrix(Arguments& c, const Affine& a) {
    return c.must(size(a.n) && size(a.k) && size(a.width) && size(a.stride),
                  "n, k, width and stride from 0 to 2**40") &&
           c.must(within(a.group, 1, MOST) && within(a.row_block, 1, MOST) && size(a.groups),
                  "group and row_block from 1 to 2**40") &&
           c.must(a.groups == over(a.k, a.group) && a.width >= a.k && a.width <= times({a.groups, a.group}),
                  "groups and width for k columns") &&
           c.must(within(a.bits, 1, 8), "1 to 8 bits") &&
           c.must(within(a.store, PLAIN, TILES), "store PLAIN to TILES") &&
           c.must(is_float(a.x), "x of a float kind") &&
           c.must(within(a.numbers, UNSIGNED, LOOKUP), "numbers UNSIGNED to LOOKUP") &&
           c.must(a.numbers != SIGNED || a.store == PLAIN, "signed codes in PLAIN only") &&
           c.must(within(a.center, -256, 256), "center from -256 to 256") &&
           c.must(
               a.numbers != MINIFLOAT || (within(a.mantissa, 0, a.bits - 1) && within(a.bias, 0, 127) && a.special > 0),
               "a small float of these bits") &&
           c.must(a.store != PLAIN || a.stride >= a.width, "stride of whole rows") &&
           c.must(a.store != BITS || a.stride == over(a.width * a.bits, 8), "stride of whole bytes of a row") &&
           c.must(a.store != TILES || (a.stride % (64 * a.bits) == 0 && a.stride / (64 * a.bits) * 32 >= a.width),
                  "stride of whole tiles") &&
           c.must(a.zero_point == NONE || is_integer(a.zero_point), "zero points I8 or U8") &&
           c.must(a.zero_bits == 0 || (within(a.zero_bits, 1, 8) && a.zero_point),
                  "packed zero points of 1 to 8 bits") &&
           c.must(a.offset == NONE || is_float(a.offset), "offsets of a float kind");
}

inline void codes(Arguments& c, const Affine& a, const void* p) {
    const int64_t rows = a.store == TILES ? over(a.n, 16) : a.n;
    c.part("codes", p, U8, a.store == PLAIN ? span(rows, a.width, a.stride) : times({rows, a.stride}));
}

// Scales, zero points and offsets; `tiled`: interleaved for 16 rows.
inline void parts(Arguments& c, const Affine& a, const Parts& p, bool tiled) {
    const int64_t rows = over(a.n, a.row_block);
    const int64_t count = a.n == 0 ? 0
                          : tiled  ? times({over(a.n, 16), a.groups, 16}) - (15 - (a.n - 1) % 16)
                                   : times({rows, a.groups});
    c.part("scale", p.scale, a.scale, count);
    if (a.zero_bits) c.part("zero_point", p.zero_point, U8, times({rows, over(a.groups * a.zero_bits, 8)}));
    else c.part("zero_point", p.zero_point, a.zero_point, count);
    c.part("offset", p.offset, a.offset, count);
}

inline bool dequantize(const char* function, const Affine* w, const Parts& p, const int64_t* index, int64_t m,
                       const void* out, int count) {
    Arguments c(function);
    c.memory("matrix", w, 1, sizeof *w);
    if (!c.fit()) return false;
    const Affine& a = *w;
    if (!matrix(c, a) || !threads(c, count) ||
        !c.must(size(m) && (index || m == a.n), "m from 0 to 2**40, n without an index") ||
        !c.must(a.scale == NONE || is_float(a.scale) || a.scale == E8M0, "scales of a float kind or E8M0"))
        return false;
    codes(c, a, p.codes);
    parts(c, a, p, a.store == TILES && a.row_block == 1);
    if (a.numbers == LOOKUP) c.memory("table", a.table, 256, 4);
    if (index) c.memory("index", index, m, 8);
    c.memory("out", out, times({m, a.k}), bytes_of(a.x));
    return c.fit();
}

inline bool quantize(const char* function, const Rounding* rounding, const void* x, int64_t ldx, const Parts& p,
                     const double* sums, int count) {
    Arguments c(function);
    c.memory("rounding", rounding, 1, sizeof *rounding);
    if (!c.fit()) return false;
    const Rounding& q = *rounding;
    const Affine& a = q.to;
    if (!matrix(c, a) || !threads(c, count) || !rows(c, a.n, ldx) || !c.must(a.k > 0, "k from 1 on") ||
        !c.must(a.numbers <= SIGNED, "integer codes") || !c.must(is_float(a.scale), "scales of a float kind") ||
        !c.must(a.zero_bits == 0, "zero points as bytes") ||
        !c.must(within(q.rule, GIVEN, MINMAX), "rule GIVEN to MINMAX") ||
        !c.must(q.rule == GIVEN || a.row_block == 1, "rows with scales of their own, or scales that are given") ||
        !c.must(q.rule != RULE_ASYMMETRIC || a.zero_point, "RULE_ASYMMETRIC with zero points") ||
        !c.must(q.rule != MINMAX || a.offset, "MINMAX with offsets") ||
        !c.must(q.lo >= -128 && q.hi <= 255 && q.lo < q.hi && q.hi - q.lo < (float)(1 << a.bits),
                "lo below hi, within the bits"))
        return false;
    input(c, x, a.n, a.k, ldx, a.x);
    codes(c, a, p.codes);
    parts(c, a, p, q.rule != GIVEN && a.store == TILES);
    c.memory("sums", sums, 2 + 2 * a.n, 8);
    return c.fit();
}

inline bool ranges(const char* function, const Affine* w, const void* x, int64_t ldx, const void* out, int count) {
    Arguments c(function);
    c.memory("matrix", w, 1, sizeof *w);
    if (!c.fit() || !matrix(c, *w) || !threads(c, count) || !rows(c, w->n, ldx)) return false;
    input(c, x, w->n, w->k, ldx, w->x);
    c.memory("out", out, times({w->n, w->groups, 2}), bytes_of(w->x));
    return c.fit();
}

inline bool finite(const char* function, const void* x, int kind, int64_t n, int count) {
    Arguments c(function);
    if (!c.must(is_float(kind), "x of a float kind") || !c.must(size(n), "a count from 0 to 2**40") ||
        !threads(c, count))
        return false;
    c.memory("x", x, n, bytes_of(kind));
    return c.fit();
}

inline bool gguf_quantize(const char* function, int type, const void* x, int kind, int64_t n, int64_t k,
                          const float* importance, const uint8_t* out, const double* sums, int count) {
    Arguments c(function);
    const GgufBlock block = gguf_block(type);
    if (!c.must(block.elements > 0, "a type of abi.h") || !c.must(is_float(kind), "x of a float kind") ||
        !c.must(size(n) && within(k, 1, MOST) && n % k == 0 && k % block.elements == 0, "whole rows of whole blocks") ||
        !threads(c, count))
        return false;
    c.memory("x", x, n, bytes_of(kind));
    if (importance) c.memory("importance", importance, k, 4);
    c.memory("out", out, n / block.elements, block.bytes);
    c.memory("sums", sums, 2 * over(n, GGUF_PIECE), 8);
    return c.fit();
}

// -- attention --------------------------------------------------------------------------------------------------------

// Elements from the first to the last of a strided tensor.
inline int64_t reach(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
    int64_t all = 1;
    const int64_t* stride = strides.begin();
    for (const int64_t n : sizes) {
        if (n <= 0) return 0;
        const int64_t more = times({n - 1, *stride++});
        if (more > TOO_MUCH - all) return TOO_MUCH;
        all += more;
    }
    return all;
}
inline bool strides(const int64_t* s, int count) {
    bool fit = true;
    for (int i = 0; i < count; ++i) fit &= size(s[i]);
    return fit;
}
inline bool heads(Arguments& c, int64_t batch, int64_t tokens, int64_t heads, int64_t shared, int64_t size) {
    return c.must(check::size(batch) && check::size(tokens), "batch and tokens from 0 to 2**40") &&
           c.must(within(shared, 1, 1 << 20) && within(heads, shared, 1 << 20) && heads % shared == 0,
                  "1 to 2**20 heads, a multiple of the shared heads") &&
           c.must(within(size, 1, MOST_CHANNELS), "1 to 1024 channels of a head");
}

inline bool row_norm(Arguments& c, const RowNorm& n, int64_t width) {
    if (!c.must(within(n.kind, NO_NORM, RMS_NORM), "norm NO_NORM to RMS_NORM") ||
        !c.must(!n.weight || is_float(n.weight_kind), "weights of a norm of a float kind") ||
        !c.must(!n.bias || is_float(n.bias_kind), "biases of a norm of a float kind"))
        return false;
    if (n.weight) c.memory("weight", n.weight, width, bytes_of(n.weight_kind));
    if (n.bias) c.memory("bias", n.bias, width, bytes_of(n.bias_kind));
    return c.fit();
}

inline bool cache_codes(Arguments& c, const AttentionArgs& a, const CacheCodes& p) {
    if (!c.must(within(p.bits, 1, 8) && is_float(p.kind), "codes of 1 to 8 bits, scales and offsets of a float kind") ||
        !c.must(p.tokens > 0 && p.channels > 0, "tokens and channels that share a scale from 1 on") ||
        !c.must(size(p.row) && p.row >= over((int64_t)a.size * p.bits, 8), "rows of whole bytes for all channels") ||
        !c.must(strides(p.code_strides, 3) && strides(p.scale_strides, 3) && strides(p.offset_strides, 3),
                "strides from 0 to 2**40"))
        return false;
    const auto parts = [&](const int64_t* s) {
        return a.tokens
                   ? reach({a.batch, a.shared, over(a.past, p.tokens), over(a.size, p.channels)}, {s[0], s[1], s[2], 1})
                   : 0;
    };
    c.memory("codes", p.codes,
             a.tokens ? reach({a.batch, a.shared, a.past, p.row},
                              {p.code_strides[0], p.code_strides[1], p.code_strides[2], 1})
                      : 0);
    c.memory("scale", p.scale, parts(p.scale_strides), bytes_of(p.kind));
    c.memory("offset", p.offset, parts(p.offset_strides), bytes_of(p.kind));
    return c.fit();
}

inline bool attention(const char* function, const AttentionArgs* args, int count) {
    Arguments c(function);
    c.memory("args", args, 1, sizeof *args);
    if (!c.fit()) return false;
    const AttentionArgs& a = *args;
    if (!threads(c, count) || !heads(c, a.batch, a.tokens, a.heads, a.shared, a.size) ||
        !c.must(size(a.length) && size(a.window) && within(a.past, 0, a.length),
                "length and window from 0 to 2**40, past up to length") ||
        !c.must(is_float(a.q_kind) && is_float(a.out_kind) && is_float(a.kind),
                "q, out, keys and values of a float kind") ||
        !c.must(!a.mask || a.mask_kind == U8 || is_float(a.mask_kind), "a mask of bytes or of a float kind") ||
        !c.must(a.scale - a.scale == 0 && a.softcap - a.softcap == 0 && a.softcap >= 0,
                "a finite scale and a softcap from 0 on") ||
        !c.must(strides(a.q_strides, 3) && strides(a.out_strides, 3) && strides(a.key_strides, 3) &&
                    strides(a.value_strides, 3) && (!a.mask || strides(a.mask_strides, 4)),
                "strides from 0 to 2**40"))
        return false;
    const auto rows = [&](const int64_t* s) {
        return reach({a.batch, a.tokens, a.heads, a.size}, {s[0], s[1], s[2], 1});
    };
    const auto past = [&](const int64_t* s) {
        return a.tokens ? reach({a.batch, a.shared, a.length - a.past, a.size}, {s[0], s[1], s[2], 1}) : 0;
    };
    c.memory("q", a.q, rows(a.q_strides), bytes_of(a.q_kind));
    c.memory("out", a.out, rows(a.out_strides), bytes_of(a.out_kind));
    c.memory("keys", a.keys, past(a.key_strides), bytes_of(a.kind));
    c.memory("values", a.values, past(a.value_strides), bytes_of(a.kind));
    if (a.past) {
        c.memory("past_keys", a.past_keys, 1, sizeof *a.past_keys);
        c.memory("past_values", a.past_values, 1, sizeof *a.past_values);
        if (!c.fit() || !cache_codes(c, a, *a.past_keys) || !cache_codes(c, a, *a.past_values)) return false;
    }
    if (a.mask)
        c.memory("mask", a.mask,
                 reach({a.batch, a.heads, a.tokens, a.length},
                       {a.mask_strides[0], a.mask_strides[1], a.mask_strides[2], a.mask_strides[3]}),
                 bytes_of(a.mask_kind));
    return c.fit();
}

inline bool rotary(const char* function, const RotaryArgs* args, int count) {
    Arguments c(function);
    c.memory("args", args, 1, sizeof *args);
    if (!c.fit()) return false;
    const RotaryArgs& a = *args;
    if (!threads(c, count) || !heads(c, a.batch, a.tokens, a.heads, a.shared, a.size) ||
        !c.must(size(a.past), "past from 0 to 2**40") ||
        !c.must(size(a.q_stride) && size(a.k_stride) && size(a.v_stride) && strides(a.key_strides, 3) &&
                    strides(a.value_strides, 3) && strides(a.cos_strides, 2) && strides(a.sin_strides, 2),
                "strides from 0 to 2**40") ||
        !c.must(is_float(a.cache_kind), "keys and values of a float kind") ||
        !c.must(within(a.rotation, UNROTATED, INTERLEAVED), "rotation UNROTATED to INTERLEAVED") ||
        !c.must(
            a.rotation == UNROTATED || (is_float(a.angle_kind) && within(a.rotated, 2, a.size) && a.rotated % 2 == 0),
            "an even number of rotated channels and angles of a float kind") ||
        !row_norm(c, a.q_norm, a.size) || !row_norm(c, a.k_norm, a.size))
        return false;
    const int64_t rows = times({a.batch, a.tokens}), own = times({a.heads, a.size}), shared = times({a.shared, a.size});
    const auto cache = [&](const int64_t* s) {
        return rows ? reach({a.batch, a.shared, a.past + a.tokens, a.size}, {s[0], s[1], s[2], 1}) : 0;
    };
    const auto angles = [&](const int64_t* s) { return reach({a.batch, a.tokens, a.rotated}, {s[0], s[1], 1}); };
    c.memory("q", a.q, span(rows, own, a.q_stride), 4);
    c.memory("k", a.k, span(rows, shared, a.k_stride), 4);
    c.memory("v", a.v, span(rows, shared, a.v_stride), 4);
    c.memory("keys", a.keys, cache(a.key_strides), bytes_of(a.cache_kind));
    c.memory("values", a.values, cache(a.value_strides), bytes_of(a.cache_kind));
    if (a.rotation != UNROTATED) {
        c.memory("cos", a.cos, angles(a.cos_strides), bytes_of(a.angle_kind));
        c.memory("sin", a.sin, angles(a.sin_strides), bytes_of(a.angle_kind));
    }
    return c.fit();
}

// -- optimizers -------------------------------------------------------------------------------------------------------

// Rules of a job's blocks, and the parts of its states.
inline bool states(Arguments& c, const OptimJob& j) {
    if (!c.must(size(j.count) && within(j.slab, 1, MOST) && j.count % j.slab == 0, "whole slabs") ||
        !c.must(within(j.block, 1, MOST) && within(j.row, 1, j.block) && j.block % j.row == 0,
                "blocks of whole rows") ||
        !c.must(within(j.rule, RULE_ADAM, RULE_SGD), "rule ADAM to SGD") ||
        !c.must(j.rule == RULE_ADAM ? within(j.states, 2, 3) : j.states == 1, "the states of the rule"))
        return false;
    const int64_t blocks = j.count / j.slab * over(j.slab, j.block);
    for (const OptimState* at = j.state; at < j.state + j.states; ++at) {
        const OptimState& s = *at;
        if (!c.must(within(s.kind, STATE_FLOAT, STATE_UFLOAT), "state FLOAT to UFLOAT")) return false;
        if (s.kind == STATE_FLOAT) {
            c.part("codes", s.codes, F32, j.count);
            c.part("scale", s.scale, NONE, 0);
            continue;
        }
        if (!c.must(s.bits == 8 || s.bits == 4, "state of 8 or 4 bits") ||
            !c.must(within(j.inner, 1, j.block) && j.block % j.inner == 0 && j.slab % j.inner == 0,
                    "blocks and slabs of whole entries"))
            return false;
        c.part("codes", s.codes, U8, times({blocks, j.block / j.row, s.bits == 8 ? j.row : (j.row + 1) / 2}));
        c.part("scale", s.scale, F32, blocks);
        if (s.kind == STATE_UFLOAT) {
            if (!c.must(within(s.shift, 16, 30) && within(s.top, 0, (1 << s.bits) - 1) &&
                            within(s.split, 0, s.top + 1) && s.base >= 0 && s.low >= 0 &&
                            ((int64_t)s.top + s.base) << s.shift <= INT32_MAX,
                        "codes that are the upper bits of a float32"))
                return false;
            continue;
        }
        c.memory("table", s.table, 1, sizeof(CodeTable));
        if (!c.fit() || !c.must(s.table, "a table")) return false;
        const CodeTable& t = *s.table;
        if (!c.must(within(t.shift, 1, 30) && t.first >= 0 && within(t.last, 0, 1 << 24) &&
                        (t.negative == 0 || t.negative == t.last + 1) &&
                        (t.mirror == 0 || (s.bits == 8 && t.negative == 0)),
                    "a table of cells"))
            return false;
        c.memory("cells", t.cells, (int64_t)t.last + 1 + t.negative, 4);
        c.memory("values", t.values, 256, 4);
    }
    return c.fit();
}

inline bool optim_steps(const char* function, const OptimJob* jobs, int64_t n, int count) {
    Arguments c(function);
    if (!c.must(size(n), "a count from 0 to 2**40") || !threads(c, count)) return false;
    c.memory("jobs", jobs, n, sizeof *jobs);
    if (!c.fit()) return false;
    for (const OptimJob* at = jobs; at < jobs + n; ++at) {
        const OptimJob& j = *at;
        if (!c.must(is_float(j.p_kind) && is_float(j.g_kind), "parameter and gradient of a float kind") ||
            !states(c, j))
            return false;
        c.memory("p", j.p, j.count, bytes_of(j.p_kind));
        c.memory("g", j.g, j.count, bytes_of(j.g_kind));
    }
    return c.fit();
}

// -- extents ----------------------------------------------------------------------------------------------------------

inline bool extents(const char* function, int what, const void* structure, Extent* out, int room, int* count) {
    constexpr int64_t BYTES[] = {sizeof(IntLinear), sizeof(FloatLinear), sizeof(Conv),
                                 sizeof(Affine),    sizeof(Affine),      sizeof(OptimJob)};
    Arguments c(function);
    if (!c.must(within(what, INT_WEIGHT, OPTIM_STATES), "INT_WEIGHT to OPTIM_STATES") ||
        !c.must(within(room, 0, 1 << 10), "room from 0 to 1024"))
        return false;
    c.memory("structure", structure, BYTES[what]);
    c.memory("out", out, room, sizeof *out);
    if (!c.fit()) return false;
    c.describe(out, room);
    if (what == INT_WEIGHT) {
        const IntLinear& w = *(const IntLinear*)structure;
        if (int_weight(c, w)) int_parts(c, w, {});
    } else if (what == FLOAT_WEIGHT) {
        const FloatLinear& w = *(const FloatLinear*)structure;
        FloatArgs a = {};
        a.outer_offset = w.outer ? structure : nullptr;  // which a weight may have, below an outer scale
        if (float_weight(c, w)) float_parts(c, w, a);
    } else if (what == CONV_WEIGHT) {
        const Conv& w = *(const Conv*)structure;
        if (conv_weight(c, w)) conv_parts(c, w, nullptr, nullptr, nullptr);
    } else if (what == OPTIM_STATES) {
        states(c, *(const OptimJob*)structure);
    } else {
        const Affine& a = *(const Affine*)structure;
        if (!matrix(c, a)) return false;
        codes(c, a, nullptr);
        parts(c, a, {}, what == MATRIX && a.store == TILES && a.row_block == 1);
    }
    *count = c.described();
    return c.fit();
}

// -- the rest ---------------------------------------------------------------------------------------------------------

inline bool probe(const char* function, int what, const void* p, int64_t n, int count) {
    Arguments c(function);
    if (!c.must(within(what, 0, 3), "what from 0 to 3") || !c.must(size(n), "n from 0 to 2**40") || !threads(c, count))
        return false;
    if (what == 0) c.memory("p", p, n);
    return c.fit();
}
inline bool isa_at(const char* function, int i, int count) {
    Arguments c(function);
    return c.must(within(i, 0, count - 1), "the number of an instruction set");
}
inline bool isa_named(const char* function, const char* name) {
    Arguments c(function);
    c.memory("name", name, 1);
    return c.fit();
}

}  // namespace check
