// The steps of a convolution net between quantized layers: int8 codes from layer to layer; see kernels/conv_chain.py.
//
// A tensor of a sample is kept as codes for convolutions that read it, as float32 for other readers, or as both. Codes
// are bytes q + 128, channels last, with the margin that the largest padding of their readers needs, so that a
// convolution is an implicit matrix product on them. Sums, scales and bias are those of conv.h, in the same order, so
// codes and numbers have the same bits as those of separate calls.
//
// With enough samples each thread takes one through all steps, so that it stays in the thread's cache. With few, all
// threads share each step.
#pragma once

#include <algorithm>

#include "conv_dot.h"
#include "conv_input.h"
#include "conv_microkernel.h"
#include "elementwise.h"
#include "int_microkernel.h"
#include "schedule.h"

namespace {

#if defined(__AVX512F__)
constexpr int CHAIN_TILES = 4;
constexpr int CHAIN_PIXELS[] = {14, 12, 8, 6};  // whose sums are in registers, by tiles - 1
#else
constexpr int CHAIN_TILES = CONV_TILES;
constexpr int CHAIN_PIXELS[] = {CONV_PIXELS};
#endif
constexpr int64_t CHAIN_BLOCK = 56;  // most pixels of a unit of work

constexpr int64_t CHAIN_ROW = 64;  // sums of a pixel: four tiles

// As conv_micro, with sums [pixel][CHAIN_ROW] that begin with `start` [tile][16].
template <int TILES, int T>
void chain_micro(const uint8_t* w, int64_t tile_bytes, const Piece* pieces, int64_t count, const uint8_t* const* px,
                 const int32_t* start, int32_t* sums, bool fresh) {
    I acc[TILES][T];
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) acc[j][t] = iload(fresh ? start + 16 * j : sums + t * CHAIN_ROW + 16 * j);
    }
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
        const uint8_t* u = w + piece->column * 64;
        const uint8_t* x[T];
        PW_UNROLL for (int t = 0; t < T; ++t) x[t] = px[t] + piece->at;
        const int64_t bytes = 4 * piece->count;
        PW_ROLLED for (int64_t i = 0; i < bytes; i += 4, u += 64) {
            B v[TILES];
            PW_UNROLL for (int j = 0; j < TILES; ++j) v[j] = flip(bload(u + j * tile_bytes));
            PW_UNROLL for (int t = 0; t < T; ++t) {
                const X four = xload((const int8_t*)x[t] + i);
                PW_UNROLL for (int j = 0; j < TILES; ++j) acc[j][t] = dot4_bytes(acc[j][t], v[j], four);
            }
        }
    }
    PW_UNROLL for (int j = 0; j < TILES; ++j) {
        PW_UNROLL for (int t = 0; t < T; ++t) istore(sums + t * CHAIN_ROW + 16 * j, acc[j][t]);
    }
}
using ChainMicro = void (*)(const uint8_t*, int64_t, const Piece*, int64_t, const uint8_t* const*, const int32_t*,
                            int32_t*, bool);
template <int TILES, int T = 1> ChainMicro pick_chain_pixels(int64_t pixels) {
    if constexpr (T > CHAIN_PIXELS[TILES - 1]) return nullptr;
    else return pixels == T ? &chain_micro<TILES, T> : pick_chain_pixels<TILES, T + 1>(pixels);
}
template <int TILES = 1> ChainMicro pick_chain(int64_t tiles, int64_t pixels) {
    if constexpr (TILES > CHAIN_TILES) return nullptr;
    else return tiles == TILES ? pick_chain_pixels<TILES>(pixels) : pick_chain<TILES + 1>(tiles, pixels);
}

// Sums of 16 channels that have one input channel each, for T pixels. w: [taps][..] numbers, `step` apart.
template <int T>
void depthwise_taps(const float* w, int64_t step, const int64_t* taps, int64_t count, const uint8_t* const* px,
                    int64_t channel, const int32_t* start, int32_t* sums) {
    F acc[T];
    PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fset(0);
    for (int64_t i = 0; i < count; ++i) {
        const F factor = fload(w + i * step);
        PW_UNROLL for (int t = 0; t < T; ++t) acc[t] = fma(cvt(iload8u(px[t] + taps[i] + channel)), factor, acc[t]);
    }
    PW_UNROLL for (int t = 0; t < T; ++t) istore(sums + t * CHAIN_ROW, iadd(iround(acc[t]), iload(start)));
}

// Scratch of a thread.
struct ChainRoom {
    const uint8_t* px[CHAIN_BLOCK];
    uint8_t* codes[CHAIN_BLOCK];
    alignas(64) int32_t start[CHAIN_TILES * 16 + 64];
    alignas(64) int32_t sums[CHAIN_BLOCK * CHAIN_ROW];  // or float32
    bool odd;                                           // whether inputs are not finite
};

inline int64_t pixel_bytes(const ChainTensor& t) { return fours(t.channels); }
inline bool same_codes(const ChainTensor& a, const ChainTensor& b) {
    return a.codes >= 0 && b.codes >= 0 && a.scale == b.scale && a.zero_point == b.zero_point;
}
inline int64_t row_bytes(const ChainTensor& t) { return (t.w + 2 * t.margin_w) * pixel_bytes(t); }

