// The steps of a transformer block in one call with one parallel region; kernels/block.py defines each step.
//
// A step is one or two phases. A phase is a number of units of work, each taken by the next free thread; threads wait for
// each other between phases. Which thread runs a unit, and what else is in the call, does not change a result: a row of
// the output depends on its own row of the input (and, after attention, on its own sequence) alone.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "elementwise.h"
#include "int_matmul.h"
#include "schedule.h"

namespace {

thread_local Workspace block_room{64u << 20};  // of a thread that runs a block: buffers, prepared inputs, scratch

// The buffers of a call.
struct Buffers {
    const Block& b;
    char* scratch;

    int kind(int i) const { return b.buffers[i].kind; }
    int64_t width(int i) const { return b.buffers[i].width; }
    char* at(int i, int64_t row, int64_t column = 0) const {
        const Buffer& f = b.buffers[i];
        char* data = f.data ? (char*)f.data : scratch + f.offset * b.rows * 4;
        return data + (row * f.width + column) * size_of(f.kind);
    }
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
    const int64_t n = f.width(s.x), end = std::min(f.b.rows, (unit + 1) * NORM_ROWS);
    for (int64_t row = unit * NORM_ROWS; row < end; ++row) {
        take_normalized(s.norm, f.at(s.x, row), f.kind(s.x), n, (n + 15) / 16 * 16, wide);
        if (s.residual >= 0)
            for (int64_t c = 0; c < n; c += 16)
                fstore(wide + c, fadd(fload(wide + c), load_part(f.at(s.residual, row), f.kind(s.residual), c, n)));
        f.put_row(s.out, row, wide);
    }
}

// Threads that the largest step can keep busy.
int threads_for(const Block& b) {
    double most = 0;
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        double products = 0;
        if (s->kind == STEP_LINEAR)
            for (int i = 0; i < s->linear->count; ++i)
                products += (double)b.rows * (double)s->linear->weights[i].n * (double)s->linear->weights[i].kp;
        else if (s->kind == STEP_NORM)
            products = 16.0 * (double)b.rows * (double)b.buffers[s->norm->x].width;
        most = std::max(most, products);
    }
    return (int)std::min<double>(b.threads, 1 + most / PRODUCTS_PER_THREAD);
}

int block(const Block* call) {
    const Block& b = *call;
    if (b.rows == 0 || b.step_count == 0) return DONE;
    const int threads = threads_for(b);
    std::vector<LinearPlan> linears;
    linears.reserve((size_t)b.step_count);
    int64_t shared = 0, per_thread = 0, ones = 0;
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        if (s->kind == STEP_LINEAR) {
            linears.emplace_back(*s->linear, b.rows, threads);
            shared = std::max(shared, linears.back().shared(threads));
            per_thread = std::max(per_thread, linears.back().per_thread());
            ones += whole_lines(s->linear->weights->kp);
        } else {
            per_thread = std::max(per_thread, whole_lines(b.buffers[s->norm->x].width * 4));
        }
    }
    const int64_t scratch = whole_lines(b.scratch * b.rows * 4);
    char* space = block_room.get((size_t)(scratch + shared + per_thread * threads + ones));
    if (!space) return NO_MEMORY;
    const Buffers f{b, space};
    char* common = space + scratch;
    char* free = common + shared + per_thread * threads;
    for (LinearPlan& p : linears)
        if (has_zero_points(p.k.w, *p.s.args)) {
            p.k.ones = fill_ones(p.k.w, free);
            free += whole_lines(p.k.w.kp);
        }
    const std::unique_ptr<std::atomic<int64_t>[]> taken(new std::atomic<int64_t>[2 * (size_t)b.step_count]());

    const auto body = [&](int id, int team) {
        std::atomic<int64_t>* next = taken.get();
        char* room = common + shared + per_thread * id;
        const auto wait = [&] {
#if defined(_OPENMP)
            if (team > 1) {
#pragma omp barrier
            }
#endif
        };
        const auto each = [&](int64_t count, const auto& run) {
            for (int64_t u; (u = next->fetch_add(1, std::memory_order_relaxed)) < count;) run(u);
            ++next;
        };
        const LinearPlan* p = linears.data();
        for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
            if (s != b.steps) wait();
            if (s->kind == STEP_NORM) {
                each((b.rows + NORM_ROWS - 1) / NORM_ROWS, [&](int64_t u) { norm_rows(*s->norm, f, (float*)room, u); });
                continue;
            }
            char* base = common + (p->own ? p->in.bytes * id : 0);
            if (p->own) {
                for (int64_t mb = 0; mb < p->k.token_blocks; ++mb) p->prepare(f, id, base, room, mb);
            } else {
                each(p->k.token_blocks, [&](int64_t mb) { p->prepare(f, id, base, room, mb); });
                wait();
            }
            each(p->units.count, [&](int64_t u) { p->run(f, (const Tokens*)base, room, u); });
            ++p;
        }
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
