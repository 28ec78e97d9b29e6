// The steps of a transformer block, each as one or two phases of units of work; kernels/block.py defines each step, and
// block.h runs them.
#pragma once

#include <optional>

#include "attention.h"
#include "elementwise.h"
#include "int_matmul.h"
#include "rotary.h"
#include "schedule.h"

namespace {

struct Use {
    int segment;  // of the steps that use a buffer, see block.h; ALL: not of one segment alone
    static constexpr int NO = -1, ALL = -2;
};

// The buffers of a call, or of rows [row0, row0 + rows) of it.
struct Buffers {
    const Block& b;
    int64_t rows;
    char* scratch;
    int64_t row0 = 0;
    char* local = nullptr;  // scratch of a thread for buffers of one segment, of room for `local_rows`
    int64_t local_rows = 0;
    const Use* uses = nullptr;
    int segment = 0;

    int kind(int i) const { return b.buffers[i].kind; }
    int64_t width(int i) const { return b.buffers[i].width; }
    char* at(int i, int64_t row, int64_t column = 0) const {
        const Buffer& f = b.buffers[i];
        if (local && uses[i].segment == segment) return local + (f.offset * local_rows + row * f.width + column) * 4;
        char* data = f.data ? (char*)f.data : scratch + f.offset * b.batch * b.tokens * 4;
        return data + ((row0 + row) * f.width + column) * size_of(f.kind);
    }
    // The first head of the first row.
    char* at(const Columns& p) const { return at(p.buffer, 0, p.start); }
    void put_row(int i, int64_t row, const float* x) const {
        const int64_t n = width(i);
        char* out = at(i, row);
        for (int64_t c = 0; c < n; c += 16) store_part(out, kind(i), c, n, fload(x + c));
    }
};

constexpr int64_t NORM_ROWS = 8;  // rows of a unit of a NormStep

struct LinearPlan {
    const BlockLinear& s;
    Work k;
    Units units;
    InputRoom in;
    // Each thread prepares the inputs for itself, which for few rows is cheaper than waiting for others. Not if they
    // are kept, too: a thread may be late.
    bool own;

    static int64_t tiles_of(const BlockLinear& s) {  // units of 16 columns of the output
        if (s.gated) return (s.count == 1 ? s.weights->n / 2 : s.weights->n) / 16 + (s.count == 2 && s.weights->n % 16);
        int64_t tiles = 0;
        for (int i = 0; i < s.count; ++i) tiles += (s.weights[i].n + 15) / 16;
        return tiles;
    }
    LinearPlan(const BlockLinear& step, int64_t rows, int threads)
        : s(step),
          k(plan(*s.weights, rows)),
          units(k, tiles_of(s), threads),
          in(k),
          own(rows <= 2 && s.normed < 0 && !hazard()) {}

    // Whether the step writes what another thread may still read if threads do not wait after preparing the inputs.
    bool hazard() const {
        bool found = false;
        for (int i = 0; i < (s.gated ? 1 : s.count); ++i) found |= s.out[i] == s.x;
        return found;
    }
    int64_t shared() const { return own ? 0 : in.bytes; }
    int64_t gate_room() const { return s.gated ? 2 * units.step * k.most * 64 : 0; }
    int64_t work_room() const { return whole_lines(in.row + gate_room() + units.room(k)); }
    int64_t per_thread() const { return work_room() + (own ? in.bytes : 0); }
    // The prepared inputs. A thread that is late writes to no memory but its own.
    char* inputs(char* room, char* common) const { return own ? room + work_room() : common; }

    void prepare(const Buffers& f, char* base, char* room, int64_t mb) const {
        Tokens& tok = in.begin(base, mb);
        const int t = k.tokens_in(mb);
        float* wide = (float*)room;
        for (int i = 0; i < t; ++i) {
            const int64_t row = k.first_token(mb) + i;
            take_normalized(s.norm, f.at(s.x, row), f.kind(s.x), k.w.k, k.w.kp, wide);
            if (s.normed >= 0) f.put_row(s.normed, row, wide);
            take_wide_row(k.w, *s.args, wide, tok, t, i, k.words, (int8_t*)(room + in.wide));
        }
    }

    // Writes the columns of a tile to a buffer, after the activation function, the gate and the residual.
    struct Write {
        const LinearPlan& p;
        const Buffers& f;
        int out, function;
        int64_t before;     // columns of the weight before those of the buffer
        const float* gate;  // what KeepGate keeps, or null
        int64_t first, column, rows;

