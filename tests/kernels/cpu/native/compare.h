// One call of the library under each instruction set, beside plain C++; and calls that it must refuse.
#pragma once

#if !defined(_WIN32)
#include <sys/wait.h>
#endif

#include <csignal>
#include <functional>
#include <memory>
#include <string>

#include "memory.h"

namespace {

enum Mode { COMPARE, SHORT, BROKEN };
Mode mode = COMPARE;
std::vector<std::string> isas;  // beside plain C++
int64_t compared = 0, wrong = 0, refused = 0;
int64_t round_now = 0;
std::string now;  // what is being called

// What a call writes. Before each it holds `before`, or 0xff. kind: NONE for the same bits, or that of its numbers: the
// same bits where they are not NaN, or within `near` of the greatest.
struct Output {
    const Room* room;
    int kind;
    double near;
    Bytes before;
    Output(const Room& r, int kind_ = NONE, double near_ = 0, Bytes before_ = {})
        : room(&r), kind(kind_), near(near_), before(std::move(before_)) {}
};

void reset(const std::vector<Output>& outputs) {
    for (const Output& o : outputs) o.before.empty() ? o.room->fill(0xff) : o.room->set(o.before);
}

// Whether they are the same, as far as `o` asks.
bool same(const Output& o, const Bytes& expected, const Bytes& y, std::string* how) {
    if (o.kind == NONE || expected == y) {
        if (expected == y) return true;
        char line[80];
        for (size_t i = 0, shown = 0; i < y.size() && shown < 4; ++i)
            if (y[i] != expected[i])
                snprintf(line, sizeof line, " [%zu] %02x not %02x", i, y[i], expected[i]), *how += line, ++shown;
        return false;
    }
    const size_t size = (size_t)size_of(o.kind);
    double most = 0, off = 0;
    for (size_t i = 0; i < y.size(); i += size) {
        const double e = value(o.kind, &expected[i]), v = value(o.kind, &y[i]);
        if (std::isnan(e) && std::isnan(v)) continue;
        most = std::max(most, std::isfinite(e) ? std::fabs(e) : 0);
        if (memcmp(&expected[i], &y[i], size) == 0) continue;
        off = std::max(off, o.near > 0 && std::isfinite(v - e) ? std::fabs(v - e) : (double)INFINITY);
    }
    if (off <= o.near * most) return true;
    char line[80];
    snprintf(line, sizeof line, " off by %g of %g", off, most);
    *how += line;
    return false;
}

// Runs `call` in another process; its signal, or minus what it returned. said: what it wrote to stderr.
int apart(const std::function<int()>& call, std::string* said) {
#if defined(_WIN32)
    return (void)said, -call();  // no fork: only in this process
#else
    int pipes[2];
    if (pipe(pipes)) perror("pipe"), abort();
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        _exit(call());
    }
    close(pipes[1]);
    char text[512];
    for (ssize_t n; (n = read(pipes[0], text, sizeof text)) > 0;) said->append(text, (size_t)n);
    close(pipes[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
#endif
}

// Calls under each instruction set, with one thread and with several. call(threads) returns a status. `values`: whether
// what is written is compared, too. Mode SHORT: each argument in turn is a byte too short, which must be noticed.
void compare(const std::string& what, const std::vector<Output>& outputs, const std::function<int64_t(int)>& call,
             bool values = true) {
    now = what;
    const std::string function = what.substr(0, what.find(' '));
    if (mode == BROKEN) return;
    reset(outputs);
    pw_isa_use("scalar");
    if (mode == SHORT) {
        for (size_t i = 0; i < Room::all().size(); ++i) {
            const Room& room = *Room::all()[i];
            if (!room.size()) continue;
            std::string said;
            const int ended = apart(
                [&] {
                    room.shorten();
                    call(1);
                    return 0;
                },
                &said);
            ++refused;
            if (ended == SIGABRT && said.find("pennyweight: " + function + ": ") == 0 &&
                said.find(" expected ") != std::string::npos)
                continue;
            ++wrong;
            printf("%s: argument %zu a byte too short (%zu bytes): ended with %d\n%s", what.c_str(), i, room.size(),
                   ended, said.c_str());
        }
        return;
    }
    std::vector<Bytes> inputs, expected;
    std::vector<const Room*> in;
    for (const Room* room : Room::all()) {
        bool out = false;
        for (const Output& o : outputs) out |= o.room == room;
        if (!out) in.push_back(room), inputs.push_back(room->copy());
    }
    const int64_t status = call(1);
    for (const Output& o : outputs) expected.push_back(o.room->copy());
    for (const std::string& isa : isas)
        for (int threads : {1, 2 + (int)below(3)}) {
            if (isa == "scalar" && threads == 1) continue;
            reset(outputs);
            pw_isa_use(isa.c_str());
            const int64_t again = call(threads);
            ++compared;
            std::string how;
            bool good = !values || again == status;
            if (!good) how = " another status";
            for (size_t i = 0; values && i < outputs.size(); ++i)
                good &= same(outputs[i], expected[i], outputs[i].room->copy(), &how);
            for (size_t i = 0; i < in.size(); ++i)
                if (in[i]->copy() != inputs[i]) good = false, how += " an input was written to";
            if (good) continue;
            if (++wrong <= 40)
                printf("%s, %d threads: %s:%s (round %ld)\n", isa.c_str(), threads, what.c_str(), how.c_str(),
                       (long)round_now);
        }
}

// Mode BROKEN: each of `calls` breaks a rule of src/check.h, and must be refused with INVALID, or with -1, 0 or null
// where a function has no status (`otherwise`); where the library asserts it says which rule and aborts.
void refuse(const std::string& function, const std::vector<std::pair<const char*, std::function<int64_t()>>>& calls,
            int64_t otherwise = INVALID) {
    if (mode != BROKEN) return;
    pw_isa_use("scalar");
    for (const auto& [rule, call] : calls) {
        std::string said;
        now = function + ": " + rule;
        const int ended = apart([&, broken = &call] { return (*broken)() == otherwise ? 100 : 101; }, &said);
#if PENNYWEIGHT_ASSERT
        const bool good = ended == SIGABRT && said.find("pennyweight: " + function + ": ") == 0;
#else
        const bool good = ended == -100;
#endif
        ++refused;
        if (!good)
            ++wrong, printf("%s: %s: not refused, ended with %d\n%s", function.c_str(), rule, ended, said.c_str());
    }
}

// The extents that the library tells of a structure: the bytes of its parts here.
template <class T> void told(int what, const T& structure, const std::vector<const Room*>& parts) {
    Extent extents[8];
    if (mode != COMPARE) return;
    bool good = pw_extents(what, &structure, extents, 8) == (int)parts.size();
    for (size_t i = 0; good && i < parts.size(); ++i)
        good &= extents[i].count * size_of(extents[i].kind) == (int64_t)parts[i]->size();
    ++compared;
    if (!good && ++wrong <= 40)
        printf("pw_extents %d: not the bytes of %s (round %ld)\n", what, now.c_str(), (long)round_now);
}

}  // namespace
