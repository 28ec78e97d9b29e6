// The steps of transformer blocks in one call with one parallel region; block_steps.h has the steps.
//
// Steps are grouped into segments: attention alone, and what is between. All steps between are row by row, so with many
// rows a thread takes a range of rows through all steps of a segment by itself: buffers that only this segment uses
// stay in its cache, and threads need not wait for each other. With fewer rows threads share each phase of a step and
// wait for each other between phases. With many sequences a thread takes some of them through all segments. Blocks of
// one call run in turn, and a later one may read what an earlier one wrote.
//
// Which thread runs what, and what else is in the call, does not change a result: a row of the output depends on its
// own row of the input (and, after attention, on its own sequence) alone.
#pragma once

#include <atomic>
#include <vector>

#include "block_steps.h"

namespace {

thread_local Workspace block_room{64u << 20};  // of a thread that runs a block: buffers, prepared inputs, scratch

// Threads that the largest step can keep busy.
int threads_for(const Block& b) {
    double most = 0;
    const double rows = (double)(b.batch * b.tokens);
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        double products = 0;
        if (s->kind == STEP_LINEAR)
            for (int i = 0; i < s->linear->count; ++i)
                products += rows * (double)s->linear->weights[i].n * (double)s->linear->weights[i].kp;
        else if (s->kind == STEP_NORM) products = 16 * rows * (double)b.buffers[s->norm->x].width;
        else if (s->kind == STEP_ROTARY)
            products = 16 * rows * ((double)s->rotary->heads + 2.0 * s->rotary->shared) * s->rotary->size;
        else
            products = 2 * rows * s->attention->heads * s->attention->size *
                       (double)(s->attention->k.buffer < 0 ? b.coded + b.length : b.tokens);
        most = std::max(most, products);
    }
    return (int)std::min<double>(b.threads, 1 + most / PRODUCTS_PER_THREAD);
}

// Rows that a thread takes through a segment: their buffers about fit its L2 cache. Every range reads all weights, so
// ranges are longer if these come from memory.
constexpr int64_t RANGE_BYTES = 512 << 10, FEWEST_ROWS = 32, MOST_ROWS = 128;
constexpr double CACHED_WEIGHTS = 4 << 20;  // bytes of a segment's weights that stay in the cache of all cores

inline double weight_bytes(const BlockStep& s) {
    double bytes = 0;
    if (s.kind == STEP_LINEAR)
        for (int i = 0; i < s.linear->count; ++i) {
            const IntLinear& w = s.linear->weights[i];
            bytes += (double)w.n * (double)w.kp * w.bits / 8;
        }
    return bytes;
}
inline int64_t fewest_rows(double weights) { return weights > CACHED_WEIGHTS ? MOST_ROWS : FEWEST_ROWS; }

struct Segment {
    const BlockStep *first, *end;
    int index;
    int64_t range = 0, ranges = 0;      // rows of a range, and their number; 0: threads share the steps
    std::vector<StepPlan> steps, rest;  // rest: those of the last range, if it is shorter

    Segment(const BlockStep* from, const BlockStep* to, int i) : first(from), end(to), index(i) {}
    bool by_row() const { return first->kind != STEP_ATTENTION; }

    void plan(const Buffers& f, int threads) {
        double weights = 0;
        for (const BlockStep* s = first; s < end; ++s) weights += weight_bytes(*s);
        const int64_t least = fewest_rows(weights);
        if (by_row() && f.rows >= 2 * threads * least) {
            const int64_t fitting =
                std::max(least, std::min(MOST_ROWS, RANGE_BYTES / std::max<int64_t>(1, f.b.scratch * 4)));
            range = std::min(fitting, f.rows / (2 * threads)) / 8 * 8;
            ranges = (f.rows + range - 1) / range;
        }
        const auto make = [&](std::vector<StepPlan>& to, int64_t rows, int count) {
            Buffers part = f;
            part.rows = rows;
            to.reserve((size_t)(end - first));
            for (const BlockStep* s = first; s < end; ++s) to.emplace_back(*s, part, count);
        };
        make(steps, range ? range : f.rows, range ? 1 : threads);
        if (range && f.rows % range) make(rest, f.rows % range, 1);
    }
    template <class Each> void each(const Each& call) {
        for (StepPlan& p : steps) call(p);
        for (StepPlan& p : rest) call(p);
    }
    // Scratch of a thread for ranges of rows: buffers, prepared inputs, and what steps need.
    struct Room {
        int64_t buffers = 0, inputs = 0, own = 0;
    };
    Room room(const Buffers& f) {
        Room r;
        if (range) r.buffers = whole_lines(f.b.scratch * range * 4);
        each([&](StepPlan& p) {
            r.inputs = std::max(r.inputs, p.shared());
            r.own = std::max(r.own, p.per_thread(f));
        });
        return r;
    }
    // A range of rows through all steps.
    void run(const Buffers& whole, const Room& sizes, int64_t unit, char* room) const {
        Buffers f = whole;
        f.row0 = unit * range, f.rows = std::min(range, whole.rows - f.row0);
        f.local = room, f.local_rows = range, f.segment = index;
        char *inputs = room + sizes.buffers, *own = inputs + sizes.inputs;
        for (const StepPlan& p : f.rows == range ? steps : rest)
            for (int phase = 0; phase < p.phases; ++phase) {
                if (phase == 0) p.begin(f, own);
                for (int64_t u = 0, count = p.units(f, phase); u < count; ++u) p.run(f, phase, u, own, inputs);
            }
    }
};