// Codes of a tensor from numbers; the arithmetic of Quantizer, with a clip before it.
struct Encoder {
    float factor, lo, hi;  // lo and hi: of a product, so that the clip is part of the quantization
    int32_t zero;          // of the bytes
    uint8_t first, last;   // bytes of lo and hi
    Encoder() : factor(0), lo(0), hi(0), zero(0), first(0), last(0) {}
    Encoder(const ChainTensor& t, float least, float most) : Encoder() {
        if (t.codes < 0) return;
        Conv conv = {};
        conv.act = STATIC, conv.x = F32, conv.act_lo = t.lo, conv.act_hi = t.hi, conv.act_scale = t.scale_kind;
        Sample sample = {};
        sample.scale = *t.scale, sample.zero = t.zero_point;
        const Quantizer q(conv, sample, 0);
        alignas(64) float f[16];
        fstore(f, q.factor);
        factor = f[0];
        const float low = least * factor,
                    high = most * factor;  // rounding and clips are monotonic, so they may change places
        const float bottom = (float)(t.lo - t.zero_point), top = (float)(t.hi - t.zero_point);
        lo = low > bottom ? std::min(low, top) : bottom, hi = high < top ? std::max(high, bottom) : top;
        zero = t.zero_point + 128;
        first = byte(lo), last = byte(hi);
    }
    PW_INLINE I operator()(F v) const {
        return iadd(iround(fleast(fmost(fmul(v, fset(factor)), fset(lo)), fset(hi))), iset(zero));
    }

  private:
    uint8_t byte(float product) const {
        alignas(64) int32_t q[16];
        istore(q, iround(fset(product)));
        return (uint8_t)(q[0] + zero);
    }
};

// One step, with what all threads and samples share.
struct ChainWork {
    const ChainStep* s;
    int64_t tiles, tile_bytes, rows_of_group;
    Piece* pieces;
    int64_t piece_count;
    int64_t* taps;         // of CHAIN_CONV depthwise
    uint8_t* interleaved;  // [chunks of 64 channels][quads][kw][256], or null
    float* numbers;        // [taps][16 * tiles], or null
    int64_t quads;
    bool depthwise;
    int64_t units;  // of a sample, without those that fill the margin
    int64_t blocks, splits, split_tiles;
    Encoder encode;  // of the result
};

class ChainSample {
    const Chain& c;
    char* scratch;  // of the sample
    const int64_t sample;
    ChainRoom& room;

    const ChainTensor& tensor(int32_t i) const { return c.tensors[i]; }
    uint8_t* codes_of(const ChainTensor& t) const { return (uint8_t*)scratch + t.codes; }
    uint8_t* code_at(const ChainTensor& t, int64_t y, int64_t x) const {
        return codes_of(t) + (y + t.margin_h) * row_bytes(t) + (x + t.margin_w) * pixel_bytes(t);
    }
    float* numbers_of(const ChainTensor& t) const {
        if (t.output >= 0) return (float*)c.outputs[t.output] + sample * t.channels * t.h * t.w;
        return t.numbers < 0 ? nullptr : (float*)(scratch + t.numbers);
    }

    // 16 codes of channels [c0, ..) of a pixel, whose first byte is `to`. Those beyond the channels contribute nothing.
    static PW_INLINE void put(const ChainTensor& t, uint8_t* to, int64_t c0, I q) {
        if (c0 + 16 <= t.channels) return istore8((int8_t*)to + c0, q);
        alignas(16) uint8_t tail[16];
        istore8((int8_t*)tail, q);
        for (int64_t i = t.channels - c0; i < 16; ++i) tail[i] = BYTE_ZERO;
        memcpy(to + c0, tail, (size_t)(pixel_bytes(t) - c0));
    }

    void fill_margin(const ChainTensor& t) const {
        if (t.codes < 0 || (t.margin_h == 0 && t.margin_w == 0)) return;
        const int64_t pixel = pixel_bytes(t), row = row_bytes(t), side = t.margin_w * pixel;
        const int byte = t.zero_point + 128;
        uint8_t* at = codes_of(t);
        const auto fill = [&](uint8_t* p, int64_t bytes) {
            memset(p, byte, (size_t)bytes);
            for (int64_t i = pixel; t.channels != pixel && i <= bytes; i += pixel)
                memset(p + i - (pixel - t.channels), BYTE_ZERO, (size_t)(pixel - t.channels));
        };
        fill(at, t.margin_h * row);
        for (int64_t y = 0; y < t.h && side; ++y) {
            fill(at + (t.margin_h + y) * row, side);
            fill(at + (t.margin_h + y + 1) * row - side, side);
        }
        fill(at + (t.margin_h + t.h) * row, t.margin_h * row);
    }

