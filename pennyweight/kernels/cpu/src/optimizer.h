// Optimizer steps with quantized states: read, update, requantize and write each block while it is in the cache.
//
// Bit-identical to optim/update_rules.py and optim/quantized_states.py if torch's kernels use fused multiply-add like
// these. A block depends only on itself and a counter, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "platform.h"

#include "abi.h"
#include "dequantize.h"
#include "simd.h"

namespace {

alignas(64) constexpr int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// 32 random bits for each of 16 elements from `at` on: the mixer "lowbias32" (C. Wellons, hash-prospector, 2018), keyed
// before each multiplication. The step times the golden ratio is added to each half, see core/stochastic_rounding.py.
inline I random16(const OptimJob& j, int64_t at) {
    I x = uadd(iset((int32_t)(uint32_t)at), iload(LANES));
    x = ixor(x, iset((int32_t)j.key[0]));
    x = umul(ixor(x, ishr<16>(x)), iset(0x21f0aaad));
    x = ixor(x, iset((int32_t)j.key[1]));
    x = umul(ixor(x, ishr<15>(x)), iset((int32_t)0xd35a2d97u));
    return ixor(x, ishr<15>(x));
}
inline I upper16(const OptimJob& j, int64_t at) { return ishr<16>(uadd(random16(j, at), iset((int32_t)j.turn))); }
inline I lower16(const OptimJob& j, int64_t at) {
    return ishr<16>(uadd(ishl(random16(j, at), 16), iset((int32_t)j.turn)));
}

// -- floats in and out ------------------------------------------------------------------------------------------------

template <int KIND> void read_floats(const char* p, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) fstore(out + i, load_kind<KIND>(p + i * bytes_of(KIND)));
    if (i == n) return;
    fstore(out + i, fset(0));
    for (; i < n; ++i) out[i] = part_at(KIND, p, i);
}
inline void read_any(int kind, const void* p, int64_t at, int64_t n, float* out) {
    const char* from = (const char*)p + at * bytes_of(kind);
    if (kind == BF16) read_floats<BF16>(from, n, out);
    else if (kind == F16) read_floats<F16>(from, n, out);
    else read_floats<F32>(from, n, out);
}
template <int KIND> void write_floats(char* p, int64_t n, const float* from) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_kind<KIND>(p + i * bytes_of(KIND), fload(from + i));
    alignas(64) char room[64];
    if (i == n) return;
    store_kind<KIND>(room, fload(from + i));
    memcpy(p + i * bytes_of(KIND), room, (size_t)((n - i) * bytes_of(KIND)));
}
// Stochastic rounding to bfloat16. NaN and inf are not changed.
inline void write_by_chance(const OptimJob& j, int64_t at, int64_t n, const float* from) {
    for (int64_t i = 0; i < n; i += 16) {
        const I b = bits(fload(from + i)), a = iand(b, iset(0x7fffffff));
        const I up = uadd(b, lower16(j, at + i));
        const I kept = ior(b, iabove(a, iset(0x7f800000), iset(0x400000), iset(0)));
        alignas(64) int16_t room[16];
        istore16(room, ishr<16>(iabove(iset(0x7f800000), a, up, kept)));
        memcpy((uint16_t*)j.p + at + i, room, (size_t)(2 * std::min<int64_t>(16, n - i)));
    }
}

// -- codes ------------------------------------------------------------------------------------------------------------

