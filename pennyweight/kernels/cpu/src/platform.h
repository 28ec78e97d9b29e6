// What compilers and operating systems do differently: OpenMP's declarations, aligned memory, yielding the processor.
#pragma once

#include <cstddef>
#include <cstdlib>

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
#endif
}

}  // namespace
