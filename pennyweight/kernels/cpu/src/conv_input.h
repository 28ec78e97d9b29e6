// The input of a convolution as int8 codes, channels last, with its padding written out.
//
// A sample is quantized with one scale, and one zero point, for all of its numbers: x = (q - zero) * scale. Its buffer
// is [rows][columns][pixel] bytes, a pixel being the channels of each group in whole fours (those added are 0). Padding
// is the zero point. `sums` has the sums of the codes under a row of the kernel, for every set of channels that shares
// a weight scale: [rows][output columns][sets]. Codes are bit-identical to core/qparams.py and core/numerics.py.
#pragma once

#include <algorithm>

#include "activation_limbs.h"

namespace {

constexpr int64_t fours(int64_t n) { return (n + 3) / 4 * 4; }

// Sizes of one call.
struct ConvShape {
    int64_t channels, group, pixel;  // input channels; bytes of a group's channels and of a pixel
    int64_t set, sets;               // channels that share a weight scale, and how many such sets a pixel has
    int64_t rows, columns;           // of the buffer
    bool sums;                       // whether sums of codes are needed
};

// Inputs that are not quantized are X * 2**e for a whole sample, X with 23 bits and sign in three limbs: three buffers,
// the top limb first.
inline int limbs_of(const Conv& w) { return w.act == FLOAT ? 3 : 1; }

struct Sample {
    int8_t* codes;  // of the first limb
    int32_t* sums;
    float scale;
    int32_t zero;
    float part[2];                  // FLOAT: factors of x, whose product may overflow
    int64_t limb_codes, limb_sums;  // from one limb to the next
};

inline ConvShape conv_shape(const Conv& w, const ConvArgs& a) {
    ConvShape s;
    s.channels = w.c * a.groups;
    s.group = w.c == 1 ? 1 : fours(w.c);
    s.pixel = fours(s.group * a.groups);
    s.set = w.channels;
    s.sets = s.channels / w.channels;
    s.rows = (a.oh - 1) * a.stride_h + (w.kh - 1) * a.dilation_h + 1;
    s.columns = (a.ow - 1) * a.stride_w + (w.kw - 1) * a.dilation_w + 1;
    s.sums = w.c > 1;
    return s;
}

// Range of a part of a sample. top: the largest |x| as bits, see absmax_bits.
struct Range {
    float lo, hi;
    uint32_t top;
};

// ENDS: lo and hi, too.
template <int KIND, bool ENDS> Range range_of(const char* x, int64_t n) {
    constexpr int CHAINS = 4;  // hide the latency of a maximum
    I top[CHAINS];
    F lo[CHAINS], hi[CHAINS];
    PW_UNROLL for (int j = 0; j < CHAINS; ++j) top[j] = iset(0), lo[j] = hi[j] = fset(0);  // zero is within the range
    const auto add = [&](F v, int j) {
        top[j] = imax(top[j], iand(bits(v), iset(0x7fffffff)));
        if (ENDS) lo[j] = fleast(v, lo[j]), hi[j] = fmost(v, hi[j]);
    };
    int64_t i = 0;
    for (; i + 16 * CHAINS <= n; i += 16 * CHAINS) {
        PW_UNROLL for (int j = 0; j < CHAINS; ++j) add(load_kind<KIND>(x + (i + 16 * j) * bytes_of(KIND)), j);
    }
    for (; i < n; i += 16) {
        alignas(64) char tail[64] = {0};
        memcpy(tail, x + i * bytes_of(KIND), (size_t)(std::min<int64_t>(16, n - i) * bytes_of(KIND)));
        add(load_kind<KIND>(tail), 0);
    }
    for (int j = 1; j < CHAINS; ++j)
        top[0] = imax(top[0], top[j]), lo[0] = fleast(lo[0], lo[j]), hi[0] = fmost(hi[0], hi[j]);
    alignas(64) int32_t t[16];
    istore(t, top[0]);
    Range r = {fleast(lo[0]), fmost(hi[0]), 0};
    for (const int32_t each : t) r.top = std::max(r.top, (uint32_t)each);
    return r;
}

// Scale and zero point from the range of a whole sample, as for a row.
inline void choose_sample_scale(const Conv& w, const ConvArgs& a, const Range& r, Sample& s) {
    if (w.act == STATIC) {
        s.zero = a.act_zero_point;
        s.scale = *(const float*)a.act_scale;
        return;
    }
    const bool odd = r.top >= 0x7f800000;
    if (w.act == FLOAT) {
        s.zero = 0, s.scale = odd ? float_of(0x7fc00000) : 0, s.part[0] = s.part[1] = 0;
        if (odd || r.top == 0) return;
        const int e = r.top < 0x00800000 ? -126 : (int)(r.top >> 23) - 126;  // |x| < 2**e
        const int half = (22 - e) / 2, p = e - 22;                           // 2**p, subnormal below -126
        s.part[0] = float_of((uint32_t)(half + 127) << 23), s.part[1] = float_of((uint32_t)(22 - e - half + 127) << 23);
        s.scale = p >= -126 ? float_of((uint32_t)(p + 127) << 23) : float_of(1u << (149 + p));
        return;
    }
    Chosen chosen = {};
    chosen.most[0] = (int32_t)(w.act == SYMMETRIC || odd ? r.top : bits_of(r.hi));
    chosen.least[0] = (int32_t)(w.act == SYMMETRIC ? 0 : bits_of(0 - r.lo));
    IntLinear row = {};
    row.x = w.x, row.act = w.act, row.act_lo = w.act_lo, row.act_hi = w.act_hi, row.act_scale = w.act_scale;
    row.act_floor = w.act_floor, row.act_steps = w.act_steps;
    choose_scales(row, chosen);
    s.scale = chosen.scale[0];
    s.zero = chosen.zero[0];
}

// q = round(x * (1 / scale)) + zero, clamped; the same arithmetic as quantize_row. Or one limb, as in split_block.
struct Quantizer {
    F factor, lo, hi;
    I zero;
    int wide;
    int low = -1;  // FLOAT: limbs below this one
    Quantizer(const Conv& w, const Sample& s, int limb) {
        if (w.act == FLOAT) {
            low = limbs_of(w) - 1 - limb;
            factor = fset(s.part[0]), lo = fset(s.part[1]), hi = fset(0), zero = iset(0), wide = F32;
            return;
        }
        float reciprocal = 1.0f / s.scale;
        if (w.act_scale != F32) {
            const float rounded = round_to(w.act_scale, reciprocal);
            reciprocal = rounded <= LARGEST[w.act_scale] || w.act_scale == BF16 ? rounded : reciprocal;
        }
        if (!(reciprocal <= LARGEST[F32])) reciprocal = 0;
        factor = fset(reciprocal);
        lo = fset((float)(w.act_lo - s.zero)), hi = fset((float)(w.act_hi - s.zero));
        zero = iset(s.zero);
        wide = w.x == w.act_scale ? w.x : F32;
    }
    PW_INLINE I operator()(F x) const {
        if (low >= 0) {
            I v = iround(fmul(fmul(x, factor), lo));
            for (int i = 0; i < low; ++i) v = ishr8(iadd(v, iset(128)));
            return low == 2 ? v : isub(v, ishl8(ishr8(iadd(v, iset(128)))));
        }
        F v = fmul(x, factor);
        if (wide != F32) v = round_kind(wide, v);
        return iadd(iround(fleast(fmost(v, lo), hi)), zero);
    }
};

inline Sample limb_of(Sample s, int limb) {
    s.codes += limb * s.limb_codes;
    s.sums += limb * s.limb_sums;
    return s;
}

inline int32_t sum_bytes(const int8_t* q, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += q[i];
    return sum;
}

class InputRows {
    static constexpr int32_t MOST = 0x7f800000;
    const Conv& w;
    const ConvArgs& a;
    const ConvShape& s;
    const Sample to;
    const Quantizer code;
    const char* x;        // the sample
    int32_t* pixel_sums;  // [rows of a unit][columns][sets], from row `first_row` on
    int64_t first_row;
    I top;  // of the numbers read, as bits; static activations only
    // The same in registers: bytes that are stored may be any member, as far as the compiler knows.
    class Codes {
        InputRows& from;
        const Quantizer code;
        I top;

