// The layout "cpu": tiles of 16 rows x 32 columns.
//
// A tile has 8 vectors of 64 bytes; vector j has the codes of columns 4j..4j+3, byte 4*row + column%4. Codes of fewer
// than 8 bits are split into planes of 4, 2 and 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1), lowest bits in
// the widest plane; vector j of a plane has 8/bits vectors of codes, the first in its lowest bits. So a tile takes
// bits * 64 bytes, tiles of the same rows are consecutive, and each is decoded with shifts and masks of whole vectors
// on every instruction set.
#pragma once

#include "simd.h"

namespace {

// Vectors 0..7 of one tile of columns, codes as unsigned bytes.
template <int BITS> PW_INLINE void decode(const uint8_t* p, B* out) {
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
                const int up = FOUR - 2 * i;  // shift of the two bits to above the lower plane
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
template <int BITS> inline void encode(const B* in, uint8_t* out) {
    if constexpr (BITS == 8) {
        for (int j = 0; j < 8; ++j) bstore(out + 64 * j, in[j]);
        return;
    }
    constexpr int FOUR = (BITS & 4) ? 4 : 0, TWO = (BITS & 2) ? 2 : 0;
    if constexpr (BITS & 4)
        for (int j = 0; j < 4; ++j) bstore(out + 64 * j, bor(bmask(in[2 * j], 15), bleft(bmask(in[2 * j + 1], 15), 4)));
    if constexpr (BITS & 2)
        for (int j = 0; j < 2; ++j) {
            B v = bmask(bright(in[4 * j], FOUR), 3);
            for (int i = 1; i < 4; ++i) v = bor(v, bleft(bmask(bright(in[4 * j + i], FOUR), 3), 2 * i));
            bstore(out + 64 * (FOUR + j), v);
        }
    if constexpr (BITS & 1) {
        B v = bmask(bright(in[0], FOUR + TWO), 1);
        for (int i = 1; i < 8; ++i) v = bor(v, bleft(bmask(bright(in[i], FOUR + TWO), 1), i));
        bstore(out + 64 * (FOUR + TWO), v);
    }
}

inline void encode_any(int bits, const B* in, uint8_t* out) {
    switch (bits) {
        case 1: return encode<1>(in, out);
        case 2: return encode<2>(in, out);
        case 3: return encode<3>(in, out);
        case 4: return encode<4>(in, out);
        case 5: return encode<5>(in, out);
        case 6: return encode<6>(in, out);
        case 7: return encode<7>(in, out);
        default: return encode<8>(in, out);
    }
}

// A tile from 16 rows of 32 bytes with stride `step`, with `add` added to each byte; and back.
inline void tile_of_rows(int bits, const uint8_t* rows, int64_t step, uint8_t add, uint8_t* tile) {
    B v[8];
    for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 4; ++r) v[4 * half + r] = bload4(rows + r * step + 16 * half, 4 * step);
        if (add)
            for (int r = 0; r < 4; ++r) v[4 * half + r] = badd(v[4 * half + r], add);
        transpose4(v + 4 * half);
    }
    encode_any(bits, v, tile);
}
// A tile of 4-bit codes from 16 rows of 16 bytes of bit streams with stride `step`. After the transposition a word has
// the columns 8j..8j+7 of one row, from the lowest bits; a tile has them in the order 0 4 1 5 2 6 3 7.
inline void tile_of_nibbles(const uint8_t* rows, int64_t step, uint8_t* tile) {
    B v[4];
    for (int r = 0; r < 4; ++r) v[r] = bload4(rows + r * step, 4 * step);
    transpose4(v);
    for (int j = 0; j < 4; ++j) {
        alignas(64) int32_t words[16];
        bstore((uint8_t*)words, v[j]);
        I w = iload(words), t = iand(ixor(w, ishr<8>(w)), iset(0x0000ff00));  // where a word and its shift differ,
        w = ixor(w, ixor(t, ishl8(t)));                                       // the two are exchanged
        t = iand(ixor(w, ishr<4>(w)), iset(0x00f000f0));
        w = ixor(w, ixor(t, ishl(t, 4)));
        istore((int32_t*)(tile + 64 * j), w);
    }
}
inline void rows_of_tile(int bits, const uint8_t* tile, uint8_t add, uint8_t* rows, int64_t step) {
    B v[8];
    decode_any(bits, tile, v);
    for (int half = 0; half < 2; ++half) {
        transpose4(v + 4 * half);
        for (int r = 0; r < 4; ++r) bstore4(rows + r * step + 16 * half, 4 * step, badd(v[4 * half + r], add));
    }
}

// 32 unsigned bytes of one row of a tile.
inline void row_of_tile(int bits, const uint8_t* tile, int row, uint8_t* out) {
    uint32_t q[8] = {0};
    tile += 4 * row;
    int shift = 0;
    for (int plane = 4; plane && bits < 8; plane >>= 1) {
        if (!(bits & plane)) continue;
        const int each = 8 / plane;
        for (int j = 0; j < 8; j += each) {
            uint32_t v;
            memcpy(&v, tile + 64 * (j / each), 4);
            for (int i = 0; i < each; ++i) q[j + i] |= (v >> plane * i & 0x01010101u * ((1u << plane) - 1)) << shift;
        }
        tile += 64 * plane;
        shift += plane;
    }
    if (bits == 8)
        for (int j = 0; j < 8; ++j) memcpy(q + j, tile + 64 * j, 4);
    memcpy(out, q, 32);
}

}  // namespace