    // Tiles [t0, t0 + n) of `count` pixels from pixel `first` on: room.sums (or FLOATS) -> numbers and codes. scale,
    // bias: [n]. lanes: sums, scale and bias are in the order of interleave().
    template <bool FLOATS, bool ADD, bool NUMBERS, bool CODES>
    void finish(const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias, int64_t t0, int64_t n,
                int64_t first, int64_t count, bool lanes) const {
#if defined(__AVX512F__)
        switch (n) {
            case 1: return finish_row<1, FLOATS, ADD, NUMBERS, CODES>(k, y, scale, bias, t0, first, count, lanes);
            case 2: return finish_row<2, FLOATS, ADD, NUMBERS, CODES>(k, y, scale, bias, t0, first, count, lanes);
            case 3: return finish_row<3, FLOATS, ADD, NUMBERS, CODES>(k, y, scale, bias, t0, first, count, lanes);
            default: return finish_row<4, FLOATS, ADD, NUMBERS, CODES>(k, y, scale, bias, t0, first, count, lanes);
        }
#else
        (void)lanes;
        const ChainStep& s = *k.s;
        const int64_t channels = y.channels;
        const float* more = ADD ? numbers_of(tensor(s.residual)) + first * channels : nullptr;
        float* numbers = NUMBERS ? numbers_of(y) + first * channels : nullptr;
        const F lo = fset(s.lo), hi = fset(s.hi);
        const Encoder encode = k.encode;
        for (int64_t t = 0; t < n; ++t) {
            const int64_t c0 = 16 * (t0 + t);
            const bool whole = c0 + 16 <= channels;
            const F factor = fload(scale + 16 * t), shift = fload(bias + 16 * t);
            const int32_t* sums = room.sums + 16 * t;
            for (int64_t i = 0; i < count; ++i, sums += CHAIN_ROW) {
                F v = FLOATS ? fload((const float*)sums) : fma(cvt(iload(sums)), factor, shift);
                if constexpr (ADD)
                    v = fadd(
                        v, whole ? fload(more + i * channels + c0) : load_part(more + i * channels, F32, c0, channels));
                if constexpr (CODES) {
                    if (whole) istore8((int8_t*)room.codes[i] + c0, encode(v));
                    else put(y, room.codes[i], c0, encode(v));
                }
                if constexpr (NUMBERS) {
                    v = fleast(fmost(v, lo), hi);
                    if (whole) fstore(numbers + i * channels + c0, v);
                    else store_part(numbers + i * channels, F32, c0, channels, v);
                }
            }
        }
#endif
    }
#if defined(__AVX512F__)
    // The same with the codes of N tiles in one store.
    template <int N, bool FLOATS, bool ADD, bool NUMBERS, bool CODES>
    void finish_row(const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias, int64_t t0,
                    int64_t first, int64_t count, bool lanes) const {
        const ChainStep& s = *k.s;
        const int64_t channels = y.channels, c0 = 16 * t0;
        const float* more = ADD ? numbers_of(tensor(s.residual)) + first * channels + c0 : nullptr;
        float* numbers = NUMBERS ? numbers_of(y) + first * channels + c0 : nullptr;
        const __m512 lo = _mm512_set1_ps(s.lo), hi = _mm512_set1_ps(s.hi), factor = _mm512_set1_ps(k.encode.factor);
        const __m512 most = _mm512_set1_ps(40000);  // above every code, and it fits an integer
        const __m512i zero = _mm512_set1_epi16((short)k.encode.zero);
        const __m512i least_byte = _mm512_set1_epi8((char)k.encode.first),
                      most_byte = _mm512_set1_epi8((char)k.encode.last);
        const __m512i order = lanes ? _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                    : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const auto ones = [](int64_t n) { return n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1; };
        const __mmask64 valid = ones(channels - c0), written = ones(std::min<int64_t>(16 * N, pixel_bytes(y) - c0));
        __m512 scales[N], shifts[N];
        __mmask16 there[N];
        PW_UNROLL for (int t = 0; t < N; ++t) {
            scales[t] = _mm512_loadu_ps(scale + 16 * t), shifts[t] = _mm512_loadu_ps(bias + 16 * t);
            there[t] = (__mmask16)ones(std::min<int64_t>(16, channels - c0 - 16 * t));
        }
        const int32_t* sums = room.sums;
        uint8_t* const* codes = room.codes;
        for (int64_t i = 0; i < count; ++i, sums += CHAIN_ROW) {
            __m512i q[4];
            PW_UNROLL for (int t = 0; t < N; ++t) {
                __m512 v = FLOATS ? _mm512_loadu_ps((const float*)sums + 16 * t)
                                  : _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 16 * t)), scales[t],
                                                    shifts[t]);
                if constexpr (ADD) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(there[t], more + i * channels + 16 * t));
                if constexpr (CODES)
                    q[t] = _mm512_cvtps_epi32(_mm512_min_ps(most, _mm512_mul_ps(v, factor)));  // NaN is below all codes
                if constexpr (NUMBERS)
                    _mm512_mask_storeu_ps(numbers + i * channels + 16 * t, there[t],
                                          _mm512_min_ps(_mm512_max_ps(v, lo), hi));
            }
            if constexpr (CODES) {
                PW_UNROLL for (int t = N; t < 4; ++t) q[t] = q[0];
                const __m512i a = _mm512_adds_epi16(_mm512_packs_epi32(q[0], q[1]), zero);
                const __m512i b = N > 2 ? _mm512_adds_epi16(_mm512_packs_epi32(q[2], q[3]), zero) : a;
                __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
                bytes = _mm512_max_epu8(_mm512_min_epu8(bytes, most_byte), least_byte);
                _mm512_mask_storeu_epi8(codes[i] + c0, written, _mm512_maskz_mov_epi8(valid, bytes));
            }
        }
    }
