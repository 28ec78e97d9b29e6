// Argument rules of optimizer steps, see check.h.
#pragma once

#include "check.h"

namespace check {

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

}  // namespace check
