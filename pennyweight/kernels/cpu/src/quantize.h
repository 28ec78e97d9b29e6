// Floats to codes of an integer format: round to nearest under scales that a rule chooses, with what the error is.
//
// The arithmetic is that of core/choose.py and core/numerics.py, bit for bit: parameters are chosen in the kind of x,
// each operation rounded to it; codes come from the parameters as stored. A row is read from memory once; it depends on
// nothing but itself, and its sums of squares are taken in one order, so neither threads nor instruction sets are seen.
#pragma once

#include <algorithm>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "affine.h"
#include "dequantize.h"
#include "lanes.h"
#include "pack.h"

namespace {

// What one row has per group, in whole vectors of 16.
struct Groups {
    float *lo, *hi;                  // range
    float *scale, *zero, *offset;    // as stored; 0 and -0 where there are none
    float *by;                       // what x is multiplied by, or divided by where there is an offset
    float *down, *least;             // offsets only
};
constexpr int64_t GROUP_ARRAYS = 8;

inline Groups groups_at(float* p, int64_t padded) {
    return {p, p + padded, p + 2 * padded, p + 3 * padded, p + 4 * padded, p + 5 * padded, p + 6 * padded, p + 7 * padded};
}

// 16 elements of x from p on, of which `count` are there; the last is repeated.
template <int KIND> inline F load_some(const char* p, int64_t count) {
    alignas(64) char room[64];
    for (int64_t i = 0; i < 16; ++i) memcpy(room + i * bytes_of(KIND), p + std::min(i, count - 1) * bytes_of(KIND), (size_t)bytes_of(KIND));
    return load_kind<KIND>(room);
}

// Least and greatest element of each group.
template <int KIND> void ranges_of(const char* x, int64_t k, int64_t group, float* lo, float* hi) {
    for (int64_t c = 0, g = 0; c < k; ++g) {
        const int64_t end = std::min(c + group, k);
        F least = end - c >= 16 ? load_kind<KIND>(x + c * bytes_of(KIND)) : load_some<KIND>(x + c * bytes_of(KIND), end - c);
        F most = least;
        for (c += 16; c + 16 <= end; c += 16) {
            const F v = load_kind<KIND>(x + c * bytes_of(KIND));
            least = fleast(least, v);
            most = fmost(most, v);
        }
        if (c < end) {
            const F v = load_some<KIND>(x + c * bytes_of(KIND), end - c);
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

// Scale, zero point and offset of 16 groups from their ranges, before they are stored.
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

// What encoding needs, from stored parameters.
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

struct Sums { double signal, noise; };

// Codes of one row as bytes, `shift` subtracted, and its sums of squares in float32. P: kind of x * scale; R: of the rest.
template <int KIND, int P, int R, bool OFFSET>
Sums encode_row(const Rounding& q, const char* x, const Groups& w, int32_t shift, uint8_t* out) {
    const int64_t k = q.to.k, group = q.to.group;
    const F lo = fset(q.lo), hi = fset(q.hi);
    const I base = iset(shift);
    Sums sums = {0, 0};
    F signal = fset(0), noise = fset(0);
    for (int64_t c = 0; c < k;) {
        const int64_t g = c / group, end = std::min((g + 1) * group, std::min(c / SPAN * SPAN + SPAN, k));
        const F by = fset(w.by[g]), scale = fset(w.scale[g]), offset = fset(w.offset[g]), less = fset(q.mid + w.zero[g]);
        const F add = fset(OFFSET ? q.lo : q.mid + w.zero[g]);
        const F down = fset(OFFSET ? w.down[g] : 0), least = fset(OFFSET ? w.least[g] : 0);
        const auto sixteen = [&](F v, uint8_t* p) {
            F steps;
            if constexpr (OFFSET)
                steps = round_kind<R>(fdiv(round_kind<R>(fsub(round_kind<P>(fmul(v, down)), least)), by));
            else
                steps = round_kind<P>(fmul(v, by));
            const F code = fleast(fmost(fadd(frint(steps), add), lo), hi);
            istore8((int8_t*)p, isub(iround(code), base));
            return fsub(fadd(fmul(fsub(code, less), scale), offset), v);
        };
        for (; c + 16 <= end; c += 16) {
            const F v = load_kind<KIND>(x + c * bytes_of(KIND)), d = sixteen(v, out + c);
            signal = fadd(signal, fmul(v, v));
            noise = fadd(noise, fmul(d, d));
        }
        if (c < end) {
            alignas(64) uint8_t bytes[16];
            alignas(64) float vs[16], ds[16];
            const F v = load_some<KIND>(x + c * bytes_of(KIND), end - c);
            fstore(ds, sixteen(v, bytes));
            fstore(vs, v);
            for (int64_t i = end - c; i < 16; ++i) vs[i] = ds[i] = 0;
            memcpy(out + c, bytes, (size_t)(end - c));
            signal = fadd(signal, fmul(fload(vs), fload(vs)));
            noise = fadd(noise, fmul(fload(ds), fload(ds)));
            c = end;
        }
        if (c % SPAN == 0 || c == k) {  // float32 sums of 64 numbers at most, then float64
            alignas(64) float s[16], n[16];
            fstore(s, signal);
            fstore(n, noise);
            for (int i = 0; i < 16; ++i) sums.signal += s[i], sums.noise += n[i];
            signal = noise = fset(0);
        }
    }
    return sums;
}
using Encoder = Sums (*)(const Rounding&, const char*, const Groups&, int32_t, uint8_t*);
template <int KIND> Encoder encoder_of(const Affine& a) {
    const bool p = promoted(KIND, a.scale) == KIND;
    if (!a.offset) return p ? encode_row<KIND, KIND, F32, false> : encode_row<KIND, F32, F32, false>;
    const bool r = p && promoted(a.offset, a.scale) == KIND;
    return r ? encode_row<KIND, KIND, KIND, true> : p ? encode_row<KIND, KIND, F32, true> : encode_row<KIND, F32, F32, true>;
}
inline Encoder encoder(const Affine& a) {
    return a.x == BF16 ? encoder_of<BF16>(a) : a.x == F16 ? encoder_of<F16>(a) : encoder_of<F32>(a);
}

// The sums of a row whose squares leave float32, which NaN and inf do too.
Sums exact_sums(const Rounding& q, const char* x, const Groups& w, int32_t shift, const uint8_t* codes) {
    Sums sums = {0, 0};
    const bool is_signed = q.to.store == PLAIN && q.lo < 0;
    for (int64_t c = 0; c < q.to.k; ++c) {
        const int64_t g = c / q.to.group;
        const float code = (float)((is_signed ? (int32_t)(int8_t)codes[c] : (int32_t)codes[c]) + shift);
        const float product = (code - (q.mid + w.zero[g])) * w.scale[g];
        const float value = std::min(std::max(product + w.offset[g], -LARGEST_OF[F32]), LARGEST_OF[F32]);
        const double v = part_at(q.to.x, x, c), d = (double)value - v;
        sums.signal += v * v;
        sums.noise += d * d;
    }
    return sums;
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
        if (step == 1) { memcpy((char*)out + (at + g) * size, room, (size_t)(n * size)); continue; }
        for (int64_t i = 0; i < n; ++i) memcpy((char*)out + (at + (g + i) * step) * size, room + i * size, (size_t)size);
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

// 8 bytes of codes below 2**bits become `bits` bytes of a stream.
inline uint64_t eight_codes(int bits, const uint8_t* p) {
    uint64_t v;
    memcpy(&v, p, 8);
    v = (v & 0x00ff00ff00ff00ffull) | (v & 0xff00ff00ff00ff00ull) >> (8 - bits);
    v = (v & 0x0000ffff0000ffffull) | (v & 0xffff0000ffff0000ull) >> (16 - 2 * bits);
    return (v & 0x00000000ffffffffull) | (v & 0xffffffff00000000ull) >> (32 - 4 * bits);
}

// Rows of bytes (16 of them in TILES, each in whole blocks of 32 and zero beyond a.width) to where codes lie.
void put_rows(const Affine& a, int64_t r0, int64_t rows, const uint8_t* bytes, int64_t step, uint8_t* codes) {
    if (a.store == TILES) {
        for (int64_t c = 0; c < step / 32; ++c) tile_of_rows(a.bits, bytes + 32 * c, step, 0, codes + r0 / 16 * a.stride + c * 64 * a.bits);
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* out = codes + (r0 + r) * a.stride;
        const uint8_t* p = bytes + r * step;
        if (a.store == PLAIN || a.bits == 8) { memcpy(out, p, (size_t)a.width); continue; }
        for (int64_t i = 0, left = a.stride; left > 0; i += 8, left -= a.bits) {
            const uint64_t v = eight_codes(a.bits, p + i);
            memcpy(out + i / 8 * a.bits, &v, (size_t)std::min<int64_t>(left, a.bits));
        }
    }
}

// x [n, k] of rows ldx elements apart. sums: signal and noise of the whole, and room for 2 n more. 1: no memory.
int quantize(const Rounding* rounding, const char* x, int64_t ldx, const Parts* parts, double* sums, int threads) {
    const Rounding& q = *rounding;
    const Affine& a = q.to;
    const int64_t height = a.store == TILES ? 16 : 1, units = (a.n + height - 1) / height;
    const int64_t step = a.store == TILES ? a.stride / (64 * a.bits) * 32 : (a.width + 63) / 32 * 32;
    const int64_t padded = (a.groups + 31) / 16 * 16, floats = GROUP_ARRAYS * padded;
    const int64_t each = (floats * 4 + height * step + 127) / 64 * 64;
    char* room = (char*)aligned_alloc(64, (size_t)(each * threads));
    if (!room) return 1;
    const int32_t shift = a.store == PLAIN ? 0 : (int32_t)q.lo;
    const Encoder encode = encoder(a);
    double* row_sums = sums + 2;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char* mine = room;
#if defined(_OPENMP)
        mine += omp_get_thread_num() * each;
#endif
        memset(mine, 0, (size_t)each);
        const Groups w = groups_at((float*)mine, padded);
        uint8_t* bytes = (uint8_t*)mine + floats * 4;
#pragma omp for schedule(static)
        for (int64_t u = 0; u < units; ++u) {
            const int64_t r0 = u * height, rows = std::min(height, a.n - r0);
            if (rows < height) memset(bytes, -shift, (size_t)(height * step));
            for (int64_t r = r0; r < r0 + rows; ++r) {
                const char* row = x + r * ldx * bytes_of(a.x);
                uint8_t* out = bytes + (r - r0) * step;
                parameters(q, *parts, r, row, w);
                Sums s = encode(q, row, w, shift, out);
                if (!(s.signal > 1e-21 && s.signal < 1e36 && s.noise < 1e36)) s = exact_sums(q, row, w, shift, out);
                row_sums[2 * r] = s.signal;
                row_sums[2 * r + 1] = s.noise;
                if (a.width > a.k) memset(out + a.k, out[a.k - 1], (size_t)(a.width - a.k));
                if (step > a.width) memset(out + a.width, a.store == TILES ? -shift : 0, (size_t)(step - a.width));
            }
            put_rows(a, r0, rows, bytes, step, (uint8_t*)parts->codes);
        }
    }
    free(room);
    sums[0] = sums[1] = 0;
    for (int64_t r = 0; r < a.n; ++r) sums[0] += row_sums[2 * r], sums[1] += row_sums[2 * r + 1];
    return 0;
}

// Least and greatest element of each group of each row, in the kind of x: out [n, groups, 2].
void ranges(const Affine* w, const char* x, int64_t ldx, char* out, int threads) {
    const Affine& a = *w;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < a.n; ++r)
        for (int64_t g = 0; g < a.groups; ++g) {
            alignas(64) float ends[16] = {0};
            alignas(64) char room[64];
            const int64_t c = g * a.group;
            ranges_any(a.x, x + (r * ldx + c) * bytes_of(a.x), std::min(a.group, a.k - c), a.group, ends, ends + 1);
            store_part(a.x, ends, 2, 1, room, 0);
            memcpy(out + (r * a.groups + g) * 2 * bytes_of(a.x), room, (size_t)(2 * bytes_of(a.x)));
        }
}

template <class WORD> bool finite_words(const WORD* p, int64_t count, WORD limit, int threads) {
    constexpr int64_t CHUNK = 1 << 15;
    int64_t bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) if (threads > 1)
    for (int64_t u = 0; u < (count + CHUNK - 1) / CHUNK; ++u) {
        WORD top = 0;
        const WORD mask = (WORD)((WORD)~(WORD)0 >> 1);
        const int64_t end = std::min(count, u * CHUNK + CHUNK);
        for (int64_t i = u * CHUNK; i < end; ++i) {
            const WORD v = p[i] & mask;
            top = v > top ? v : top;
        }
        bad += top >= limit;
    }
    return !bad;
}

// 1 where none of `count` elements is NaN or inf.
int finite(const void* x, int kind, int64_t count, int threads) {
    if (kind == F32) return finite_words<uint32_t>((const uint32_t*)x, count, 0x7f800000, threads);
    return finite_words<uint16_t>((const uint16_t*)x, count, kind == BF16 ? 0x7f80 : 0x7c00, threads);
}

}  // namespace
