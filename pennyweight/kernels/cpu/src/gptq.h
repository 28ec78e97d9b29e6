// The loops over the columns of a block in GPTQ and in coordinate descent. Their operations and the order of these are
// those of quantize_columns in algorithms/solvers/gptq.py and coordinate_descent in refinement.py, the references, so
// the results have the same bits for any number of threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace {

constexpr int GPTQ_VECTORS = 4;  // as many chains of additions beside each other, and errors that fit the first cache
constexpr int GPTQ_LANES = 16 * GPTQ_VECTORS;

// The first `count` of 16 numbers; any count.
inline F load_first(const float* p, int64_t count) {
    if (count >= 16) return fload(p);
    alignas(64) float some[16] = {0};
    if (count > 0) memcpy(some, p, (size_t)count * 4);
    return fload(some);
}
inline void store_first(float* p, F a, int64_t count) {
    if (count >= 16) return fstore(p, a);
    alignas(64) float some[16];
    fstore(some, a);
    if (count > 0) memcpy(p, some, (size_t)count * 4);
}

// The code that a number is rounded to.
inline I code_of(const NumberTable& t, F number) {
    const F wanted = t.sign ? bitcast(iand(bits(number), iset(0x7fffffff))) : number;
    F above = fset(0);
    for (int i = 0; i < t.count; ++i) above = fadd(above, fabove(wanted, fset(t.levels[i]), fset(1), fset(0)));
    const I code = iround(above);
    return t.sign ? ior(code, ishl(ishr<31>(bits(number)), t.sign)) : code;
}

// `lanes` rows of the weight, from `first` on.
template <bool TABLE, bool ZERO, bool OFFSET, bool DESCENT>
void gptq_rows(const GptqBlock& b, int64_t first, int64_t lanes) {
    alignas(64) float errors[GPTQ_COLUMNS * GPTQ_LANES];
    const F shift = fset(b.shift), lo = fset(b.lo), hi = fset(b.hi), mid = fset(b.mid);
    for (int64_t i = 0; i < b.columns; ++i) {
        const float* lower = b.lower + i * b.columns;
        const int64_t row = i * b.n + first;
        F wanted[GPTQ_VECTORS];
        for (int v = 0; v < GPTQ_VECTORS; ++v) wanted[v] = load_first(b.w + row + 16 * v, lanes - 16 * v);
        for (int64_t j = 0; j < i; ++j) {
            const F u = fset(lower[j]);
            const float* e = errors + j * GPTQ_LANES;
            PW_UNROLL for (int v = 0; v < GPTQ_VECTORS; ++v) wanted[v] = fsub(wanted[v], fmul(u, fload(e + 16 * v)));
        }
        const F diagonal = fset(lower[i]);
        if (DESCENT && !(lower[i] > 0)) {  // inputs that are always 0: the column stays as it is
            for (int v = 0; v < GPTQ_VECTORS; ++v) {
                fstore(errors + i * GPTQ_LANES + 16 * v, fset(0));
                store_first(b.errors + row + 16 * v, fset(0), lanes - 16 * v);
            }
            continue;
        }
        for (int v = 0; v < GPTQ_VECTORS; ++v) {
            const int64_t at = row + 16 * v, count = lanes - 16 * v;
            if (count <= 0) break;
            const auto part = [&](const float* p) { return load_first(p + at, count); };
            const F current = DESCENT ? part(b.values) : fset(0);
            if constexpr (DESCENT) wanted[v] = fadd(current, fdiv(wanted[v], diagonal));
            const F kept = b.keep ? fmul(wanted[v], part(b.keep)) : wanted[v];
            I code;
            F value;
            if constexpr (TABLE) {
                code = code_of(b.table, fdiv(OFFSET ? fsub(kept, part(b.offset)) : kept, part(b.factor)));
                value = pick(b.table.numbers, code);
            } else {
                F step = fmul(kept, part(b.factor));
                if constexpr (OFFSET) step = fdiv(fsub(step, part(b.least)), part(b.divisor));
                step = frint(step);
                if constexpr (ZERO) step = fadd(step, part(b.zero_point));
                step = fclip(fadd(step, shift), lo, hi);
                code = iround(step);
                value = fsub(step, mid);
                if constexpr (ZERO) value = fsub(value, part(b.zero_point));
            }
            value = fmul(value, part(b.scale));
            if constexpr (OFFSET) value = fadd(value, part(b.offset));
            const F error = DESCENT ? fsub(value, current) : fdiv(fsub(wanted[v], value), diagonal);
            fstore(errors + i * GPTQ_LANES + 16 * v, error);
            store_first(b.values + at, value, count);
            store_first(b.errors + at, error, count);
            int8_t codes[16];
            istore8(codes, code);
            memcpy(b.codes + at, codes, (size_t)std::min<int64_t>(count, 16));
        }
        for (int v = (int)((lanes + 15) / 16); v < GPTQ_VECTORS; ++v)  // lanes beyond the weight
            fstore(errors + i * GPTQ_LANES + 16 * v, fset(0));
    }
}

template <bool DESCENT> auto gptq_of(const GptqBlock& b) {
    if (b.table.levels)
        return b.offset ? gptq_rows<true, false, true, DESCENT> : gptq_rows<true, false, false, DESCENT>;
    return b.offset ? (b.zero_point ? gptq_rows<false, true, true, DESCENT> : gptq_rows<false, false, true, DESCENT>)
                    : (b.zero_point ? gptq_rows<false, true, false, DESCENT> : gptq_rows<false, false, false, DESCENT>);
}

void gptq_block(const GptqBlock* block) {
    const GptqBlock& b = *block;
    const auto run = b.descent ? gptq_of<true>(b) : gptq_of<false>(b);
    const int64_t tiles = (b.n + GPTQ_LANES - 1) / GPTQ_LANES;
#pragma omp parallel for schedule(dynamic, 1) num_threads(b.threads) if (b.threads > 1)
    for (int64_t t = 0; t < tiles; ++t) run(b, t * GPTQ_LANES, std::min<int64_t>(b.n - t * GPTQ_LANES, GPTQ_LANES));
}

}  // namespace
