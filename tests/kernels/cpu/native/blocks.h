// Cases of the steps of a transformer block.
#pragma once

#include <utility>

#include "attention.h"
#include "linears.h"

namespace {

// The layers of a linear step, which differ in their rows only. x: the kind of the model.
struct LinearCase {
    struct One {
        Room codes, scale, zero, offset, outer_scale, outer_offset;
        Bias bias;
        explicit One(const IntCase& c)
            : codes(any_bytes((c.w.n + 15) / 16 * c.w.kp / 32 * 64 * c.w.bits)),
              scale(numbers(c.w.scale, c.parts, 0.02f, true)),
              zero(numbers(c.w.zero_point, c.parts)),
              offset(numbers(c.w.offset, c.parts, 0.02f)),
              outer_scale(numbers(c.w.outer ? c.w.outer_kind : NONE, c.outers, 0.02f, true)),
              outer_offset(numbers(c.w.outer && c.w.offset ? c.w.outer_kind : NONE, c.outers, 0.02f)),
              bias(c.w.n) {}
    };
    std::vector<IntLinear> weights;
    std::vector<std::unique_ptr<One>> own;
    std::vector<LinearArgs> args;
    std::unique_ptr<Room> act_scale, every_weight, every_args, outs, step;
    BlockLinear s = {};

