// Argument rules of pw_blocks, see check.h.
#pragma once

#include "check_attention.h"
#include "check_linear.h"

namespace check {

// Whether i is the index of a buffer of that width.
inline bool buffer(Arguments& c, const Block& b, int i, int64_t width) {
    return c.must(within(i, 0, b.buffer_count - 1), "the index of a buffer") &&
           c.must(b.buffers[i].width == width, "a buffer of the step's width");
}

inline bool block_linear(Arguments& c, const Block& b, const BlockLinear& s) {
    if (!c.must(within(s.count, 1, s.gated ? 2 : 1 << 10), "1 to 1024 weights, gated 1 or 2") ||
        !c.must(within(s.gated, 0, 1), "gated 0 or 1") ||
        !c.must(within(s.function, IDENTITY, HARDSWISH), "function IDENTITY to HARDSWISH"))
        return false;
    c.memory("weights", s.weights, s.count, sizeof *s.weights);
    c.memory("args", s.args, s.count, sizeof *s.args);
    c.memory("out", s.out, s.gated ? 1 : s.count, sizeof *s.out);
    if (!c.fit()) return false;
    const IntLinear& w = *s.weights;
    if (!int_weight(c, w) || !c.must(w.act == FLOAT || w.x == F32, "x F32 for quantized inputs") ||
        !c.must(w.act != STATIC || !s.args->act_zero_point || w.block <= 512,
                "block 512 at most beside a zero point") ||
        !c.must(!s.gated || (s.count == 2 ? w.n == s.weights[1].n : w.n % 32 == 0),
                "gate and up of one size, in whole tiles") ||
        !buffer(c, b, s.x, w.k) || !row_norm(c, s.norm, w.k) || (s.normed != -1 && !buffer(c, b, s.normed, w.k)))
        return false;
    if (w.act == STATIC) c.memory("act_scale", s.args->act_scale, 1, 4);
    for (int i = 0; i < s.count; ++i) {
        const IntLinear& v = s.weights[i];
        const LinearArgs& a = s.args[i];
        if (!c.must(same_but_rows(w, v), "weights that differ in n only") || !c.must(size(v.n), "n from 0 to 2**40") ||
            !bias_kind(c, a.bias, a.bias_kind))
            return false;
        int_parts(c, v, a);
        if (s.gated && i) continue;
        const int64_t width = s.gated && s.count == 1 ? v.n / 2 : v.n;
        if (!buffer(c, b, s.out[i], width) || (s.residual != -1 && !buffer(c, b, s.residual, width)) ||
            !c.must(s.count == 1 || s.gated || s.residual == -1 || s.out[i] != s.residual,
                    "a residual beside several outputs of its own") ||
            !c.must(s.out[i] != s.normed, "the normalized input in a buffer of its own"))
            return false;
    }
    return c.fit();
}

// Columns of a buffer: `heads` heads side by side.
inline bool columns(Arguments& c, const Block& b, const Columns& p, int64_t heads, int64_t size) {
    return c.must(within(p.buffer, 0, b.buffer_count - 1) && p.start >= 0, "columns of a buffer") &&
           c.must(p.start + heads * size <= b.buffers[p.buffer].width, "heads within the columns of a buffer");
}
inline bool float_columns(Arguments& c, const Block& b, const Columns& p, int64_t heads, int64_t size) {
    return columns(c, b, p, heads, size) && c.must(b.buffers[p.buffer].kind == F32, "heads in float32");
}

inline bool block_norm(Arguments& c, const Block& b, const BlockNorm& s) {
    if (!c.must(within(s.x, 0, b.buffer_count - 1), "the index of a buffer")) return false;
    const int64_t width = b.buffers[s.x].width;
    return buffer(c, b, s.out, width) && (s.residual == -1 || buffer(c, b, s.residual, width)) &&
           row_norm(c, s.norm, width);
}

// Keys and values of the call, of which tokens before `end` are used.
inline void cache(Arguments& c, const Block& b, int64_t shared, int64_t size, int64_t end) {
    const auto used = [&](const int64_t* s) {
        return b.tokens ? reach({b.batch, shared, end, size}, {s[0], s[1], s[2], 1}) : 0;
    };
    c.memory("keys", b.keys, used(b.key_strides), bytes_of(b.cache_kind));
    c.memory("values", b.values, used(b.value_strides), bytes_of(b.cache_kind));
}

inline bool block_rotary(Arguments& c, const Block& b, const BlockRotary& s) {
    if (!heads(c, b.batch, b.tokens, s.heads, s.shared, s.size) || !float_columns(c, b, s.q, s.heads, s.size) ||
        !float_columns(c, b, s.k, s.shared, s.size) || !float_columns(c, b, s.v, s.shared, s.size) ||
        !row_norm(c, s.q_norm, s.size) || !row_norm(c, s.k_norm, s.size) ||
        !c.must(is_float(b.cache_kind), "keys and values of a float kind") ||
        !c.must(within(s.rotation, UNROTATED, INTERLEAVED), "rotation UNROTATED to INTERLEAVED") ||
        !c.must(
            s.rotation == UNROTATED || (is_float(b.angle_kind) && within(s.rotated, 2, s.size) && s.rotated % 2 == 0),
            "an even number of rotated channels and angles of a float kind"))
        return false;
    cache(c, b, s.shared, s.size, b.past + b.tokens);
    if (s.rotation != UNROTATED) {
        c.memory("cos", b.cos, reach({b.batch, b.tokens, s.rotated}, {b.cos_strides[0], b.cos_strides[1], 1}),
                 bytes_of(b.angle_kind));
        c.memory("sin", b.sin, reach({b.batch, b.tokens, s.rotated}, {b.sin_strides[0], b.sin_strides[1], 1}),
                 bytes_of(b.angle_kind));
    }
    return c.fit();
}

inline bool block_attention(Arguments& c, const Block& b, const BlockAttention& s) {
    const bool own = s.k.buffer >= 0;  // keys are the tokens of the call
    if (!heads(c, b.batch, b.tokens, s.heads, s.shared, s.size) || !columns(c, b, s.q, s.heads, s.size) ||
        !buffer(c, b, s.out, (int64_t)s.heads * s.size) ||
        !c.must(own || (s.k.buffer == -1 && s.v.buffer == -1), "both keys and values in buffers, or -1") ||
        (own && (!columns(c, b, s.k, s.shared, s.size) || !columns(c, b, s.v, s.shared, s.size))) ||
        !c.must(!own || b.buffers[s.k.buffer].kind == b.buffers[s.v.buffer].kind, "keys and values of one kind") ||
        !c.must(s.out != s.q.buffer && (!own || (s.out != s.k.buffer && s.out != s.v.buffer)),
                "an output that is no input") ||
        !c.must(own || is_float(b.cache_kind), "keys and values of a float kind") ||
        !c.must(!b.mask || b.mask_kind == U8 || is_float(b.mask_kind), "a mask of bytes or of a float kind") ||
        !c.must(s.scale - s.scale == 0 && s.softcap - s.softcap == 0 && s.softcap >= 0,
                "a finite scale and a softcap from 0 on"))
        return false;
    if (!own) cache(c, b, s.shared, s.size, b.length);
    if (!own && b.coded) {
        c.memory("past_keys", b.past_keys, 1, sizeof *b.past_keys);
        c.memory("past_values", b.past_values, 1, sizeof *b.past_values);
        AttentionArgs a = {};
        a.batch = b.batch, a.tokens = b.tokens, a.shared = s.shared, a.size = s.size, a.past = b.coded;
        if (!c.fit() || !cache_codes(c, a, *b.past_keys) || !cache_codes(c, a, *b.past_values)) return false;
    }
    const int64_t length = own ? b.tokens : b.coded + b.length;
    if (b.mask)
        c.memory("mask", b.mask,
                 reach({b.batch, s.heads, b.tokens, length},
                       {b.mask_strides[0], b.mask_strides[1], b.mask_strides[2], b.mask_strides[3]}),
                 bytes_of(b.mask_kind));
    return c.fit();
}

inline bool block(Arguments& c, const Block* call) {
    c.memory("block", call, 1, sizeof *call);
    if (!c.fit()) return false;
    const Block& b = *call;
    const int64_t rows = size(b.batch) && size(b.tokens) ? times({b.batch, b.tokens}) : TOO_MUCH;
    if (!c.must(size(rows) && size(b.scratch), "batch, tokens, rows and scratch from 0 to 2**40") ||
        !threads(c, b.threads) ||
        !c.must(size(b.past) && size(b.length) && size(b.window) && size(b.coded),
                "past, length, window and coded from 0 to 2**40") ||
        !c.must(within(b.step_count, 0, 1 << 16) && within(b.buffer_count, 0, 1 << 16),
                "counts of steps and buffers from 0 to 65536") ||
        !c.must(times({rows, b.scratch, 4}) < MOST, "scratch below 2**40 bytes") ||
        !c.must(strides(b.key_strides, 3) && strides(b.value_strides, 3) && strides(b.cos_strides, 2) &&
                    strides(b.sin_strides, 2) && strides(b.mask_strides, 4),
                "strides from 0 to 2**40"))
        return false;
    c.memory("steps", b.steps, b.step_count, sizeof *b.steps);
    c.memory("buffers", b.buffers, b.buffer_count, sizeof *b.buffers);
    if (!c.fit()) return false;
    for (int i = 0; i < b.buffer_count; ++i) {
        const Buffer& f = b.buffers[i];
        if (!c.must(size(f.width) && is_float(f.kind), "buffers of a float kind")) return false;
        if (f.data || rows == 0) c.memory("data", f.data, times({rows, f.width}), bytes_of(f.kind));
        else if (!c.must(f.kind == F32 && size(f.offset) && f.offset % 16 == 0 && f.offset + f.width <= b.scratch,
                         "scratch buffers, float32, within the scratch"))
            return false;
    }
    for (int i = 0; i < b.step_count && c.fit(); ++i) {
        const BlockStep& s = b.steps[i];
        if (!c.must(within(s.kind, STEP_LINEAR, STEP_ATTENTION), "step LINEAR to ATTENTION")) return false;
        if (s.kind == STEP_LINEAR) c.memory("linear", s.linear, 1, sizeof *s.linear);
        else if (s.kind == STEP_NORM) c.memory("norm", s.norm, 1, sizeof *s.norm);
        else if (s.kind == STEP_ROTARY) c.memory("rotary", s.rotary, 1, sizeof *s.rotary);
        else c.memory("attention", s.attention, 1, sizeof *s.attention);
        if (!c.fit()) return false;
        if (s.kind == STEP_LINEAR   ? !block_linear(c, b, *s.linear)
            : s.kind == STEP_NORM   ? !block_norm(c, b, *s.norm)
            : s.kind == STEP_ROTARY ? !block_rotary(c, b, *s.rotary)
                                    : !block_attention(c, b, *s.attention))
            return false;
    }
    return c.fit();
}

inline bool blocks(const char* function, const Block* const* calls, int count) {
    Arguments c(function);
    if (!c.must(within(count, 0, 1 << 16), "a count of blocks from 0 to 65536")) return false;
    c.memory("blocks", calls, count, sizeof *calls);
    for (int i = 0; i < count && c.fit(); ++i) block(c, calls[i]);
    return c.fit();
}

}  // namespace check
