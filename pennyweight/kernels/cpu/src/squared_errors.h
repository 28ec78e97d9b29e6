// The weighted squared error of blocks under given parameters: what a search for parameters compares. The operations
// and their order are those of squared_errors in core/qparams_search.py, the reference, so the results have the same
// bits.
#pragma once

#include <algorithm>

#include "gptq.h"

namespace {

// The sum of 16 lanes by halves: lane i + lane i + 8, then i + 4, ..
inline float sum_by_halves(F a) {
    alignas(64) float lanes[16];
    fstore(lanes, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

// Blocks from `begin` on, before `end`.
template <bool TABLE, bool ZERO, bool OFFSET> void block_errors(const BlockErrors& b, int64_t begin, int64_t end) {
    const F shift = fset(b.shift), lo = fset(b.lo), hi = fset(b.hi), mid = fset(b.mid);
    for (int64_t i = begin; i < end; ++i) {
        const float* x = b.x + i * b.size;
        const float* weight = b.weight ? b.weight + i % b.weights * b.size : nullptr;
        const F factor = fset(b.factor[i]), scale = fset(b.scale[i]);
        const F zero = fset(ZERO ? b.zero_point[i] : 0), least = fset(OFFSET && !TABLE ? b.least[i] : 0);
        const F divisor = fset(OFFSET && !TABLE ? b.divisor[i] : 1), offset = fset(OFFSET ? b.offset[i] : 0);
        F sums[40];  // sums[l]: of 2**l vectors, where bit l of the count of vectors is set
        int64_t count = 0;
        for (int64_t j = 0; j < b.size; j += 16, ++count) {
            const int64_t left = b.size - j;
            const F there = load_first(x + j, left);
            F value;
            if constexpr (TABLE) {
                value = pick(b.table.numbers, code_of(b.table, fdiv(OFFSET ? fsub(there, offset) : there, factor)));
            } else {
                F code = fmul(there, factor);
                if constexpr (OFFSET) code = fdiv(fsub(code, least), divisor);
                code = frint(code);
                if constexpr (ZERO) code = fadd(code, zero);
                code = fclip(fadd(code, shift), lo, hi);
                value = fsub(code, mid);
                if constexpr (ZERO) value = fsub(value, zero);
            }
            value = fmul(value, scale);
            if constexpr (OFFSET) value = fadd(value, offset);
            F error = fsub(value, there);
            error = fmul(error, error);
            if (weight) error = fmul(error, load_first(weight + j, left));
            if (left < 16) {  // a rounded 0 need not be 0
                alignas(64) float some[16];
                fstore(some, error);
                for (int64_t lane = left; lane < 16; ++lane) some[lane] = 0;
                error = fload(some);
            }
            int level = 0;
            for (; count >> level & 1; ++level) error = fadd(sums[level], error);
            sums[level] = error;
        }
        F total = fset(0);
        bool any = false;
        for (int level = 0; count >> level; ++level)
            if (count >> level & 1) {
                total = any ? fadd(sums[level], total) : sums[level];
                any = true;
            }
        b.errors[i] = sum_by_halves(total);
    }
}

void squared_errors(const BlockErrors* errors) {
    const BlockErrors& b = *errors;
    const auto run = b.table.levels ? (b.offset ? block_errors<true, false, true> : block_errors<true, false, false>)
                     : b.offset ? (b.zero_point ? block_errors<false, true, true> : block_errors<false, false, true>)
                                : (b.zero_point ? block_errors<false, true, false> : block_errors<false, false, false>);
    const int64_t step = std::max<int64_t>(1, (1 << 14) / b.size);
    const int64_t parts = (b.blocks + step - 1) / step;
#pragma omp parallel for schedule(dynamic, 1) num_threads(b.threads) if (b.threads > 1)
    for (int64_t p = 0; p < parts; ++p) run(b, p * step, std::min(b.blocks, (p + 1) * step));
}

}  // namespace