      public:
        explicit Codes(InputRows& rows) : from(rows), code(rows.code), top(rows.top) {}
        ~Codes() { from.top = top; }
        PW_INLINE I operator()(F v) {
            top = imax(top, iand(bits(v), iset(0x7fffffff)));
            return code(v);
        }
    };

    int8_t* pixel_at(int64_t y, int64_t column) const {
        return to.codes + ((y + a.pad_h) * s.columns + a.pad_w + column) * s.pixel;
    }
    int32_t* sum_at(int64_t y, int64_t column) const {
        return pixel_sums + ((y + a.pad_h - first_row) * s.columns + a.pad_w + column) * s.sets;
    }
    // Columns of the input that the buffer has.
    int64_t width() const { return std::min(a.w, s.columns - a.pad_w); }
    bool used(int64_t y) const {  // kernels of one row with a stride do not read all rows
        return y + a.pad_h < s.rows && (w.kh > 1 || (y + a.pad_h) % a.stride_h == 0);
    }

    void fill(int64_t row, int64_t column, int64_t count) const {
        if (count <= 0) return;
        memset(to.codes + (row * s.columns + column) * s.pixel, to.zero, (size_t)(count * s.pixel));
        if (s.sums)
            std::fill_n(pixel_sums + ((row - first_row) * s.columns + column) * s.sets, count * s.sets,
                        (int32_t)(to.zero * s.set));
        if (to.zero == 0 || s.group == w.c) return;
        for (int64_t i = 0; i < count * a.groups; ++i) {  // channels that do not exist are 0
            int8_t* p =
                to.codes + (row * s.columns + column) * s.pixel + i / a.groups * s.pixel + i % a.groups * s.group;
            memset(p + w.c, 0, (size_t)(s.group - w.c));
        }
    }
    void sum_pixel(const int8_t* p, int32_t* sums) const {
        if (!s.sums) return;
        const int64_t per_group = w.c / s.set;
        for (int64_t i = 0; i < s.sets; ++i)
            sums[i] = sum_bytes(p + i / per_group * s.group + i % per_group * s.set, s.set);
    }
    // A pixel from its channels without gaps.
    void spread(const int8_t* q, int8_t* p) const {
        if (s.group == w.c) {
            memcpy(p, q, (size_t)s.channels);
            return;
        }
        for (int64_t g = 0; g < a.groups; ++g) {
            memcpy(p + g * s.group, q + g * w.c, (size_t)w.c);
            memset(p + g * s.group + w.c, 0, (size_t)(s.group - w.c));
        }
    }

