// What compilers and operating systems do differently: OpenMP's declarations, aligned memory, yielding the processor.
#pragma once

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_WIN32)
#include <malloc.h>
extern "C" __attribute__((dllimport)) int SwitchToThread(void);
#else
#include <sched.h>
#endif

#if defined(_OPENMP)
extern "C" {  // as in omp.h, which Apple's compiler does not have
int omp_get_num_threads() noexcept;
int omp_get_thread_num() noexcept;
}
#endif

namespace {

// `bytes`: a multiple of `alignment`. Null if there is no memory.
inline void* aligned_memory(size_t alignment, size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes, alignment);
#else
    return std::aligned_alloc(alignment, bytes);
#endif
}

inline void free_aligned(void* p) {
#if defined(_WIN32)
    _aligned_free(p);
#else
    std::free(p);
#endif
}

inline void yield_thread() {
#if defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
}

inline void pause_thread() {  // of a loop that waits
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // some ten cycles; "yield" takes none
#endif
}

// Waits while *p is `value`, or for a while: the system wakes a thread that sleeps at once, one that yields when it is
// its turn.
inline void sleep_while(std::atomic<uint32_t>* p, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (p->load() == value) yield_thread();
#endif
}

inline void wake_all(std::atomic<uint32_t>* p) {
#if defined(__linux__)
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)p;
#endif
}

}  // namespace
