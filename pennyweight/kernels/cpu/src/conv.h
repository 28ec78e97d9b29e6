// y = f((conv(x, w) + bias)) with integer codes, for one and two dimensions.
//
//   I = sum_k (q[k] - zero) * (u[o,k] - center - zero_point[o])        int32, over the kernel and the channels of a set
//   y[o] = f(sum over sets of I * scale[o,set] * scale of the sample + bias[o])
//
// A sample is quantized with one scale; a float input that is not quantized is an integer of three limbs times a power
// of two, see conv_input.h. Integer sums are exact and sets are added in their order, so a result depends
// only on its sample and on its row of w: not on the batch, the threads, the memory format or the instruction set.
//
// Each thread has its own samples, or all threads share each sample where there are few. A unit of work is a block of
// output pixels and a range of tiles of 16 output channels.
#pragma once

#include "conv_epilogue.h"
#include "conv_input.h"
#include "conv_microkernel.h"
#include "int_microkernel.h"
#include "schedule.h"

namespace {

// The weight of one call, decoded, and the geometry of its kernel. Shared by all threads.
struct ConvWork {
    const Conv& w;
    const ConvArgs& a;
    ConvShape s;
    int64_t tiles, tile_bytes, pixels, rows_of_group;
    int64_t pieces_of_set, columns;  // fours of columns of a set
    bool direct, decoded, zeros;     // zeros: inputs have a zero point
    const uint8_t* codes;            // [tiles][columns of all sets][16][4]
    int32_t* sums;                   // [tiles][sets][16] of the codes, for inputs with a zero point
    float* direct_codes;             // [taps][16 * tiles]
    int64_t* taps;                   // [kh * kw]
    Piece* pieces;                   // [sets of a group][pieces_of_set]
    bool all8() const { return w.bits == 8; }
    int32_t center() const { return w.center - (SIGNED_BYTES && all8() ? 128 : 0); }  // of the sums of dot4
    int64_t sets() const { return w.c / w.channels; }                                 // of a group
};

inline int64_t conv_pieces(const Conv& w, const ConvArgs& a, bool* merged) {
    const int64_t set = fours(w.channels), taps = w.kh * w.kw;
    *merged = a.groups == 1 && w.channels == w.c && a.dilation_w == 1;  // the columns of a kernel row have no gaps
    const int64_t run = (*merged ? w.kw : 1) * set / 4, runs = *merged ? w.kh : taps;
    return runs * ((run + CONV_CHUNK - 1) / CONV_CHUNK);
}

inline void make_pieces(ConvWork& k) {
    const Conv& w = k.w;
    const ConvArgs& a = k.a;
    bool merged;
    k.pieces_of_set = conv_pieces(w, a, &merged);
    const int64_t set = fours(w.channels), run = (merged ? w.kw : 1) * set / 4;
    Piece* out = k.pieces;
    for (int64_t j = 0; j < k.sets(); ++j)
        for (int64_t ky = 0; ky < w.kh; ++ky)
            for (int64_t kx = 0; kx < (merged ? 1 : w.kw); ++kx)
                for (int64_t i = 0; i < run; i += CONV_CHUNK) {
                    const int64_t at =
                        (ky * a.dilation_h * k.s.columns + kx * a.dilation_w) * k.s.pixel + j * w.channels;
                    const int64_t column = ((j * w.kh + ky) * w.kw + kx) * set / 4;
                    *out++ = {at + 4 * i, column + i, std::min(CONV_CHUNK, run - i)};
                }
}

// Codes as bytes, or for the direct kernel as numbers; and sums of codes. One tile.
void decode_conv(const ConvWork& k, int64_t tile) {
    const Conv& w = k.w;
    const ConvArgs& a = k.a;
    if (k.direct) {
        const int64_t width = 16 * k.tiles;
        I center = iset(w.center);
        if (w.zero_point) center = iadd(center, zero16({a.zero_point, w.zero_point}, 16 * tile));
        for (int64_t i = 0; i < w.kh * w.kw; ++i)
            fstore(k.direct_codes + i * width + 16 * tile,
                   cvt(isub(iload8u((const uint8_t*)a.codes + i * width + 16 * tile), center)));
        return;
    }
    if (k.decoded) {
        const uint8_t* from = (const uint8_t*)a.codes + tile * w.kp * 2 * w.bits;
        uint8_t* to = (uint8_t*)k.codes + tile * k.tile_bytes;
        for (int64_t i = 0; i < w.kp; i += 32, from += 64 * w.bits) {
            B v[8];
            decode_any(w.bits, from, v);
            for (int j = 0; j < 8; ++j, to += 64) bstore(to, v[j]);
        }
    }
    if (!k.zeros) return;
    const X ones = xload((const int8_t*)"\1\1\1\1");
    const uint8_t* u = k.codes + tile * k.tile_bytes;
    for (int64_t j = 0; j < k.sets(); ++j) {
        I sum = iset(SIGNED_BYTES && k.all8() ? 128 * 4 * (int32_t)k.columns : 0);
        for (int64_t i = 0; i < k.columns; ++i, u += 64)
            sum = k.all8() ? dot4<true>(sum, bload(u), ones) : dot4<false>(sum, bload(u), ones);
        istore(k.sums + (tile * k.sets() + j) * 16, sum);
    }
}

// Scratch of a thread for one unit of work.
struct ConvRoom {
    const int8_t* px[CONV_BLOCK];
    int64_t patch_of;                                        // its set of channels, -1: none
    int32_t patch[CONV_BLOCK];                               // sums of the codes under a kernel
    alignas(64) int32_t sums[CONV_TILES * CONV_BLOCK * 16];  // [tile][pixel][16]
    alignas(64) float out[CONV_TILES * CONV_BLOCK * 16];
    alignas(64) float limbs[CONV_TILES * CONV_BLOCK * 16];  // sums of the limbs so far
};

class ConvUnits {
    const ConvWork& k;
    const Sample& x;
    char* y;  // of the sample

