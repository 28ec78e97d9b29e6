// The steps of a transformer block in one call with one parallel region; kernels/block.py defines each step.
//
// A step is one or two phases. A phase is a number of units of work, each taken by the next free thread; threads wait for
// each other between phases. Which thread runs a unit, and what else is in the call, does not change a result: a row of
// the output depends on its own row of the input (and, after attention, on its own sequence) alone.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "int_matmul.h"
#include "rotary.h"
#include "schedule.h"

namespace {

thread_local Workspace block_room{64u << 20};  // of a thread that runs a block: buffers, prepared inputs, scratch

// The buffers of a call.
struct Buffers {
    const Block& b;
    char* scratch;
    int64_t rows;

    int kind(int i) const { return b.buffers[i].kind; }
    int64_t width(int i) const { return b.buffers[i].width; }
    char* at(int i, int64_t row, int64_t column = 0) const {
        const Buffer& f = b.buffers[i];
        char* data = f.data ? (char*)f.data : scratch + f.offset * rows * 4;
        return data + (row * f.width + column) * size_of(f.kind);
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
    bool own;  // each thread prepares the inputs for itself, which for few rows is cheaper than waiting for others

    static int64_t tiles_of(const BlockLinear& s) {  // units of 16 columns of the output
        if (s.gated) return (s.count == 1 ? s.weights->n / 2 : s.weights->n) / 16 + (s.count == 2 && s.weights->n % 16);
        int64_t tiles = 0;
        for (int i = 0; i < s.count; ++i) tiles += (s.weights[i].n + 15) / 16;
        return tiles;
    }
    LinearPlan(const BlockLinear& step, int64_t rows, int threads)
        : s(step), k(plan(*s.weights, rows)), units(k, tiles_of(s), threads), in(k), own(rows <= 2 && !hazard()) {}

    // Whether the step writes what another thread may still read if threads do not wait after preparing the inputs.
    bool hazard() const {
        bool found = s.normed >= 0 && (s.normed == s.x || s.normed == s.residual);
        for (int i = 0; i < (s.gated ? 1 : s.count); ++i) found |= s.out[i] == s.x;
        return found;
    }
    int64_t shared(int threads) const { return in.bytes * (own ? threads : 1); }
    int64_t gate_room() const { return s.gated ? units.step * k.most * 64 : 0; }
    int64_t per_thread() const { return in.row + gate_room() + units.room(k); }

    void prepare(const Buffers& f, int id, char* base, char* room, int64_t mb) const {
        Tokens& tok = in.begin(base, mb);
        const int t = k.tokens_in(mb);
        float* wide = (float*)room;
        for (int i = 0; i < t; ++i) {
            const int64_t row = k.first_token(mb) + i;
            take_normalized(s.norm, f.at(s.x, row), f.kind(s.x), k.w.k, k.w.kp, wide);
            if (s.normed >= 0 && (!own || id == 0)) f.put_row(s.normed, row, wide);
            take_wide_row(k.w, *s.args, wide, tok, t, i, k.words, (int8_t*)(room + in.wide));
        }
    }

    // Writes the columns of a tile to a buffer, after the activation function, the gate and the residual.
    struct Write {
        const LinearPlan& p;
        const Buffers& f;
        int out, function;
        int64_t before;     // columns of the weight before those of the buffer
        const float* gate;  // [rows from `first` on][16], or null
        int64_t first;

        void operator()(const Finish& finish, float* c, int64_t m, int tokens, int64_t col, const Tokens& tok) const {
            const int64_t n = f.width(out), column = col - before;
            const int residual = p.s.residual, kind = f.kind(out);
            for (int t = 0; t < tokens; ++t) fstore(c + 16 * t, finish.at(c, tok, t));
            activate(function, c, tokens);
            for (int t = 0; t < tokens; ++t) {
                F y = fload(c + 16 * t);
                if (gate) y = fmul(y, fload(gate + (m + t - first) * 16));
                if (residual >= 0) y = fadd(y, load_part(f.at(residual, m + t), f.kind(residual), column, n));
                store_part(f.at(out, m + t), kind, column, n, y);
            }
        }
    };
    // Keeps the columns of a tile of the gate, after the activation function.
    struct KeepGate {
        int function;
        float* gate;
        int64_t first;
        void operator()(const Finish& finish, float* c, int64_t m, int tokens, int64_t, const Tokens& tok) const {
            float* to = gate + (m - first) * 16;
            for (int t = 0; t < tokens; ++t) fstore(to + 16 * t, finish.at(c, tok, t));
            activate(function, to, tokens);
        }
    };

    void run(const Buffers& f, const Tokens* tokens, char* room, int64_t u) const {
        float* sums = (float*)(room + in.row + gate_room());
        units.each(k, u, [&](int64_t tile, int64_t mb0, int64_t mb1) {
            if (s.gated) {
                float* gate = (float*)(room + in.row);
                const int last = s.count - 1;
                const int64_t first = k.first_token(mb0), half = s.count == 1 ? units.tiles : 0;
                run_tile(k, *s.weights, *s.args, tokens, tile, mb0, mb1, sums, KeepGate{s.function, gate, first});
                run_tile(k, s.weights[last], s.args[last], tokens, tile + half, mb0, mb1, sums,
                         Write{*this, f, *s.out, IDENTITY, half * 16, gate, first});
                return;
            }
            int64_t i = 0;
            for (int64_t own; tile >= (own = (s.weights[i].n + 15) / 16); ++i) tile -= own;
            run_tile(k, s.weights[i], s.args[i], tokens, tile, mb0, mb1, sums,
                     Write{*this, f, s.out[i], s.function, 0, nullptr, 0});
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
    memcpy(a.key_strides, b.key_strides, sizeof a.key_strides), memcpy(a.value_strides, b.value_strides, sizeof a.value_strides);
    memcpy(a.cos_strides, b.cos_strides, sizeof a.cos_strides), memcpy(a.sin_strides, b.sin_strides, sizeof a.sin_strides);
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
        a.keys = b.keys, a.values = b.values, a.kind = b.cache_kind, a.length = b.length;
        memcpy(a.key_strides, b.key_strides, sizeof a.key_strides), memcpy(a.value_strides, b.value_strides, sizeof a.value_strides);
    } else {
        a.keys = f.at(s.k), a.values = f.at(s.v), a.kind = f.kind(s.k.buffer), a.length = b.tokens;
        strides(a.key_strides, s.k.buffer, size, f.width(s.k.buffer)), strides(a.value_strides, s.v.buffer, size, f.width(s.v.buffer));
    }
    a.mask = b.mask, a.mask_kind = b.mask_kind;
    memcpy(a.mask_strides, b.mask_strides, sizeof a.mask_strides);
    a.batch = b.batch, a.tokens = b.tokens, a.window = b.window, a.causal = b.causal;
    a.heads = s.heads, a.shared = s.shared, a.size = s.size, a.scale = s.scale, a.softcap = s.softcap;
    return a;
}

// Threads that the largest step can keep busy.
int threads_for(const Block& b) {
    double most = 0;
    const double rows = (double)(b.batch * b.tokens);
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        double products = 0;
        if (s->kind == STEP_LINEAR)
            for (int i = 0; i < s->linear->count; ++i) products += rows * (double)s->linear->weights[i].n * (double)s->linear->weights[i].kp;
        else if (s->kind == STEP_NORM)
            products = 16 * rows * (double)b.buffers[s->norm->x].width;
        else if (s->kind == STEP_ROTARY)
            products = 16 * rows * ((double)s->rotary->heads + 2.0 * s->rotary->shared) * s->rotary->size;
        else
            products = 2 * rows * s->attention->heads * s->attention->size * (double)(s->attention->k.buffer < 0 ? b.length : b.tokens);
        most = std::max(most, products);
    }
    return (int)std::min<double>(b.threads, 1 + most / PRODUCTS_PER_THREAD);
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
    int64_t shared(int threads) const {
        return linear ? linear->shared(threads) : s.kind == STEP_ATTENTION ? attention_shared(attention) : 0;
    }
    int64_t per_thread(const Buffers& f) const {
        if (linear) return linear->per_thread();
        return s.kind == STEP_ATTENTION ? whole_lines(attention_room(attention)) : s.kind == STEP_NORM ? whole_lines(f.width(s.norm->x) * 4) : 0;
    }
    int64_t units(const Buffers& f, int phase) const {
        if (linear) return phase + 1 < phases ? linear->k.token_blocks : linear->units.count;
        return s.kind == STEP_NORM ? (f.rows + NORM_ROWS - 1) / NORM_ROWS : s.kind == STEP_ROTARY ? rotary_units(rotary) : attention_units(attention, phase);
    }
    // What a thread does by itself before it takes units.
    void begin(const Buffers& f, int id, char* room, char* common) const {
        if (!linear || !linear->own) return;
        for (int64_t mb = 0; mb < linear->k.token_blocks; ++mb) linear->prepare(f, id, common + linear->in.bytes * id, room, mb);
    }
    void run(const Buffers& f, int id, int phase, int64_t u, char* room, char* common) const {
        if (s.kind == STEP_NORM) return norm_rows(*s.norm, f, (float*)room, u);
        if (s.kind == STEP_ROTARY) return rotary_unit(rotary, u);
        if (s.kind == STEP_ATTENTION) return attention_unit(attention, phase, u, room, common);
        if (phase + 1 < phases) return linear->prepare(f, id, common, room, u);
        linear->run(f, (const Tokens*)(common + (linear->own ? linear->in.bytes * id : 0)), room, u);
    }
};

int block(const Block* call) {
    const Block& b = *call;
    const int64_t rows = b.batch * b.tokens, scratch = whole_lines(b.scratch * rows * 4);
    if (rows == 0 || b.step_count == 0) return DONE;
    const int threads = threads_for(b);
    Buffers f{b, nullptr, rows};
    std::vector<StepPlan> plans;
    plans.reserve((size_t)b.step_count);
    int64_t shared = 0, per_thread = 0, more = 16 * (int64_t)b.step_count;
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        plans.emplace_back(*s, f, threads);
        const StepPlan& p = plans.back();
        shared = std::max(shared, p.shared(threads)), per_thread = std::max(per_thread, p.per_thread(f));
        if (p.linear) more += whole_lines(p.linear->k.w.kp);
    }
    f.scratch = block_room.get((size_t)(scratch + shared + per_thread * threads + more));
    if (!f.scratch) return NO_MEMORY;
    char *common = f.scratch + scratch, *free = common + shared + per_thread * threads;
    for (StepPlan& p : plans) {
        p.fill(f);
        if (p.linear && has_zero_points(p.linear->k.w, *p.s.linear->args)) {
            p.linear->k.ones = fill_ones(p.linear->k.w, free);
            free += whole_lines(p.linear->k.w.kp);
        }
    }
    std::atomic<int64_t>* const taken = (std::atomic<int64_t>*)free;  // units of each phase
    for (int i = 0; i < 2 * b.step_count; ++i) new (taken + i) std::atomic<int64_t>(0);

    const auto body = [&](int id, int team) {
        std::atomic<int64_t>* next = taken;
        char* room = common + shared + per_thread * id;
        for (const StepPlan& p : plans)
            for (int phase = 0; phase < p.phases; ++phase, ++next) {
#if defined(_OPENMP)
                if (team > 1 && next != taken) {
#pragma omp barrier
                }
#endif
                if (phase == 0) p.begin(f, id, room, common);
                const int64_t count = p.units(f, phase);
                for (int64_t u; (u = next->fetch_add(1, std::memory_order_relaxed)) < count;) p.run(f, id, phase, u, room, common);
            }
        (void)team;
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    } else
#endif
        body(0, 1);
    block_room.trim();
    return DONE;
}

}  // namespace
