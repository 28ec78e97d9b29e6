// Scales, zero points and offsets of the groups of a row, chosen by a rule from the range of each group, and the values
// that encoding needs. Bit-identical to core/qparams.py and core/numerics.py: parameters are chosen in the kind of x,
// each operation rounded to it, and codes are computed from the parameters as stored.
#pragma once

#include <algorithm>

#include "abi.h"
#include "dequantize.h"
#include "simd.h"

namespace {

// Per-group values of one row, padded to whole vectors of 16.
struct Groups {
    float *lo, *hi;                // range
    float *scale, *zero, *offset;  // as stored; 0 and -0 where there are none
    float* by;                     // multiplier of x, or divisor if there is an offset
    float *down, *least;           // offsets only
};
constexpr int64_t GROUP_ARRAYS = 8;

inline Groups groups_at(float* p, int64_t padded) {
    return {
        p, p + padded, p + 2 * padded, p + 3 * padded, p + 4 * padded, p + 5 * padded, p + 6 * padded, p + 7 * padded};
}

// 16 elements of x from p on, of which only `count` exist; the last one is repeated.
template <int KIND> inline F load_some(const char* p, int64_t count) {
    alignas(64) char room[64];
    for (int64_t i = 0; i < 16; ++i)
        memcpy(room + i * bytes_of(KIND), p + std::min(i, count - 1) * bytes_of(KIND), (size_t)bytes_of(KIND));
    return load_kind<KIND>(room);
}

// Minimum and maximum of each group.
template <int KIND> void ranges_of(const char* x, int64_t k, int64_t group, float* lo, float* hi) {
    for (int64_t c = 0, g = 0; c < k; ++g) {
        const int64_t end = std::min(c + group, k);
        if constexpr (KIND != F32) {
            const auto* p = (const uint16_t*)x;
            int16_t least, most;
            const int64_t whole = (end - c) / 32 * 32;
            ends_of_words(p + c, whole, &least, &most);
            for (c += whole; c < end; ++c) {
                least = std::min(least, ordered(p[c]));
                most = std::max(most, ordered(p[c]));
            }
            const uint16_t ends[2] = {(uint16_t)ordered((uint16_t)least), (uint16_t)ordered((uint16_t)most)};
            lo[g] = part_at(KIND, ends, 0);
            hi[g] = part_at(KIND, ends, 1);
            continue;
        }
        F least = end - c >= 16 ? load_kind<KIND>(x + c * 4) : load_some<KIND>(x + c * 4, end - c);
        F most = least;
        for (c += 16; c < end; c += 16) {
            const F v = end - c >= 16 ? load_kind<KIND>(x + c * 4) : load_some<KIND>(x + c * 4, end - c);
            least = fleast(least, v);
            most = fmost(most, v);
        }
        lo[g] = fleast(least);
        hi[g] = fmost(most);
        c = end;
    }
}
inline void ranges_any(int kind, const char* x, int64_t k, int64_t group, float* lo, float* hi) {
    if (kind == BF16) return ranges_of<BF16>(x, k, group, lo, hi);
    if (kind == F16) return ranges_of<F16>(x, k, group, lo, hi);
    return ranges_of<F32>(x, k, group, lo, hi);
}

inline F infinity() { return fset(float_from(0x7f800000)); }
inline F magnitude(F a) { return bitcast(iand(bits(a), iset(0x7fffffff))); }
inline F finite_or(F a, F other) { return fabove(infinity(), magnitude(a), a, other); }
inline F within(F a, float lo, float hi) { return fleast(fmost(a, fset(lo)), fset(hi)); }
inline F negative(F a) { return fsub(fset(-0.0f), a); }

// Stores a number of kind `from` in kind `to`, within its range.
inline F stored(int to, F a) { return within(round_kind(to, a), -LARGEST_OF[to], LARGEST_OF[to]); }

// Scale, zero point and offset of 16 groups from their ranges, before rounding to the stored kinds.
inline void choose16(const Rounding& q, F lo, F hi, F* scale, F* zero, F* offset) {
    const int kind = q.to.x;
    const auto round = [&](F a) { return round_kind(kind, a); };
    const float bottom = q.lo - q.mid, top = q.hi - q.mid, steps = q.hi - q.lo;
    const auto span = [&] {
        const F wide = round(fdiv(round(fsub(hi, lo)), fset(steps)));
        return finite_or(wide, round(fsub(round(fdiv(hi, fset(steps))), round(fdiv(lo, fset(steps))))));
    };
    const auto floored = [&](F s) { return within(s, q.floor, LARGEST_OF[kind]); };
    *zero = fset(0);
    *offset = fset(0);
    if (q.rule == RULE_SYMMETRIC) {
        *scale = floored(round(bottom >= 0 ? fdiv(hi, fset(top)) : fdiv(fmost(negative(lo), hi), fset(steps / 2))));
    } else if (q.rule == NO_CLIP) {
        const F low = round(fdiv(lo, fset(bottom))), high = round(fdiv(hi, fset(top)));
        *scale = floored(bottom == 0 ? high : top == 0 ? low : fmost(low, high));
    } else if (q.rule == RULE_ASYMMETRIC) {
        lo = fleast(lo, fset(0));
        hi = fmost(hi, fset(0));
        *scale = floored(span());
        *zero = within(round(fsub(fset(q.lo), frint(round(fdiv(lo, *scale))))), q.lo, q.hi);
    } else {
        *scale = floored(span());
        const F sum = round(fadd(lo, round(fmul(*scale, fset(q.mid - q.lo)))));
        *offset = finite_or(sum, round(fadd(round(fmul(lo, fset(q.rest))), round(fmul(hi, fset(q.part))))));
    }
}

inline int promoted(int a, int b) { return a == b ? a : F32; }

// The values that encoding needs, from stored parameters.
inline void derive16(const Rounding& q, const Groups& w, int64_t g) {
    const int s = q.to.scale, o = q.to.offset;
    const F scale = fload(w.scale + g);
    if (!o) {
        F by = round_kind(s, fdiv(fset(1), scale));
        if (s == F16) by = finite_or(by, fdiv(fset(1), scale));
        fstore(w.by + g, finite_or(by, fset(0)));
        return;
    }
    const F down = fabove(scale, fset(q.large), fset(0.25f), fset(1));
    const F less = round_kind(s, fmul(scale, down));
    const F start = round_kind(promoted(o, s), fmul(fload(w.offset + g), down));
    const F least = round_kind(promoted(o, s), fsub(start, round_kind(s, fmul(less, fset(q.mid - q.lo)))));
    fstore(w.by + g, fabove(magnitude(less), fset(0), less, infinity()));
    fstore(w.down + g, down);
    fstore(w.least + g, least);
}

inline void store_part(int kind, const float* from, int64_t count, int64_t step, void* out, int64_t at) {
    for (int64_t g = 0; g < count; g += 16) {
        alignas(64) char room[64];
        const F v = fload(from + g);
        if (kind == BF16) store_kind<BF16>(room, v);
        else if (kind == F16) store_kind<F16>(room, v);
        else if (kind == F32) store_kind<F32>(room, v);
        else istore8((int8_t*)room, iround(v));
        const int64_t size = bytes_of(kind), n = std::min<int64_t>(16, count - g);
        char* to = (char*)out + (at + g * step) * size;
        if (step == 1) memcpy(to, room, (size_t)(n * size));
        else if (size == 4)
            for (int64_t i = 0; i < n; ++i) memcpy(to + i * step * 4, room + i * 4, 4);
        else if (size == 2)
            for (int64_t i = 0; i < n; ++i) memcpy(to + i * step * 2, room + i * 2, 2);
        else
            for (int64_t i = 0; i < n; ++i) to[i * step] = room[i];
    }
}

// Parameters of one row: chosen and stored, or as given.
void parameters(const Rounding& q, const Parts& parts, int64_t r, const char* x, const Groups& w) {
    const Affine& a = q.to;
    if (q.rule == GIVEN) {
        for (int64_t g = 0; g < a.groups; ++g) {
            const int64_t i = r / a.row_block * a.groups + g;
            w.scale[g] = part_at(a.scale, parts.scale, i);
            w.zero[g] = a.zero_point ? part_at(a.zero_point, parts.zero_point, i) : 0;
            w.offset[g] = a.offset ? part_at(a.offset, parts.offset, i) : -0.0f;
        }
    } else {
        ranges_any(a.x, x, a.k, a.group, w.lo, w.hi);
    }
    for (int64_t g = 0; g < a.groups; g += 16) {
        if (q.rule != GIVEN) {
            F scale, zero, offset;
            choose16(q, fload(w.lo + g), fload(w.hi + g), &scale, &zero, &offset);
            fstore(w.scale + g, stored(a.scale, scale));
            fstore(w.zero + g, a.zero_point ? zero : fset(0));
            fstore(w.offset + g, a.offset ? stored(a.offset, offset) : fset(-0.0f));
        }
        derive16(q, w, g);
    }
    if (q.rule == GIVEN) return;
    const int64_t at = part_index(a, r, 0), step = a.store == TILES ? 16 : 1;
    store_part(a.scale, w.scale, a.groups, step, parts.scale, at);
    if (a.zero_point) store_part(a.zero_point, w.zero, a.groups, step, parts.zero_point, at);
    if (a.offset) store_part(a.offset, w.offset, a.groups, step, parts.offset, at);
}

}  // namespace