    // One row of channels-last input. room: [w * channels].
    template <int KIND> void channels_last(int64_t y, int8_t* room) {
        const char* from = x + y * a.w * s.channels * bytes_of(KIND);
        const int64_t count = width() * s.channels;
        const bool direct = s.pixel == s.channels;
        int8_t* out = direct ? pixel_at(y, 0) : room;
        Codes code_of(*this);
        if (direct && s.sets == 1 && s.channels % 16 == 0 && s.sums) {
            int32_t* sums = sum_at(y, 0);
            const int64_t n = width(), channels = s.channels;
            for (int64_t i = 0; i < n; ++i) {
                I sum = iset(0);
                for (int64_t c = 0; c < channels; c += 16, from += 16 * bytes_of(KIND), out += 16) {
                    const I q = code_of(load_kind<KIND>(from));
                    sum = iadd(sum, q);
                    istore8(out, q);
                }
                sums[i] = isum(sum);
            }
            return;
        }
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) istore8(out + i, code_of(load_kind<KIND>(from + i * bytes_of(KIND))));
        if (i < count) {
            alignas(64) char tail[64] = {0};
            alignas(16) int8_t q[16];
            memcpy(tail, from + i * bytes_of(KIND), (size_t)((count - i) * bytes_of(KIND)));
            istore8(q, code_of(load_kind<KIND>(tail)));
            memcpy(out + i, q, (size_t)(count - i));
        }
        if (w.c < 4 && a.groups == 1 && s.sums) {  // pixels of one word
            const uint32_t mask = 0xffffffffu >> (32 - 8 * w.c);
            uint8_t* p = (uint8_t*)pixel_at(y, 0);
            int32_t* sums = sum_at(y, 0);
            for (int64_t at = 0; at < width(); ++at, p += 4) {
                uint32_t four;
                memcpy(&four, room + at * w.c, 4);
                four &= mask;
                memcpy(p, &four, 4);
                sums[at] = (int8_t)four + (int8_t)(four >> 8) + (int8_t)(four >> 16);
            }
            return;
        }
        if (direct && !s.sums) return;
        for (int64_t at = 0; at < width(); ++at) {
            if (!direct) spread(room + at * s.channels, pixel_at(y, at));
            sum_pixel(pixel_at(y, at), sum_at(y, at));
        }
    }