// Finds the segments of the steps, and which buffers only one segment uses.
void divide(const Block& b, std::vector<Segment>& segments, std::vector<Use>& uses) {
    uses.assign((size_t)b.buffer_count, Use{Use::NO});
    for (int i = 0; i < b.buffer_count; ++i)
        if (b.buffers[i].data) uses[(size_t)i].segment = Use::ALL;
    segments.reserve((size_t)b.step_count);
    const auto use = [&](int buffer, int segment) {
        if (buffer < 0) return;
        int& known = uses[(size_t)buffer].segment;
        known = known == Use::NO || known == segment ? segment : Use::ALL;
    };
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        const bool more = !segments.empty() && s->kind != STEP_ATTENTION && segments.back().by_row();
        if (more) segments.back().end = s + 1;
        else segments.emplace_back(s, s + 1, (int)segments.size());
        const int here = segments.back().index;
        if (s->kind == STEP_LINEAR) {
            const BlockLinear& p = *s->linear;
            use(p.x, here), use(p.normed, here), use(p.residual, here);
            for (int i = 0; i < (p.gated ? 1 : p.count); ++i) use(p.out[i], here);
        } else if (s->kind == STEP_NORM) {
            use(s->norm->x, here), use(s->norm->out, here), use(s->norm->residual, here);
        } else if (s->kind == STEP_ROTARY) {  // reads buffers of the whole call
            for (const Columns* p : {&s->rotary->q, &s->rotary->k, &s->rotary->v}) use(p->buffer, Use::ALL);
        } else {
            for (const Columns* p : {&s->attention->q, &s->attention->k, &s->attention->v}) use(p->buffer, Use::ALL);
            use(s->attention->out, Use::ALL);
        }
    }
}

// All steps for a call, or for some of its sequences.
class Execution {
    const Block& b;
    std::vector<Segment> segments;
    std::vector<Use> uses;
    Buffers f;
    int64_t scratch, shared = 0, per_thread = 0;
    char* common = nullptr;
    Phase* phases = nullptr;

  public:
    // Bytes of memory that it needs: while it runs, and of its own, from place() on.
    int64_t working, own;

    Execution(const Block& call, int threads) : b(call), f{call, call.batch * call.tokens, nullptr} {
        divide(b, segments, uses);
        f.uses = uses.data();
        own = 2 * (int64_t)sizeof(Phase) * b.step_count;
        for (Segment& s : segments) {
            s.plan(f, threads);
            const Segment::Room r = s.room(f);
            per_thread = std::max(per_thread, r.buffers + r.own + (s.range ? r.inputs : 0));
            s.each([&](StepPlan& p) {
                if (!s.range) shared = std::max(shared, p.shared());
                if (p.linear) own += whole_lines(p.linear->k.w.kp);
            });
        }
        scratch = whole_lines(b.scratch * f.rows * 4);
        working = whole_lines(scratch + shared + per_thread * threads), own = whole_lines(own);
    }
    void place(char* space, char* free) {
        f.scratch = space, common = space + scratch;
        for (Segment& s : segments)
            s.each([&](StepPlan& p) {
                p.fill(f);
                if (p.linear && has_zero_points(p.linear->k.w, *p.s.linear->args)) {
                    p.linear->k.ones = fill_ones(p.linear->k.w, free);
                    free += whole_lines(p.linear->k.w.kp);
                }
            });
        phases = (Phase*)free;
        for (int i = 0; i < 2 * b.step_count; ++i) new (phases + i) Phase;
    }
    // Thread `id`. before: the phase of which it reads what threads wrote, or null; at the end the last one.
    void run(int id, Phase*& before) {
        Phase* next = phases;
        char* room = common + shared + per_thread * id;
        const auto phase = [&](int64_t count, const auto& begin, const auto& run) {
            Phase& here = *next++;
            if (count == 0) return;
            if (before) before->wait();
            before = &here;
            if (!here.any(count)) return;
            begin();
            here.take(count, run);
        };
        for (Segment& s : segments) {
            if (s.range) {
                const Segment::Room sizes = s.room(f);
                phase(s.ranges, [] {}, [&](int64_t u) { s.run(f, sizes, u, room); });
                continue;
            }
            for (const StepPlan& p : s.steps)
                for (int i = 0; i < p.phases; ++i)
                    phase(
                        p.units(f, i),
                        [&] {
                            if (i == 0) p.begin(f, room);
                        },
                        [&](int64_t u) { p.run(f, i, u, room, common); });
        }
    }
};

