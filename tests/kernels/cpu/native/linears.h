// Cases of linear layers: integer codes, alone and several at once, and codes of floats and tables.
#pragma once

#include "compare.h"

namespace {

// The input of a linear layer, its rows `ldx` elements apart, the last with nothing behind it. Rows may be one row
// again and again, as those of expand().
struct Input {
    int kind;
    int64_t m, k, ldx;
    Bytes numbers_;
    Room x;
    static int64_t rows(int64_t n, int64_t k) {
        if (chance(30)) return std::max<int64_t>(1, 3000000 / (n * k));  // more than one unit of work
        return one_of<int64_t>({0, 1, 1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 33, 70});
    }
    Input(int64_t n, int64_t k_)
        : kind(one_of<int>({F32, BF16, F16})),
          m(std::min<int64_t>(rows(n, k_), 1100)),
          k(k_),
          ldx(chance(12) ? 0 : k + one_of<int64_t>({0, 0, 7})),
          numbers_(numbers(kind, m ? (m - 1) * ldx + k : 0)),
          x(numbers_) {}
    bool finite() const { return all_finite(kind, numbers_); }
};

struct Bias {
    int kind = one_of<int>({NONE, F32, BF16, F16});
    Room room;
    explicit Bias(int64_t n) : room(numbers(kind, n)) {}
};

// A weight of integer codes, and everything that goes with it.
struct IntCase {
    IntLinear w = {};
    int64_t outers = 0, parts = 0;
    IntCase(int64_t n, int64_t k, int x) {
        w.n = n, w.k = k, w.x = x, w.bits = (int)(1 + below(8));
        w.center = one_of<int32_t>({0, 1 << (w.bits - 1), (int32_t)below(1 << w.bits)});
        w.scale = one_of<int32_t>({F32, BF16, F16, E8M0});
        w.zero_point = one_of<int32_t>({NONE, NONE, I8, U8});
        w.offset = w.zero_point ? NONE : one_of<int32_t>({NONE, NONE, F32, BF16, F16});
        int64_t group = one_of<int64_t>({0, -1, 32, 64, 96, 128, 256, 32 * (1 + below(12))});
        if (group < 0 && (w.zero_point || w.offset || w.scale == E8M0)) group = 0;
        if (group >= k) group = 0;
        if (group == 0 && w.offset) group = up(k, 32);
        w.group = (int32_t)group;
        w.kp = group > 0 ? up(up(k, group), 32) : up(k, 32);
        if (chance(12)) w.kp += group > 0 ? group : 32;  // columns that nobody asked for
        if (group > 0 && !w.zero_point && chance(2)) {   // codes under outer numbers
            w.outer = (int32_t)(1 + below(8)), w.outer_kind = one_of<int32_t>({F32, BF16, F16});
            w.scale = one_of<int32_t>({I8, U8});
            if (w.offset) w.offset = one_of<int32_t>({I8, U8});
        }
        w.act = one_of<int32_t>({FLOAT, FLOAT, SYMMETRIC, ASYMMETRIC, STATIC});
        const int64_t most = w.act == FLOAT ? 128 : w.act == SYMMETRIC ? 2048 : 512;
        w.block = (int32_t)most;
        if (group > 0)
            for (w.block = (int32_t)(std::min(most, group) / (chance(4) ? 64 : 32) * 32 + 32);
                 w.block > most || group % w.block;)
                w.block -= 32;
        w.act_lo = one_of<int32_t>({-128, -127, -64}), w.act_hi = w.act_lo == -64 ? 63 : 127;
        w.act_scale = one_of<int32_t>({F32, BF16, F16});
        w.act_floor = 1e-30f, w.act_steps = w.act == ASYMMETRIC ? 255.0f : 127.5f;
        if ((w.act == SYMMETRIC || w.act == ASYMMETRIC) && chance(2)) {  // inputs in groups of columns
            w.act_group = 32 * one_of<int64_t>({1, 2, 3, 4, 8, 1 + below(12)});
            for (w.block = std::min<int32_t>(w.block, (int32_t)w.act_group);
                 w.act_group % w.block || (group > 0 && group % w.block);)
                w.block -= 32;
        }
        resize();
    }
    void resize() {  // after n changed
        const int64_t tiles = (w.n + 15) / 16, groups = w.group > 0 ? w.kp / w.group : 1;
        outers = w.outer ? tiles * (up(groups, w.outer) / w.outer) * 16 : 0;
        parts = w.group < 0 ? 1 : w.outer ? outers * w.outer : tiles * groups * 16;
    }
};

struct IntArgs {  // of one weight
    Room codes, scale, zero, offset, outer_scale, outer_offset, y;
    Bias bias;
    IntArgs(const IntCase& c, const Input& in)
        : codes(any_bytes((c.w.n + 15) / 16 * c.w.kp / 32 * 64 * c.w.bits)),
          scale(numbers(c.w.scale, c.parts, 0.02f, true)),
          zero(numbers(c.w.zero_point, c.parts)),
          offset(numbers(c.w.offset, c.parts, 0.02f)),
          outer_scale(numbers(c.w.outer ? c.w.outer_kind : NONE, c.outers, 0.02f, true)),
          outer_offset(numbers(c.w.outer && c.w.offset ? c.w.outer_kind : NONE, c.outers, 0.02f)),
          y((size_t)(in.m * c.w.n * size_of(in.kind))),
          bias(c.w.n) {}
    LinearArgs args(const Input& in, const Room& act_scale, int64_t act_zero, int threads) const {
        return {in.x.data(),
                in.m,
                in.ldx,
                y.data(),
                bias.room.pointer(),
                codes.pointer(),
                scale.pointer(),
                zero.pointer(),
                offset.pointer(),
                outer_scale.pointer(),
                outer_offset.pointer(),
                act_scale.pointer(),
                (int32_t)act_zero,
                bias.kind,
                threads};
    }
};

int call_one(const IntLinear& w, const LinearArgs& a) {
    return pw_int_linear(&w, a.x, a.m, a.ldx, a.y, a.bias, a.bias_kind, a.codes, a.scale, a.zero_point, a.offset,
                         a.outer_scale, a.outer_offset, a.act_scale, a.act_zero_point, a.threads);
}

std::string name_of(const char* function, const IntLinear& w, const Input& in, int bias) {
    char what[260];
    snprintf(what, sizeof what,
             "%s n %ld k %ld kp %ld m %ld ldx %ld bits %d center %d group %d block %d scale %d zero %d offset %d outer "
             "%d x %d act %d in groups of %ld "
             "bias %d",
             function, (long)w.n, (long)w.k, (long)w.kp, (long)in.m, (long)in.ldx, w.bits, w.center, w.group, w.block,
             w.scale, w.zero_point, w.offset, w.outer, w.x, w.act, (long)w.act_group, bias);
    return what;
}

void int_linear() {
    const int64_t n = rows_of(), k = columns_of();
    const Input in(n, k);
    const IntCase c(n, k, in.kind);
    const IntArgs own(c, in);
    const IntLinear& w = c.w;
    const Room act_scale(numbers(w.act == STATIC ? F32 : NONE, 1, 0.02f, true));
    const int64_t act_zero = w.act == STATIC && chance(2) ? below(20) - 10 : 0;
    compare(name_of("pw_int_linear", w, in, own.bias.kind), {{own.y, in.kind}},
            [&](int threads) { return call_one(w, own.args(in, act_scale, act_zero, threads)); });
    told(INT_WEIGHT, w, {&own.codes, &own.scale, &own.zero, &own.offset, &own.outer_scale, &own.outer_offset});
    const auto with = [&](auto change) {
        return [&, change] {
            IntLinear v = w;
            LinearArgs a = own.args(in, act_scale, act_zero, 1);
            change(v, a);
            return (int64_t)call_one(v, a);
        };
    };
    using W = IntLinear;
    using A = LinearArgs;
    refuse("pw_int_linear",
           {
               {"n", with([](W& v, A&) { v.n = -1; })},
               {"k", with([](W& v, A&) { v.k = -1; })},
               {"k above kp", with([](W& v, A&) { v.k = v.kp + 1; })},
               {"kp", with([](W& v, A&) { v.kp = 0; })},
               {"kp of half a step", with([](W& v, A&) { v.kp += 16; })},
               {"bits 0", with([](W& v, A&) { v.bits = 0; })},
               {"bits 9", with([](W& v, A&) { v.bits = 9; })},
               {"group", with([](W& v, A&) { v.group = -2; })},
               {"block 0", with([](W& v, A&) { v.block = 0; })},
               {"block of half a step", with([](W& v, A&) { v.block = 16; })},
               {"a long block", with([](W& v, A&) { v.block = 4096; })},
               {"groups of the input below 0",
                with([](W& v, A&) { v.act = SYMMETRIC, v.act_lo = -1, v.act_hi = 1, v.act_group = -v.block; })},
               {"groups of the input of half a step",
                with([](W& v, A&) { v.act = SYMMETRIC, v.act_lo = -1, v.act_hi = 1, v.act_group = v.block + 16; })},
               {"groups of a float input", with([](W& v, A&) { v.act = FLOAT, v.block = 32, v.act_group = 32; })},
               {"groups of a static input",
                with([](W& v, A&) { v.act = STATIC, v.act_lo = -1, v.act_hi = 1, v.block = 32, v.act_group = 32; })},
               {"a group that divides nothing", with([](W& v, A&) { v.group = v.block * 77777; })},
               {"kind of scales", with([](W& v, A&) { v.scale = E4M3; })},
               {"kind of zero points", with([](W& v, A&) { v.zero_point = F32; })},
               {"kind of offsets", with([](W& v, A&) { v.offset = 99; })},
               {"an offset beside one scale a row", with([](W& v, A&) { v.offset = F32, v.group = 0; })},
               {"kind of x", with([](W& v, A&) { v.x = I8; })},
               {"act", with([](W& v, A&) { v.act = 4; })},
               {"outer", with([](W& v, A&) { v.outer = -1; })},
               {"kind of scales of activations", with([](W& v, A&) { v.act_scale = NONE; })},
               {"m", with([](W&, A& a) { a.m = -1; })},
               {"ldx", with([](W&, A& a) { a.m = 2, a.ldx = -1; })},
               {"threads", with([](W&, A& a) { a.threads = 0; })},
               {"no codes", with([](W&, A& a) { a.codes = nullptr; })},
               {"no scale", with([](W&, A& a) { a.scale = nullptr; })},
               {"no y", with([](W&, A& a) { a.m = std::max<int64_t>(a.m, 1), a.y = nullptr; })},
               {"no x", with([](W&, A& a) { a.m = std::max<int64_t>(a.m, 1), a.x = nullptr; })},
               {"kind of bias", with([](W&, A& a) { a.bias = a.codes, a.bias_kind = I8; })},
               {"more rows than int64", with([](W& v, A&) { v.n = INT64_MAX; })},
               {"no weight",
                [&] {
                    return (int64_t)pw_int_linear(nullptr, nullptr, 0, k, nullptr, nullptr, 0, nullptr, nullptr,
                                                  nullptr, nullptr, nullptr, nullptr, nullptr, 0, 1);
                }},
           });
}

void int_linears() {
    const int64_t k = columns_of(), n = rows_of();
    const Input in(4 * n, k);
    IntCase c(n, k, in.kind);
    const Room act_scale(numbers(c.w.act == STATIC ? F32 : NONE, 1, 0.02f, true));
    const int count = 1 + (int)below(4);
    std::vector<IntLinear> weights;
    std::vector<std::unique_ptr<IntArgs>> own;
    std::vector<Output> outputs;
    for (int i = 0; i < count; ++i) {
        c.w.n = i ? rows_of() : n;
        c.resize();
        weights.push_back(c.w);
        own.push_back(std::make_unique<IntArgs>(c, in));
        outputs.push_back({own.back()->y, in.kind});
    }
    const auto args = [&](int threads) {
        std::vector<LinearArgs> a;
        for (const auto& o : own) a.push_back(o->args(in, act_scale, 0, threads));
        return a;
    };
    const auto bytes = [](const auto& items) {
        return Bytes((const uint8_t*)items.data(), (const uint8_t*)(items.data() + items.size()));
    };
    const Room every_weight(bytes(weights));
    std::vector<std::unique_ptr<Room>> every_args;  // of 1 thread, of 2, ..
    for (int threads = 1; threads <= (mode == COMPARE ? 4 : 1); ++threads)
        every_args.push_back(std::make_unique<Room>(bytes(args(threads))));
    compare(name_of("pw_int_linears", weights[0], in, count), outputs, [&](int threads) {
        return pw_int_linears((const IntLinear*)every_weight.data(),
                              (const LinearArgs*)every_args[(size_t)threads - 1]->data(), count);
    });
    refuse("pw_int_linears",
           {
               {"count", [&] { return (int64_t)pw_int_linears(weights.data(), args(1).data(), -1); }},
               {"no weights", [&] { return (int64_t)pw_int_linears(nullptr, args(1).data(), count); }},
               {"no arguments", [&] { return (int64_t)pw_int_linears(weights.data(), nullptr, count); }},
               {"another weight",
                [&] {
                    const IntLinear two[2] = {weights[0], [](IntLinear w) { return ++w.center, w; }(weights[0])};
                    const LinearArgs both[2] = {args(1)[0], args(1)[0]};
                    return (int64_t)pw_int_linears(two, both, 2);
                }},
           });
}

// A table of numbers that bfloat16 holds, as src/abi.h has it.
struct Numbers {
    Bytes values = Bytes(1024), low = Bytes(256), high = Bytes(256);
    explicit Numbers(const FloatLinear& w) {
        for (int i = 0; i < 256; ++i) {
            float f = float_of(bits_of(number()) & 0xffff0000u);
            if (w.decode == SMALL_FLOAT) {
                const int bias = (1 << (w.exponent - 1)) - 1, e = i >> w.mantissa & ((1 << w.exponent) - 1);
                const float m = (float)(i & ((1 << w.mantissa) - 1)) / (float)(1 << w.mantissa);
                f = std::ldexp(e ? 1 + m : m, (e ? e : 1) - bias) * (i >> (w.bits - 1) & 1 ? -1.0f : 1.0f);
            }
            if (w.decode == INTEGER) f = (float)(i - 16);
            memcpy(&values[4 * (size_t)i], &f, 4);
            low[(size_t)i] = (uint8_t)(bits_of(f) >> 16), high[(size_t)i] = (uint8_t)(bits_of(f) >> 24);
        }
    }
};

FloatLinear float_weight(int64_t n, int64_t k, int x) {
    static const int small[4][3] = {{8, 4, 3}, {8, 5, 2}, {6, 3, 2}, {6, 2, 3}};
    const int* shape = small[below(4)];
    FloatLinear w = {};
    w.n = n, w.k = k, w.x = x;
    w.decode = one_of<int32_t>({TABLE16, SMALL_FLOAT, TABLE256, INTEGER});
    w.bits = w.decode == TABLE16       ? (int)(1 + below(4))
             : w.decode == SMALL_FLOAT ? shape[0]
                                       : (int)(5 + below(w.decode == INTEGER ? 2 : 4));
    w.exponent = shape[1], w.mantissa = shape[2];
    w.limit = w.exponent == 4 ? 448.0f : w.exponent == 5 ? 57344.0f : w.exponent == 3 ? 28.0f : 7.5f;
    int64_t group = one_of<int64_t>({0, -1, 16, 32, 48, 64, 256, 16 * (1 + below(20))});
    if (group >= k) group = 0;
    w.scale =
        group < 0 ? one_of<int32_t>({NONE, F32, BF16, F16}) : one_of<int32_t>({F32, BF16, F16, E8M0, E4M3, I8, U8});
    w.row_block = group > 0 && size_of(w.scale) > 1 ? one_of<int32_t>({0, 16, 32, 48}) : 0;
    w.group = (int32_t)group;
    w.kp = group > 0 ? up(up(k, group), 32) : up(k, 32);
    if (chance(12)) w.kp += 32;
    w.block = 256;
    if (group > 0)
        for (w.block = (int32_t)(std::min<int64_t>(chance(4) ? 64 : 256, group) / 16 * 16); group % w.block;)
            w.block -= 16;
    const int64_t groups = group > 0 ? (k + group - 1) / group : 1;
    w.scale_groups = groups;
    const bool nested = w.scale == E4M3 || w.scale == I8 || w.scale == U8;
    w.outer = nested ? one_of<int32_t>({0, -1, 1, 2, 5}) : 0;
    w.outer_kind = w.outer ? one_of<int32_t>({F32, BF16, F16}) : NONE;
    if (group > 0 && !w.row_block && chance(2))
        w.offset = w.outer > 0 ? one_of<int32_t>({I8, U8}) : nested ? NONE : one_of<int32_t>({F32, BF16, F16});
    if (w.outer > 0) w.scale_groups = up(groups, w.outer), w.outer_groups = w.scale_groups / w.outer;
    return w;
}

void float_linear() {
    const int64_t n = rows_of(), k = columns_of(), tiles = (n + 15) / 16;
    const Input in(n, k);
    FloatLinear w = float_weight(n, k, in.kind);
    const Numbers table(w);
    const Room values(table.values), low(table.low), high(table.high);
    w.values = (const float*)values.data(), w.low = low.data(), w.high = high.data();
    const int64_t parts = w.group < 0   ? 1
                          : w.row_block ? (n + w.row_block - 1) / w.row_block * w.scale_groups
                                        : tiles * w.scale_groups * 16;
    const int64_t outers = w.outer < 0 ? 1 : w.outer ? tiles * w.outer_groups * 16 : 0;
    Bytes packed = any_bytes(tiles * w.kp / 32 * 64 * w.bits);
    if (w.decode == SMALL_FLOAT && w.bits == 8 && !wild)
        for (auto& c : packed) c &= 0xbb;  // neither inf nor NaN
    const Room codes(packed);
    const Bytes every[] = {numbers(w.scale, parts, 0.02f, true), numbers(w.outer_kind, outers, 0.02f, true),
                           numbers(w.offset, parts, 0.02f),
                           numbers(size_of(w.offset) == 1 ? w.outer_kind : NONE, outers, 0.02f)};
    const Room scale(every[0]), outer(every[1]), offset(every[2]), offset_scale(every[3]);
    const Room outer_offset(numbers(w.outer && w.scale == I8 && chance(2) ? F32 : NONE, outers, 0.02f));
    const Bias bias(n);
    const Room y((size_t)(in.m * n * size_of(in.kind)));
    char what[260];
    snprintf(what, sizeof what,
             "pw_float_linear n %ld k %ld kp %ld m %ld ldx %ld bits %d decode %d group %d block %d scale %d rows %d "
             "outer %d offset %d x %d bias %d",
             (long)n, (long)k, (long)w.kp, (long)in.m, (long)in.ldx, w.bits, w.decode, w.group, w.block, w.scale,
             w.row_block, w.outer, w.offset, w.x, bias.kind);
    const auto call = [&](const FloatLinear& v, int64_t m, int64_t ldx, const void* to, const void* from, int threads) {
        return pw_float_linear(&v, in.x.data(), m, ldx, (void*)to, bias.room.pointer(), bias.kind, from,
                               scale.pointer(), outer.pointer(), outer_offset.pointer(), offset.pointer(),
                               offset_scale.pointer(), threads);
    };
    // sums may be in another order, which shows where they leave their range or cancel
    compare(
        what, {{y, in.kind, in.kind == F32 ? 1e-5 : 0x1p-7}},
        [&](int threads) { return call(w, in.m, in.ldx, y.data(), codes.data(), threads); }, !wild);
    // below an outer scale there may be an outer offset of as many numbers
    const Room below_outer((size_t)(w.outer ? outers * 4 : 0));
    told(FLOAT_WEIGHT, w, {&codes, &scale, &outer, &below_outer, &offset, &offset_scale});
    const auto with = [&](auto change) {
        return [&, change] {
            FloatLinear v = w;
            change(v);
            return (int64_t)call(v, in.m, in.ldx, y.data(), codes.data(), 1);
        };
    };
    using W = FloatLinear;
    refuse("pw_float_linear", {
                                  {"no weight",
                                   [&] {
                                       return (int64_t)pw_float_linear(nullptr, nullptr, 0, k, nullptr, nullptr, 0,
                                                                       nullptr, nullptr, nullptr, nullptr, nullptr,
                                                                       nullptr, 1);
                                   }},
                                  {"n", with([](W& v) { v.n = -1; })},
                                  {"k", with([](W& v) { v.k = 0; })},
                                  {"k above kp", with([](W& v) { v.k = v.kp + 1; })},
                                  {"kp", with([](W& v) { v.kp += 16; })},
                                  {"bits", with([](W& v) { v.bits = 9; })},
                                  {"decode", with([](W& v) { v.decode = 4; })},
                                  {"group", with([](W& v) { v.group = 24; })},
                                  {"block", with([](W& v) { v.block = 8; })},
                                  {"block 0", with([](W& v) { v.block = 0; })},
                                  {"row_block", with([](W& v) { v.row_block = 8; })},
                                  {"kind of scales", with([](W& v) { v.scale = 8; })},
                                  {"no outer scale", with([](W& v) { v.outer = v.outer ? -2 : 1; })},
                                  {"kind of offsets", with([](W& v) { v.offset = E8M0; })},
                                  {"kind of x", with([](W& v) { v.x = U8; })},
                                  {"no values", with([](W& v) { v.values = nullptr; })},
                                  {"no low", with([](W& v) { v.low = nullptr; })},
                                  {"scale_groups", with([](W& v) { v.scale_groups = -1; })},
                                  {"m", [&] { return (int64_t)call(w, -1, k, y.data(), codes.data(), 1); }},
                                  {"ldx", [&] { return (int64_t)call(w, 3, -5, y.data(), codes.data(), 1); }},
                                  {"no y", [&] { return (int64_t)call(w, 1, k, nullptr, codes.data(), 1); }},
                                  {"no codes", [&] { return (int64_t)call(w, 1, k, y.data(), nullptr, 1); }},
                                  {"threads", [&] { return (int64_t)call(w, 0, k, y.data(), codes.data(), -3); }},
                              });
}

}  // namespace
