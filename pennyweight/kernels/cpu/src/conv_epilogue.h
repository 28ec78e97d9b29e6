// Output of a convolution: scale, bias, activation function, and the memory format.
#pragma once

#include <algorithm>

#include "elementwise.h"
#include "int_microkernel.h"

namespace {

class ConvOutput {
    const Conv& w;
    const ConvArgs& a;
    const float x_scale;
    char* y;
    const int64_t pixels;
    const bool one_set;  // the scale of the weight is applied here

  public:
    ConvOutput(const Conv& w_, const ConvArgs& a_, float x_scale_, char* y_, int64_t pixels_, bool one_set_)
        : w(w_), a(a_), x_scale(x_scale_), y(y_), pixels(pixels_), one_set(one_set_) {}

    // Rows [r0, r1) of a tile for pixels [first, first + count): value(i) is the sum of pixel `first` + i, without the
    // scale. room: [count][16].
    template <class Value>
    void store(const Value& value, float* room, int64_t tile, int64_t r0, int64_t r1, int64_t first,
               int64_t count) const {
        F scale, bias;
        numbers(tile, scale, bias);
        const auto plain = [&](int64_t i) { return fma(value(i), scale, bias); };
        with_function(a.function, [&](auto f) {
            write([&](int64_t i) { return apply<decltype(f)::value>(plain(i)); }, room, tile, r0, r1, first, count);
        });
    }

  private:
    void numbers(int64_t tile, F& scale, F& bias) const {
        alignas(64) char tail[64] = {0};
        scale = fset(x_scale), bias = fset(0);
        if (w.one_scale) {
            memcpy(tail, a.scale, (size_t)size_of(w.scale));
            alignas(64) float f[16];
            fstore(f, part16({tail, w.scale}, 0));
            scale = fset(x_scale * f[0]);
        } else if (one_set) {
            scale = fmul(scale, part16({a.scale, w.scale}, 16 * tile));
        }
        if (a.bias) {
            const int64_t width = std::min<int64_t>(16, w.o - 16 * tile), each = size_of(a.bias_kind);
            if (width == 16) {
                bias = load16(a.bias, a.bias_kind, 16 * tile);
                return;
            }
            memcpy(tail, (const char*)a.bias + 16 * tile * each, (size_t)(width * each));
            bias = load16(tail, a.bias_kind, 0);
        }
    }

    template <class Value>
    void write(const Value& value, float* room, int64_t tile, int64_t r0, int64_t r1, int64_t first,
               int64_t count) const {
        const bool whole = r1 - r0 == 16;
        const int64_t each = size_of(w.x);
        if (!a.y_last) {
            for (int64_t i = 0; i < count; ++i) fstore(room + 16 * i, value(i));
            if (whole && w.x == F32) planes(room, (float*)y + r0 * pixels + first, pixels, count);
            else some_planes(room, tile, r0, r1, first, count);
            return;
        }
        char* out = y + (first * w.o + r0) * each;
        if (whole && w.x == F32) {
            for (int64_t i = 0; i < count; ++i, out += w.o * each) fstore((float*)out, value(i));
        } else if (whole) {
            for (int64_t i = 0; i < count; ++i, out += w.o * each) store16(out, w.x, 0, value(i));
        } else {
            for (int64_t i = 0; i < count; ++i, out += w.o * each) {
                alignas(64) char tail[64];
                store16(tail, w.x, 0, value(i));
                memcpy(out, tail + (r0 - 16 * tile) * each, (size_t)((r1 - r0) * each));
            }
        }
    }

    // 16 planes, `step` numbers apart.
    static void planes(const float* sums, float* out, int64_t step, int64_t count) {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            B v[4];
            for (int j = 0; j < 4; ++j) v[j] = bload((const uint8_t*)(sums + 16 * (i + j)));
            transpose4(v);
            for (int j = 0; j < 4; ++j) bstore4((uint8_t*)(out + j * step + i), 16 * step, v[j]);
        }
        for (; i < count; ++i)
            for (int64_t r = 0; r < 16; ++r) out[r * step + i] = sums[16 * i + r];
    }
    void some_planes(const float* sums, int64_t tile, int64_t r0, int64_t r1, int64_t first, int64_t count) const {
        constexpr int64_t MOST = 64;  // pixels, see CONV_BLOCK
        alignas(64) float rows[16 * MOST];
        planes(sums, rows, MOST, count);
        const int64_t each = size_of(w.x);
        for (int64_t r = r0; r < r1; ++r) {
            const float* from = rows + (r - 16 * tile) * MOST;
            char* out = y + (r * pixels + first) * each;
            int64_t i = 0;
            for (; i + 16 <= count; i += 16) store16(out + i * each, w.x, 0, fload(from + i));
            if (i == count) continue;
            alignas(64) char tail[64];
            store16(tail, w.x, 0, fload(from + i));
            memcpy(out + i * each, tail, (size_t)((count - i) * each));
        }
    }
};

}  // namespace