#endif
    template <bool FLOATS, bool ADD>
    void finish(const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias, int64_t t0, int64_t n,
                int64_t first, int64_t count, bool lanes) const {
        const bool numbers = numbers_of(y) != nullptr, codes = y.codes >= 0;
        if (numbers && codes) finish<FLOATS, ADD, true, true>(k, y, scale, bias, t0, n, first, count, lanes);
        else if (codes) finish<FLOATS, ADD, false, true>(k, y, scale, bias, t0, n, first, count, lanes);
        else finish<FLOATS, ADD, true, false>(k, y, scale, bias, t0, n, first, count, lanes);
    }
    void finish(const ChainWork& k, const ChainTensor& y, const float* scale, const float* bias, int64_t t0, int64_t n,
                int64_t first, int64_t count, bool lanes) const {
        const bool add = k.s->residual >= 0;
        if (k.s->function != IDENTITY) {
            with_function(k.s->function, [&](auto f) {
                for (int64_t i = 0; i < count; ++i) PW_ROLLED for (int64_t t = 0; t < n; ++t) {
                        float* v = (float*)room.sums + i * CHAIN_ROW + 16 * t;
                        fstore(v, apply<decltype(f)::value>(
                                      fma(cvt(iload((const int32_t*)v)), fload(scale + 16 * t), fload(bias + 16 * t))));
                    }
            });
            if (add) finish<true, true>(k, y, scale, bias, t0, n, first, count, lanes);
            else finish<true, false>(k, y, scale, bias, t0, n, first, count, lanes);
        } else if (add) finish<false, true>(k, y, scale, bias, t0, n, first, count, lanes);
        else finish<false, false>(k, y, scale, bias, t0, n, first, count, lanes);
    }

    // -- convolutions -------------------------------------------------------------------------------------------------

    void start(const ChainWork& k, const ChainTensor& x, int64_t t0, int64_t n) const {
        const I zero =
            iset((k.depthwise ? 0 : BYTE_ZERO) - x.zero_point - 128);  // depthwise products are of the bytes themselves
        for (int64_t t = 0; t < n; ++t)
            istore(room.start + 16 * t, t0 + t < k.tiles ? umul(iload(k.s->sums + 16 * (t0 + t)), zero) : iset(0));
    }

    void dense(const ChainWork& k, int64_t t0, int64_t n, int64_t count) const {
        const int64_t most = CHAIN_PIXELS[n - 1], blocks = (count + most - 1) / most, small = count / blocks,
                      larger = count % blocks;
        const int64_t group = k.s->groups == 1 ? 0 : 16 * t0 / k.rows_of_group * k.s->conv->c;
        const uint8_t* px[CHAIN_BLOCK];
        for (int64_t i = 0; i < count; ++i) px[i] = room.px[i] + group;
        const uint8_t* w = (const uint8_t*)k.s->codes + t0 * k.tile_bytes;
        const Piece *piece = k.pieces, *end = piece + k.piece_count;
        for (bool fresh = true; piece < end; fresh = false) {
            int64_t pieces = 0, columns = 0;
            while (piece + pieces < end && (!pieces || columns + piece[pieces].count <= CONV_CHUNK))
                columns += piece[pieces++].count;
            for (int64_t b = 0, p = 0; b < blocks; ++b) {
                const int64_t each = small + (b < larger);
                pick_chain(n, each)(w, k.tile_bytes, piece, pieces, px + p, room.start, room.sums + CHAIN_ROW * p,
                                    fresh);
                p += each;
            }
            piece += pieces;
        }
    }

    // Whether the sums are in the order of interleave().
    bool depthwise(const ChainWork& k, const ChainTensor& x, int64_t t0, int64_t n, int64_t first,
                   int64_t count) const {
        const ChainStep& s = *k.s;
#if defined(__AVX512VNNI__)
        if (k.interleaved) {
            exchange16(room.start);
            const uint8_t* w = k.interleaved + t0 / 4 * k.quads * s.kw * 256;
            const int64_t row = row_bytes(x) * s.dilation_h, pixel = pixel_bytes(x),
                          ow = k.s->y < 0 ? 1 : tensor(s.y).w;
            for (int64_t i = 0; i < count;) {
                const int64_t each = std::min({count - i, (int64_t)DEPTHWISE_PIXELS, ow - (first + i) % ow});
                const uint8_t* rows[16];
                for (int64_t r = 0; r < 4 * k.quads; ++r) rows[r] = room.px[i] + 16 * t0 + std::min(r, s.kh - 1) * row;
                pick_depthwise(s.kw, s.stride_w, each)(w, k.quads, rows, pixel, room.start, room.sums + CHAIN_ROW * i);
                i += each;
            }
            return true;
        }
#endif
        (void)x, (void)first;
        const int64_t width = 16 * k.tiles, taps = s.kh * s.kw;
        for (int64_t t = 0; t < n; ++t) {
            const float* w = k.numbers + 16 * (t0 + t);
            int32_t* sums = room.sums + 16 * t;
            int64_t p = 0;
            for (; p + 4 <= count; p += 4)
                depthwise_taps<4>(w, width, k.taps, taps, room.px + p, 16 * (t0 + t), room.start + 16 * t,
                                  sums + CHAIN_ROW * p);
            for (; p < count; ++p)
                depthwise_taps<1>(w, width, k.taps, taps, room.px + p, 16 * (t0 + t), room.start + 16 * t,
                                  sums + CHAIN_ROW * p);
        }
        return false;
    }

    void convolve(const ChainWork& k, int64_t unit) const {
        const ChainStep& s = *k.s;
        const ChainTensor &x = tensor(s.x), &y = tensor(s.y);
        const int64_t pixels = y.h * y.w, b = unit % k.blocks, small = pixels / k.blocks, larger = pixels % k.blocks;
        const int64_t first = b * small + std::min(b, larger), count = small + (b < larger);
        const int64_t begin = unit / k.blocks * k.split_tiles, end = std::min(k.tiles, begin + k.split_tiles);
        const int64_t in_row = row_bytes(x), in_pixel = pixel_bytes(x);
        for (int64_t i = 0, oy = first / y.w, ox = first % y.w; i < count; ++i) {
            room.px[i] = codes_of(x) + (oy * s.stride_h + x.margin_h - s.pad_h) * in_row +
                         (ox * s.stride_w + x.margin_w - s.pad_w) * in_pixel;
            if (y.codes >= 0) room.codes[i] = code_at(y, oy, ox);
            if (++ox == y.w) ox = 0, ++oy;
        }
        const Conv& w = *s.conv;
        const float x_scale = *x.scale;
        alignas(64) float scale[4 * 16], bias[4 * 16];
        for (int64_t t0 = begin; t0 < end;) {
            int64_t n = 4;
            if (!k.depthwise) {  // parts of nearly equal size
                const int64_t own = k.rows_of_group / 16,
                              left = s.groups == 1 ? end - t0 : std::min(end - t0, own - t0 % own);
                const int64_t parts = (left + CHAIN_TILES - 1) / CHAIN_TILES;
                n = (left + parts - 1) / parts;
            }
            n = std::min(n, end - t0);
            start(k, x, t0, k.depthwise ? 4 : n);
            bool lanes = false;
            if (k.depthwise) lanes = depthwise(k, x, t0, n, first, count);
            else dense(k, t0, n, count);
            for (int64_t t = 0; t < (k.depthwise ? 4 : n); ++t) {
                F factor = fset(x_scale);
                if (w.one_scale) {
                    alignas(64) char one[64] = {0};
                    memcpy(one, s.scale, (size_t)size_of(w.scale));
                    alignas(64) float f[16];
                    fstore(f, part16({one, w.scale}, 0));
                    factor = fset(x_scale * f[0]);
                } else if (t < n) {
                    factor = fmul(factor, part16({s.scale, w.scale}, 16 * (t0 + t)));
                }
                fstore(scale + 16 * t, factor);
                fstore(bias + 16 * t, s.bias ? load_part(s.bias, F32, 16 * (t0 + t), w.o) : fset(0));
            }
#if defined(__AVX512VNNI__)
            if (lanes && y.codes >= 0 && !numbers_of(y) && s.residual < 0) {
                exchange16(scale), exchange16(bias);
                n = 4;  // those that do not exist are not written
            } else if (lanes) {
                for (int64_t i = 0; i < count; ++i) exchange16(room.sums + CHAIN_ROW * i);
                lanes = false;
            }
#endif
            finish(k, y, scale, bias, t0, n, first, count, lanes);
            t0 += n;
        }
    }

    // -- other steps --------------------------------------------------------------------------------------------------

    // Numbers in room.sums of one group of 16 channels are written as the result.
    void finish_numbers(const ChainWork& k, const ChainTensor& y, int64_t tile, int64_t first, int64_t count) const {
        const float none[16] = {0};
        if (k.s->residual >= 0) finish<true, true>(k, y, none, none, tile, 1, first, count, false);
        else finish<true, false>(k, y, none, none, tile, 1, first, count, false);
    }
    void place_codes(const ChainTensor& y, int64_t first, int64_t count) const {
        for (int64_t i = 0; i < count && y.codes >= 0; ++i)
            room.codes[i] = code_at(y, (first + i) / y.w, (first + i) % y.w);
    }

    void max_pool(const ChainWork& k, int64_t oy) const {
        const ChainStep& s = *k.s;
        const ChainTensor &x = tensor(s.x), &y = tensor(s.y);
        const float* numbers = numbers_of(x);
        const int64_t n = x.channels, y0 = std::max<int64_t>(0, oy * s.stride_h - s.pad_h),
                      y1 = std::min(x.h, oy * s.stride_h - s.pad_h + s.kh);
        const auto columns = [&](int64_t ox, int64_t& x0, int64_t& x1) {
            x0 = std::max<int64_t>(0, ox * s.stride_w - s.pad_w), x1 = std::min(x.w, ox * s.stride_w - s.pad_w + s.kw);
        };
        if (same_codes(x, y) && !numbers_of(y)) {  // codes have the order of the numbers
            const int64_t pixel = pixel_bytes(x);
            for (int64_t ox = 0, x0, x1; ox < y.w; ++ox) {
                columns(ox, x0, x1);
                uint8_t* out = code_at(y, oy, ox);
                memcpy(out, code_at(x, y0, x0), (size_t)pixel);
                for (int64_t iy = y0; iy < y1; ++iy)
                    for (int64_t ix = x0; ix < x1; ++ix) {
                        const uint8_t* from = code_at(x, iy, ix);
                        for (int64_t i = 0; i < pixel; ++i) out[i] = from[i] > out[i] ? from[i] : out[i];
                    }
            }
            return;
        }
        for (int64_t first = 0; first < y.w; first += CHAIN_BLOCK) {
            const int64_t count = std::min(CHAIN_BLOCK, y.w - first);
            place_codes(y, oy * y.w + first, count);
            for (int64_t c0 = 0; c0 < n; c0 += 16) {
                for (int64_t i = 0, x0, x1; i < count; ++i) {
                    columns(first + i, x0, x1);
                    const bool whole = c0 + 16 <= n;
                    const auto at = [&](int64_t iy, int64_t ix) {
                        const float* from = numbers + (iy * x.w + ix) * n;
                        return whole ? fload(from + c0) : load_part(from, F32, c0, n);
                    };
                    F most = at(y0, x0);
                    for (int64_t iy = y0; iy < y1; ++iy)
                        for (int64_t ix = x0; ix < x1; ++ix) most = fmost(at(iy, ix), most);
                    fstore((float*)room.sums + CHAIN_ROW * i, most);
                }
                finish_numbers(k, y, c0 / 16, oy * y.w + first, count);
            }
        }
    }

    void mean(const ChainWork& k, int64_t tile) const {
        const ChainTensor &x = tensor(k.s->x), &y = tensor(k.s->y);
        const int64_t n = x.channels, pixels = x.h * x.w, c0 = 16 * tile;
        const float* numbers = numbers_of(x);
        F sum = fset(0);
        for (int64_t p = 0; p < pixels; ++p) sum = fadd(sum, load_part(numbers + p * n, F32, c0, n));
        fstore((float*)room.sums, fdiv(sum, fset((float)pixels)));
        place_codes(y, 0, 1);
        finish_numbers(k, y, tile, 0, 1);
    }

    void add(const ChainWork& k, int64_t oy) const {
        const ChainTensor &x = tensor(k.s->x), &y = tensor(k.s->y);
        const int64_t n = x.channels;
        const float* numbers = numbers_of(x);
        for (int64_t first = oy * y.w; first < (oy + 1) * y.w; first += CHAIN_BLOCK) {
            const int64_t count = std::min(CHAIN_BLOCK, (oy + 1) * y.w - first);
            place_codes(y, first, count);
            for (int64_t c0 = 0; c0 < n; c0 += 16) {
                for (int64_t i = 0; i < count; ++i)
                    fstore((float*)room.sums + CHAIN_ROW * i, load_part(numbers + (first + i) * n, F32, c0, n));
                finish_numbers(k, y, c0 / 16, first, count);
            }
        }
    }

    // One row of an input.
    void take(const ChainWork& k, int64_t iy) const {
        const ChainTensor& y = tensor(k.s->y);
        const ChainInput& in = c.inputs[k.s->x];
        const int64_t n = y.channels, plane = y.h * y.w;
        const float* from = (const float*)in.data + sample * n * plane;
        const auto load = [](const float* p, int64_t count) {
            return count == 16 ? fload(p) : load_part(p, F32, 0, count);
        };
        I top = iset(0);
        const auto see = [&](F v) { top = imax(top, iand(bits(v), iset(0x7fffffff))); };
        for (int64_t x0 = 0; x0 < y.w; x0 += 16) {
            const int64_t count = std::min<int64_t>(16, y.w - x0), first = iy * y.w + x0;
            if (!in.last && n <= 4 && y.codes >= 0 && !numbers_of(y)) {  // images: a pixel is one word
                const Encoder encode = k.encode;
                I word = iset(0);
                for (int64_t j = 0; j < n; ++j) {
                    const F v = load(from + j * plane + first, count);
                    see(v);
                    word = ior(word, ishl(iand(encode(v), iset(255)), (int)(8 * j)));
                }
                for (int64_t j = n; j < 4; ++j) word = ior(word, iset((int32_t)((uint32_t)BYTE_ZERO << (8 * j))));
                uint8_t* to = code_at(y, iy, x0);
                if (count == 16) {
                    istore((int32_t*)to, word);
                    continue;
                }
                alignas(64) int32_t words[16];
                istore(words, word);
                memcpy(to, words, (size_t)(4 * count));
                continue;
            }
            place_codes(y, first, count);
            for (int64_t c0 = 0; c0 < n; c0 += 16) {
                const int64_t channels = std::min<int64_t>(16, n - c0);
                float* numbers = (float*)room.sums;
                if (in.last) {
                    for (int64_t i = 0; i < count; ++i)
                        fstore(numbers + CHAIN_ROW * i, load(from + (first + i) * n + c0, channels));
                } else {
                    for (int64_t i = 0; i < count; ++i) fstore(numbers + CHAIN_ROW * i, fset(0));
                    for (int64_t j = 0; j < channels; ++j)
                        for (int64_t i = 0; i < count; ++i)
                            numbers[CHAIN_ROW * i + j] = from[(c0 + j) * plane + first + i];
                }
                for (int64_t i = 0; i < count; ++i) see(fload(numbers + CHAIN_ROW * i));
                finish_numbers(k, y, c0 / 16, first, count);
            }
        }
        alignas(64) int32_t t[16];
        istore(t, top);
        if (*std::max_element(t, t + 16) >= 0x7f800000) room.odd = true;
    }

  public:
    ChainSample(const Chain& c_, char* scratch_, int64_t sample_, ChainRoom& room_)
        : c(c_), scratch(scratch_), sample(sample_), room(room_) {}

    void run(const ChainWork& k, int64_t unit) const {
        if (unit == k.units) return fill_margin(tensor(k.s->y));
        switch (k.s->kind) {
            case CHAIN_INPUT: return take(k, unit);
            case CHAIN_CONV: return convolve(k, unit);
            case CHAIN_MAX: return max_pool(k, unit);
            case CHAIN_MEAN: return mean(k, unit);
            default: return add(k, unit);
        }
    }
    // What a convolution makes of an input that is not finite.
    void spoil() const {
        for (int32_t i = 0; i < c.tensor_count; ++i) {
            const ChainTensor& t = tensor(i);
            if (t.output >= 0) std::fill_n(numbers_of(t), t.channels * t.h * t.w, float_of(0x7fc00000));
        }
    }
};

