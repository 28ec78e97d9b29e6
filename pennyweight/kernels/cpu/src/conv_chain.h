// The steps of a convolution net between quantized layers: int8 codes from layer to layer; see kernels/conv_chain.py.
//
// A tensor of a sample is kept as codes for convolutions that read it, as float32 for other readers, or as both. Codes
// are bytes q + 128, channels last, with the margin that the largest padding of their readers needs, so that a
// convolution is an implicit matrix product on them. Sums, scales and bias are those of conv.h, in the same order, so
// codes and numbers have the same bits as those of separate calls.
//
// With enough samples each thread takes one through all steps, so that it stays in the thread's cache. With few, all
// threads share each step.
#pragma once

#include "conv_chain_steps.h"

namespace {

thread_local Workspace chains{32u << 20};  // of a thread that calls a chain

class ChainCall {
    const Chain& c;
    int threads;
    bool own;  // each thread has its own samples
    int64_t sample_bytes;
    ChainWork* work;
    Phase* phases;         // [sample][step], if threads share samples
    int64_t* next_sample;  // if they do not
    int32_t* odd;          // [sample]: whether an input of it is not finite, if threads share samples
    char* buffers;         // of samples

    double products() const {
        double all = 0;
        for (int32_t i = 0; i < c.step_count; ++i) {
            const ChainStep& s = c.steps[i];
            const ChainTensor& y = c.tensors[s.y];
            if (s.kind == CHAIN_CONV) all += (double)(y.h * y.w) * (double)(s.conv->o * s.conv->c * s.kh * s.kw);
        }
        return all * (double)c.n;
    }

    // Whether the step after a convolution is max pooling of its result.
    bool pooled(int32_t j) const {
        return j + 1 < c.step_count && c.steps[j].kind == CHAIN_CONV && c.steps[j + 1].kind == CHAIN_MAX &&
               c.steps[j + 1].x == c.steps[j].y;
    }
    // Both, row by row: the result of the convolution is read while it is in the cache.
    void run_pooled(const ChainSample& one, int32_t j) const {
        const ChainWork &k = work[j], &pool = work[j + 1];
        const ChainTensor& x = c.tensors[k.s->y];
        const int64_t pixels = x.h * x.w, small = pixels / k.blocks, larger = pixels % k.blocks;
        int64_t done = 0;
        const auto make = [&](int64_t rows) {
            for (; done < k.units && done * small + std::min(done, larger) < rows * x.w; ++done) run_unit(one, k, done);
        };
        run_unit(one, k, k.units);
        for (int64_t y = 0; y < pool.units; ++y) {
            make(std::min(x.h, y * pool.s->stride_h - pool.s->pad_h + pool.s->kh));
            run_unit(one, pool, y);
        }
        make(x.h);
        run_unit(one, pool, pool.units);
    }

    // A thread with samples of its own.
    void run_own(int id, ChainRoom& room) const {
        for (int64_t i; (i = __atomic_fetch_add(next_sample, 1, __ATOMIC_RELAXED)) < c.n;) {
            room.odd = false;
            const ChainSample one{c, buffers + id * sample_bytes, i, room};
            for (int32_t j = 0; j < c.step_count; ++j) {
                if (pooled(j)) run_pooled(one, j++);
                else
                    for (int64_t u = 0; u <= work[j].units; ++u) run_unit(one, work[j], u);
            }
            if (room.odd) spoil(one);
        }
    }
    // A thread that shares each step of each sample.
    void run_shared(ChainRoom& room) const {
        for (int64_t i = 0; i < c.n; ++i) {
            room.odd = false;
            const ChainSample one{c, buffers, i, room};
            for (int32_t j = 0; j < c.step_count; ++j) {
                Phase& step = phases[i * c.step_count + j];
                const bool last = step.take(work[j].units + 1, [&](int64_t u) {
                    run_unit(one, work[j], u);
                    if (room.odd) __atomic_store_n(odd + i, 1, __ATOMIC_RELAXED);
                });
                if (last && j + 1 == c.step_count && __atomic_load_n(odd + i, __ATOMIC_RELAXED)) spoil(one);
                step.wait();
            }
        }
    }

    void choose_threads() {
        threads = (int)std::min<double>(c.threads, 1 + products() / PRODUCTS_PER_THREAD);
        own = threads == 1 || c.n >= 4 * threads || c.n % threads == 0;
        if (own) threads = (int)std::min<int64_t>(threads, c.n);
    }
    // Takes memory and prepares the steps. Whether there is memory.
    bool prepare_steps() {
        const int64_t team = own ? 1 : threads;
        const int64_t works = whole_lines(c.step_count * (int64_t)sizeof(ChainWork)),
                      counters = own ? 0 : c.n * c.step_count * (int64_t)sizeof(Phase);
        sample_bytes = whole_lines(c.scratch + 128);                  // vectors are read beyond the last pixel
        const int64_t others = whole_lines(8 + (own ? 0 : c.n * 4));  // next_sample, and odd
        int64_t shared = works + counters + others;
        ChainWork none;
        for (int32_t i = 0; i < c.step_count; ++i) shared += prepare(none, c, c.steps[i], team, nullptr);
        char* space = chains.get((size_t)(shared + (own ? threads : 1) * sample_bytes));
        if (!space) return false;
        work = (ChainWork*)space;
        phases = (Phase*)(space + works);
        next_sample = (int64_t*)(space + works + counters);
        odd = (int32_t*)(next_sample + 1);
        buffers = space + shared;
        for (int64_t i = 0; i < counters / (int64_t)sizeof(Phase); ++i) new (phases + i) Phase;
        memset((void*)next_sample, 0, (size_t)others);
        char* at = space + works + counters + others;
        for (int32_t i = 0; i < c.step_count; ++i) at += prepare(work[i], c, c.steps[i], team, at);
        return true;
    }

  public:
    explicit ChainCall(const Chain& chain)
        : c(chain),
          threads(1),
          own(true),
          sample_bytes(0),
          work(nullptr),
          phases(nullptr),
          next_sample(nullptr),
          odd(nullptr),
          buffers(nullptr) {}

    int run() {
        choose_threads();
        if (!prepare_steps()) return NO_MEMORY;
        const auto body = [&](int id) {
            ChainRoom& room = *(ChainRoom*)scratch.get(sizeof(ChainRoom));
            own ? run_own(id, room) : run_shared(room);
        };
#if defined(_OPENMP)
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            body(omp_get_thread_num());
        } else
#endif
            body(0);
        chains.trim();
        return DONE;
    }
};

}  // namespace
