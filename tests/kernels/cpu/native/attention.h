// Cases of attention and of rotary embeddings. Every instruction set gives the same bits.
#pragma once

#include "compare.h"

namespace {

// Elements from the first to the last of a tensor.
int64_t extent(std::initializer_list<int64_t> sizes, const int64_t* strides) {
    int64_t all = 1;
    for (const int64_t n : sizes) {
        if (n == 0) return 0;
        all += (n - 1) * *strides++;
    }
    return all;
}
// Strides of [batch, outer, inner, row], in this order or with the two inner ones exchanged, and sometimes apart.
void lay_out(int64_t* strides, int64_t outer, int64_t inner, int64_t row) {
    const int64_t apart = chance(3) ? row + one_of<int64_t>({1, 3, 16}) : row;
    if (chance(2)) strides[2] = apart, strides[1] = apart * inner;
    else strides[1] = apart, strides[2] = apart * outer;
    strides[0] = apart * outer * inner + (chance(4) ? 5 : 0);
}

struct Heads {
    int64_t batch, tokens;
    int32_t heads, shared, size;
    Heads()
        : batch(1 + below(2)),
          tokens(one_of<int64_t>({1, 1, 2, 4, 5, 17, 40})),
          shared((int32_t)(1 + below(3))),
          size(chance(2) ? one_of<int32_t>({1, 7, 16, 33, 64, 80, 128}) : (int32_t)(1 + below(150))) {
        heads = shared * (int32_t)(1 + below(5));
    }
};

// Keys or values as codes, with groups of tokens or of channels.
struct CodesCase {
    CacheCodes c = {};
    std::unique_ptr<Room> codes, scale, offset, room;
    bool finite;
    CodesCase(const Heads& h, int64_t past, bool keys) {
        c.bits = chance(3) ? (int32_t)(1 + below(8)) : one_of<int32_t>({4, 8}),
        c.kind = one_of<int32_t>({F32, BF16, F16});
        const int32_t group = chance(3) ? (int32_t)(1 + below(40)) : one_of<int32_t>({16, 32});
        c.tokens = keys ? group : 1, c.channels = keys ? 1 : group;
        if (chance(2)) c.hadamard = h.size & -h.size;
        if (c.hadamard > 1 && chance(3)) c.hadamard /= 2;
        c.row = (h.size * c.bits + 7) / 8 + (chance(4) ? 3 : 0);
        lay_out(c.code_strides, h.shared, past, c.row);
        const int64_t groups = (past + c.tokens - 1) / c.tokens, parts = (h.size + c.channels - 1) / c.channels;
        lay_out(c.scale_strides, h.shared, groups, parts);
        lay_out(c.offset_strides, h.shared, groups, parts);
        codes = std::make_unique<Room>(any_bytes(extent({h.batch, h.shared, past}, c.code_strides) + c.row - 1));
        scale = std::make_unique<Room>(
            numbers(c.kind, extent({h.batch, h.shared, groups}, c.scale_strides) + parts - 1, 0.02f, true));
        offset =
            std::make_unique<Room>(numbers(c.kind, extent({h.batch, h.shared, groups}, c.offset_strides) + parts - 1));
        finite = all_finite(c.kind, scale->copy()) && all_finite(c.kind, offset->copy());
        c.codes = codes->data(), c.scale = scale->data(), c.offset = offset->data();
        room = std::make_unique<Room>(sizeof c);
        memcpy(room->data(), &c, sizeof c);
    }
    const CacheCodes* get() const { return (const CacheCodes*)room->data(); }
};

void attention() {
    const Heads h;
    AttentionArgs a = {};
    a.batch = h.batch, a.tokens = h.tokens, a.heads = h.heads, a.shared = h.shared, a.size = h.size;
    a.length = chance(2) ? one_of<int64_t>({0, 1, 16, 17, 64, 256, 300, 700}) : below(400);
    a.past = chance(2) ? below(a.length + 1) : 0;
    a.q_kind = one_of<int32_t>({F32, F32, BF16, F16}), a.out_kind = one_of<int32_t>({F32, F32, BF16, F16}),
    a.kind = one_of<int32_t>({F32, BF16, F16});
    a.causal = chance(2), a.window = chance(3) ? 1 + below(a.length + 1) : 0;
    a.scale = one_of<float>({0.125f, 1.0f, -0.3f}), a.softcap = chance(4) ? 5.0f : 0.0f;
    lay_out(a.q_strides, a.tokens, a.heads, a.size);
    lay_out(a.out_strides, a.tokens, a.heads, a.size);
    const int64_t newest = a.length - a.past;
    lay_out(a.key_strides, a.shared, newest, a.size);
    lay_out(a.value_strides, a.shared, newest, a.size);
    const auto elements = [&](const int64_t* s) {
        const int64_t n = extent({a.batch, a.shared, newest}, s);
        return n ? n + a.size - 1 : 0;
    };
    const Room q(numbers(a.q_kind, extent({a.batch, a.tokens, a.heads}, a.q_strides) + a.size - 1));
    const Room out((size_t)((extent({a.batch, a.tokens, a.heads}, a.out_strides) + a.size - 1) * size_of(a.out_kind)));
    const Room keys(numbers(a.kind, elements(a.key_strides))), values(numbers(a.kind, elements(a.value_strides)));
    std::unique_ptr<CodesCase> past_keys, past_values;
    if (a.past) {
        past_keys = std::make_unique<CodesCase>(h, a.past, chance(4) ? false : true);
        past_values = std::make_unique<CodesCase>(h, a.past, chance(4) ? true : false);
        a.past_keys = past_keys->get(), a.past_values = past_values->get();
    }
    std::unique_ptr<Room> mask;
    if (a.length && chance(2)) {
        a.mask_kind = one_of<int32_t>({U8, F32, BF16, F16});
        int64_t step = chance(4) ? 2 : 1;
        a.mask_strides[3] = chance(8) ? 0 : step, step *= a.length;
        a.mask_strides[2] = chance(3) ? 0 : step, step *= a.mask_strides[2] ? a.tokens : 1;
        a.mask_strides[1] = chance(2) ? 0 : step, step *= a.mask_strides[1] ? a.heads : 1;
        a.mask_strides[0] = chance(2) ? 0 : step;
        const int64_t n = extent({a.batch, a.heads, a.tokens, a.length}, a.mask_strides);
        Bytes made = a.mask_kind == U8 ? any_bytes(n) : numbers(a.mask_kind, n);
        if (a.mask_kind == U8)
            for (auto& b : made) b &= 1;
        if (a.mask_kind == F32)
            for (int64_t i = 0; i < n; ++i)
                if (chance(2)) {
                    const float f = chance(2) ? -INFINITY : -3.4028235e38f;
                    memcpy(&made[(size_t)i * 4], &f, 4);
                }
        mask = std::make_unique<Room>(made);
        a.mask = mask->data();
    }
    a.q = q.data(), a.out = out.data(), a.keys = keys.pointer(), a.values = values.pointer();
    char what[240];
    snprintf(what, sizeof what,
             "pw_attention %ld x %ld heads %d of %d size %d length %ld past %ld kinds %d %d %d mask %d causal %d "
             "window %ld cap %g",
             (long)a.batch, (long)a.tokens, a.heads, a.shared, a.size, (long)a.length, (long)a.past, a.q_kind,
             a.out_kind, a.kind, a.mask_kind, a.causal, (long)a.window, a.softcap);
    compare(
        what, {{out, a.out_kind}}, [&](int threads) { return pw_attention(&a, threads); },
        all_finite(a.kind, values.copy()) && (!a.past || past_values->finite));
    const auto broken = [&](const std::function<void(AttentionArgs&)>& change, int threads = 1) {
        return [&a, change, threads] {
            AttentionArgs b = a;
            change(b);
            return (int64_t)pw_attention(&b, threads);
        };
    };
    refuse("pw_attention",
           {
               {"no args", [&] { return (int64_t)pw_attention(nullptr, 1); }},
               {"threads", broken([](AttentionArgs&) {}, 0)},
               {"batch", broken([](AttentionArgs& b) { b.batch = -1; })},
               {"tokens", broken([](AttentionArgs& b) { b.tokens = -1; })},
               {"length", broken([](AttentionArgs& b) { b.length = -1; })},
               {"past", broken([](AttentionArgs& b) { b.past = b.length + 1; })},
               {"window", broken([](AttentionArgs& b) { b.window = -1; })},
               {"heads", broken([](AttentionArgs& b) { b.heads = 0; })},
               {"shared", broken([](AttentionArgs& b) { b.shared = b.heads + 1; })},
               {"size", broken([](AttentionArgs& b) { b.size = 1025; })},
               {"no channels", broken([](AttentionArgs& b) { b.size = 0; })},
               {"q_kind", broken([](AttentionArgs& b) { b.q_kind = U8; })},
               {"out_kind", broken([](AttentionArgs& b) { b.out_kind = NONE; })},
               {"kind", broken([](AttentionArgs& b) { b.kind = E4M3; })},
               {"mask_kind", broken([](AttentionArgs& b) { b.mask = &b, b.mask_kind = I8; })},
               {"scale", broken([](AttentionArgs& b) { b.scale = INFINITY; })},
               {"softcap", broken([](AttentionArgs& b) { b.softcap = -1; })},
               {"stride", broken([](AttentionArgs& b) { b.key_strides[1] = -1; })},
               {"no q", broken([](AttentionArgs& b) { b.q = nullptr; })},
               {"no out", broken([](AttentionArgs& b) { b.out = nullptr; })},
               {"no keys", broken([](AttentionArgs& b) { b.past = 0, b.length = 1, b.keys = nullptr; })},
               {"no values", broken([](AttentionArgs& b) { b.past = 0, b.length = 1, b.values = nullptr; })},
               {"no past", broken([](AttentionArgs& b) { b.length = b.past = 1, b.past_keys = nullptr; })},
           });
    if (!a.past) return;
    const auto coded = [&](const std::function<void(CacheCodes&)>& change) {
        return [&a, change] {
            CacheCodes c = *a.past_values;
            change(c);
            AttentionArgs b = a;
            b.past_values = &c;
            return (int64_t)pw_attention(&b, 1);
        };
    };
    refuse("pw_attention", {
                               {"bits", coded([](CacheCodes& c) { c.bits = 9; })},
                               {"kind of scales", coded([](CacheCodes& c) { c.kind = E8M0; })},
                               {"tokens of a group", coded([](CacheCodes& c) { c.tokens = 0; })},
                               {"channels of a group", coded([](CacheCodes& c) { c.channels = 0; })},
                               {"blocks of 3", coded([](CacheCodes& c) { c.hadamard = 3; })},
                               {"blocks below 0", coded([](CacheCodes& c) { c.hadamard = -2; })},
                               {"blocks beyond the channels", coded([](CacheCodes& c) { c.hadamard = 256; })},
                               {"row", coded([](CacheCodes& c) { c.row = 0; })},
                               {"strides of codes", coded([](CacheCodes& c) { c.code_strides[2] = -1; })},
                               {"no codes", coded([](CacheCodes& c) { c.codes = nullptr; })},
                               {"no scale", coded([](CacheCodes& c) { c.scale = nullptr; })},
                               {"no offset", coded([](CacheCodes& c) { c.offset = nullptr; })},
                           });
}

struct NormCase {
    RowNorm n = {};
    Room weight, bias;
    explicit NormCase(int64_t width)
        : n{nullptr,
            nullptr,
            (int32_t)below(3),
            one_of<int32_t>({NONE, F32, BF16, F16}),
            one_of<int32_t>({NONE, F32, BF16, F16}),
            1e-5f,
            chance(2) ? 1.0f : 0.0f},
          weight(numbers(n.weight_kind, width)),
          bias(numbers(n.bias_kind, width)) {
        n.weight = weight.pointer(), n.bias = bias.pointer();
    }
};

void rotary() {
    const Heads h;
    RotaryArgs a = {};
    a.batch = h.batch, a.tokens = h.tokens, a.heads = h.heads, a.shared = h.shared, a.size = h.size, a.past = below(20);
    a.cache_kind = one_of<int32_t>({F32, BF16, F16});
    a.rotation = a.size > 1 ? one_of<int32_t>({UNROTATED, HALVES, INTERLEAVED}) : (int32_t)UNROTATED;
    const NormCase q_norm(a.size), k_norm(a.size);
    a.q_norm = q_norm.n, a.k_norm = k_norm.n;
    a.q_stride = a.heads * a.size + below(5), a.k_stride = a.shared * a.size + below(5), a.v_stride = a.shared * a.size;
    const int64_t rows = a.batch * a.tokens;
    lay_out(a.key_strides, a.shared, a.past + a.tokens, a.size);
    lay_out(a.value_strides, a.shared, a.past + a.tokens, a.size);
    const auto cache = [&](const int64_t* s) { return extent({a.batch, a.shared, a.past + a.tokens}, s) + a.size - 1; };
    const Bytes before = numbers(F32, (rows - 1) * a.q_stride + a.heads * a.size);
    const Room q(before), k(numbers(F32, (rows - 1) * a.k_stride + a.shared * a.size)),
        v(numbers(F32, rows * a.v_stride));
    const Room keys((size_t)(cache(a.key_strides) * size_of(a.cache_kind))),
        values((size_t)(cache(a.value_strides) * size_of(a.cache_kind)));
    std::unique_ptr<Room> cos, sin;
    if (a.rotation) {
        a.angle_kind = one_of<int32_t>({F32, BF16, F16}), a.rotated = 2 * (int32_t)(1 + below(a.size / 2));
        for (int64_t* s : {a.cos_strides, a.sin_strides})
            s[1] = a.rotated + below(2), s[0] = chance(2) ? 0 : s[1] * a.tokens;
        cos = std::make_unique<Room>(numbers(a.angle_kind, extent({a.batch, a.tokens}, a.cos_strides) + a.rotated - 1));
        sin = std::make_unique<Room>(numbers(a.angle_kind, extent({a.batch, a.tokens}, a.sin_strides) + a.rotated - 1));
        a.cos = cos->data(), a.sin = sin->data();
    }
    a.q = (float*)q.data(), a.k = (const float*)k.data(), a.v = (const float*)v.data(), a.keys = keys.data(),
    a.values = values.data();
    char what[160];
    snprintf(what, sizeof what,
             "pw_rotary %ld x %ld heads %d of %d size %d past %ld rotation %d of %d kinds %d %d norms %d %d",
             (long)a.batch, (long)a.tokens, a.heads, a.shared, a.size, (long)a.past, a.rotation, a.rotated,
             a.cache_kind, a.angle_kind, a.q_norm.kind, a.k_norm.kind);
    compare(what, {{q, F32, 0, before}, {keys, a.cache_kind}, {values, a.cache_kind}},
            [&](int threads) { return pw_rotary(&a, threads); });
    const auto broken = [&](const std::function<void(RotaryArgs&)>& change, int threads = 1) {
        return [&a, change, threads] {
            RotaryArgs b = a;
            change(b);
            return (int64_t)pw_rotary(&b, threads);
        };
    };
    refuse("pw_rotary",
           {
               {"no args", [&] { return (int64_t)pw_rotary(nullptr, 1); }},
               {"threads", broken([](RotaryArgs&) {}, 0)},
               {"batch", broken([](RotaryArgs& b) { b.batch = -1; })},
               {"heads", broken([](RotaryArgs& b) { b.heads = 0; })},
               {"size", broken([](RotaryArgs& b) { b.size = 1025; })},
               {"past", broken([](RotaryArgs& b) { b.past = -1; })},
               {"stride", broken([](RotaryArgs& b) { b.k_stride = -1; })},
               {"cache_kind", broken([](RotaryArgs& b) { b.cache_kind = U8; })},
               {"rotation", broken([](RotaryArgs& b) { b.rotation = 3; })},
               {"odd", broken([](RotaryArgs& b) { b.rotation = HALVES, b.angle_kind = F32, b.rotated = 1; })},
               {"angle_kind", broken([](RotaryArgs& b) { b.rotation = HALVES, b.angle_kind = U8; })},
               {"norm", broken([](RotaryArgs& b) { b.q_norm.kind = 3; })},
               {"no q", broken([](RotaryArgs& b) { b.q = nullptr; })},
               {"no k", broken([](RotaryArgs& b) { b.k = nullptr; })},
               {"no v", broken([](RotaryArgs& b) { b.v = nullptr; })},
               {"no keys", broken([](RotaryArgs& b) { b.keys = nullptr; })},
               {"no values", broken([](RotaryArgs& b) { b.values = nullptr; })},
           });
    if (a.rotation)
        refuse("pw_rotary", {{"no cos", broken([](RotaryArgs& b) { b.cos = nullptr; })},
                             {"no sin", broken([](RotaryArgs& b) { b.sin = nullptr; })}});
}

}  // namespace