        void operator()(const Finish& finish, float* c, int64_t m, int tokens, int64_t col, const Tokens& tok) const {
            const int64_t n = f.width(out), at = col - before;
            const int residual = p.s.residual, kind = f.kind(out), other = residual < 0 ? NONE : f.kind(residual);
            const int64_t step = n * size_of(kind), step_from = n * size_of(other);
            char* to = f.at(out, m, at);
            const char* from = residual < 0 ? nullptr : f.at(residual, m, at);
            const float* gates = gate ? gate + (at - column) / 16 * rows + (m - first) * 16 : nullptr;
            if (at + 16 <= n && kind == F32 && function == IDENTITY && !gates && (!from || other == F32)) {
                if (from)
                    finish.each(c, tok, tokens, [&](int t, F y) {
                        fstore((float*)(to + t * step), fadd(y, fload((const float*)(from + t * step))));
                    });
                else finish.each(c, tok, tokens, [&](int t, F y) { fstore((float*)(to + t * step), y); });
                return;
            }
            finish.each(c, tok, tokens, [&](int t, F y) { fstore(c + 16 * t, y); });
            activate(function, c, tokens);
            for (int t = 0; t < tokens; ++t, to += step) {
                F y = fload(c + 16 * t);
                if (gates) y = fmul(y, fload(gates + 16 * t));
                if (from) y = fadd(y, load_part(from + t * step_from, other, 0, n - at));
                store_part(to, kind, 0, n - at, y);
            }
        }
    };
    // Keeps the columns of tiles of the gate, from `column` on, after the activation function: [tile][rows from
    // `first`][16].
    struct KeepGate {
        int function;
        float* gate;
        int64_t first, column, rows;  // rows: floats of a tile
        void operator()(const Finish& finish, float* c, int64_t m, int tokens, int64_t col, const Tokens& tok) const {
            float* to = gate + (col - column) / 16 * rows + (m - first) * 16;
            finish.each(c, tok, tokens, [&](int t, F y) { fstore(to + 16 * t, y); });
            activate(function, to, tokens);
        }
    };

    void run(const Buffers& f, const Tokens* tokens, char* room, int64_t u) const {
        float* sums = (float*)(room + in.row + gate_room());
        units.each(k, u, [&](int64_t tile, int64_t end, int64_t mb0, int64_t mb1) {
            if (s.gated) {
                float* gate = (float*)(room + in.row);
                const int last = s.count - 1;
                const int64_t first = k.first_token(mb0), half = s.count == 1 ? units.tiles : 0,
                              rows = units.step * k.most * 16;
                const int count = run_tiles(k, *s.weights, *s.args, tokens, tile, end, mb0, mb1, sums,
                                            KeepGate{s.function, gate, first, tile * 16, rows});
                return run_tiles(k, s.weights[last], s.args[last], tokens, tile + half, tile + half + count, mb0, mb1,
                                 sums, Write{*this, f, *s.out, IDENTITY, half * 16, gate, first, tile * 16, rows});
            }
            const Place at(s.weights, tile, end);
            return run_tiles(k, s.weights[at.weight], s.args[at.weight], tokens, at.tile, at.end, mb0, mb1, sums,
                             Write{*this, f, s.out[at.weight], s.function, 0, nullptr, 0, 0, 0});
        });
    }
};

inline void norm_rows(const BlockNorm& s, const Buffers& f, float* wide, int64_t unit) {
    const int64_t n = f.width(s.x), end = std::min(f.rows, (unit + 1) * NORM_ROWS);
    for (int64_t row = unit * NORM_ROWS; row < end; ++row) {
        take_normalized(s.norm, f.at(s.x, row), f.kind(s.x), n, (n + 15) / 16 * 16, wide);
        if (s.residual >= 0)
            for (int64_t c = 0; c < n; c += 16)
                fstore(wide + c, fadd(fload(wide + c), load_part(f.at(s.residual, row), f.kind(s.residual), c, n)));
        f.put_row(s.out, row, wide);
    }
}

inline RotaryArgs rotary_of(const BlockRotary& s, const Buffers& f) {
    const Block& b = f.b;
    RotaryArgs a = {};
    a.q = (float*)f.at(s.q), a.k = (const float*)f.at(s.k), a.v = (const float*)f.at(s.v);
    a.q_stride = f.width(s.q.buffer), a.k_stride = f.width(s.k.buffer), a.v_stride = f.width(s.v.buffer);
    a.keys = b.keys, a.values = b.values, a.cos = b.cos, a.sin = b.sin;
    memcpy(a.key_strides, b.key_strides, sizeof a.key_strides),
        memcpy(a.value_strides, b.value_strides, sizeof a.value_strides);
    memcpy(a.cos_strides, b.cos_strides, sizeof a.cos_strides),
        memcpy(a.sin_strides, b.sin_strides, sizeof a.sin_strides);
    a.q_norm = s.q_norm, a.k_norm = s.k_norm;
    a.batch = b.batch, a.tokens = b.tokens, a.past = b.past;
    a.heads = s.heads, a.shared = s.shared, a.size = s.size, a.rotation = s.rotation, a.rotated = s.rotated;
    a.cache_kind = b.cache_kind, a.angle_kind = b.angle_kind;
    return a;
}

inline AttentionArgs attention_of(const BlockAttention& s, const Buffers& f) {
    const Block& b = f.b;
    AttentionArgs a = {};
    const auto strides = [&](int64_t* to, int i, int64_t first, int64_t second) {  // batch, and two more
        to[0] = b.tokens * f.width(i), to[1] = first, to[2] = second;
    };
    const int64_t size = s.size;
    a.q = f.at(s.q), a.out = f.at(s.out, 0), a.q_kind = f.kind(s.q.buffer), a.out_kind = f.kind(s.out);
    strides(a.q_strides, s.q.buffer, f.width(s.q.buffer), size), strides(a.out_strides, s.out, f.width(s.out), size);
    if (s.k.buffer < 0) {
        a.keys = b.keys, a.values = b.values, a.kind = b.cache_kind, a.length = b.coded + b.length;
        a.past = b.coded, a.past_keys = b.past_keys, a.past_values = b.past_values;
        memcpy(a.key_strides, b.key_strides, sizeof a.key_strides),
            memcpy(a.value_strides, b.value_strides, sizeof a.value_strides);
    } else {
        a.keys = f.at(s.k), a.values = f.at(s.v), a.kind = f.kind(s.k.buffer), a.length = b.tokens;
        strides(a.key_strides, s.k.buffer, size, f.width(s.k.buffer)),
            strides(a.value_strides, s.v.buffer, size, f.width(s.v.buffer));
    }
    a.mask = b.mask, a.mask_kind = b.mask_kind;
    memcpy(a.mask_strides, b.mask_strides, sizeof a.mask_strides);
    a.batch = b.batch, a.tokens = b.tokens, a.window = b.window, a.causal = b.causal;
    a.heads = s.heads, a.shared = s.shared, a.size = s.size, a.scale = s.scale, a.softcap = s.softcap;
    return a;
}

// A step with what its kind needs.
struct StepPlan {
    const BlockStep& s;
    std::optional<LinearPlan> linear;
    RotaryArgs rotary;
    AttentionArgs attention;
    int phases = 1;

