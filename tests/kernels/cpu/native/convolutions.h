// Cases of convolutions: dense, grouped and depthwise, contiguous and channels last; alone and in a chain.
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
             "pw_convolution o %ld c %ld kernel %ld %ld channels %ld bits %d center %d scale %d zero %d one %d x %d "
             "act %d n %ld h %ld w %ld groups %ld "
             "stride %ld %ld pad %ld %ld dilation %ld %ld last %d %d function %d bias %d zero %d",
             (long)c.w.o, (long)c.w.c, (long)c.w.kh, (long)c.w.kw, (long)c.w.channels, c.w.bits, c.w.center, c.w.scale,
             c.w.zero_point, c.w.one_scale, c.w.x, c.w.act, (long)a.n, (long)a.h, (long)a.w, (long)a.groups,
             (long)a.stride_h, (long)a.stride_w, (long)a.pad_h, (long)a.pad_w, (long)a.dilation_h, (long)a.dilation_w,
             a.x_last, a.y_last, a.function, a.bias_kind, a.act_zero_point);
    compare(what, {{y, c.w.x}}, [&](int threads) {
        ConvArgs b = a;
        b.threads = threads;
        return pw_convolution(&c.w, &b);
    });
    told(CONV_WEIGHT, c.w, {&codes, &scale, &zero});
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
    refuse("pw_convolution",
           {
               {"no convolution", [&] { return (int64_t)pw_convolution(nullptr, &a); }},
               {"no arguments", [&] { return (int64_t)pw_convolution(&c.w, nullptr); }},
               {"o", with([](W& v, A&) { v.o = -1; })},
               {"c", with([](W& v, A&) { v.c = 0; })},
               {"kh", with([](W& v, A&) { v.kh = 0; })},
               {"kw", with([](W& v, A&) { v.kw = 1 << 20; })},
               {"channels", with([](W& v, A&) { v.channels = v.c + 1; })},
               {"kp", with([](W& v, A&) { v.c = std::max<int64_t>(v.c, 2), v.channels = v.c, v.kp += 32; })},
               {"bits", with([](W& v, A&) { v.bits = 9; })},
               {"center", with([](W& v, A&) { v.center = 256; })},
               {"kind of scales", with([](W& v, A&) { v.scale = E8M0; })},
               {"kind of zero points", with([](W& v, A&) { v.zero_point = F32; })},
               {"one scale with zero points", with([](W& v, A&) { v.one_scale = 1, v.zero_point = I8; })},
               {"kind of x", with([](W& v, A&) { v.x = I8; })},
               {"act", with([](W& v, A&) { v.act = FLOAT, v.x = BF16; })},
               {"act of no kind", with([](W& v, A&) { v.act = 4; })},
               {"act_hi", with([](W& v, A&) { v.act == FLOAT ? v.act = -1 : v.act_hi = 128; })},
               {"kind of scales of activations", with([](W& v, A&) { v.act_scale = NONE; })},
               {"n", with([](W&, A& b) { b.n = -1; })},
               {"h", with([](W&, A& b) { b.h = -1; })},
               {"groups", with([](W& v, A& b) { b.groups = v.o + 1; })},
               {"no groups", with([](W&, A& b) { b.groups = 0; })},
               {"stride", with([](W&, A& b) { b.stride_h = 0; })},
               {"dilation", with([](W&, A& b) { b.dilation_w = 0; })},
               {"padding", with([](W&, A& b) { b.pad_w = -1; })},
               {"oh", with([](W&, A& b) { ++b.oh; })},
               {"ow", with([](W&, A& b) { b.ow = 0; })},
               {"act_zero_point", with([](W&, A& b) { b.act_zero_point = 128; })},
               {"function", with([](W&, A& b) { b.function = 8; })},
               {"memory format", with([](W&, A& b) { b.x_last = 2; })},
               {"threads", with([](W&, A& b) { b.threads = 0; })},
               {"kind of bias", with([](W&, A& b) { b.bias = b.codes, b.bias_kind = I8; })},
               {"no codes", with([](W&, A& b) { b.codes = nullptr; })},
               {"no scale", with([](W&, A& b) { b.scale = nullptr; })},
               {"no y", with([](W&, A& b) { b.n = std::max<int64_t>(b.n, 1), b.y = nullptr; })},
               {"more than int64", with([](W&, A& b) { b.n = INT64_MAX; })},
           });
}