// Sequences [first, first + batch) of a call.
class Sequences {
    struct Own {
        Buffer buffer;
    };
    std::vector<Own> buffers;
    CacheCodes keys, values;

  public:
    Block b;

    Sequences(const Block& whole, int64_t first, int64_t batch) : b(whole) {
        static_assert(sizeof(Own) == sizeof(Buffer));
        buffers.reserve((size_t)b.buffer_count);
        for (const Buffer* f = whole.buffers; f < whole.buffers + whole.buffer_count; ++f) {
            buffers.push_back({*f});
            move(buffers.back().buffer.data, first * b.tokens * f->width, f->kind);
        }
        b.buffers = (const Buffer*)buffers.data(), b.batch = batch;
        move(b.keys, first * b.key_strides[0], b.cache_kind), move(b.values, first * b.value_strides[0], b.cache_kind);
        move(b.cos, first * b.cos_strides[0], b.angle_kind), move(b.sin, first * b.sin_strides[0], b.angle_kind);
        move(b.mask, first * b.mask_strides[0], b.mask_kind);
        if (b.coded) move(b.past_keys, keys, first), move(b.past_values, values, first);
    }
    Sequences(const Sequences&) = delete;
    static void move(const CacheCodes*& from, CacheCodes& to, int64_t sequences) {
        to = *from, from = &to;
        move(to.codes, sequences * to.code_strides[0], U8);
        move(to.scale, sequences * to.scale_strides[0], to.kind),
            move(to.offset, sequences * to.offset_strides[0], to.kind);
    }
    template <class T> static void move(T*& p, int64_t elements, int kind) {
        if (p) p = (T*)((char*)p + elements * size_of(kind));
    }
};

// Sequences that a thread takes through all steps by itself, so that all buffers stay in its cache; 0: threads share
// all.
constexpr int64_t SEQUENCE_BYTES = 2 << 20;
int64_t sequences_for(const Block& b, int threads) {
    double weights = 0;
    bool attention = false;
    for (const BlockStep* s = b.steps; s < b.steps + b.step_count; ++s) {
        weights += weight_bytes(*s);
        attention |= s->kind == STEP_ATTENTION;
    }
    const int64_t count = (fewest_rows(weights) + b.tokens - 1) / b.tokens;
    return attention && b.batch >= 2 * threads * count && count * b.tokens * b.scratch * 4 <= SEQUENCE_BYTES ? count
                                                                                                             : 0;
}

// body(thread) by up to `threads` threads.
template <class Body> void parallel(int threads, const Body& body) {
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num());
        return;
    }
#endif
    (void)threads;
    body(0);
}

// A block of which each thread takes `count` sequences at a time.
int block_by_sequences(const Block& b, int threads, int64_t count) {
    const int64_t parts = (b.batch + count - 1) / count, last = b.batch - (parts - 1) * count;
    int64_t working = 0, own = 0;
    for (const int64_t n : {count, last}) {
        const Execution e(Sequences(b, 0, n).b, 1);
        working = std::max(working, e.working), own = std::max(own, e.own);
    }
    char* space = block_room.get((size_t)((working + own) * threads));
    if (!space) return NO_MEMORY;
    std::atomic<int64_t> next{0};
    parallel(threads, [&](int id) {
        char* room = space + (working + own) * id;
        for (int64_t u; (u = next.fetch_add(1)) < parts;) {
            const Sequences part(b, u * count, u + 1 < parts ? count : last);
            Execution e(part.b, 1);
            e.place(room, room + working);
            Phase* before = nullptr;
            e.run(0, before);
        }
    });
    return DONE;
}

// Blocks whose steps all threads share.
int blocks_in_turn(const Block* const* calls, int count, int threads) {
    std::vector<Execution> each;
    each.reserve((size_t)count);
    int64_t working = 0, own = 0;
    for (int i = 0; i < count; ++i) {
        const Execution& e = each.emplace_back(*calls[i], threads);
        working = std::max(working, e.working), own += e.own;
    }
    char* space = block_room.get((size_t)(working + own));
    if (!space) return NO_MEMORY;
    char* free = space + working;
    for (Execution& e : each) e.place(space, free), free += e.own;
    parallel(threads, [&](int id) {
        Phase* before = nullptr;
        for (Execution& e : each) e.run(id, before);
    });
    return DONE;
}

int blocks(const Block* const* calls, int count) {
    int status = DONE;
    for (int i = 0; i < count && status == DONE;) {
        int together = 0, threads = 1;
        int64_t sequences = 0;
        for (; i + together < count; ++together) {
            const Block& b = *calls[i + together];
            if (b.batch * b.tokens == 0 || b.step_count == 0) break;
            const int wanted = threads_for(b);
            sequences = sequences_for(b, wanted);
            if (sequences && !together) threads = wanted;
            if (sequences) break;
            threads = std::max(threads, wanted);
        }
        if (together) status = blocks_in_turn(calls + i, together, threads);
        else if (sequences) status = block_by_sequences(*calls[i], threads, sequences);
        i += std::max(together, 1);
    }
    block_room.trim();
    return status;
}

}  // namespace
