// Argument rules of linear layers, see check.h.
#pragma once

#include "check.h"

namespace check {

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

}  // namespace check
