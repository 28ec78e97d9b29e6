// Argument rules of pw_extents, and the extents that it describes; see check.h.
#pragma once

#include "check_codes.h"
#include "check_conv.h"
#include "check_linear.h"
#include "check_optim.h"

namespace check {

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

}  // namespace check