// The weight of a step of a chain.
struct ChainWeight {
    Conv w = {};
    int64_t groups = 1, tiles = 0;
    Bytes bytes, sums;
    ChainWeight(int64_t o, int64_t c, int64_t groups_, int64_t kh, int64_t kw) : groups(groups_), tiles((o + 15) / 16) {
        w.o = o, w.c = w.channels = c, w.kh = kh, w.kw = kw, w.kp = up(kh * kw * up(c, 4), 32), w.bits = 8,
        w.center = 128;
        w.scale = one_of<int32_t>({F32, BF16, F16}), w.x = F32, w.one_scale = chance(4), w.act = STATIC;
        w.act_lo = -128, w.act_hi = 127, w.act_scale = F32, w.act_floor = 1e-30f, w.act_steps = 127.5f;
        std::vector<int32_t> all((size_t)(16 * tiles), 0);
        const int64_t wide = up(c, 4), columns = w.kp, taps = kh * kw;
        if (c == 1) {
            bytes = any_bytes(taps * 16 * tiles);
            for (int64_t i = 0; i < taps; ++i)
                for (int64_t r = 0; r < o; ++r) all[(size_t)r] += bytes[(size_t)(i * 16 * tiles + r)] - 128;
        } else {
            Bytes rows((size_t)(tiles * 16 * columns), 0);
            for (int64_t r = 0; r < o; ++r)
                for (int64_t i = 0; i < taps * wide; ++i)
                    if (i % wide < c) {
                        const uint8_t code = (uint8_t)below(256);
                        rows[(size_t)(r * columns + i)] = code, all[(size_t)r] += code - 128;
                    }
            bytes.resize((size_t)(tiles * columns / 32 * 512));
            pw_isa_use("scalar");
            pw_pack_codes(rows.data(), tiles * 16, columns, columns, 8, 0, bytes.data(), 1);
        }
        sums.resize(all.size() * 4);
        memcpy(sums.data(), all.data(), sums.size());
    }
    int64_t scales() const { return w.one_scale ? 1 : 16 * tiles; }
};