    int64_t first_of_row(int64_t p) const { return p - p % k.a.ow; }
    int64_t pixel_at(int64_t p) const {  // of the buffer
        return p / k.a.ow * k.a.stride_h * k.s.columns + p % k.a.ow * k.a.stride_w;
    }

    // Sums of the codes under the kernel, times center if all rows have the same.
    void patch_sums(int64_t first, int64_t count, int64_t set, int limb, ConvRoom& room) const {
        const int64_t key = set * limbs_of(k.w) + limb;
        if (room.patch_of == key) return;
        room.patch_of = key;
        const Conv& w = k.w;
        const ConvArgs& a = k.a;
        const int64_t sets = k.s.sets;
        const int32_t factor = w.zero_point ? 1 : k.center();
        for (int64_t i = 0; i < count;) {
            const int64_t oy = (first + i) / a.ow, ox = (first + i) % a.ow, n = std::min(count - i, a.ow - ox);
            const int32_t* at = x.sums + limb * x.limb_sums + (oy * a.stride_h * a.ow + ox) * sets + set;
            int32_t* out = room.patch + i;
            for (int64_t j = 0; j < n; ++j) out[j] = at[j * sets];
            for (int64_t ky = 1; ky < w.kh; ++ky) {
                at += a.dilation_h * a.ow * sets;
                for (int64_t j = 0; j < n; ++j) out[j] += at[j * sets];
            }
            for (int64_t j = 0; j < n; ++j) out[j] *= factor;
            i += n;
        }
    }

