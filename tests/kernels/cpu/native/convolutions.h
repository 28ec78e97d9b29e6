// Cases of convolutions: dense, grouped and depthwise, contiguous and channels last.
#pragma once

#include "linears.h"

namespace {

// A weight and an input that fit each other.
struct ConvCase {
    Conv w = {};
    ConvArgs a = {};
    int64_t tiles = 0, parts = 0, codes = 0;
    ConvCase() {
        const bool depthwise = chance(4), line = chance(5);
        a.groups = depthwise ? 1 + below(40) : one_of<int64_t>({1, 1, 1, 2, 3});
        w.c = depthwise ? 1 : one_of<int64_t>({1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 1 + below(70)});
        w.o = a.groups * (depthwise ? one_of<int64_t>({1, 1, 2, 3}) : one_of<int64_t>({1, 7, 16, 17, 1 + below(90)}));
        w.kh = line ? 1 : one_of<int64_t>({1, 1, 2, 3, 3, 5, 7}), w.kw = one_of<int64_t>({1, 1, 2, 3, 3, 5, 7});
        w.channels = w.c;
        if (w.c % 4 == 0 && chance(3)) w.channels = w.c % 8 == 0 ? one_of<int64_t>({4, 8}) : 4;
        const int64_t sets = w.c / w.channels;
        w.kp = up(sets * w.kh * w.kw * up(w.channels, 4), 32);
        w.bits = (int)(1 + below(8)), w.center = (int32_t)below(1 << w.bits);
        w.scale = one_of<int32_t>({F32, BF16, F16}), w.x = one_of<int32_t>({F32, BF16, F16});
        w.zero_point = one_of<int32_t>({NONE, NONE, I8, U8});
        w.one_scale = sets == 1 && !w.zero_point && chance(4);
        w.act = one_of<int32_t>({SYMMETRIC, SYMMETRIC, ASYMMETRIC, STATIC, FLOAT});
        if (w.act == FLOAT && w.c == 1) w.act = SYMMETRIC;
        if (w.act == FLOAT) w.x = F32;
        w.act_lo = one_of<int32_t>({-128, -127, -64}), w.act_hi = w.act_lo == -64 ? 63 : 127;
        w.act_scale = one_of<int32_t>({F32, BF16, F16});
        w.act_floor = 1e-30f, w.act_steps = w.act == ASYMMETRIC ? 255.0f : 127.5f;
        a.n = one_of<int64_t>({0, 1, 1, 2, 3, 5});
        a.stride_h = one_of<int64_t>({1, 1, 2, 3}), a.stride_w = one_of<int64_t>({1, 1, 2, 3});
        a.dilation_h = one_of<int64_t>({1, 1, 2}), a.dilation_w = one_of<int64_t>({1, 1, 1, 2});
        a.pad_h = line ? 0 : below(w.kh + 1), a.pad_w = below(w.kw + 1);
        const int64_t reach_h = a.dilation_h * (w.kh - 1) + 1, reach_w = a.dilation_w * (w.kw - 1) + 1;
        a.h = line ? 1 : std::max<int64_t>(chance(20) ? 0 : 1, reach_h - 2 * a.pad_h) + below(12);
        a.w = std::max<int64_t>(1, reach_w - 2 * a.pad_w) + below(chance(4) ? 80 : 20);
        if (line) w.kh = 1;
        a.h = std::max(a.h, reach_h - 2 * a.pad_h);
        a.oh = (a.h + 2 * a.pad_h - reach_h) / a.stride_h + 1, a.ow = (a.w + 2 * a.pad_w - reach_w) / a.stride_w + 1;
        a.x_last = (int32_t)below(2), a.y_last = (int32_t)below(2), a.function = (int32_t)(chance(2) ? 0 : below(8));
        a.act_zero_point = w.act == STATIC && chance(2) ? (int32_t)(below(200) - 100) : 0;
        a.threads = 1;
        tiles = (w.o + 15) / 16;
        parts = w.one_scale ? 1 : tiles * sets * 16;
        codes = w.c == 1 ? w.kh * w.kw * tiles * 16 : tiles * w.kp / 32 * 64 * w.bits;
    }
    int64_t inputs() const { return a.n * a.groups * w.c * a.h * a.w; }
    int64_t outputs() const { return a.n * w.o * a.oh * a.ow; }
};

// Codes of added channels are 0.
Bytes conv_codes(const ConvCase& c) {
    Bytes out = any_bytes(c.codes);
    if (c.w.c == 1) {
        for (auto& b : out) b &= (uint8_t)((1 << c.w.bits) - 1);
        return out;
    }
    if (c.w.channels % 4 == 0) return out;
    const int64_t wide = up(c.w.channels, 4), columns = c.w.kp;
    Bytes rows((size_t)(c.tiles * 16 * columns), 0);
    for (size_t i = 0; i < rows.size(); ++i)
        if ((int64_t)i % columns % wide < c.w.channels) rows[i] = (uint8_t)below(1 << c.w.bits);
    pw_isa_use("scalar");
    pw_pack_codes(rows.data(), c.tiles * 16, columns, columns, c.w.bits, 0, out.data(), 1);
    return out;
}

void convolution() {
    const ConvCase c;
    const Room x(numbers(c.w.x, c.inputs())), y((size_t)(c.outputs() * size_of(c.w.x)));
    const Room codes(conv_codes(c)), scale(numbers(c.w.scale, c.parts, 0.02f, true));
    Bytes zeros = numbers(c.w.zero_point, c.parts);
    const Room zero(zeros), act_scale(numbers(c.w.act == STATIC ? F32 : NONE, 1, 0.02f, true));
    const Bias bias(c.w.o);
    ConvArgs a = c.a;
    a.x = x.data(), a.y = y.data(), a.bias = bias.room.pointer(), a.bias_kind = bias.kind, a.codes = codes.pointer();
    a.scale = scale.pointer(), a.zero_point = zero.pointer(), a.act_scale = act_scale.pointer();
    char what[400];
    snprintf(what, sizeof what,
             "pw_convolution o %ld c %ld kernel %ld %ld channels %ld bits %d center %d scale %d zero %d one %d x %d act %d n %ld h %ld w %ld groups %ld "
             "stride %ld %ld pad %ld %ld dilation %ld %ld last %d %d function %d bias %d zero %d",
             (long)c.w.o, (long)c.w.c, (long)c.w.kh, (long)c.w.kw, (long)c.w.channels, c.w.bits, c.w.center, c.w.scale, c.w.zero_point, c.w.one_scale,
             c.w.x, c.w.act, (long)a.n, (long)a.h, (long)a.w, (long)a.groups, (long)a.stride_h, (long)a.stride_w, (long)a.pad_h, (long)a.pad_w,
             (long)a.dilation_h, (long)a.dilation_w, a.x_last, a.y_last, a.function, a.bias_kind, a.act_zero_point);
    compare(what, {{y, c.w.x}}, [&](int threads) {
        ConvArgs b = a;
        b.threads = threads;
        return pw_convolution(&c.w, &b);
    });
    const auto with = [&](auto change) {
        return [&, change] {
            Conv v = c.w;
            ConvArgs b = a;
            change(v, b);
            return (int64_t)pw_convolution(&v, &b);
        };
    };
    using W = Conv;
    using A = ConvArgs;
    refuse("pw_convolution", {
        {"no convolution", [&] { return (int64_t)pw_convolution(nullptr, &a); }}, {"no arguments", [&] { return (int64_t)pw_convolution(&c.w, nullptr); }},
        {"o", with([](W& v, A&) { v.o = -1; })}, {"c", with([](W& v, A&) { v.c = 0; })}, {"kh", with([](W& v, A&) { v.kh = 0; })},
        {"kw", with([](W& v, A&) { v.kw = 1 << 20; })}, {"channels", with([](W& v, A&) { v.channels = v.c + 1; })},
        {"kp", with([](W& v, A&) { v.c = std::max<int64_t>(v.c, 2), v.channels = v.c, v.kp += 32; })}, {"bits", with([](W& v, A&) { v.bits = 9; })},
        {"center", with([](W& v, A&) { v.center = 256; })}, {"kind of scales", with([](W& v, A&) { v.scale = E8M0; })},
        {"kind of zero points", with([](W& v, A&) { v.zero_point = F32; })}, {"one scale with zero points", with([](W& v, A&) { v.one_scale = 1, v.zero_point = I8; })},
        {"kind of x", with([](W& v, A&) { v.x = I8; })}, {"act", with([](W& v, A&) { v.act = FLOAT, v.x = BF16; })}, {"act of no kind", with([](W& v, A&) { v.act = 4; })}, {"act_hi", with([](W& v, A&) { v.act_hi = 128; })},
        {"kind of scales of activations", with([](W& v, A&) { v.act_scale = NONE; })}, {"n", with([](W&, A& b) { b.n = -1; })},
        {"h", with([](W&, A& b) { b.h = -1; })}, {"groups", with([](W& v, A& b) { b.groups = v.o + 1; })}, {"no groups", with([](W&, A& b) { b.groups = 0; })},
        {"stride", with([](W&, A& b) { b.stride_h = 0; })}, {"dilation", with([](W&, A& b) { b.dilation_w = 0; })}, {"padding", with([](W&, A& b) { b.pad_w = -1; })},
        {"oh", with([](W&, A& b) { ++b.oh; })}, {"ow", with([](W&, A& b) { b.ow = 0; })}, {"act_zero_point", with([](W&, A& b) { b.act_zero_point = 128; })},
        {"function", with([](W&, A& b) { b.function = 8; })}, {"memory format", with([](W&, A& b) { b.x_last = 2; })}, {"threads", with([](W&, A& b) { b.threads = 0; })},
        {"kind of bias", with([](W&, A& b) { b.bias = b.codes, b.bias_kind = I8; })}, {"no codes", with([](W&, A& b) { b.codes = nullptr; })},
        {"no scale", with([](W&, A& b) { b.scale = nullptr; })}, {"no y", with([](W&, A& b) { b.n = std::max<int64_t>(b.n, 1), b.y = nullptr; })},
        {"more than int64", with([](W&, A& b) { b.n = INT64_MAX; })},
    });
}

}  // namespace
