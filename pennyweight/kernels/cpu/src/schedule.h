// Distributes the work of a linear layer over threads: first its inputs are prepared, then its units of work run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "platform.h"

namespace {

// Minimum number of products for a second thread.
constexpr double PRODUCTS_PER_THREAD = 1 << 17;

// Memory kept between calls; after trim() at most `keep` bytes.
class Workspace {
    char* data = nullptr;
    size_t size = 0, keep;

  public:
    explicit Workspace(size_t most) : keep(most) {}
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    char* get(size_t bytes) {
        if (bytes > size) {
            free_aligned(data);
            size = (bytes + 4095) / 4096 * 4096;
            data = (char*)aligned_memory(4096, size);
            if (!data) size = 0;
        }
        return data;
    }
    void trim() {
        if (size > keep) {
            free_aligned(data);
            data = nullptr;
            size = 0;
        }
    }
    ~Workspace() { free_aligned(data); }
};
thread_local Workspace inputs{4u << 20};   // of a thread that calls a kernel: the prepared inputs
thread_local Workspace scratch{4u << 20};  // of each thread that works for it

inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Units of work that threads take, each the next one, and that are to be done before a later phase begins. Threads wait
// for work and not for each other: one that the system has stopped holds up the others only if it has a unit.
class alignas(64) Phase {
    std::atomic<int64_t> taken{0}, done{0};
    std::atomic<uint32_t> over{0}, sleepers{0};

    bool is_over() const { return over.load(std::memory_order_acquire); }

  public:
    bool any(int64_t count) const { return taken.load(std::memory_order_relaxed) < count; }
    // Calls run(u) for units of the `count` that nobody has taken. Whether the last one was done here.
    template <class Run> bool take(int64_t count, const Run& run) {
        int64_t mine = 0;
        for (int64_t u; (u = taken.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) run(u);
        if (mine == 0 || done.fetch_add(mine, std::memory_order_acq_rel) + mine < count) return false;
        over.store(1);
        if (sleepers.load()) wake_all(&over);
        return true;
    }
    // Until all units are done, of which there is one at least.
    void wait() {
        using Clock = std::chrono::steady_clock;
        constexpr std::chrono::microseconds AWAKE{20};  // on a machine with more to do it is better to sleep then
        Clock::time_point end{};
        for (int i = 1; !is_over(); ++i) {
            pause_thread();
            if (i % 64) continue;  // the clock takes longer than most waits
            const auto now = Clock::now();
            if (i == 64) end = now + AWAKE;
            else if (now >= end) break;
        }
        if (is_over()) return;
        sleepers.fetch_add(1);
        while (!over.load()) sleep_while(&over, 0);
    }
};

// Calls prepare(thread, i) for every i < `count`, then run(thread, u) for every u < `units`, each taken by the next
// free thread. copies: every thread prepares all inputs for itself, which for few is cheaper than waiting for others.
template <class Prepare, class Run>
void run_units(int threads, bool copies, int64_t count, int64_t units, const Prepare& prepare, const Run& run) {
    Phase inputs_ready;
    std::atomic<int64_t> next_unit{0};
    auto body = [&](int id, int team) {
        if (copies || team == 1) {
            for (int64_t i = 0; i < count; ++i) prepare(id, i);
        } else if (count) {
            inputs_ready.take(count, [&](int64_t i) { prepare(id, i); });
            inputs_ready.wait();
        }
        for (int64_t u; (u = next_unit.fetch_add(1)) < units;) run(id, u);
        scratch.trim();
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
    } else
#endif
        body(0, 1);
    inputs.trim();
}

}  // namespace