    LinearCase(const std::vector<int64_t>& rows, int64_t k, int x) {
        IntCase c(rows[0], k, x);
        if (c.w.act != FLOAT || chance(3)) c.w.x = F32;
        act_scale = std::make_unique<Room>(numbers(c.w.act == STATIC ? F32 : NONE, 1, 0.02f, true));
        const int32_t act_zero = c.w.act == STATIC && chance(2) ? (int32_t)below(20) - 10 : 0;
        for (const int64_t n : rows) {
            c.w.n = n;
            c.resize();
            weights.push_back(c.w);
            own.push_back(std::make_unique<One>(c));
            const One& o = *own.back();
            args.push_back({nullptr, 0, 0, nullptr, o.bias.room.pointer(), o.codes.pointer(), o.scale.pointer(),
                            o.zero.pointer(), o.offset.pointer(), o.outer_scale.pointer(), o.outer_offset.pointer(),
                            act_scale->pointer(), act_zero, o.bias.kind, 0});
        }
    }
    template <class T> static Bytes bytes(const std::vector<T>& items) {
        return Bytes((const uint8_t*)items.data(), (const uint8_t*)(items.data() + items.size()));
    }
    // Puts the structures into rooms.
    void finish(std::vector<int32_t> out) {
        every_weight = std::make_unique<Room>(bytes(weights)), every_args = std::make_unique<Room>(bytes(args));
        outs = std::make_unique<Room>(bytes(out));
        s.weights = (const IntLinear*)every_weight->data(), s.args = (const LinearArgs*)every_args->data(),
        s.out = (const int32_t*)outs->data();
        s.count = (int32_t)weights.size();
        step = std::make_unique<Room>(bytes(std::vector<BlockLinear>{s}));
    }
    BlockStep as_step() const { return {(const BlockLinear*)step->data(), nullptr, nullptr, nullptr, STEP_LINEAR}; }
};

int64_t run(const Block* one) { return pw_blocks(&one, 1); }
int64_t run(const Room& one) { return run((const Block*)one.data()); }

// Linear layers with a normalized input that is kept, a gated one, one with a residual, and a normalization.
void block() {
    const int64_t k = columns_of(), n = rows_of(), f = rows_of(),
                  rows = std::min<int64_t>(Input::rows(std::max(n, f), k), 400);
    const int x = one_of<int>({F32, BF16, F16});
    const bool halves = chance(2);  // gate and up in one weight
    const int64_t gated = halves ? up(f, 16) : f;
    const Room in(numbers(x, rows * k)), kept((size_t)(rows * k * 4)), y((size_t)(rows * k * size_of(x)));
    NormCase before(k), middle(n), after(k);
    LinearCase first(chance(2) ? std::vector<int64_t>{n, k} : std::vector<int64_t>{n, k, rows_of()}, k, x);
    LinearCase second(halves ? std::vector<int64_t>{2 * gated} : std::vector<int64_t>{f, f}, n, x),
        third({k}, gated, x);
    const auto function = [] { return (int32_t)below(8); };
    first.s.norm = before.n, first.s.x = 0, first.s.normed = 4, first.s.residual = -1, first.s.function = function();
    second.s.norm = middle.n, second.s.x = 2, second.s.normed = -1, second.s.residual = -1,
    second.s.function = function(), second.s.gated = 1;
    third.s.x = 5, third.s.normed = -1, third.s.residual = one_of<int32_t>({0, 3, 4, 6}), third.s.function = function();
    if (third.s.residual == 6) third.s.residual = 3;
    const bool in_place = chance(3);
    const int32_t sum = in_place ? 3 : 6;
    std::vector<int32_t> out{2, 3};
    if (first.weights.size() == 3) out.push_back(7);
    first.finish(out), second.finish({5}), third.finish({sum});
    const Room last(LinearCase::bytes(std::vector<BlockNorm>{{after.n, sum, 1, chance(2) ? 0 : -1}}));
    const Room steps(LinearCase::bytes(
        std::vector<BlockStep>{first.as_step(),
                               second.as_step(),
                               third.as_step(),
                               {nullptr, (const BlockNorm*)last.data(), nullptr, nullptr, STEP_NORM}}));
    int64_t at = 0;
    const auto scratch = [&](int64_t width) {
        const int64_t offset = at;
        at += up(width, 16);
        return Buffer{nullptr, width, offset, F32};
    };
    const Room buffers(LinearCase::bytes(std::vector<Buffer>{{in.pointer(), k, 0, x},
                                                             {y.pointer(), k, 0, x},
                                                             scratch(n),
                                                             scratch(k),
                                                             {kept.pointer(), k, at, F32},
                                                             scratch(gated),
                                                             scratch(k),
                                                             scratch(first.weights.back().n)}));
    if (rows == 0) at = up(at, 16);
    Block call = {};
    call.steps = (const BlockStep*)steps.data(), call.buffers = (const Buffer*)buffers.data(), call.scratch = at,
    call.step_count = 4, call.buffer_count = 8;
    call.batch = rows % 3 ? rows : 3, call.tokens = rows % 3 ? 1 : rows / 3;
    std::vector<std::unique_ptr<Room>> calls;  // of 1 thread, of 2, ..
    for (int threads = 1; threads <= (mode == COMPARE ? 4 : 1); ++threads)
        call.threads = threads, calls.push_back(std::make_unique<Room>(LinearCase::bytes(std::vector<Block>{call})));
    char what[200];
    snprintf(what, sizeof what,
             "pw_blocks k %ld n %ld f %ld rows %ld x %d halves %d functions %d %d %d acts %d %d %d norms %d %d %d "
             "residual %d",
             (long)k, (long)n, (long)f, (long)rows, x, halves, first.s.function, second.s.function, third.s.function,
             first.weights[0].act, second.weights[0].act, third.weights[0].act, before.n.kind, middle.n.kind,
             after.n.kind, third.s.residual);
    compare(what, {{y, x}, {kept, F32}}, [&](int threads) { return run(*calls[(size_t)threads - 1]); });

    struct Parts {  // to be broken
        std::vector<BlockStep> steps;
        std::vector<Buffer> buffers;
        BlockLinear linear, gated;
        BlockNorm norm;
        Block call;
    };
    const auto with = [&](auto change) {
        return [&, change] {
            const auto* s = (const BlockStep*)steps.data();
            const auto* b = (const Buffer*)buffers.data();
            Parts p{{s, s + 4}, {b, b + 8}, *s[0].linear, *s[1].linear, *s[3].norm, *(const Block*)calls[0]->data()};
            p.steps[0].linear = &p.linear, p.steps[1].linear = &p.gated, p.steps[3].norm = &p.norm;
            p.call.steps = p.steps.data(), p.call.buffers = p.buffers.data(), p.call.batch = std::max<int64_t>(rows, 1),
            p.call.tokens = 1;
            change(p);
            return run(&p.call);
        };
    };
    using P = Parts;
    refuse("pw_blocks",
           {
               {"no block", [] { return run((const Block*)nullptr); }},
               {"no blocks", [] { return (int64_t)pw_blocks(nullptr, 1); }},
               {"count", [] { return (int64_t)pw_blocks(nullptr, -1); }},
               {"batch", with([](P& p) { p.call.batch = -1; })},
               {"rows", with([](P& p) { p.call.batch = p.call.tokens = (int64_t)1 << 39; })},
               {"scratch", with([](P& p) { p.call.scratch = -1; })},
               {"much scratch", with([](P& p) { p.call.scratch = (int64_t)1 << 39; })},
               {"threads", with([](P& p) { p.call.threads = 0; })},
               {"count of steps", with([](P& p) { p.call.step_count = -1; })},
               {"count of buffers", with([](P& p) { p.call.buffer_count = -1; })},
               {"no steps", with([](P& p) { p.call.steps = nullptr; })},
               {"no buffers", with([](P& p) { p.call.buffers = nullptr; })},
               {"kind of a step", with([](P& p) { p.steps[0].kind = 9; })},
               {"no linear", with([](P& p) { p.steps[0].linear = nullptr; })},
               {"no norm", with([](P& p) { p.steps[3].norm = nullptr; })},
               {"kind of a buffer", with([](P& p) { p.buffers[0].kind = I8; })},
               {"scratch of bfloat16", with([](P& p) { p.buffers[2].kind = BF16; })},
               {"beyond the scratch", with([](P& p) { p.buffers[2].offset = p.call.scratch; })},
               {"an odd place", with([](P& p) { p.buffers[2].offset += 1; })},
               {"a negative place", with([](P& p) { p.buffers[2].offset = -16; })},
               {"width", with([](P& p) { p.buffers[0].width += 1; })},
               {"no input", with([](P& p) { p.buffers[0].data = nullptr, p.buffers[0].kind = BF16; })},
               {"x", with([](P& p) { p.linear.x = 8; })},
               {"a negative x", with([](P& p) { p.linear.x = -1; })},
               {"normed", with([](P& p) { p.linear.normed = 8; })},
               {"residual", with([](P& p) { p.linear.residual = -2; })},
               {"function", with([](P& p) { p.linear.function = 8; })},
               {"gated", with([](P& p) { p.gated.gated = 2; })},
               {"no weight", with([](P& p) { p.linear.count = 0; })},
               {"three gates", with([](P& p) { p.gated.count = 3; })},
               {"no weights", with([](P& p) { p.linear.weights = nullptr; })},
               {"no arguments", with([](P& p) { p.linear.args = nullptr; })},
               {"no out", with([](P& p) { p.linear.out = nullptr; })},
               {"an output that is the residual", with([](P& p) { p.linear.residual = 3; })},
               {"kind of a norm", with([](P& p) { p.linear.norm.kind = 3; })},
               {"weight of a norm", with([](P& p) { p.norm.norm.weight = &p, p.norm.norm.weight_kind = I8; })},
               {"bias of a norm", with([](P& p) { p.norm.norm.bias = &p, p.norm.norm.bias_kind = NONE; })},
               {"x of a norm", with([](P& p) { p.norm.x = 8; })},
               {"out of a norm", with([](P& p) { p.norm.out = -1; })},
               {"residual of a norm", with([](P& p) { p.norm.residual = 8; })},
           });
}

// Rotary embeddings with a cache, and attention over the cache or over the tokens of the call.
void block_attention() {
    const Heads h;
    const bool cached = chance(2), many = chance(6);  // many: several ranges of rows
    const int64_t batch = h.batch, tokens = many ? 90 : h.tokens, past = cached ? below(20) : 0,
                  k = many ? 40 : std::min<int64_t>(columns_of(), 700);
    const int32_t size = std::min(h.size, 64), columns = (h.heads + 2 * h.shared) * size;
    const int64_t rows = batch * tokens, width = (int64_t)h.heads * size;
    const int x = one_of<int>({F32, BF16, F16});
    const Room in(numbers(x, rows * k)), y((size_t)(rows * k * size_of(x)));
    NormCase before(k), q_norm(size), k_norm(size);
    LinearCase first({columns}, k, x), second({k}, width, x);
    first.s.norm = before.n, first.s.x = 0, first.s.normed = -1, first.s.residual = -1;
    second.s.x = 3, second.s.normed = -1, second.s.residual = 0;
    first.finish({2}), second.finish({1});

    const Columns q{2, 0}, keys_at{2, (int32_t)width}, values_at{2, (int32_t)width + h.shared * size}, none{-1, 0};
    BlockRotary r{q_norm.n, k_norm.n, q, keys_at, values_at, h.heads, h.shared, size, UNROTATED, 0};
    if (size > 1 && chance(3) == false)
        r.rotation = one_of<int32_t>({HALVES, INTERLEAVED}), r.rotated = 2 * (int32_t)(1 + below(size / 2));
    const BlockAttention a{q,    cached ? none : keys_at, cached ? none : values_at, 3, h.heads, h.shared, size,
                           0.2f, chance(4) ? 5.0f : 0.0f};
    const Room rotary(LinearCase::bytes(std::vector<BlockRotary>{r})),
        attention(LinearCase::bytes(std::vector<BlockAttention>{a}));
    const std::vector<BlockStep> every{
        first.as_step(),
        {nullptr, nullptr, (const BlockRotary*)rotary.data(), nullptr, STEP_ROTARY},
        {nullptr, nullptr, nullptr, (const BlockAttention*)attention.data(), STEP_ATTENTION},
        second.as_step()};
    const Room steps(LinearCase::bytes(every));
    const int64_t up_columns = up(columns, 16);
    const Room buffers(LinearCase::bytes(std::vector<Buffer>{
        {in.data(), k, 0, x}, {y.data(), k, 0, x}, {nullptr, columns, 0, F32}, {nullptr, width, up_columns, F32}}));

    Block b = {};
    b.steps = (const BlockStep*)steps.data(), b.buffers = (const Buffer*)buffers.data();
    b.batch = batch, b.tokens = tokens, b.past = past, b.length = past + tokens,
    b.window = chance(3) ? 1 + below(b.length) : 0, b.causal = chance(2);
    b.scratch = up_columns + up(width, 16), b.cache_kind = one_of<int32_t>({F32, BF16, F16});
    b.step_count = (int32_t)every.size(), b.buffer_count = 4;
    lay_out(b.key_strides, h.shared, b.length, size), lay_out(b.value_strides, h.shared, b.length, size);
    const auto elements = [&](const int64_t* s) { return extent({batch, h.shared, b.length}, s) + size - 1; };
    const Bytes old_keys = numbers(b.cache_kind, elements(b.key_strides)),
                old_values = numbers(b.cache_kind, elements(b.value_strides));
    const Room keys(old_keys), values(old_values);
    b.keys = keys.pointer(), b.values = values.pointer();
    std::unique_ptr<Room> cos, sin, mask;
    if (r.rotation) {
        b.angle_kind = one_of<int32_t>({F32, BF16, F16});
        for (int64_t* s : {b.cos_strides, b.sin_strides})
            s[1] = r.rotated + below(2), s[0] = chance(2) ? 0 : s[1] * tokens;
        cos = std::make_unique<Room>(numbers(b.angle_kind, extent({batch, tokens}, b.cos_strides) + r.rotated - 1));
        sin = std::make_unique<Room>(numbers(b.angle_kind, extent({batch, tokens}, b.sin_strides) + r.rotated - 1));
        b.cos = cos->data(), b.sin = sin->data();
    }
    const int64_t length = cached ? b.length : tokens;
    if (chance(2)) {
        b.mask_kind = one_of<int32_t>({U8, F32, BF16}), b.mask_strides[3] = 1,
        b.mask_strides[2] = chance(2) ? 0 : length;
        const int64_t n = extent({batch, h.heads, tokens, length}, b.mask_strides);
        mask = std::make_unique<Room>(b.mask_kind == U8 ? Bytes((size_t)n, 1) : numbers(b.mask_kind, n));
        b.mask = mask->data();
    }
    // A second block of the same steps reads what the first one writes.
    const Room y2(y.size()), keys2(old_keys), values2(old_values);
    const Room buffers2(LinearCase::bytes(std::vector<Buffer>{{y.pointer(), k, 0, x},
                                                              {y2.pointer(), k, 0, x},
                                                              {nullptr, columns, 0, F32},
                                                              {nullptr, width, up_columns, F32}}));
    std::vector<std::unique_ptr<Room>> calls, pairs;  // of 1 thread, of 2, ..
    for (b.threads = 1; b.threads <= (mode == COMPARE ? 4 : 1); ++b.threads) {
        Block next = b;
        next.buffers = (const Buffer*)buffers2.data(), next.keys = keys2.pointer(), next.values = values2.pointer();
        for (const Block& one : {b, next}) calls.push_back(std::make_unique<Room>(LinearCase::bytes(std::vector{one})));
        pairs.push_back(std::make_unique<Room>(
            LinearCase::bytes(std::vector{(const Block*)calls.end()[-2]->data(), (const Block*)calls.back()->data()})));
    }
    b.threads = 1;
    char what[200];
    snprintf(what, sizeof what,
             "pw_blocks with attention %ld x %ld k %ld heads %d of %d size %d past %ld cached %d rotation %d of %d "
             "kinds %d %d mask %d window %ld",
             (long)batch, (long)tokens, (long)k, h.heads, h.shared, size, (long)past, cached, r.rotation, r.rotated, x,
             b.cache_kind, b.mask ? b.mask_kind : 0, (long)b.window);
    bool alone = mode == COMPARE;  // the first time: each in a call of its own
    compare(
        what,
        {{y, x},
         {y2, x},
         {keys, b.cache_kind, 0, old_keys},
         {values, b.cache_kind, 0, old_values},
         {keys2, b.cache_kind, 0, old_keys},
         {values2, b.cache_kind, 0, old_values}},
        [&](int threads) {
            const auto* pair = (const Block* const*)pairs[(size_t)threads - 1]->data();
            if (!std::exchange(alone, false)) return (int64_t)pw_blocks(pair, 2);
            const int64_t status = run(pair[0]);
            return std::max(status, run(pair[1]));
        },
        !wild);
    if (!cached) return;

    struct Parts {  // to be broken
        BlockRotary rotary;
        BlockAttention attention;
        Block call;
    };
    const auto with = [&](auto change) {
        return [&, change] {
            Parts p{r, a, b};
            std::vector<BlockStep> s = every;
            s[1].rotary = &p.rotary, s[2].attention = &p.attention;
            p.call.steps = s.data();
            change(p);
            if (!p.call.steps) s[1].rotary = nullptr, p.call.steps = s.data();
            return run(&p.call);
        };
    };
    using P = Parts;
    refuse("pw_blocks", {
                            {"no rotary", with([](P& p) { p.call.steps = nullptr; })},
                            {"batch", with([](P& p) { p.call.batch = -1; })},
                            {"tokens", with([](P& p) { p.call.tokens = -1; })},
                            {"past", with([](P& p) { p.call.past = -1; })},
                            {"length", with([](P& p) { p.call.length = -1; })},
                            {"window", with([](P& p) { p.call.window = -1; })},
                            {"stride", with([](P& p) { p.call.key_strides[0] = -1; })},
                            {"kind of the cache", with([](P& p) { p.call.cache_kind = U8; })},
                            {"no keys", with([](P& p) { p.call.keys = nullptr; })},
                            {"no values", with([](P& p) { p.call.values = nullptr; })},
                            {"kind of the mask", with([](P& p) { p.call.mask = &p, p.call.mask_kind = I8; })},
                            {"heads", with([](P& p) { p.rotary.heads = 0; })},
                            {"size", with([](P& p) { p.rotary.size = 1025; })},
                            {"columns of q", with([](P& p) { p.rotary.q.start = 1 << 20; })},
                            {"buffer of k", with([](P& p) { p.rotary.k.buffer = 4; })},
                            {"buffer of v", with([](P& p) { p.rotary.v.buffer = -1; })},
                            {"negative columns", with([](P& p) { p.rotary.v.start = -1; })},
                            {"rotation", with([](P& p) { p.rotary.rotation = 3; })},
                            {"odd", with([](P& p) { p.rotary.rotation = HALVES, p.rotary.rotated = 1; })},
                            {"norm", with([](P& p) { p.rotary.q_norm.kind = -1; })},
                            {"heads of attention", with([](P& p) { p.attention.shared = p.attention.heads + 1; })},
                            {"q of attention", with([](P& p) { p.attention.q.buffer = -1; })},
                            {"out", with([](P& p) { p.attention.out = 0; })},
                            {"out is q", with([](P& p) { p.attention.q.buffer = 3; })},
                            {"k without v", with([](P& p) { p.attention.k.buffer = 2; })},
                            {"scale", with([](P& p) { p.attention.scale = INFINITY; })},
                            {"softcap", with([](P& p) { p.attention.softcap = -1; })},
                        });
}

}  // namespace
