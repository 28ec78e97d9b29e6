// Argument rules of pw_block, see check.h.
#pragma once

#include "check.h"

namespace check {

inline bool row_norm(Arguments& c, const RowNorm& n, int64_t width) {
    if (!c.must(within(n.kind, NO_NORM, RMS_NORM), "norm NO_NORM to RMS_NORM") ||
        !c.must(!n.weight || is_float(n.weight_kind), "weights of a norm of a float kind") ||
        !c.must(!n.bias || is_float(n.bias_kind), "biases of a norm of a float kind"))
        return false;
    if (n.weight) c.memory("weight", n.weight, width, bytes_of(n.weight_kind));
    if (n.bias) c.memory("bias", n.bias, width, bytes_of(n.bias_kind));
    return c.fit();
}

// Whether i is the index of a buffer of that width.
inline bool buffer(Arguments& c, const Block& b, int i, int64_t width) {
    return c.must(within(i, 0, b.buffer_count - 1), "the index of a buffer") && c.must(b.buffers[i].width == width, "a buffer of the step's width");
}

inline bool block_linear(Arguments& c, const Block& b, const BlockLinear& s) {
    if (!c.must(within(s.count, 1, s.gated ? 2 : 1 << 10), "1 to 1024 weights, gated 1 or 2") || !c.must(within(s.gated, 0, 1), "gated 0 or 1") ||
        !c.must(within(s.function, IDENTITY, SILU), "function IDENTITY to SILU"))
        return false;
    c.memory("weights", s.weights, s.count, sizeof *s.weights);
    c.memory("args", s.args, s.count, sizeof *s.args);
    c.memory("out", s.out, s.gated ? 1 : s.count, sizeof *s.out);
    if (!c.fit()) return false;
    const IntLinear& w = *s.weights;
    if (!int_weight(c, w) || !c.must(w.act == FLOAT || w.x == F32, "x F32 for quantized inputs") ||
        !c.must(w.act != STATIC || !s.args->act_zero_point || w.block <= 512, "block 512 at most beside a zero point") ||
        !c.must(!s.gated || (s.count == 2 ? w.n == s.weights[1].n : w.n % 32 == 0), "gate and up of one size, in whole tiles") ||
        !buffer(c, b, s.x, w.k) || !row_norm(c, s.norm, w.k) || (s.normed != -1 && !buffer(c, b, s.normed, w.k)))
        return false;
    if (w.act == STATIC) c.memory("act_scale", s.args->act_scale, 1, 4);
    for (int i = 0; i < s.count; ++i) {
        const IntLinear& v = s.weights[i];
        const LinearArgs& a = s.args[i];
        if (!c.must(same_but_rows(w, v), "weights that differ in n only") || !c.must(size(v.n), "n from 0 to 2**40") || !bias_kind(c, a.bias, a.bias_kind))
            return false;
        int_memory(c, v, a, 0);
        if (s.gated && i) continue;
        const int64_t width = s.gated && s.count == 1 ? v.n / 2 : v.n;
        if (!buffer(c, b, s.out[i], width) || (s.residual != -1 && !buffer(c, b, s.residual, width)) ||
            !c.must(s.count == 1 || s.gated || s.residual == -1 || s.out[i] != s.residual, "a residual beside several outputs of its own") ||
            !c.must(s.out[i] != s.normed, "the normalized input in a buffer of its own"))
            return false;
    }
    return c.fit();
}

inline bool block(const char* function, const Block* call) {
    Arguments c(function);
    c.memory("block", call, 1, sizeof *call);
    if (!c.fit()) return false;
    const Block& b = *call;
    if (!c.must(size(b.rows) && size(b.scratch), "rows and scratch from 0 to 2**40") || !threads(c, b.threads) ||
        !c.must(within(b.step_count, 0, 1 << 16) && within(b.buffer_count, 0, 1 << 16), "counts of steps and buffers from 0 to 65536") ||
        !c.must(times({b.rows, b.scratch, 4}) < MOST, "scratch below 2**40 bytes"))
        return false;
    c.memory("steps", b.steps, b.step_count, sizeof *b.steps);
    c.memory("buffers", b.buffers, b.buffer_count, sizeof *b.buffers);
    if (!c.fit()) return false;
    for (int i = 0; i < b.buffer_count; ++i) {
        const Buffer& f = b.buffers[i];
        if (!c.must(size(f.width) && is_float(f.kind), "buffers of a float kind")) return false;
        if (f.data || b.rows == 0) c.memory("data", f.data, times({b.rows, f.width}), bytes_of(f.kind));
        else if (!c.must(f.kind == F32 && size(f.offset) && f.offset % 16 == 0 && f.offset + f.width <= b.scratch, "scratch buffers, float32, within the scratch"))
            return false;
    }
    for (int i = 0; i < b.step_count && c.fit(); ++i) {
        const BlockStep& s = b.steps[i];
        if (!c.must(within(s.kind, STEP_LINEAR, STEP_NORM), "step LINEAR to NORM")) return false;
        if (s.kind == STEP_LINEAR) {
            c.memory("linear", s.linear, 1, sizeof *s.linear);
            if (!c.fit() || !block_linear(c, b, *s.linear)) return false;
        } else {
            c.memory("norm", s.norm, 1, sizeof *s.norm);
            if (!c.fit()) return false;
            const BlockNorm& n = *s.norm;
            if (!c.must(within(n.x, 0, b.buffer_count - 1), "the index of a buffer")) return false;
            const int64_t width = b.buffers[n.x].width;
            if (!buffer(c, b, n.out, width) || (n.residual != -1 && !buffer(c, b, n.residual, width)) || !row_norm(c, n.norm, width)) return false;
        }
    }
    return c.fit();
}

}  // namespace check