    StepPlan(const BlockStep& step, const Buffers& f, int threads) : s(step) {
        if (s.kind == STEP_LINEAR) linear.emplace(*s.linear, f.rows, threads);
        fill(f);
        if (s.kind == STEP_ATTENTION) phases = attention_phases(attention);
        if (linear && !linear->own) phases = 2;
    }
    void fill(const Buffers& f) {  // again when the scratch has an address
        if (s.kind == STEP_ROTARY) rotary = rotary_of(*s.rotary, f);
        if (s.kind == STEP_ATTENTION) attention = attention_of(*s.attention, f);
    }
    int64_t rotary_row_units() const { return rotary_units(rotary) / (rotary.batch * rotary.tokens); }
    int64_t shared() const {
        return linear ? linear->shared() : s.kind == STEP_ATTENTION ? attention_shared(attention) : 0;
    }
    int64_t per_thread(const Buffers& f) const {
        if (linear) return linear->per_thread();
        return s.kind == STEP_ATTENTION ? whole_lines(attention_room(attention))
               : s.kind == STEP_NORM    ? whole_lines(f.width(s.norm->x) * 4)
                                        : 0;
    }
    int64_t units(const Buffers& f, int phase) const {
        if (linear) return phase + 1 < phases ? linear->k.token_blocks : linear->units.count;
        return s.kind == STEP_NORM     ? (f.rows + NORM_ROWS - 1) / NORM_ROWS
               : s.kind == STEP_ROTARY ? rotary_row_units() * f.rows
                                       : attention_units(attention, phase);
    }
    // What a thread does by itself before it takes units.
    void begin(const Buffers& f, char* room) const {
        if (!linear || !linear->own) return;
        for (int64_t mb = 0; mb < linear->k.token_blocks; ++mb)
            linear->prepare(f, linear->inputs(room, nullptr), room, mb);
    }
    void run(const Buffers& f, int phase, int64_t u, char* room, char* common) const {
        if (s.kind == STEP_NORM) return norm_rows(*s.norm, f, (float*)room, u);
        if (s.kind == STEP_ROTARY) return rotary_unit(rotary, rotary_row_units() * f.row0 + u);
        if (s.kind == STEP_ATTENTION) return attention_unit(attention, phase, u, room, common);
        if (phase + 1 < phases) return linear->prepare(f, common, room, u);
        linear->run(f, (const Tokens*)linear->inputs(room, common), room, u);
    }
};

}  // namespace