thread_local Workspace chains{32u << 20};  // of a thread that calls a chain

// Units of work of a step that were taken, and that are done.
struct Progress {
    int64_t next, done;
};
// Until all units are done. Threads do not wait for each other, only for work: one that the system has suspended
// without a unit delays nobody.
inline void wait_for(const int64_t& done, int64_t units) {
    for (int64_t spins = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < units; ++spins) {
        if (spins > 1 << 16) yield_thread();  // after about a millisecond
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

class ChainCall {
    const Chain& c;
    int threads;
    bool own;  // each thread has its own samples
    ChainWork* work;

    // Memory that a step needs, and with `space` its contents.
    int64_t prepare(ChainWork& k, const ChainStep& s, char* space) const {
        char* at = space;
        const auto take = [&](int64_t bytes) {
            char* p = at;
            at += whole_lines(bytes);
            return p;
        };
        k = {};
        k.s = &s;
        const ChainTensor& y = c.tensors[s.y];
        if (space) k.encode = Encoder(y, s.lo, s.hi);
        k.units = s.kind == CHAIN_MEAN ? (y.channels + 15) / 16 : y.h;
        if (s.kind != CHAIN_CONV) return 0;
        const Conv& w = *s.conv;
        const ChainTensor& x = c.tensors[s.x];
        const int64_t pixels = y.h * y.w, team = own ? 1 : threads;
        k.depthwise = w.c == 1;
        k.tiles = (w.o + 15) / 16, k.tile_bytes = w.kp * 16, k.rows_of_group = w.o / s.groups;
        k.blocks = (pixels + CHAIN_BLOCK - 1) / CHAIN_BLOCK;
        const int64_t most = k.depthwise ? 4 : CHAIN_TILES, groups = (k.tiles + most - 1) / most;
        k.splits = team == 1 ? 1 : std::min(groups, (4 * team + k.blocks - 1) / k.blocks);
        k.split_tiles = (groups + k.splits - 1) / k.splits * most;
        k.splits = (k.tiles + k.split_tiles - 1) / k.split_tiles;
        k.units = k.blocks * k.splits;
        const int64_t row = row_bytes(x), pixel = pixel_bytes(x), taps = s.kh * s.kw;
        if (!k.depthwise) {
            const int64_t set = fours(w.c);
            const bool merged = s.groups == 1 && s.dilation_w == 1;
            const int64_t run = (merged ? s.kw : 1) * set / 4, runs = merged ? s.kh : taps;
            k.piece_count = runs * ((run + CONV_CHUNK - 1) / CONV_CHUNK);
            k.pieces = (Piece*)take(k.piece_count * (int64_t)sizeof(Piece));
            if (!space) return at - space;
            Piece* out = k.pieces;
            for (int64_t ky = 0; ky < s.kh; ++ky)
                for (int64_t kx = 0; kx < (merged ? 1 : s.kw); ++kx)
                    for (int64_t i = 0; i < run; i += CONV_CHUNK)
                        *out++ = {ky * s.dilation_h * row + kx * s.dilation_w * pixel + 4 * i,
                                  (ky * s.kw + kx) * set / 4 + i, std::min(CONV_CHUNK, run - i)};
            return at - space;
        }
#if defined(__AVX512VNNI__)
        if ((s.kw == 3 || s.kw == 5) && s.stride_w <= 2 && s.dilation_w == 1 && s.kh <= 16) {
            k.quads = (s.kh + 3) / 4;
            const int64_t chunks = (k.tiles + 3) / 4, width = 16 * k.tiles;
            k.interleaved = (uint8_t*)take(chunks * k.quads * s.kw * 256);
            if (!space) return at - space;
            uint8_t* out = k.interleaved;
            for (int64_t chunk = 0; chunk < chunks; ++chunk)
                for (int64_t quad = 0; quad < k.quads; ++quad)
                    for (int64_t kx = 0; kx < s.kw; ++kx, out += 256) {
                        alignas(64) uint8_t rows[4][64];
                        memset(rows, 0x80, sizeof rows);
                        for (int64_t r = 0; r < 4 && 4 * quad + r < s.kh; ++r)
                            memcpy(rows[r], (const uint8_t*)s.codes + ((4 * quad + r) * s.kw + kx) * width + 64 * chunk,
                                   (size_t)std::min<int64_t>(64, width - 64 * chunk));
                        __m512i v[4];
                        const auto at_row = [&](int i) { return flip(bload(rows[i])).v; };
                        interleave(at_row(0), at_row(1), at_row(2), at_row(3), v);
                        for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + 64 * j, v[j]);
                    }
            return at - space;
        }
#endif
        k.taps = (int64_t*)take(taps * 8);
        k.numbers = (float*)take(taps * 16 * k.tiles * 4);
        if (!space) return at - space;
        for (int64_t i = 0; i < taps; ++i) k.taps[i] = i / s.kw * s.dilation_h * row + i % s.kw * s.dilation_w * pixel;
        for (int64_t i = 0; i < taps * 16 * k.tiles; i += 16)
            fstore(k.numbers + i, cvt(isub(iload8u((const uint8_t*)s.codes + i), iset(128))));
        return at - space;
    }

    double products() const {
        double all = 0;
        for (int32_t i = 0; i < c.step_count; ++i) {
            const ChainStep& s = c.steps[i];
            const ChainTensor& y = c.tensors[s.y];
            if (s.kind == CHAIN_CONV) all += (double)(y.h * y.w) * (double)(s.conv->o * s.conv->c * s.kh * s.kw);
        }
        return all * (double)c.n;
    }

    // Whether the step after a convolution is max pooling of its result.
    bool pooled(int32_t j) const {
        return j + 1 < c.step_count && c.steps[j].kind == CHAIN_CONV && c.steps[j + 1].kind == CHAIN_MAX &&
               c.steps[j + 1].x == c.steps[j].y;
    }
    // Both, row by row: the result of the convolution is read while it is in the cache.
    void run_pooled(const ChainSample& one, int32_t j) const {
        const ChainWork &k = work[j], &pool = work[j + 1];
        const ChainTensor& x = c.tensors[k.s->y];
        const int64_t pixels = x.h * x.w, small = pixels / k.blocks, larger = pixels % k.blocks;
        int64_t done = 0;
        const auto make = [&](int64_t rows) {
            for (; done < k.units && done * small + std::min(done, larger) < rows * x.w; ++done) one.run(k, done);
        };
        one.run(k, k.units);
        for (int64_t y = 0; y < pool.units; ++y) {
            make(std::min(x.h, y * pool.s->stride_h - pool.s->pad_h + pool.s->kh));
            one.run(pool, y);
        }
        make(x.h);
        one.run(pool, pool.units);
    }

  public:
    explicit ChainCall(const Chain& chain) : c(chain), threads(1), own(true), work(nullptr) {}

    int run() {
        threads = (int)std::min<double>(c.threads, 1 + products() / PRODUCTS_PER_THREAD);
        own = threads == 1 || c.n >= 4 * threads || c.n % threads == 0;
        if (own) threads = (int)std::min<int64_t>(threads, c.n);
        const int64_t works = whole_lines(c.step_count * (int64_t)sizeof(ChainWork)),
                      counters = own ? 0 : whole_lines(c.n * c.step_count * (int64_t)sizeof(Progress));
        const int64_t sample_bytes = whole_lines(c.scratch + 128);  // vectors are read beyond the last pixel
        int64_t shared = works + counters + 64;
        ChainWork none;
        for (int32_t i = 0; i < c.step_count; ++i) shared += prepare(none, c.steps[i], nullptr);
        char* space = chains.get((size_t)(shared + (own ? threads : 1) * sample_bytes));
        if (!space) return NO_MEMORY;
        work = (ChainWork*)space;
        Progress* steps = (Progress*)(space + works);
        int64_t* next_sample = (int64_t*)(space + works + counters);
        memset((void*)steps, 0, (size_t)(counters + 64));
        int32_t* odd = (int32_t*)(next_sample + 1);
        char *at = space + works + counters + 64, *buffers = space + shared;
        for (int32_t i = 0; i < c.step_count; ++i) at += prepare(work[i], c.steps[i], at);

        const auto body = [&](int id) {
            ChainRoom* room = (ChainRoom*)scratch.get(sizeof(ChainRoom));
            if (own) {
                for (int64_t i; (i = __atomic_fetch_add(next_sample, 1, __ATOMIC_RELAXED)) < c.n;) {
                    room->odd = false;
                    const ChainSample one(c, buffers + id * sample_bytes, i, *room);
                    for (int32_t j = 0; j < c.step_count; ++j) {
                        if (pooled(j)) run_pooled(one, j++);
                        else
                            for (int64_t u = 0; u <= work[j].units; ++u) one.run(work[j], u);
                    }
                    if (room->odd) one.spoil();
                }
                return;
            }
            for (int64_t i = 0; i < c.n; ++i) {
                room->odd = false;
                const ChainSample one(c, buffers, i, *room);
                for (int32_t j = 0; j < c.step_count; ++j) {
                    Progress& step = steps[i * c.step_count + j];
                    const int64_t units = work[j].units + 1;
                    for (int64_t u; (u = __atomic_fetch_add(&step.next, 1, __ATOMIC_RELAXED)) < units;) {
                        one.run(work[j], u);
                        if (room->odd) __atomic_store_n(odd, (int32_t)(i + 1), __ATOMIC_RELAXED);
                        const bool last = __atomic_add_fetch(&step.done, 1, __ATOMIC_ACQ_REL) == units;
                        if (last && j + 1 == c.step_count && __atomic_load_n(odd, __ATOMIC_RELAXED) == i + 1)
                            one.spoil();
                    }
                    wait_for(step.done, units);
                }
            }
        };
#if defined(_OPENMP)
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            body(omp_get_thread_num());
        } else
#endif
            body(0);
        chains.trim();
        return DONE;
    }
};

}  // namespace