    // Sums of tiles [t0, t1) for the channels of one group: room.sums and room.patch, or if `folded` room.out.
    void dense(int64_t t0, int64_t t1, int64_t group, int64_t first, int64_t count, ConvRoom& room) const {
        const int64_t blocks = (count + CONV_PIXELS - 1) / CONV_PIXELS, small = count / blocks, larger = count % blocks;
        const int8_t* px[CONV_BLOCK];
        for (int64_t j = 0; j < k.sets(); ++j)
            for (int limb = 0; limb < limbs_of(k.w); ++limb) {
                for (int64_t i = 0; i < count; ++i) px[i] = room.px[i] + group * k.s.group + limb * x.limb_codes;
                const Piece *piece = k.pieces + j * k.pieces_of_set, *end = piece + k.pieces_of_set;
                for (bool fresh = true; piece < end; fresh = false) {
                    int64_t pieces = 0, columns = 0;
                    while (piece + pieces < end && (!pieces || columns + piece[pieces].count <= CONV_CHUNK))
                        columns += piece[pieces++].count;
                    for (int64_t b = 0, p = 0; b < blocks; ++b) {
                        const int64_t n = small + (b < larger);
                        const ConvMicro micro = k.all8() ? pick_conv<true>(t1 - t0, n) : pick_conv<false>(t1 - t0, n);
                        micro(k.codes + t0 * k.tile_bytes, k.tile_bytes, piece, pieces, px + p, room.sums + 16 * p,
                              16 * CONV_BLOCK, fresh);
                        p += n;
                    }
                    piece += pieces;
                }
                patch_sums(first, count, group * k.sets() + j, limb, room);
                for (int64_t t = t0; t < t1 && folded(); ++t) fold(t, j, limb, count, room, (t - t0) * CONV_BLOCK * 16);
            }
    }

    // Whether more than the center must be subtracted from sums, or several sets added.
    bool folded() const { return k.sets() > 1 || k.w.zero_point || x.zero || k.w.act == FLOAT; }

    // Adds the sums of one set, corrected for center and zero points, to the float sums; with limbs after the last one.
    void fold(int64_t tile, int64_t j, int limb, int64_t count, ConvRoom& room, int64_t at) const {
        const Conv& w = k.w;
        const int64_t sets = k.sets(), index = (tile * sets + j) * 16;
        const int32_t* sums = room.sums + at;
        float *out = room.out + at, *limbs = room.limbs + at;
        const bool last = limb + 1 == limbs_of(w);
        const I center =
            w.zero_point ? iadd(iset(k.center()), zero16({k.a.zero_point, w.zero_point}, index)) : iset(k.center());
        I shift = iset(0);
        if (k.zeros && x.zero) {
            const I columns = iset((int32_t)(w.channels * w.kh * w.kw));
            I own = w.zero_point ? iadd(iset(w.center), zero16({k.a.zero_point, w.zero_point}, index)) : iset(w.center);
            own = isub(iload(k.sums + index), umul(own, columns));
            shift = umul(own, iset(x.zero));
        }
        const int32_t* patch = room.patch;
        const bool centered = !w.zero_point;  // patch is multiplied
        const F scale = sets > 1 ? part16({k.a.scale, w.scale}, index) : fset(1);
        for (int64_t i = 0; i < count; ++i) {
            const I less = centered ? iset(-patch[i]) : umul(center, iset(-patch[i]));
            const I part = uadd(uadd(iload(sums + 16 * i), less), isub(iset(0), shift));
            F sum = cvt(part);
            if (limb) sum = fma(fload(limbs + 16 * i), fset(256), sum);
            if (!last) fstore(limbs + 16 * i, sum);
            else if (sets == 1) fstore(out + 16 * i, sum);
            else fstore(out + 16 * i, j ? fma(sum, scale, fload(out + 16 * i)) : fmul(sum, scale));
        }
    }

