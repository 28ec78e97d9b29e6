// Everything but linear layers: codes from and to floats and layouts, and optimizer steps.
#include <algorithm>

#include "bandwidth_probe.h"
#include "dequantize.h"
#include "gguf_codes.h"
#include "gguf_quantize.h"
#include "gptq.h"
#include "optimizer.h"
#include "pack.h"
#include "quantize.h"
#include "squared_errors.h"
#include "vtable.h"

namespace {

// Plain codes [n, k] (bytes, to which flip is added) -> tiles [ceil(n/16), kp/32, 64 * bits]. Padding is code 0.
void pack_codes(const uint8_t* codes, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads) {
    const int64_t rows = (n + 15) / 16, cols = kp / 32;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < cols; ++c) {
            const uint8_t* src = codes + 16 * t * k + 32 * c;
            uint8_t* tile = out + (t * cols + c) * 64 * bits;
            const int64_t height = std::min<int64_t>(n - 16 * t, 16), width = std::min<int64_t>(k - 32 * c, 32);
            if (height == 16 && width == 32) {
                tile_of_rows(bits, src, k, (uint8_t)flip, tile);
                continue;
            }
            uint8_t edge[512] = {0};
            for (int64_t r = 0; r < height && width > 0; ++r) memcpy(edge + 32 * r, src + r * k, (size_t)width);
            tile_of_rows(bits, edge, 32, (uint8_t)flip, tile);
        }
}

// Bit streams of rows [n, ceil(k * bits / 8)] -> the same tiles. Padding is code `pad`. 32 columns begin on a byte.
void pack_stream(const uint8_t* stream, int64_t n, int64_t k, int64_t kp, int bits, int pad, uint8_t* out,
                 int threads) {
    const int64_t rows = (n + 15) / 16, cols = kp / 32, step = (k * bits + 7) / 8;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < cols; ++c) {
            const int64_t at = 4 * bits * c;
            const uint8_t* src = stream + 16 * t * step + at;
            uint8_t* tile = out + (t * cols + c) * 64 * bits;
            const int64_t height = std::min<int64_t>(n - 16 * t, 16), width = std::min<int64_t>(k - 32 * c, 32);
            const bool whole = height == 16 && width == 32;
            if (whole && bits == 4) {
                tile_of_nibbles(src, step, tile);
                continue;
            }
            alignas(64) uint8_t codes[512];
            if (!whole) memset(codes, pad, sizeof codes);
            for (int64_t r = 0; r < height && width > 0; ++r) {
                uint8_t* to = codes + 32 * r;
                if (bits == 8) {
                    memcpy(to, src + r * step, (size_t)width);
                    continue;
                }
                bytes_of_stream(bits, src + r * step, step - at, width, to);  // whole 16 codes
                if (width < 32) memset(to + width, pad, (size_t)(32 - width));
            }
            tile_of_rows(bits, codes, 32, 0, tile);
        }
}

// The inverse of pack_codes.
void unpack_codes(const uint8_t* packed, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* codes,
                  int threads) {
    const int64_t rows = (n + 15) / 16, cols = kp / 32;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < cols; ++c) {
            uint8_t* dst = codes + 16 * t * k + 32 * c;
            const uint8_t* tile = packed + (t * cols + c) * 64 * bits;
            const int64_t height = std::min<int64_t>(n - 16 * t, 16), width = std::min<int64_t>(k - 32 * c, 32);
            if (height == 16 && width == 32) {
                rows_of_tile(bits, tile, (uint8_t)-flip, dst, k);
                continue;
            }
            uint8_t edge[512];
            rows_of_tile(bits, tile, (uint8_t)-flip, edge, 32);
            for (int64_t r = 0; r < height && width > 0; ++r) memcpy(dst + r * k, edge + 32 * r, (size_t)width);
        }
}

}  // namespace

PW_PART(conversions) {
    table->pack_codes = pack_codes;
    table->pack_stream = pack_stream;
    table->unpack_codes = unpack_codes;
    table->dequantize = dequantize;
    table->quantize = quantize;
    table->ranges = ranges;
    table->finite = finite;
    table->gguf_quantize = gguf_quantize;
    table->gguf_codes = gguf_codes;
    table->gptq_block = gptq_block;
    table->squared_errors = squared_errors;
    table->optim_steps = optim_steps;
    table->probe[PROBE_READ] = probe_memory;
    table->probe[PROBE_F32] = probe_threads<probe_f32>;
}
