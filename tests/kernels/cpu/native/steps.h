// Cases of optimizer steps, of the probe, and of what chooses instruction sets.
#pragma once

#include "compare.h"

namespace {

// A table of `count` random numbers in [-1, 1], with cells of 12 bits in which no two decision levels lie.
struct RandomTable {
    Bytes numbers = Bytes(1024);
    std::vector<int32_t> entries;
    CodeTable t = {};
    RandomTable(int count, bool mirror) {
        float values[256] = {0};
        for (int i = 0; i < count; ++i)  // half of each sign; neighbours an eighth of an octave apart
            values[i] = (mirror || i >= count / 2 ? 1.0f : -1.0f) *
                        std::exp2(-0.125f * (float)(mirror || i >= count / 2 ? count - 1 - i : i) -
                                  0.0625f * (float)below(2) * 0.5f);
        t.shift = 23 - 5, t.first = (int32_t)(bits_of(0x1p-40f) >> t.shift),
        t.last = (int32_t)(bits_of(2.0f) >> t.shift) - t.first;
        t.mirror = mirror, t.negative = mirror ? 0 : t.last + 1;
        for (int half = 0; half < (mirror ? 1 : 2); ++half) {
            int code = mirror ? 0 : count / 2;  // of 0: above all negative levels
            for (int32_t c = t.first; c <= t.first + t.last; ++c) {
                int32_t level = (1 << t.shift) - 1, before = code;
                for (int i = 1; i < count; ++i) {
                    const float l = (values[i - 1] + values[i]) / 2;
                    if ((l < 0) != (half == 1) || (int32_t)(bits_of(std::fabs(l)) >> t.shift) != c) continue;
                    level = (int32_t)bits_of(std::fabs(l)) & ((1 << t.shift) - 1);
                    code += half ? -1 : 1;
                }
                entries.push_back(before | level << 8);
            }
        }
        memcpy(numbers.data(), values, sizeof values);
    }
};

struct TableRoom {
    Room cells, values, table;
    static Bytes bytes(const void* p, size_t n) { return Bytes((const uint8_t*)p, (const uint8_t*)p + n); }
    explicit TableRoom(const RandomTable& t)
        : cells(bytes(t.entries.data(), t.entries.size() * 4)), values(t.numbers), table(sizeof(CodeTable)) {
        CodeTable own = t.t;
        own.cells = (const int32_t*)cells.data(), own.values = (const float*)values.data();
        memcpy(table.data(), &own, sizeof own);
    }
};

struct JobCase {
    OptimJob j = {};
    std::vector<std::unique_ptr<Room>> rooms;
    std::vector<std::unique_ptr<TableRoom>> tables;
    std::vector<Output> outputs;
    bool moderate = true;  // else a NaN may come, and codes of its sign, which is left open

