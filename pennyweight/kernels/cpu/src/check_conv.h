// Argument rules of convolutions and of chains of them, see check.h.
#pragma once

#include "check.h"

namespace check {

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

// -- chains
// ------------------------------------------------------------------------------------------------------------

constexpr int64_t CHAIN_SIDE = (int64_t)1 << 31, CHAIN_SCRATCH = (int64_t)1 << 40;

// Whether the codes, or the numbers, of a tensor are within the scratch.
inline bool chain_tensor(Arguments& c, const Chain& chain, const ChainTensor& t) {
    if (!c.must(within(t.channels, 1, CHAIN_SIDE) && within(t.h, 1, CHAIN_SIDE) && within(t.w, 1, CHAIN_SIDE),
                "a tensor that is not empty") ||
        !c.must(within(t.margin_h, 0, CHAIN_SIDE) && within(t.margin_w, 0, CHAIN_SIDE), "margins from 0 to 2**31") ||
        !c.must(within(t.output, -1, chain.output_count - 1), "the index of an output") ||
        !c.must(t.codes >= 0 || t.numbers >= 0 || t.output >= 0, "a tensor that is kept"))
        return false;
    const int64_t codes = times({t.h + 2 * t.margin_h, t.w + 2 * t.margin_w, over(t.channels, 4) * 4}),
                  numbers = times({t.h, t.w, t.channels, 4});
    if (!c.must(codes < MOST && numbers < MOST, "a tensor below 2**40 bytes")) return false;
    if (t.codes >= 0) {
        if (!c.must(t.codes % 64 == 0 && t.codes <= chain.scratch - codes, "codes within the scratch") ||
            !c.must(within(t.zero_point, -128, 127) && within(t.lo, -128, 127) && within(t.hi, t.lo, 127),
                    "int8 codes") ||
            !c.must(is_float(t.scale_kind), "scales of codes of a float kind"))
            return false;
        c.memory("scale", t.scale, 1, 4);
    }
    if (t.numbers >= 0 &&
        !c.must(t.numbers % 64 == 0 && t.numbers <= chain.scratch - numbers, "numbers within the scratch"))
        return false;
    if (t.output >= 0) c.memory("outputs", chain.outputs[t.output], times({chain.n, t.channels, t.h, t.w}), 4);
    return c.fit();
}

inline bool chain_conv(Arguments& c, const ChainStep& s, const ChainTensor& x, const ChainTensor& y) {
    c.memory("conv", s.conv, 1, sizeof *s.conv);
    if (!c.fit()) return false;
    const Conv& w = *s.conv;
    const bool depthwise = w.c == 1;
    if (!c.must(within(w.o, 1, CHAIN_SIDE) && within(w.c, 1, CHAIN_SIDE) && within(s.groups, 1, CHAIN_SIDE),
                "o, c and groups from 1 to 2**31") ||
        !c.must(w.kh == s.kh && w.kw == s.kw, "the kernel of the convolution") ||
        !c.must(w.channels == w.c && w.bits == 8 && w.center == 128 && w.zero_point == NONE && w.act == STATIC &&
                    w.x == F32,
                "8 bits, one set, static inputs") ||
        !c.must(is_float(w.scale) && within(w.one_scale, 0, 1), "scales of a float kind") ||
        !c.must(times({s.kh, s.kw, over(w.c, 4) * 4}) <= (depthwise ? 512 : 1 << 15), "sums that fit") ||
        !c.must(depthwise ? s.groups == w.o
                          : w.o % s.groups == 0 && (s.groups == 1 || (w.c % 4 == 0 && w.o / s.groups % 16 == 0)),
                "groups in whole tiles, or of one channel") ||
        !c.must(depthwise || w.kp == over(times({s.kh, s.kw, over(w.c, 4) * 4}), 32) * 32,
                "kp of all columns in blocks of 32") ||
        !c.must(x.codes >= 0 && x.channels == w.c * s.groups && y.channels == w.o, "channels of a convolution") ||
        !c.must(s.pad_h <= x.margin_h && s.pad_w <= x.margin_w, "a margin for the padding") ||
        !c.must(within(s.function, IDENTITY, HARDSWISH), "function IDENTITY to HARDSWISH"))
        return false;
    if (s.bias) c.memory("bias", s.bias, w.o, 4);
    conv_parts(c, w, s.codes, s.scale, nullptr);
    c.memory("sums", s.sums, over(w.o, 16) * 16, 4);
    return c.fit();
}

inline bool chain_step(Arguments& c, const Chain& chain, const ChainStep& s) {
    const bool input = s.kind == CHAIN_INPUT;
    if (!c.must(within(s.kind, CHAIN_INPUT, CHAIN_ADD), "a kind of step") ||
        !c.must(within(s.x, 0, (input ? chain.input_count : chain.tensor_count) - 1), "the index of x") ||
        !c.must(within(s.y, 0, chain.tensor_count - 1), "the index of y") || !c.must(s.lo <= s.hi, "lo to hi") ||
        !c.must(within(s.residual, -1, chain.tensor_count - 1), "the index of a residual"))
        return false;
    const ChainTensor& y = chain.tensors[s.y];
    if (input) {
        const ChainInput& in = chain.inputs[s.x];
        if (!c.must(s.residual < 0 && within(in.last, 0, 1), "an input")) return false;
        c.memory("data", in.data, times({chain.n, y.channels, y.h, y.w}), 4);
        return c.fit();
    }
    const ChainTensor& x = chain.tensors[s.x];
    const auto has_numbers = [](const ChainTensor& t) { return t.numbers >= 0 || t.output >= 0; };
    if (!c.must(s.x != s.y && s.residual != s.y, "results in a tensor of their own")) return false;
    if (s.residual >= 0) {
        const ChainTensor& r = chain.tensors[s.residual];
        if (!c.must(has_numbers(r) && r.channels == y.channels && r.h == y.h && r.w == y.w,
                    "a residual of the size of the result") ||
            !c.must(s.kind == CHAIN_CONV || s.kind == CHAIN_ADD, "a step with a residual"))
            return false;
    }
    if (s.kind == CHAIN_CONV || s.kind == CHAIN_MAX) {
        if (!c.must(within(s.kh, 1, 1 << 15) && within(s.kw, 1, 1 << 15) && within(s.stride_h, 1, CHAIN_SIDE) &&
                        within(s.stride_w, 1, CHAIN_SIDE),
                    "a kernel and strides from 1") ||
            !c.must(within(s.pad_h, 0, CHAIN_SIDE) && within(s.pad_w, 0, CHAIN_SIDE) &&
                        within(s.dilation_h, 1, CHAIN_SIDE) && within(s.dilation_w, 1, CHAIN_SIDE),
                    "padding from 0, dilations from 1") ||
            !c.must(y.h == conv_size(x.h, s.kh, s.stride_h, s.pad_h, s.dilation_h) &&
                        y.w == conv_size(x.w, s.kw, s.stride_w, s.pad_w, s.dilation_w),
                    "the size of the result"))
            return false;
    }
    if (s.kind == CHAIN_CONV) return chain_conv(c, s, x, y);
    if (!c.must(x.channels == y.channels, "the channels of x")) return false;
    if (s.kind == CHAIN_MAX)
        return c.must(2 * s.pad_h <= s.kh && 2 * s.pad_w <= s.kw && s.dilation_h == 1 && s.dilation_w == 1,
                      "windows that are not empty") &&
               c.must(has_numbers(x) || (!has_numbers(y) && x.codes >= 0 && y.codes >= 0 && x.scale == y.scale &&
                                         x.zero_point == y.zero_point),
                      "numbers, or the same codes");
    return c.must(has_numbers(x), "numbers of x") &&
           (s.kind == CHAIN_MEAN ? c.must(y.h == 1 && y.w == 1, "a mean of each channel")
                                 : c.must(x.h == y.h && x.w == y.w, "a result of the size of x"));
}

inline bool conv_chain(const char* function, const Chain* chain) {
    Arguments c(function);
    c.memory("chain", chain, 1, sizeof *chain);
    if (!c.fit()) return false;
    const Chain& a = *chain;
    constexpr int MANY = 1 << 20;
    if (!c.must(within(a.step_count, 0, MANY) && within(a.tensor_count, 0, MANY) && within(a.input_count, 0, MANY) &&
                    within(a.output_count, 0, MANY),
                "at most 2**20 steps and tensors") ||
        !c.must(within(a.n, 0, CHAIN_SIDE) && within(a.scratch, 0, CHAIN_SCRATCH), "n and scratch from 0") ||
        !threads(c, a.threads))
        return false;
    c.memory("steps", a.steps, a.step_count, sizeof *a.steps);
    c.memory("tensors", a.tensors, a.tensor_count, sizeof *a.tensors);
    c.memory("inputs", a.inputs, a.input_count, sizeof *a.inputs);
    c.memory("outputs", a.outputs, a.output_count, sizeof *a.outputs);
    if (!c.fit()) return false;
    for (int32_t i = 0; i < a.tensor_count; ++i)
        if (!chain_tensor(c, a, a.tensors[i])) return false;
    for (int32_t i = 0; i < a.step_count; ++i)
        if (!chain_step(c, a, a.steps[i])) return false;
    return c.fit();
}

}  // namespace check