    // `count` <= 16 pixels from pixel `first` of the planes of contiguous input. room: [16 * channels].
    template <int KIND> void planes(int64_t first, int64_t count, int8_t* room) {
        const int64_t plane = a.h * a.w;
        int8_t* out[16];
        int32_t* sums[16];
        for (int64_t i = 0, y = first / a.w, column = first % a.w; i < count; ++i) {
            const bool there = column < width();
            out[i] = there ? pixel_at(y, column) : nullptr;
            sums[i] = there ? sum_at(y, column) : nullptr;
            if (++column == a.w) column = 0, ++y;
        }
        const bool direct = s.group == w.c || a.groups == 1;
        Codes code_of(*this);
        I sum = iset(0);
        for (int64_t c0 = 0; c0 < s.channels; c0 += 16) {
            alignas(64) uint8_t fourths[4][64], pixels[16][16];
            const int64_t most = std::min<int64_t>(16, s.channels - c0);
            for (int64_t quarter = 0; quarter < 4; ++quarter) {
                I word = iset(0);
                for (int64_t j = 0; j < 4 && 4 * quarter + j < most; ++j) {
                    const char* from = x + ((c0 + 4 * quarter + j) * plane + first) * bytes_of(KIND);
                    alignas(64) char tail[64];
                    if (count < 16) {
                        memset(tail, 0, 64);
                        memcpy(tail, from, (size_t)(count * bytes_of(KIND)));
                        from = tail;
                    }
                    const I q = code_of(load_kind<KIND>(from));
                    sum = iadd(sum, q);
                    word = ior(word, ishl(iand(q, iset(255)), (int)(8 * j)));
                }
                istore((int32_t*)fourths[quarter], word);
            }
            B v[4] = {bload(fourths[0]), bload(fourths[1]), bload(fourths[2]), bload(fourths[3])};
            transpose4(v);
            for (int i = 0; i < 4; ++i) bstore4(pixels[i], 64, v[i]);
            const int64_t bytes = direct ? std::min<int64_t>(16, s.pixel - c0) : most;
            for (int64_t i = 0; i < count; ++i) {
                if (!out[i]) continue;
                int8_t* p = direct ? out[i] + c0 : room + i * s.channels + c0;
                if (bytes == 16) memcpy(p, pixels[i], 16);
                else if (bytes == 4) memcpy(p, pixels[i], 4);
                else memcpy(p, pixels[i], (size_t)bytes);
            }
        }
        alignas(64) int32_t all[16];
        istore(all, sum);
        for (int64_t i = 0; i < count; ++i) {
            if (!out[i]) continue;
            if (!direct) spread(room + i * s.channels, out[i]);
            if (s.sets > 1) sum_pixel(out[i], sums[i]);
            else if (s.sums) *sums[i] = all[i];
        }
    }

