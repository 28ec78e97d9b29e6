// The layout "cpu": tiles of 16 rows x 32 columns.
//
// A tile holds 8 vectors of 64 bytes; vector j has the codes of columns 4j..4j+3, byte 4*row + column%4. Codes of fewer
// than 8 bits are cut into planes of 4, 2 and 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1), lowest bits in
// the widest plane; vector j of a plane holds 8/bits vectors of codes, the first in its lowest bits. So bits * 64 bytes
// are one tile of columns, tiles of the same rows follow each other, and each is decoded by shifts and masks of whole
// vectors, on every instruction set alike.
#pragma once

#include "simd.h"

namespace {

// Vectors 0..7 of one tile of columns, codes as unsigned bytes.
template <int BITS> inline void decode(const uint8_t* p, B* out) {
    if constexpr (BITS == 8) {
        for (int j = 0; j < 8; ++j) out[j] = bload(p + 64 * j);
        return;
    }
    constexpr int FOUR = (BITS & 4) ? 4 : 0, TWO = (BITS & 2) ? 2 : 0;
    if constexpr (BITS & 4)
        for (int j = 0; j < 4; ++j) {
            const B v = bload(p + 64 * j);
            out[2 * j] = bmask(v, 15);
            out[2 * j + 1] = bmask(bright(v, 4), 15);
        }
    if constexpr (BITS & 2)
        for (int j = 0; j < 2; ++j) {
            const B v = bload(p + 64 * (FOUR + j));
            for (int i = 0; i < 4; ++i) {
                const int up = FOUR - 2 * i;  // how far the two bits move to stand above the lower plane
                const B part = bmask(up >= 0 ? bleft(v, up) : bright(v, -up), (uint8_t)(3 << FOUR));
                out[4 * j + i] = FOUR ? bor(out[4 * j + i], part) : part;
            }
        }
    if constexpr (BITS & 1) {
        const B v = bload(p + 64 * (FOUR + TWO));
        for (int i = 0; i < 8; ++i) {
            const int up = FOUR + TWO - i;
            const B part = bmask(up >= 0 ? bleft(v, up) : bright(v, -up), (uint8_t)(1 << (FOUR + TWO)));
            out[i] = FOUR + TWO ? bor(out[i], part) : part;
        }
    }
}

inline void decode_any(int bits, const uint8_t* p, B* out) {
    switch (bits) {
        case 1: return decode<1>(p, out);
        case 2: return decode<2>(p, out);
        case 3: return decode<3>(p, out);
        case 4: return decode<4>(p, out);
        case 5: return decode<5>(p, out);
        case 6: return decode<6>(p, out);
        case 7: return decode<7>(p, out);
        default: return decode<8>(p, out);
    }
}

// One tile of columns from 8 vectors of unsigned bytes: the inverse of decode.
inline void encode_tile(int bits, const uint8_t* in, uint8_t* out) {
    if (bits == 8) { memcpy(out, in, 512); return; }
    memset(out, 0, (size_t)bits * 64);
    int shift = 0;
    for (int plane = 4; plane; plane >>= 1) {
        if (!(bits & plane)) continue;
        const int each = 8 / plane;
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 64; ++i)
                out[64 * (j / each) + i] |= (uint8_t)(((in[64 * j + i] >> shift) & ((1 << plane) - 1)) << (plane * (j % each)));
        out += 64 * plane;
        shift += plane;
    }
}

// Plain codes [n, k] (bytes, to which lo is added) -> tiles [ceil(n/16), kp/32, 64 * bits]. What pads is 0.
void pack_codes(const uint8_t* codes, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads) {
    const int64_t rows = (n + 15) / 16, cols = kp / 32;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; ++t) {
        alignas(64) uint8_t tile[512];
        for (int64_t c = 0; c < cols; ++c) {
            memset(tile, 0, sizeof tile);
            const int64_t width = k - 32 * c < 32 ? k - 32 * c : 32;
            for (int r = 0; r < 16 && 16 * t + r < n; ++r) {
                const uint8_t* src = codes + (16 * t + r) * k + 32 * c;
                if (width == 32)
                    for (int q = 0; q < 8; ++q) {
                        uint32_t four;
                        memcpy(&four, src + 4 * q, 4);
                        memcpy(tile + 64 * q + 4 * r, &four, 4);
                    }
                else
                    for (int i = 0; i < width; ++i) tile[64 * (i / 4) + 4 * r + i % 4] = src[i];
            }
            const uint8_t add = (uint8_t)flip, mask = (uint8_t)((1 << bits) - 1);
            for (int i = 0; i < 512; ++i) tile[i] = (uint8_t)(tile[i] + add) & mask;
            encode_tile(bits, tile, out + (t * cols + c) * 64 * bits);
        }
    }
}

// The inverse of pack_codes.
void unpack_codes(const uint8_t* packed, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* codes, int threads) {
    const int64_t rows = (n + 15) / 16, cols = kp / 32;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < rows; ++t) {
        alignas(64) uint8_t tile[512];
        B v[8];
        for (int64_t c = 0; c < cols; ++c) {
            decode_any(bits, packed + (t * cols + c) * 64 * bits, v);
            for (int j = 0; j < 8; ++j) bstore(tile + 64 * j, v[j]);
            for (int i = 0; i < 512; ++i) tile[i] = (uint8_t)(tile[i] - flip);
            const int64_t width = k - 32 * c < 32 ? k - 32 * c : 32;
            for (int r = 0; r < 16 && 16 * t + r < n; ++r) {
                uint8_t* dst = codes + (16 * t + r) * k + 32 * c;
                for (int i = 0; i < width; ++i) dst[i] = tile[64 * (i / 4) + 4 * r + i % 4];
            }
        }
    }
}

}  // namespace