// input -> convolution (dense, grouped or depthwise) -> 1x1 convolution with a residual, max pooling -> mean, sum
void conv_chain() {
    const bool was = wild;
    const bool depthwise = chance(2), grouped = !depthwise && chance(4);
    const int64_t groups = depthwise ? 1 + below(140)
                           : grouped ? 1 + below(3)
                                     : 1,
                  c = depthwise ? 1
                      : grouped ? 4 * (1 + below(8))
                                : 2 + below(50);
    const int64_t o = depthwise ? groups
                      : grouped ? groups * 16 * (1 + below(3))
                                : one_of<int64_t>({1, 16, 17, 48, 64, 65, 1 + below(150)});
    const int64_t kh = one_of<int64_t>({1, 2, 3, 3, 5, 7}), kw = one_of<int64_t>({1, 2, 3, 3, 5}),
                  n = one_of<int64_t>({0, 1, 1, 2, 3, 5});
    wild = false;  // weights are finite
    const ChainWeight first(o, depthwise ? 1 : c, groups, kh, kw), second(o == 1 ? 1 : o, o, 1, 1, 1);
    const bool more = o > 1;  // a convolution with one input channel is not a step
    ChainStep a = {}, b = {}, p = {}, mean = {}, sum = {}, in = {};
    for (ChainStep* s : {&a, &b, &p, &mean, &sum, &in})
        s->groups = s->kh = s->kw = s->stride_h = s->stride_w = s->dilation_h = s->dilation_w = 1, s->residual = -1,
        s->lo = -INFINITY, s->hi = INFINITY;
    a.kh = kh, a.kw = kw, a.groups = groups, a.stride_h = 1 + below(2), a.stride_w = 1 + below(3),
    a.dilation_h = 1 + below(2), a.dilation_w = chance(3) ? 2 : 1;
    a.pad_h = below(kh + 1), a.pad_w = below(kw + 1), a.lo = one_of<float>({0, -INFINITY}),
    a.hi = one_of<float>({6, INFINITY});
    a.function = chance(2) ? 0 : (int32_t)below(8);
    const int64_t h = std::max<int64_t>(1, a.dilation_h * (kh - 1) + 1 - 2 * a.pad_h) + below(12),
                  width = std::max<int64_t>(1, a.dilation_w * (kw - 1) + 1 - 2 * a.pad_w) + below(40);
    const int64_t oh = (h + 2 * a.pad_h - a.dilation_h * (kh - 1) - 1) / a.stride_h + 1,
                  ow = (width + 2 * a.pad_w - a.dilation_w * (kw - 1) - 1) / a.stride_w + 1;
    p.kh = 1 + below(std::min<int64_t>(3, oh)), p.kw = 1 + below(std::min<int64_t>(3, ow)), p.stride_h = 1 + below(2),
    p.stride_w = 1 + below(2);
    p.pad_h = below(p.kh / 2 + 1), p.pad_w = below(p.kw / 2 + 1);
    const int64_t ph = (oh + 2 * p.pad_h - p.kh) / p.stride_h + 1, pw = (ow + 2 * p.pad_w - p.kw) / p.stride_w + 1;

    std::vector<ChainTensor> tensors;
    int64_t scratch = 0;
    const Room code_scale(numbers(F32, 1, 0.03f, true));
    const auto tensor = [&](int64_t channels, int64_t rows, int64_t columns, int64_t mh, int64_t mw, bool codes,
                            bool floats, int32_t output) {
        ChainTensor t = {};
        t.channels = channels, t.h = rows, t.w = columns, t.margin_h = mh, t.margin_w = mw, t.codes = t.numbers = -1,
        t.output = output;
        t.scale_kind = F32, t.lo = -128, t.hi = 127;
        if (codes) {
            t.codes = scratch, scratch += up((rows + 2 * mh) * (columns + 2 * mw) * up(channels, 4), 64);
            t.zero_point = (int32_t)(below(60) - 30), t.scale = (const float*)code_scale.data();
        }
        if (floats) t.numbers = scratch, scratch += up(rows * columns * channels * 4, 64);
        tensors.push_back(t);
    };
    tensor(groups * first.w.c, h, width, a.pad_h, a.pad_w + below(2), true, chance(2), -1);
    tensor(o, oh, ow, 0, 0, true, true, -1);
    tensor(o, oh, ow, 0, 0, false, false, 0);
    tensor(o, ph, pw, below(2), below(2), chance(2), true, -1);
    tensor(o, 1, 1, 0, 0, false, false, 1);
    tensor(o, ph, pw, 0, 0, false, false, 2);
    in.kind = CHAIN_INPUT, in.y = 0;
    a.kind = CHAIN_CONV, a.x = 0, a.y = 1;
    b.kind = more ? CHAIN_CONV : CHAIN_ADD, b.x = 1, b.y = 2, b.residual = chance(2) ? 1 : -1, b.lo = -1;
    p.kind = CHAIN_MAX, p.x = 1, p.y = 3, mean.kind = CHAIN_MEAN, mean.x = 3, mean.y = 4, sum.kind = CHAIN_ADD,
    sum.x = 3, sum.y = 5, sum.residual = 3;

    const Room codes_a(first.bytes), sums_a(first.sums), scale_a(numbers(first.w.scale, first.scales(), 0.02f, true)),
        bias_a(numbers(F32, chance(2) ? o : 0));
    const Room codes_b(second.bytes), sums_b(second.sums),
        scale_b(numbers(second.w.scale, second.scales(), 0.02f, true)), bias_b(numbers(F32, chance(2) ? o : 0));
    const auto give = [&](ChainStep& s, const ChainWeight& w, const Room& codes, const Room& sums, const Room& scale,
                          const Room& bias) {
        s.conv = &w.w, s.codes = codes.pointer(), s.sums = (const int32_t*)sums.pointer(), s.scale = scale.pointer(),
        s.bias = bias.pointer();
    };
    give(a, first, codes_a, sums_a, scale_a, bias_a);
    if (more) give(b, second, codes_b, sums_b, scale_b, bias_b);
    wild = was;
    const Room x(numbers(F32, n * groups * first.w.c * h * width)), y0((size_t)(n * o * oh * ow * 4)),
        y1((size_t)(n * o * 4)), y2((size_t)(n * o * ph * pw * 4));
    const ChainInput input = {x.data(), (int64_t)below(2)};
    void* const outputs[] = {y0.data(), y1.data(), y2.data()};
    const std::vector<ChainStep> steps = {in, a, p, b, mean, sum};
    const Chain call = {steps.data(), tensors.data(), &input, outputs, n, scratch, 6, 6, 1, 3, 1};
    char what[300];
    snprintf(what, sizeof what,
             "pw_conv_chain o %ld c %ld groups %ld kernel %ld %ld n %ld h %ld w %ld stride %ld %ld pad %ld %ld "
             "dilation %ld %ld function %d",
             (long)o, (long)c, (long)groups, (long)kh, (long)kw, (long)n, (long)h, (long)width, (long)a.stride_h,
             (long)a.stride_w, (long)a.pad_h, (long)a.pad_w, (long)a.dilation_h, (long)a.dilation_w, a.function);
    if (mode != SHORT || (n && more))  // the second weight is not read without channels, nothing without samples
        compare(what, {{y0, F32}, {y1, F32}, {y2, F32}}, [&](int threads) {
            Chain again = call;
            again.threads = threads;
            return pw_conv_chain(&again);
        });
    struct Parts {
        std::vector<ChainStep> steps;
        std::vector<ChainTensor> tensors;
        ChainInput input;
        Conv conv;
        Chain call;
    };
    using P = Parts;
    const auto with = [&](auto change) {
        return [&, change] {
            P parts = {steps, tensors, input, first.w, call};
            parts.steps[1].conv = &parts.conv;
            parts.call.steps = parts.steps.data(), parts.call.tensors = parts.tensors.data(),
            parts.call.inputs = &parts.input;
            parts.call.n = std::max<int64_t>(parts.call.n, 1);
            change(parts);
            return (int64_t)pw_conv_chain(&parts.call);
        };
    };
    refuse("pw_conv_chain",
           {
               {"no chain", [] { return (int64_t)pw_conv_chain(nullptr); }},
               {"n", with([](P& q) { q.call.n = -1; })},
               {"more than int64", with([](P& q) { q.call.n = INT64_MAX; })},
               {"threads", with([](P& q) { q.call.threads = 0; })},
               {"steps", with([](P& q) { q.call.steps = nullptr; })},
               {"tensors", with([](P& q) { q.call.tensors = nullptr; })},
               {"step_count", with([](P& q) { q.call.step_count = -1; })},
               {"scratch", with([](P& q) { q.call.scratch = 0; })},
               {"inputs", with([](P& q) { q.call.inputs = nullptr; })},
               {"outputs", with([](P& q) { q.call.outputs = nullptr; })},
               {"no x", with([](P& q) { q.input.data = nullptr; })},
               {"memory format", with([](P& q) { q.input.last = 2; })},
               {"kind", with([](P& q) { q.steps[1].kind = 5; })},
               {"x", with([](P& q) { q.steps[1].x = 6; })},
               {"y", with([](P& q) { q.steps[1].y = -1; })},
               {"residual", with([](P& q) { q.steps[5].residual = 6; })},
               {"residual of another size", with([](P& q) { q.tensors[1].channels += 4, q.steps[5].residual = 1; })},
               {"lo above hi", with([](P& q) { q.steps[4].lo = 2, q.steps[4].hi = 1; })},
               {"y is x", with([](P& q) { q.steps[1].y = 0; })},
               {"size", with([](P& q) { ++q.tensors[1].h; })},
               {"empty", with([](P& q) { q.tensors[0].w = 0; })},
               {"margin", with([](P& q) { q.steps[1].pad_h = q.tensors[0].margin_h + 1; })},
               {"place of codes", with([](P& q) { q.tensors[0].codes += 1; })},
               {"zero point", with([](P& q) { q.tensors[0].zero_point = 200; })},
               {"no scale of codes", with([](P& q) { q.tensors[0].scale = nullptr; })},
               {"not kept", with([](P& q) { q.tensors[1].codes = q.tensors[1].numbers = -1; })},
               {"output", with([](P& q) { q.tensors[2].output = 3; })},
               {"no codes of x", with([](P& q) { q.tensors[0].numbers = 0, q.tensors[0].codes = -1; })},
               {"stride", with([](P& q) { q.steps[1].stride_w = 0; })},
               {"kernel", with([](P& q) { ++q.conv.kh; })},
               {"bits", with([](P& q) { q.conv.bits = 4; })},
               {"center", with([](P& q) { q.conv.center = 0; })},
               {"act", with([](P& q) { q.conv.act = SYMMETRIC; })},
               {"groups", with([](P& q) { q.steps[1].groups = 0; })},
               {"function", with([](P& q) { q.steps[1].function = 8; })},
               {"no codes", with([](P& q) { q.steps[1].codes = nullptr; })},
               {"no sums", with([](P& q) { q.steps[1].sums = nullptr; })},
               {"no scale", with([](P& q) { q.steps[1].scale = nullptr; })},
               {"no conv", with([](P& q) { q.steps[1].conv = nullptr; })},
               {"window", with([](P& q) { q.steps[2].pad_h = q.steps[2].kh; })},
               {"pooling of nothing", with([](P& q) { q.tensors[1].numbers = -1, q.tensors[1].codes = 0; })},
               {"mean of other size", with([](P& q) { q.tensors[4].h = 2; })},
           });
}

}  // namespace