    void depthwise(int64_t tile, int64_t first, int64_t count, ConvRoom& room) const {
        const Conv& w = k.w;
        const float* codes = k.direct_codes + 16 * tile;
        const int64_t width = 16 * k.tiles, taps = w.kh * w.kw;
        const I zero = iset(x.zero);
        if (k.rows_of_group == 1) {
            int64_t p = 0;
            const int64_t pixel = k.s.pixel, neighbours = pixel * k.a.stride_w * (DIRECT_PIXELS - 1);
            if (const DirectRow row = pick_direct(w.kw, k.a.stride_w, k.a.dilation_w))
                while (p + DIRECT_PIXELS <= count) {
                    if (room.px[p + DIRECT_PIXELS - 1] - room.px[p] == neighbours &&
                        first_of_row(first + p) + k.a.ow >= first + p + DIRECT_PIXELS) {
                        row(codes, width, w.kh, k.a.dilation_h * k.s.columns * pixel, room.px[p] + 16 * tile, pixel,
                            zero, room.out + 16 * p);
                        p += DIRECT_PIXELS;
                    } else {
                        direct_micro<1>(codes, width, k.taps, taps, room.px + p, 16 * tile, zero, room.out + 16 * p);
                        ++p;
                    }
                }
            for (; p + DIRECT_PIXELS <= count; p += DIRECT_PIXELS)
                direct_micro<DIRECT_PIXELS>(codes, width, k.taps, taps, room.px + p, 16 * tile, zero,
                                            room.out + 16 * p);
            for (; p < count; ++p)
                direct_micro<1>(codes, width, k.taps, taps, room.px + p, 16 * tile, zero, room.out + 16 * p);
            return;
        }
        int32_t source[16];
        for (int64_t i = 0; i < 16; ++i) source[i] = (int32_t)(std::min(16 * tile + i, w.o - 1) / k.rows_of_group);
        for (int64_t p = 0; p < count; ++p)
            direct_micro(codes, width, k.taps, taps, room.px[p], source, zero, room.out + 16 * p);
    }

  public:
    ConvUnits(const ConvWork& k_, const Sample& x_, char* y_) : k(k_), x(x_), y(y_) {}

    // Output pixels [first, first + count) of tiles [t0, t1).
    void run(int64_t first, int64_t count, int64_t t0, int64_t t1, ConvRoom& room) const {
        for (int64_t i = 0; i < count; ++i) room.px[i] = x.codes + pixel_at(first + i) * k.s.pixel;
        room.patch_of = -1;
        const ConvOutput out(k.w, k.a, x.scale, y, k.pixels, k.sets() == 1);
        if (k.direct) {
            for (int64_t t = t0; t < t1; ++t) {
                depthwise(t, first, count, room);
                const float* sums = room.out;
                out.store([=](int64_t i) { return fload(sums + 16 * i); }, room.out, t, 16 * t,
                          std::min(16 * t + 16, k.w.o), first, count);
            }
            return;
        }
        for (int64_t t = t0; t < t1;) {
            const int64_t group = 16 * t / k.rows_of_group, last = std::min(16 * t + 15, k.w.o - 1) / k.rows_of_group;
            int64_t n = 1;  // tiles of this group alone
            while (t + n < t1 && n < CONV_TILES && std::min(16 * (t + n) + 15, k.w.o - 1) / k.rows_of_group == group)
                ++n;
            for (int64_t g = group; g <= last; ++g) {
                dense(t, t + n, g, first, count, room);
                for (int64_t i = t; i < t + n; ++i) {
                    const int64_t r0 = std::max(16 * i, g * k.rows_of_group);
                    const int64_t r1 = std::min({16 * i + 16, (g + 1) * k.rows_of_group, k.w.o});
                    float* to = room.out + (i - t) * CONV_BLOCK * 16;
                    const int32_t *sums = room.sums + (i - t) * CONV_BLOCK * 16, *patch = room.patch;
                    if (folded()) out.store([=](int64_t p) { return fload(to + 16 * p); }, to, i, r0, r1, first, count);
                    else
                        out.store([=](int64_t p) { return cvt(isub(iload(sums + 16 * p), iset(patch[p]))); }, to, i, r0,
                                  r1, first, count);
                }
            }
            t += n;
        }
    }
};

}  // namespace
