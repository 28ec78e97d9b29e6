// Peak rates of this machine: bytes read from memory, and products of each kind, over all threads.
//
// Used only by benchmarks. A caller times a call of tens of milliseconds and divides the result by the time.
#pragma once

#include "simd_probe.h"

namespace {

// n rounds of a loop of simd_probe.h in every thread. Returns the number of operations (two per multiply-add); 0 if the
// instruction set does not support them.
template <int64_t (*LOOP)(int64_t)> int64_t probe_threads(const void*, int64_t n, int threads) {
    int64_t done = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : done)
    for (int t = 0; t < threads; ++t) done += LOOP(n);
    return done;
}

// Reads `p` [n bytes] once, each thread its own part. Returns the bytes read.
inline int64_t probe_memory(const void* p, int64_t n, int threads) {
    int64_t done = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : done)
    for (int t = 0; t < threads; ++t) done += probe_read((const uint8_t*)p + n / threads * t, n / threads);
    return done;
}

}  // namespace
