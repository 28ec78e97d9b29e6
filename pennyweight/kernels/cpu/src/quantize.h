// Floats to codes of an integer format: round-to-nearest with scales chosen by a rule, and the quantization error.
//
// Bit-identical to core/numerics.py. A row is read from memory once and depends only on itself, and its sums of squares
// have a fixed order, so results do not depend on threads or instruction sets.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "platform.h"

#include "abi.h"
#include "dequantize.h"
#include "pack.h"
#include "qparams.h"
#include "simd.h"

namespace {

struct Sums {
    double signal, noise;
};

// round_kind<R>(b / by), with `over` = 1 / by. In bfloat16 one correction of b * over is exact: a quotient of two such
// numbers is either halfway between two others, and is then computed exactly, or 2**-17 of it away. Not beyond 2**60.
template <int R> inline F quotient(F b, F by, F over, bool usual) {
    if (R != BF16 || !usual) return round_kind<R>(fdiv(b, by));
    const F guess = fmul(b, over);
    return round_kind<R>(fma(fma(negative(guess), by, b), over, guess));
}

// Codes of one row as bytes, with `shift` subtracted, and its sums of squares in float32. P: kind of x * scale; R: kind
// of the rest. A scale multiplies the code minus a constant; that difference, n, is rounded and clamped.
template <int KIND, int P, int R, bool OFFSET>
Sums encode_row(const Rounding& q, const char* x, const Groups& w, int32_t shift, uint8_t* out) {
    const int64_t k = q.to.k, group = q.to.group;
    Sums sums = {0, 0};
    F signal = fset(0), noise = fset(0);
    const auto fold = [&] {  // float32 sums of 64 numbers at most, then float64
        alignas(64) float s[16], n[16];
        fstore(s, signal);
        fstore(n, noise);
        for (int i = 0; i < 16; ++i) sums.signal += s[i], sums.noise += n[i];
        signal = noise = fset(0);
    };
    const bool moves = !OFFSET && q.to.zero_point;
    const F first = fset(q.lo - q.mid);
    F lo, hi;
    I base;
    const auto limits = [&](float less) {  // code - n
        lo = fset(q.lo - less);
        hi = fset(q.hi - less);
        base = iset((int32_t)less - shift);
    };
    limits(OFFSET ? q.lo : q.mid);
    int64_t c = 0, next = SPAN;
    for (int64_t g = 0; c < k; ++g) {
        if (moves) limits(w.zero[g]);
        const F by = fset(w.by[g]), scale = fset(w.scale[g]);
        const F offset = fset(w.offset[g]);
        const F down = fset(OFFSET ? w.down[g] : 0), least = fset(OFFSET ? w.least[g] : 0);
        const F over = fset(OFFSET ? 1 / w.by[g] : 0);
        const bool same = OFFSET && w.down[g] == 1;
        const bool usual = OFFSET && q.rule != GIVEN && w.by[g] > 0x1p-60f && w.by[g] < 0x1p60f;
        const auto sixteen = [&](F v, uint8_t* p) __attribute__((always_inline)) {
            F steps;
            if constexpr (OFFSET) {
                const F a = same ? v : round_kind<P>(fmul(v, down));
                steps = quotient<R>(round_kind<R>(fsub(a, least)), by, over, usual);
            } else {
                steps = round_kind<P>(fmul(v, by));
            }
            const F n = fleast(fmost(frint(steps), lo), hi);
            istore8((int8_t*)p, iadd(iround(n), base));
            return fsub(OFFSET ? fadd(fmul(fadd(n, first), scale), offset) : fmul(n, scale), v);
        };
        const int64_t stop = std::min((g + 1) * group, k);
        while (c < stop) {
            const int64_t end = std::min(stop, next);
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
            if (c == next) next += SPAN, fold();
        }
    }
    fold();
    return sums;
}
using Encoder = Sums (*)(const Rounding&, const char*, const Groups&, int32_t, uint8_t*);
template <int KIND> Encoder encoder_of(const Affine& a) {
    const bool p = promoted(KIND, a.scale) == KIND;
    if (!a.offset) return p ? encode_row<KIND, KIND, F32, false> : encode_row<KIND, F32, F32, false>;
    const bool r = p && promoted(a.offset, a.scale) == KIND;
    return r   ? encode_row<KIND, KIND, KIND, true>
           : p ? encode_row<KIND, KIND, F32, true>
               : encode_row<KIND, F32, F32, true>;
}
inline Encoder encoder(const Affine& a) {
    return a.x == BF16 ? encoder_of<BF16>(a) : a.x == F16 ? encoder_of<F16>(a) : encoder_of<F32>(a);
}

// The sums of a row whose squares overflow float32, including NaN and inf.
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

// 8 bytes of codes below 2**bits become `bits` bytes of a stream.
inline uint64_t eight_codes(int bits, const uint8_t* p) {
    uint64_t v;
    memcpy(&v, p, 8);
    v = (v & 0x00ff00ff00ff00ffull) | (v & 0xff00ff00ff00ff00ull) >> (8 - bits);
    v = (v & 0x0000ffff0000ffffull) | (v & 0xffff0000ffff0000ull) >> (16 - 2 * bits);
    return (v & 0x00000000ffffffffull) | (v & 0xffffffff00000000ull) >> (32 - 4 * bits);
}

// Writes rows of bytes (16 rows in TILES, each in whole blocks of 32 and zero beyond a.width) to the stored codes.
void put_rows(const Affine& a, int64_t r0, int64_t rows, const uint8_t* bytes, int64_t step, uint8_t* codes) {
    if (a.store == TILES) {
        for (int64_t c = 0; c < step / 32; ++c)
            tile_of_rows(a.bits, bytes + 32 * c, step, 0, codes + r0 / 16 * a.stride + c * 64 * a.bits);
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* out = codes + (r0 + r) * a.stride;
        const uint8_t* p = bytes + r * step;
        if (a.store == PLAIN || a.bits == 8) {
            memcpy(out, p, (size_t)a.width);
            continue;
        }
        for (int64_t i = 0, left = a.stride; left > 0; i += 8, left -= a.bits) {
            const uint64_t v = eight_codes(a.bits, p + i);
            memcpy(out + i / 8 * a.bits, &v, (size_t)std::min<int64_t>(left, a.bits));
        }
    }
}

// x [n, k] with row stride ldx. sums: signal and noise of the tensor, and scratch for 2 n more. 1: out of memory.
int quantize(const Rounding* rounding, const char* x, int64_t ldx, const Parts* parts, double* sums, int threads) {
    const Rounding& q = *rounding;
    const Affine& a = q.to;
    const int64_t height = a.store == TILES ? 16 : 1, units = (a.n + height - 1) / height;
    const int64_t step = a.store == TILES ? a.stride / (64 * a.bits) * 32 : (a.width + 63) / 32 * 32;
    const int64_t padded = (a.groups + 31) / 16 * 16, floats = GROUP_ARRAYS * padded;
    const int64_t each = (floats * 4 + height * step + 127) / 64 * 64;
    char* room = (char*)aligned_memory(64, (size_t)(each * threads));
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
#pragma omp for schedule(dynamic, 8)
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
    free_aligned(room);
    sums[0] = sums[1] = 0;
    for (int64_t r = 0; r < a.n; ++r) sums[0] += row_sums[2 * r], sums[1] += row_sums[2 * r + 1];
    return 0;
}

// Minimum and maximum of each group of each row, in the kind of x: out [n, groups, 2].
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
        const WORD mask = (WORD)((WORD) ~(WORD)0 >> 1);
        const int64_t end = std::min(count, u * CHUNK + CHUNK);
        for (int64_t i = u * CHUNK; i < end; ++i) {
            const WORD v = p[i] & mask;
            top = v > top ? v : top;
        }
        bad += top >= limit;
    }
    return !bad;
}

// 1 if none of `count` elements is NaN or inf.
int finite(const void* x, int kind, int64_t count, int threads) {
    if (kind == F32) return finite_words<uint32_t>((const uint32_t*)x, count, 0x7f800000, threads);
    return finite_words<uint16_t>((const uint16_t*)x, count, kind == BF16 ? 0x7f80 : 0x7c00, threads);
}

}  // namespace
