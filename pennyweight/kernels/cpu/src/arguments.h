// Checks that an exported function applies to its arguments before it uses them. The rules are in check.h.
//
// Arguments that break a rule make the function return INVALID. With PENNYWEIGHT_ASSERT=1, as scripts/sanitize builds
// it, the library prints the rule and aborts. It also counts the calls of each function per instruction set: if
// PENNYWEIGHT_COUNTS=path is set in the environment, the counts are appended to that file when the process ends. Under
// AddressSanitizer every byte of each argument must also be addressable.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "abi.h"

#if PENNYWEIGHT_ASSERT
#include <cstdio>
#include <cstdlib>
#include <mutex>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#endif

namespace check {

#if PENNYWEIGHT_ASSERT

class Counts {
    struct Row {
        const char *isa, *function;
        int64_t calls;
    };
    static constexpr int ROOM = 256;
    Row rows[ROOM] = {};
    int used = 0;
    std::mutex one;

  public:
    void add(const char* isa, const char* function) {
        const std::lock_guard<std::mutex> alone(one);
        int i = 0;
        while (i < used && (rows[i].isa != isa || rows[i].function != function)) ++i;  // literals: one address each
        if (i == ROOM) std::abort();
        if (i == used) rows[used++] = {isa, function, 0};
        ++rows[i].calls;
    }
    ~Counts() {
        const char* path = std::getenv("PENNYWEIGHT_COUNTS");
        std::FILE* file = path ? std::fopen(path, "a") : nullptr;
        if (!file) return;
        for (int i = 0; i < used; ++i)
            std::fprintf(file, "%s %s %lld\n", rows[i].isa, rows[i].function, (long long)rows[i].calls);
        std::fclose(file);
    }
};
static Counts counts;
static const char* isa = "none";  // in use

#endif

constexpr int64_t TOO_MUCH = INT64_MAX;

// Product of non-negative numbers, TOO_MUCH if it overflows int64.
inline int64_t times(std::initializer_list<int64_t> factors) {
    int64_t all = 1;
    for (const int64_t f : factors)
        if (__builtin_mul_overflow(all, f, &all)) return TOO_MUCH;
    return all;
}

inline int64_t bytes_of(int kind) { return kind == NONE ? 0 : kind == F32 ? 4 : kind == BF16 || kind == F16 ? 2 : 1; }

class Arguments {
    const char* function;
    bool whole = true;
    Extent* extents = nullptr;  // if parts are described instead of checked
    int room = 0, used = 0;

  public:
    explicit Arguments(const char* name) : function(name) {
#if PENNYWEIGHT_ASSERT
        counts.add(isa, name);
#endif
    }
    // Whether all rules hold.
    bool fit() const { return whole; }
    // From now on parts are described: each is entered in a table, and no memory is looked at.
    void describe(Extent* table, int size) { extents = table, room = size; }
    int described() const { return used; }
    // A part of a quantized tensor: `count` elements of a kind at p. NONE: there is none.
    void part(const char* name, const void* p, int kind, int64_t count) {
        if (!extents) return kind == NONE ? void() : memory(name, p, count, bytes_of(kind));
        if (must(used < room, "room for every part")) extents[used++] = {name, kind == NONE ? 0 : count, kind};
    }
    // Records and returns whether a rule holds.
    bool must(bool holds, const char* rule) {
        if (!holds) {
            whole = false;
#if PENNYWEIGHT_ASSERT
            std::fprintf(stderr, "pennyweight: %s: expected: %s\n", function, rule);
            std::abort();
#else
            (void)rule;
#endif
        }
        return holds;
    }
    // `count` elements of `size` bytes at p, which may be null if there are none. Addresses are multiples of the size.
    void memory(const char* name, const void* p, int64_t count, int64_t size = 1) {
        const int64_t bytes = times({count, size});
        if (bytes == 0 || extents) return;
        if (p && bytes < TOO_MUCH) {
#if PENNYWEIGHT_ASSERT
            if (size <= 8 && (uintptr_t)p % (uintptr_t)size) {
                std::fprintf(stderr, "pennyweight: %s: %s: %p is not a multiple of %lld\n", function, name, p,
                             (long long)size);
                std::abort();
            }
#if defined(__SANITIZE_ADDRESS__)
            if (void* bad = __asan_region_is_poisoned((void*)p, (size_t)bytes))
                found(name, p, bytes, (char*)bad - (const char*)p);
#endif
#endif
            return;
        }
        whole = false;
#if PENNYWEIGHT_ASSERT
        found(name, p, bytes, 0);
#else
        (void)name;
#endif
    }

#if PENNYWEIGHT_ASSERT
  private:
    [[noreturn]] void found(const char* name, const void* p, int64_t bytes, int64_t have) {
        std::fprintf(stderr, "pennyweight: %s: %s: expected %lld bytes at %p, found %lld\n", function, name,
                     (long long)bytes, p, (long long)have);
        std::abort();
    }
#endif
};

}  // namespace check
