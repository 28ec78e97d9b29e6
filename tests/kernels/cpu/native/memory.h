// Memory for arguments: as long as it must be, with a page on either side that nobody may touch. It ends where the one
// page begins, or begins where the other ends. Under AddressSanitizer nothing beside it may be touched at all.
#pragma once

#if defined(_WIN32)
#include <cstddef>  // and not windows.h, which defines `near` and `small`
extern "C" __attribute__((dllimport)) void* VirtualAlloc(void*, size_t, unsigned long kind, unsigned long protection);
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "random.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
constexpr bool SANITIZED = true;
#else
#define __asan_poison_memory_region(p, n) ((void)(p), (void)(n))
#define __asan_unpoison_memory_region(p, n) ((void)(p), (void)(n))
constexpr bool SANITIZED = false;
#endif

namespace {

enum Place { AT_END, AT_BEGIN };
Place place = AT_END;

// Memory between two such pages, used again when it is given back.
struct Slot {
    uint8_t* first = nullptr;
    size_t bytes = 0;
};
std::map<size_t, std::vector<Slot>> idle;

#if defined(_WIN32)
size_t page_size() { return 4096; }
uint8_t* between_pages(size_t bytes) {
    constexpr unsigned long COMMIT = 0x1000, RESERVE = 0x2000, NO_ACCESS = 1, READ_WRITE = 4;
    const size_t page = page_size();
    char* p = (char*)VirtualAlloc(nullptr, bytes + 2 * page, RESERVE, NO_ACCESS);
    if (!p || !VirtualAlloc(p + page, bytes, COMMIT, READ_WRITE)) fprintf(stderr, "VirtualAlloc failed\n"), abort();
    return (uint8_t*)p + page;
}
#else
size_t page_size() { return (size_t)sysconf(_SC_PAGESIZE); }
uint8_t* between_pages(size_t bytes) {
    const size_t page = page_size();
    void* p = mmap(nullptr, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect((char*)p + page, bytes, PROT_READ | PROT_WRITE)) perror("mmap"), abort();
    return (uint8_t*)p + page;
}
#endif

Slot take_slot(size_t wanted) {
    const size_t page = page_size();
    size_t bytes = page;
    while (bytes < wanted) bytes *= 2;
    auto& row = idle[bytes];
    if (row.empty()) {
        return {between_pages(bytes), bytes};
    }
    const Slot slot = row.back();
    row.pop_back();
    return slot;
}

class Room {
    Slot slot;
    uint8_t* p = nullptr;
    size_t count = 0;

  public:
    static std::vector<const Room*>& all() {  // that are in use
        static std::vector<const Room*> rooms;
        return rooms;
    }
    explicit Room(size_t bytes) : slot(take_slot(bytes)), count(bytes) {
        p = place == AT_END ? slot.first + slot.bytes - bytes : slot.first;
        __asan_poison_memory_region(slot.first, slot.bytes);
        __asan_unpoison_memory_region(p, bytes);
        all().push_back(this);
    }
    explicit Room(const Bytes& bytes) : Room(bytes.size()) {
        if (count) memcpy(p, bytes.data(), count);
    }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() {
        __asan_unpoison_memory_region(slot.first, slot.bytes);
        idle[slot.bytes].push_back(slot);
        all().erase(std::find(all().begin(), all().end(), this));
    }
    uint8_t* data() const { return p; }
    size_t size() const { return count; }
    void* pointer() const { return count ? p : nullptr; }  // null where there is nothing
    Bytes copy() const { return Bytes(p, p + count); }
    void set(const Bytes& bytes) const {
        if (count) memcpy(p, bytes.data(), count);
    }
    void fill(uint8_t b) const {
        if (count) memset(p, b, count);
    }
    void shorten() const { __asan_poison_memory_region(p + count - 1, 1); }  // placed AT_BEGIN
};

}  // namespace
