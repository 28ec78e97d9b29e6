// A step of a chain of convolutions, with what all threads and samples share: places of pieces, prepared weights.
#pragma once

#include <algorithm>

#include "conv_chain_products.h"
#include "conv_input.h"
#include "schedule.h"

namespace {

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

// Memory that a step takes from a space; without one it is only counted.
struct ChainSpace {
    char *begin, *at;
    explicit ChainSpace(char* space) : begin(space), at(space) {}
    bool counted() const { return !begin; }
    int64_t used() const { return at - begin; }
    template <class T> T* take(int64_t count) {
        char* p = at;
        at += whole_lines(count * (int64_t)sizeof(T));
        return (T*)p;
    }
};

// How the pixels and tiles of a convolution are divided among `team` threads.
inline void divide(ChainWork& k, const Conv& w, int64_t pixels, int64_t team) {
    k.blocks = (pixels + CHAIN_BLOCK - 1) / CHAIN_BLOCK;
    const int64_t most = k.depthwise ? 4 : CHAIN_TILES, groups = (k.tiles + most - 1) / most;
    k.splits = team == 1 ? 1 : std::min(groups, (4 * team + k.blocks - 1) / k.blocks);
    k.split_tiles = (groups + k.splits - 1) / k.splits * most;
    k.splits = (k.tiles + k.split_tiles - 1) / k.split_tiles;
    k.units = k.blocks * k.splits;
    k.tile_bytes = w.kp * 16;
}

// The pieces of input that a row of the weight meets.
inline void prepare_dense(ChainWork& k, const ChainStep& s, const ChainTensor& x, ChainSpace& space) {
    const int64_t row = row_bytes(x), pixel = pixel_bytes(x), set = fours(s.conv->c);
    const bool merged = s.groups == 1 && s.dilation_w == 1;
    const int64_t run = (merged ? s.kw : 1) * set / 4, runs = merged ? s.kh : s.kh * s.kw;
    k.piece_count = runs * ((run + CONV_CHUNK - 1) / CONV_CHUNK);
    k.pieces = space.take<Piece>(k.piece_count);
    if (space.counted()) return;
    Piece* out = k.pieces;
    for (int64_t ky = 0; ky < s.kh; ++ky)
        for (int64_t kx = 0; kx < (merged ? 1 : s.kw); ++kx)
            for (int64_t i = 0; i < run; i += CONV_CHUNK)
                *out++ = {ky * s.dilation_h * row + kx * s.dilation_w * pixel + 4 * i, (ky * s.kw + kx) * set / 4 + i,
                          std::min(CONV_CHUNK, run - i)};
}

// The codes of a depthwise weight for depthwise_row().
inline void prepare_rows(ChainWork& k, const ChainStep& s, ChainSpace& space) {
    k.quads = (s.kh + 3) / 4;
    const int64_t chunks = (k.tiles + 3) / 4, width = 16 * k.tiles;
    k.interleaved = space.take<uint8_t>(chunks * k.quads * s.kw * 256);
    if (space.counted()) return;
    uint8_t* out = k.interleaved;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
        for (int64_t quad = 0; quad < k.quads; ++quad)
            for (int64_t kx = 0; kx < s.kw; ++kx, out += 256) {
                alignas(64) uint8_t rows[4][64];
                memset(rows, 0x80, sizeof rows);
                for (int64_t r = 0; r < 4 && 4 * quad + r < s.kh; ++r)
                    memcpy(rows[r], (const uint8_t*)s.codes + ((4 * quad + r) * s.kw + kx) * width + 64 * chunk,
                           (size_t)std::min<int64_t>(64, width - 64 * chunk));
                B v[4];
                for (int i = 0; i < 4; ++i) v[i] = flip(bload(rows[i]));
                interleave4(v);
                for (int j = 0; j < 4; ++j) bstore(out + 64 * j, v[j]);
            }
}

// The codes of a depthwise weight as numbers, and the places of its taps, for depthwise_taps().
inline void prepare_taps(ChainWork& k, const ChainStep& s, const ChainTensor& x, ChainSpace& space) {
    const int64_t row = row_bytes(x), pixel = pixel_bytes(x), taps = s.kh * s.kw;
    k.taps = space.take<int64_t>(taps);
    k.numbers = space.take<float>(taps * 16 * k.tiles);
    if (space.counted()) return;
    for (int64_t i = 0; i < taps; ++i) k.taps[i] = i / s.kw * s.dilation_h * row + i % s.kw * s.dilation_w * pixel;
    for (int64_t i = 0; i < taps * 16 * k.tiles; i += 16)
        fstore(k.numbers + i, cvt(isub(iload8u((const uint8_t*)s.codes + i), iset(128))));
}

// A step for a team of threads that share a sample. Returns the memory that it takes; without `begin` it has no
// contents.
inline int64_t prepare(ChainWork& k, const Chain& c, const ChainStep& s, int64_t team, char* begin) {
    ChainSpace space(begin);
    const ChainTensor& y = c.tensors[s.y];
    k = {};
    k.s = &s;
    if (begin) k.encode = Encoder(y, s.lo, s.hi);
    k.units = s.kind == CHAIN_MEAN ? (y.channels + 15) / 16 : y.h;
    if (s.kind != CHAIN_CONV) return 0;
    const Conv& w = *s.conv;
    const ChainTensor& x = c.tensors[s.x];
    k.depthwise = w.c == 1;
    k.tiles = (w.o + 15) / 16, k.rows_of_group = w.o / s.groups;
    divide(k, w, y.h * y.w, team);
    const bool rows = DEPTHWISE_ROWS && (s.kw == 3 || s.kw == 5) && s.stride_w <= 2 && s.dilation_w == 1 && s.kh <= 16;
    if (!k.depthwise) prepare_dense(k, s, x, space);
    else if (rows) prepare_rows(k, s, space);
    else prepare_taps(k, s, x, space);
    return space.used();
}

}  // namespace