    uint8_t* keep(const Bytes& bytes, int kind, bool output = true) {
        rooms.push_back(std::make_unique<Room>(bytes));
        if (output && !bytes.empty()) outputs.push_back({*rooms.back(), kind, 0, bytes});
        moderate &= kind == NONE || all_moderate(kind, bytes);
        return rooms.back()->data();
    }
    JobCase() {
        const int64_t slabs = below(5), entries = 1 + below(9), blocks = 1 + below(3);
        j.inner = one_of<int64_t>({1, 1, 7, 27});
        j.row = j.inner == 1 ? 0 : one_of<int64_t>({j.inner, j.inner == 27 ? 3 : 7});
        j.block = j.inner == 1 ? one_of<int64_t>({1, 2, 16, 64, 150, 256, 1024}) : entries * j.inner;
        if (!j.row) j.row = j.block;
        j.slab = j.block * (blocks - 1) + (j.inner == 1 ? 1 + below(j.block) : (1 + below(entries)) * j.inner);
        j.count = slabs * j.slab;
        j.p_kind = one_of<int32_t>({F32, BF16, F16}), j.g_kind = one_of<int32_t>({F32, BF16, F16});
        j.rule = one_of<int32_t>({RULE_ADAM, RULE_LION, RULE_SGD});
        j.states = j.rule == RULE_ADAM ? 2 + (int)below(2) : 1;
        j.flags = (int32_t)below(8);
        j.key[0] = random_bits(), j.key[1] = random_bits() * 2, j.turn = random_bits();
        const float adam[8] = {0.99f, 0.01f * (float)below(2), 0.1f, 0.999f, 0.001f, 0.3f, 1e-8f, 0.01f};
        const float lion[8] = {0.99f, 0, 0.1f, 0.01f, 0.01f}, sgd[8] = {1, 0.01f, 0.9f, 1, 0.01f};
        memcpy(j.c, j.rule == RULE_ADAM ? adam : j.rule == RULE_LION ? lion : sgd, sizeof j.c);
        const int bits = one_of<int>({4, 8});
        j.p = keep(numbers(j.p_kind, j.count), j.p_kind);
        j.g = keep(numbers(j.g_kind, j.count), j.g_kind, false);
        for (int k = 0; k < j.states; ++k) add_state(k, bits, slabs * blocks);
    }
    void add_state(int k, int bits, int64_t blocks) {
        OptimState& s = j.state[k];
        s.kind = chance(5) ? STATE_FLOAT : k ? STATE_UFLOAT : STATE_TABLE;
        if (s.kind == STATE_FLOAT) {
            s.codes = keep(numbers(F32, j.count, 1, true), F32);
            return;
        }
        s.bits = bits, s.stochastic = k == 1 && chance(2), s.power = (int)below(2), s.hi = k ? 15.5f : 1;
        s.top = (1 << bits) - 1, s.shift = bits == 8 ? 19 : 22, s.split = bits == 8 ? 128 : 0;
        s.base = bits == 8 ? 1840 : 246, s.low = bits == 8 ? 856 : 124;
        const bool mirror = bits == 8 && chance(2);
        if (s.kind == STATE_TABLE) {
            tables.push_back(std::make_unique<TableRoom>(RandomTable(mirror ? 127 : 1 << bits, mirror)));
            s.table = (const CodeTable*)tables.back()->table.data();
        }
        Bytes codes = any_bytes(blocks * (j.block / j.row) * (bits == 8 ? j.row : (j.row + 1) / 2));
        if (s.kind == STATE_TABLE && mirror)
            for (auto& c : codes) c = (uint8_t)((c & 0x80) | (c & 127) % 127);
        s.codes = keep(codes, NONE);
        s.scale = (float*)keep(numbers(F32, blocks, 0.1f, true), F32);
    }
};

void optimizers() {
    std::vector<std::unique_ptr<JobCase>> cases((size_t)(chance(4) ? below(4) : 1));
    std::vector<Output> outputs;
    std::vector<OptimJob> jobs;
    std::string what = "pw_optim_steps";
    bool moderate = true;
    for (auto& c : cases) {
        c = std::make_unique<JobCase>();
        outputs.insert(outputs.end(), c->outputs.begin(), c->outputs.end());
        moderate &= c->moderate;
        const OptimJob& j = c->j;
        jobs.push_back(j);
        char line[200];
        snprintf(line, sizeof line,
                 " rule %d states %d (%d %d %d) bits %d kinds %d %d count %ld slab %ld block %ld inner %ld row %ld "
                 "flags %d;",
                 j.rule, j.states, j.state[0].kind, j.state[1].kind, j.state[2].kind, j.state[0].bits, j.p_kind,
                 j.g_kind, (long)j.count, (long)j.slab, (long)j.block, (long)j.inner, (long)j.row, j.flags);
        what += line;
    }
    const Room room(TableRoom::bytes(jobs.data(), jobs.size() * sizeof(OptimJob)));
    compare(
        what, outputs,
        [&](int threads) { return pw_optim_steps((const OptimJob*)room.data(), (int64_t)jobs.size(), threads); },
        moderate);
    if (jobs.empty()) return;
    const auto with = [&](auto change) {
        return [&, change] {
            OptimJob v = jobs[0];
            change(v);
            return (int64_t)pw_optim_steps(&v, 1, 1);
        };
    };
    using W = OptimJob;
    refuse("pw_optim_steps",
           {
               {"count", with([](W& v) { v.count = -1; })},
               {"slab", with([](W& v) { v.slab = 0; })},
               {"slabs that are not whole", with([](W& v) { v.count = v.slab * 2 + 1, v.slab += v.slab == 1; })},
               {"block", with([](W& v) { v.block = 0; })},
               {"row", with([](W& v) { v.row = v.block + 1; })},
               {"rule", with([](W& v) { v.rule = 3; })},
               {"states", with([](W& v) { v.states = 4; })},
               {"no states", with([](W& v) { v.states = 0; })},
               {"kind of p", with([](W& v) { v.p_kind = I8; })},
               {"kind of g", with([](W& v) { v.g_kind = NONE; })},
               {"kind of state", with([](W& v) { v.state[0].kind = 3; })},
               {"bits of state", with([](W& v) { v.state[0].kind = STATE_UFLOAT, v.state[0].bits = 5; })},
               {"no table",
                with([](W& v) { v.state[0].kind = STATE_TABLE, v.state[0].bits = 8, v.state[0].table = nullptr; })},
               {"shift", with([](W& v) { v.state[0].kind = STATE_UFLOAT, v.state[0].bits = 8, v.state[0].shift = 3; })},
               {"no p", with([](W& v) { v.count = v.slab, v.p = nullptr; })},
               {"no g", with([](W& v) { v.count = v.slab, v.g = nullptr; })},
               {"no jobs", [&] { return (int64_t)pw_optim_steps(nullptr, 1, 1); }},
               {"number of jobs", [&] { return (int64_t)pw_optim_steps(jobs.data(), -1, 1); }},
               {"threads", [&] { return (int64_t)pw_optim_steps(jobs.data(), 1, 0); }},
           });
}

// Those of a job; those of other structures are compared beside the calls that read them.
void extents() {
    OptimJob job = {};
    job.count = job.slab = 1 + below(5000), job.block = job.row = 64, job.rule = RULE_LION, job.states = 1;
    job.state[0].kind = STATE_FLOAT;
    const Room structure(TableRoom::bytes(&job, sizeof job)), out(2 * sizeof(Extent));
    const auto call = [&](int what, const void* from, const void* to, int room) {
        return (int64_t)pw_extents(what, from, (Extent*)to, room);
    };
    compare("pw_extents", {{out}}, [&](int) { return call(OPTIM_STATES, structure.data(), out.data(), 2); });
    refuse("pw_extents",
           {
               {"what", [&] { return call(6, structure.data(), out.data(), 2); }},
               {"no structure", [&] { return call(OPTIM_STATES, nullptr, out.data(), 2); }},
               {"no room", [&] { return call(OPTIM_STATES, structure.data(), out.data(), 1); }},
               {"room", [&] { return call(OPTIM_STATES, structure.data(), out.data(), -1); }},
               {"no extents", [&] { return call(OPTIM_STATES, structure.data(), nullptr, 2); }},
               {"a rule of the structure",
                [&] {
                    job.states = 2;
                    return call(OPTIM_STATES, &job, out.data(), 2);
                }},
           },
           -1);
}

// What the probe reads; its figures are those of the instruction set.
void probe() {
    const int what = (int)below(4);
    const Room p(any_bytes(what ? 0 : below(5000)));
    const int64_t n = what ? below(50) : (int64_t)p.size();
    compare("pw_probe", {}, [&](int threads) { return pw_probe(what, p.data(), n, threads); }, false);
    refuse("pw_probe",
           {
               {"what", [&] { return pw_probe(4, p.data(), 1, 1); }},
               {"n", [&] { return pw_probe(1, nullptr, -1, 1); }},
               {"threads", [&] { return pw_probe(1, nullptr, 1, 0); }},
               {"no memory", [&] { return pw_probe(0, nullptr, 64, 1); }},
           },
           0);
}

void choosing() {
    for (int i = 0; i < pw_isa_count(); ++i)
        if (pw_isa_here(i) && pw_isa_use(pw_isa_name(i)) != i)
            ++wrong, printf("instruction set %d is not the one chosen by its name\n", i);
    if (pw_isa_use("no such one") != -1) ++wrong, printf("an instruction set that nobody knows was found\n");
    refuse("pw_isa_name",
           {{"before the first", [&] { return (int64_t)(intptr_t)pw_isa_name(-1); }},
            {"after the last", [&] { return (int64_t)(intptr_t)pw_isa_name(pw_isa_count()); }}},
           0);
    refuse("pw_isa_here",
           {{"before the first", [&] { return (int64_t)pw_isa_here(-1); }},
            {"after the last", [&] { return (int64_t)pw_isa_here(pw_isa_count()); }}},
           0);
    refuse("pw_isa_use", {{"no name", [&] { return (int64_t)pw_isa_use(nullptr); }}}, -1);
}

}  // namespace
