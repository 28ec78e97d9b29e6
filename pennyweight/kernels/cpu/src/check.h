// Argument rules of each exported function, here and in check_*.h: consistent sizes, known kinds, and memory of the
// size that they require. Each function returns whether all rules hold; see arguments.h for what happens if not.
// Extents are exact: only memory that a function reads or writes is required.
#pragma once

#include "arguments.h"

namespace check {

constexpr int64_t MOST = (int64_t)1 << 40;  // of rows, columns and strides, so that sums of a few fit int64
constexpr int MOST_THREADS = 1 << 12;

inline bool within(int64_t x, int64_t lo, int64_t hi) { return lo <= x && x <= hi; }
inline bool size(int64_t n) { return within(n, 0, MOST); }
inline int64_t over(int64_t n, int64_t step) { return (n + step - 1) / step; }
inline bool is_float(int kind) { return within(kind, F32, F16); }
inline bool is_integer(int kind) { return kind == I8 || kind == U8; }
// Elements from the first to the last of m rows of k with stride ldx. Rows may overlap, as after expand().
inline int64_t span(int64_t m, int64_t k, int64_t ldx) {
    const int64_t before = m > 1 ? times({m - 1, ldx}) : 0;
    return m <= 0 ? 0 : before > TOO_MUCH - MOST ? TOO_MUCH : before + k;
}
inline bool threads(Arguments& c, int64_t count) { return c.must(within(count, 1, MOST_THREADS), "1 to 4096 threads"); }
inline void input(Arguments& c, const void* x, int64_t m, int64_t k, int64_t ldx, int kind) {
    c.memory("x", x, span(m, k, ldx), bytes_of(kind));
}
inline bool rows(Arguments& c, int64_t m, int64_t ldx) {
    return c.must(size(m), "m from 0 to 2**40") && c.must(m <= 1 || size(ldx), "ldx from 0 to 2**40");
}
inline bool bias_kind(Arguments& c, const void* bias, int kind) {
    return c.must(!bias || is_float(kind), "bias float32, bfloat16 or float16");
}

inline bool probe(const char* function, int what, const void* p, int64_t n, int count) {
    Arguments c(function);
    if (!c.must(within(what, 0, 3), "what from 0 to 3") || !c.must(size(n), "n from 0 to 2**40") || !threads(c, count))
        return false;
    if (what == 0) c.memory("p", p, n);
    return c.fit();
}
inline bool isa_at(const char* function, int i, int count) {
    Arguments c(function);
    return c.must(within(i, 0, count - 1), "the number of an instruction set");
}
inline bool isa_named(const char* function, const char* name) {
    Arguments c(function);
    c.memory("name", name, 1);
    return c.fit();
}

}  // namespace check
