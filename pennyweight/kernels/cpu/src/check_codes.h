// Argument rules of packing and conversions, see check.h.
#pragma once

#include "check.h"

namespace check {

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
    if (!c.must(block.made > 0, "a type of abi.h that is made") || !c.must(is_float(kind), "x of a float kind") ||
        !c.must(size(n) && within(k, 1, MOST) && n % k == 0 && k % block.elements == 0, "whole rows of whole blocks") ||
        !threads(c, count))
        return false;
    c.memory("x", x, n, bytes_of(kind));
    if (importance) c.memory("importance", importance, k, 4);
    c.memory("out", out, n / block.elements, block.bytes);
    c.memory("sums", sums, 2 * over(n, GGUF_PIECE), 8);
    return c.fit();
}

inline bool gguf_codes(const char* function, int type, const uint8_t* blocks, int64_t n, const uint8_t* stream,
                       int count) {
    Arguments c(function);
    const GgufBlock block = gguf_block(type);
    if (!c.must(block.elements > 0, "a type of abi.h") || !c.must(size(n), "a count from 0 to 2**40") ||
        !threads(c, count))
        return false;
    c.memory("blocks", blocks, n, block.bytes);
    c.memory("stream", stream, n, block.elements / 8 * block.bits);
    return c.fit();
}

// What a block is rounded with.
template <class BLOCK> bool terms(Arguments& c, const BLOCK& b) {
    const NumberTable& t = b.table;
    const bool table = t.levels;
    return c.must(table ? !b.least && !b.divisor && !b.zero_point : !b.least == !b.offset && !b.divisor == !b.offset,
                  "all terms of offsets or none; with a table nothing but an offset") &&
           c.must(!table || (within(t.count, 1, TABLE_LEVELS) && within(t.sign, 0, 5) &&
                             (!t.sign || t.count + 1 == 1 << t.sign)),
                  "1 to 63 levels; with a sign bit one less than a power of two");
}

inline void number_table(Arguments& c, const NumberTable& t) {
    if (!t.levels) return;
    c.memory("levels", t.levels, t.count, 4);
    c.memory("numbers", t.numbers, t.sign ? (int64_t)2 << t.sign : t.count + 1, 4);
}

inline bool gptq_block(const char* function, const GptqBlock* block) {
    Arguments c(function);
    c.memory("block", block, 1, sizeof *block);
    if (!c.fit()) return false;
    const GptqBlock& b = *block;
    const bool table = b.table.levels;
    if (!c.must(size(b.n) && within(b.columns, 1, GPTQ_COLUMNS), "n from 0 to 2**40 and 1 to 128 columns") ||
        !terms(c, b) ||
        !c.must(b.lo >= -128 && b.hi <= 255 && b.lo < b.hi && b.hi - b.lo < 256, "lo below hi, within 8 bits") ||
        !c.must(within(b.descent, 0, 1), "descent 0 or 1") || !threads(c, b.threads))
        return false;
    const int64_t count = times({b.n, b.columns});
    c.memory("w", b.w, count, 4);
    c.memory("lower", b.lower, b.columns * b.columns, 4);
    c.memory("factor", b.factor, count, 4);
    c.memory("scale", b.scale, count, 4);
    if (b.keep) c.memory("keep", b.keep, count, 4);
    if (b.zero_point) c.memory("zero_point", b.zero_point, count, 4);
    if (b.offset) {
        if (!table) c.memory("least", b.least, count, 4);
        if (!table) c.memory("divisor", b.divisor, count, 4);
        c.memory("offset", b.offset, count, 4);
    }
    number_table(c, b.table);
    c.memory("codes", b.codes, count);
    c.memory("values", b.values, count, 4);
    c.memory("errors", b.errors, count, 4);
    return c.fit();
}

inline bool squared_errors(const char* function, const BlockErrors* errors) {
    Arguments c(function);
    c.memory("errors", errors, 1, sizeof *errors);
    if (!c.fit()) return false;
    const BlockErrors& b = *errors;
    if (!c.must(size(b.blocks) && within(b.size, 1, (int64_t)1 << 40), "blocks from 0, a size from 1, to 2**40") ||
        !c.must(!b.weight || within(b.weights, 1, (int64_t)1 << 40), "rows of weights") || !terms(c, b) ||
        !c.must(b.lo < b.hi, "lo below hi") || !threads(c, b.threads))
        return false;
    c.memory("x", b.x, times({b.blocks, b.size}), 4);
    if (b.weight) c.memory("weight", b.weight, times({b.weights, b.size}), 4);
    c.memory("factor", b.factor, b.blocks, 4);
    c.memory("scale", b.scale, b.blocks, 4);
    if (b.zero_point) c.memory("zero_point", b.zero_point, b.blocks, 4);
    if (b.offset) {
        if (!b.table.levels) c.memory("least", b.least, b.blocks, 4);
        if (!b.table.levels) c.memory("divisor", b.divisor, b.blocks, 4);
        c.memory("offset", b.offset, b.blocks, 4);
    }
    number_table(c, b.table);
    c.memory("result", b.errors, b.blocks, 4);
    return c.fit();
}

}  // namespace check
