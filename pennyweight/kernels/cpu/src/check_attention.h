// Argument rules of attention and rotary embeddings, see check.h.
#pragma once

#include "check.h"

namespace check {

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
        !c.must(p.hadamard == 0 || (within(p.hadamard, 1, MOST_CHANNELS) && (p.hadamard & (p.hadamard - 1)) == 0 &&
                                    a.size % p.hadamard == 0),
                "rotated blocks of a power of two that divides the channels") ||
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

}  // namespace check