    template <int KIND> void quantize(int64_t y0, int64_t y1, int8_t* room) {
        if (a.x_last) {
            for (int64_t y = y0; y < y1; ++y)
                if (used(y)) channels_last<KIND>(y, room);
            return;
        }
        while (y0 < y1) {
            if (!used(y0)) {
                ++y0;
                continue;
            }
            int64_t end = y0 + 1;  // rows that are read one after the other
            while (end < y1 && used(end)) ++end;
            const int64_t last = end * a.w;
            for (int64_t i = y0 * a.w; i < last; i += 16) {
                if (last - i < 16 && last - y0 * a.w >= 16) i = last - 16;  // some pixels twice
                planes<KIND>(i, std::min<int64_t>(16, last - i), room);
            }
            y0 = end;
        }
    }

  public:
    // sums: [rows of a unit][columns][sets]
    InputRows(const Conv& w_, const ConvArgs& a_, const ConvShape& s_, const Sample& to_, int limb, const char* x_,
              int32_t* sums)
        : w(w_),
          a(a_),
          s(s_),
          to(limb_of(to_, limb)),
          code(w_, to_, limb),
          x(x_),
          pixel_sums(sums),
          first_row(0),
          top(iset(0)) {}

    // Whether all numbers that were read are finite.
    bool finite() const {
        alignas(64) int32_t t[16];
        istore(t, top);
        return *std::max_element(t, t + 16) < MOST;
    }

    // Rows [r0, r1) of the buffer. room: [max(w, 16) * channels + 4].
    void run(int64_t r0, int64_t r1, int8_t* room) {
        first_row = r0;
        const int64_t right = a.pad_w + std::max<int64_t>(width(), 0);
        for (int64_t r = r0; r < r1; ++r) {
            const bool inside = r >= a.pad_h && r < a.pad_h + a.h;
            fill(r, 0, inside ? std::min(a.pad_w, s.columns) : s.columns);
            if (inside) fill(r, right, s.columns - right);
        }
        const int64_t y0 = std::max<int64_t>(0, r0 - a.pad_h), y1 = std::min(a.h, r1 - a.pad_h);
        if (y0 < y1 && width() > 0) {
            if (w.x == BF16) quantize<BF16>(y0, y1, room);
            else if (w.x == F16) quantize<F16>(y0, y1, room);
            else quantize<F32>(y0, y1, room);
        }
        for (int64_t r = r0; r < r1 && s.sums; ++r) {
            const int64_t y = r - a.pad_h;
            if (y >= 0 && y < a.h && !used(y)) continue;  // no kernel row reads it: its sums were not written
            sum_row(pixel_sums + (r - r0) * s.columns * s.sets, to.sums + r * a.ow * s.sets);
        }
    }

  private:
    // Sums under a row of the kernel for each output column.
    void sum_row(const int32_t* from, int32_t* out) const {
        const int64_t n = a.ow * s.sets;
        for (int64_t kx = 0; kx < w.kw; ++kx, from += a.dilation_w * s.sets) {
            if (a.stride_w == 1) {
                if (kx == 0) std::copy_n(from, n, out);
                else
                    for (int64_t i = 0; i < n; ++i) out[i] += from[i];
                continue;
            }
            for (int64_t i = 0; i < a.ow; ++i)
                for (int64_t j = 0; j < s.sets; ++j) {
                    const int32_t v = from[i * a.stride_w * s.sets + j];
                    out[i * s.sets + j] = kx ? out[i * s.sets + j] + v : v;
                }
        }
    }
};

}  // namespace