// Bytes of the codes of `count` blocks.
inline int64_t code_bytes(const OptimJob& j, const OptimState& s, int64_t count) {
    return count * (j.block / j.row) * (s.bits == 8 ? j.row : (j.row + 1) / 2);
}
// The first n codes of a block, one per byte; and back, all of them.
inline void unpack4(const uint8_t* __restrict p, int64_t row, int64_t n, uint8_t* __restrict out) {
    for (; n > 0; n -= row, p += (row + 1) / 2, out += row) {
        const int64_t end = std::min(row, n);
        for (int64_t i = 0; i < end / 2; ++i) {
            out[2 * i] = p[i] & 15;
            out[2 * i + 1] = p[i] >> 4;
        }
        if (end % 2) out[end - 1] = p[end / 2] & 15;
    }
}
inline void pack4(const uint8_t* __restrict codes, int64_t row, int64_t n, uint8_t* __restrict p) {
    for (; n > 0; n -= row, p += (row + 1) / 2, codes += row) {
        for (int64_t i = 0; i < row / 2; ++i) p[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        if (row % 2) p[row / 2] = codes[row - 1];
    }
}

inline void decode_block(const OptimState& s, const uint8_t* codes, float scale, int64_t n, float* out) {
    const F by = fset(scale);
    if (s.kind == STATE_UFLOAT) {
        const I base = iset(s.base), low = iset(s.low), last = iset(s.split - 1);
        for (int64_t i = 0; i < n; i += 16) {
            const I code = iload8u(codes + i);
            const I b = iabove(code, last, ishl(iadd(code, base), s.shift), ishl(iadd(code, low), s.shift + 1));
            fstore(out + i, fmul(bitcast(b), by));
        }
    } else if (s.bits == 4) {
        const Lookup16 values(s.table->values);
        for (int64_t i = 0; i < n; i += 16) fstore(out + i, fmul(values.at(iload8u(codes + i)), by));
    } else {
        for (int64_t i = 0; i < n; i += 16) fstore(out + i, fmul(pick(s.table->values, iload8u(codes + i)), by));
    }
}

inline void encode_block(const OptimJob& j, const OptimState& s, const float* x, float scale, int64_t at, int64_t n,
                         uint8_t* out) {
    const F by = fset(scale);
    if (s.kind == STATE_UFLOAT) {
        const I base = iset(s.base), low = iset(s.low), top = iset(s.top),
                below = iset(((s.split + s.base) << s.shift) - 1);
        const I half = iset((1 << (s.shift - 1)) - 1), half_low = iset((1 << s.shift) - 1);
        for (int64_t i = 0; i < n; i += 16) {
            const I b = bits(fdiv(fload(x + i), by));
            I up = half, up_low = half_low;
            if (s.stochastic) {
                up = ishl(upper16(j, at + i), s.shift - 16);
                up_low = ishl(up, 1);
            }
            const I code =
                iabove(b, below, isub(ishr(uadd(b, up), s.shift), base), isub(ishr(uadd(b, up_low), s.shift + 1), low));
            const I least = imax(code, iset(0));
            istore8((int8_t*)out + i, iabove(least, top, top, least));
        }
        return;
    }
    const CodeTable& t = *s.table;
    const I low = iset((1 << t.shift) - 1), first = iset(t.first), last = iset(t.last), half = iset(t.negative);
    const I turn = iset(t.negative ? 2 : 0), sign = iset(t.mirror ? 128 : 0);
    for (int64_t i = 0; i < n; i += 16) {
        const I b = bits(fdiv(fload(x + i), by)), a = iand(b, iset(0x7fffffff));
        const I minus = isub(iset(0), ishr<31>(b));  // all bits of a negative number's lane
        const I near = imax(isub(ishr(a, t.shift), first), iset(0));
        const I cell = iadd(iabove(near, last, last, near), iand(minus, half));
        const I entry = bits(pick((const float*)t.cells, cell));
        const I more = iabove(iand(a, low), ishr<8>(entry), isub(iset(1), iand(minus, turn)), iset(0));
        istore8((int8_t*)out + i, ior(iadd(iand(entry, iset(255)), more), iand(minus, sign)));
    }
}

// -- rules ------------------------------------------------------------------------------------------------------------

// torch.lerp: a + w (b - a), from the nearer end.
inline F flerp(F a, F b, float w) {
    const F way = fsub(b, a);
    return w < 0.5f ? fma(fset(w), way, a) : fma(fset(w - 1), way, b);
}

// c of RULE_ADAM: the initial factor of p, weight decay of the gradient, 1 - beta1, beta2, 1 - beta2, root of the
// second moment's correction, eps, step size. States: first moment, second moment, and with three states its maximum.
// c of RULE_LION: the first two, 1 - beta1, 1 - beta2, learning rate. State: momentum.
// c of RULE_SGD: the first two, momentum, 1 - dampening, learning rate. State: momentum.
inline void update(const OptimJob& j, float* p, const float* g, float* const* s, int64_t n) {
    const float* c = j.c;
    const bool maximize = j.flags & MAXIMIZE, three = j.states == 3;
    for (int64_t i = 0; i < n; i += 16) {
        F x = fload(p + i), d = fload(g + i), m = fload(s[0] + i);
        if (maximize) d = fsub(fset(-0.0f), d);
        if (c[0] != 1) x = fmul(x, fset(c[0]));
        if (c[1] != 0) d = fma(x, fset(c[1]), d);
        if (j.rule == RULE_ADAM) {
            F v = fload(s[1] + i);
            m = flerp(m, d, c[2]);
            v = fma(fmul(fset(c[4]), d), d, fmul(v, fset(c[3])));
            fstore(s[1] + i, v);
            if (three) {
                v = fmost(fload(s[2] + i), v);
                fstore(s[2] + i, v);
            }
            const F root = fadd(fdiv(fsqrt(v), fset(c[5])), fset(c[6]));
            x = fadd(x, fdiv(fmul(fset(-c[7]), m), root));
        } else if (j.rule == RULE_LION) {
            const F to = flerp(m, d, c[2]), rate = fset(c[4]), none = fset(0);
            x = fsub(x, fsub(fabove(to, none, rate, none), fabove(none, to, rate, none)));
            m = flerp(m, d, c[3]);
        } else {
            m = fma(fset(c[3]), d, fmul(m, fset(c[2])));
            x = fma(fset(-c[4]), j.flags & NESTEROV ? fma(fset(c[2]), m, d) : m, x);
        }
        fstore(s[0] + i, m);
        fstore(p + i, x);
    }
}

struct OptimRoom {  // scratch of one thread
    float *p, *g, *s[3];
    uint8_t* codes;
};

// The smallest power of two that is at least a; from 2**-127 to 2**127.
inline float power_above(float a) {
    int exponent;
    const float mantissa = std::frexp(a, &exponent);
    if (!(a > 0)) return 0x1p-127f;
    return std::isfinite(a) ? std::ldexp(1.0f, std::min(std::max(exponent - (mantissa == 0.5f), -127), 127)) : 0x1p127f;
}

inline void optim_block(const OptimJob& j, int64_t index, const OptimRoom& room) {
    const int64_t in_slab = (j.slab + j.block - 1) / j.block, in = index % in_slab * j.block;
    const int64_t at = index / in_slab * j.slab + in, n = std::min(j.block, j.slab - in), whole = (n + 15) / 16 * 16;
    read_any(j.p_kind, j.p, at, n, room.p);
    read_any(j.g_kind, j.g, at, n, room.g);
    for (int k = 0; k < j.states; ++k) {
        const OptimState& s = j.state[k];
        if (s.kind == STATE_FLOAT) {
            read_any(F32, s.codes, at, n, room.s[k]);
            continue;
        }
        const uint8_t* codes = (const uint8_t*)s.codes + code_bytes(j, s, index);
        if (s.bits == 4 || whole != n) {
            memset(room.codes + n / 16 * 16, 0, 16);
            if (s.bits == 4) unpack4(codes, j.row, n, room.codes);
            else memcpy(room.codes, codes, (size_t)n);
            codes = room.codes;
        }
        decode_block(s, codes, s.scale[index], n, room.s[k]);
    }
    update(j, room.p, room.g, room.s, n);
    if (j.flags & STOCHASTIC && j.p_kind == BF16) write_by_chance(j, at, n, room.p);
    else if (j.p_kind == BF16) write_floats<BF16>((char*)j.p + 2 * at, n, room.p);
    else if (j.p_kind == F16) write_floats<F16>((char*)j.p + 2 * at, n, room.p);
    else write_floats<F32>((char*)j.p + 4 * at, n, room.p);
    for (int k = 0; k < j.states; ++k) {
        const OptimState& s = j.state[k];
        float* x = room.s[k];
        if (s.kind == STATE_FLOAT) {
            write_floats<F32>((char*)s.codes + 4 * at, n, x);
            continue;
        }
        for (int64_t i = n; i < whole; ++i) x[i] = 0;
        F most = fset(0);
        for (int64_t i = 0; i < whole; i += 16) most = fmost(bitcast(iand(bits(fload(x + i)), iset(0x7fffffff))), most);
        const float ratio = fmost(most) / s.hi;
        const float scale = s.power ? power_above(ratio) : std::min(std::max(ratio, 1.17549435e-38f), 3.40282347e38f);
        s.scale[index] = scale;
        uint8_t* to = (uint8_t*)s.codes + code_bytes(j, s, index);
        uint8_t* codes = s.bits == 8 && whole == j.block ? to : room.codes;
        encode_block(j, s, x, scale, at, n, codes);
        for (int64_t i = n; i < j.block; ++i) codes[i] = codes[i - j.inner];
        if (s.bits == 4) pack4(codes, j.row, j.block, to);
        else if (codes != to) memcpy(to, codes, (size_t)j.block);
    }
}

// Runs all jobs, in pieces of about 2**15 elements distributed over threads. Returns 1 if out of memory.
int optim_steps(const OptimJob* jobs, int64_t count, int threads) {
    int64_t most = 16;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, (jobs[i].block + 31) / 16 * 16);
    const int64_t each = (5 * 4 + 1) * most / 64 * 64 + 64;
    char* rooms = (char*)aligned_memory(64, (size_t)(each * threads));
    if (!rooms) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char* mine = rooms;
#if defined(_OPENMP)
        mine += omp_get_thread_num() * each;
#endif
        float* f = (float*)mine;
        const OptimRoom room = {f, f + most, {f + 2 * most, f + 3 * most, f + 4 * most}, (uint8_t*)(f + 5 * most)};
        for (int64_t i = 0; i < count; ++i) {
            const OptimJob& j = jobs[i];
            const int64_t blocks = j.count / j.slab * ((j.slab + j.block - 1) / j.block);
            const int64_t piece = std::max<int64_t>(1, (1 << 15) / j.block), pieces = (blocks + piece - 1) / piece;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t u = 0; u < pieces; ++u)
                for (int64_t b = u * piece; b < std::min(blocks, (u + 1) * piece); ++b) optim_block(j, b, room);
        }
    }
    free_aligned(rooms);
    return 0;
}

}  // namespace
