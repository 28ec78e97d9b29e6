// Codes of blocks of GGUF files, as the bit stream of core/packing.py: the part of reading a file that touches every
// element. Scales and offsets are read by io/gguf/quants.py, whose functions `fields` and `pack_bits` are the
// reference.
#pragma once

#include <algorithm>
#include <cstring>

#include "abi.h"

namespace {

// Where a type has its codes. low: the offset of the fields of `low_bits`, in runs of `low_run` bytes, each with all
// fields at the first shift, then all at the next; high: the same for the bits above them.
struct CodeFields {
    int low, low_bits, low_run, high, high_bits, high_run;
};
template <int TYPE> constexpr CodeFields code_fields() {
    switch (TYPE) {
        case GGUF_Q4_0:
        case GGUF_IQ4_NL: return {2, 4, 16, 0, 0, 1};
        case GGUF_Q4_1: return {4, 4, 16, 0, 0, 1};
        case GGUF_Q5_0: return {6, 4, 16, 2, 1, 1};
        case GGUF_Q5_1: return {8, 4, 16, 4, 1, 1};
        case GGUF_Q8_0: return {2, 8, 32, 0, 0, 1};
        case GGUF_Q2_K: return {16, 2, 32, 0, 0, 1};
        case GGUF_Q3_K: return {32, 2, 32, 0, 1, 32};
        case GGUF_Q4_K: return {16, 4, 32, 0, 0, 1};
        case GGUF_Q5_K: return {48, 4, 32, 16, 1, 32};
        case GGUF_Q6_K: return {0, 4, 64, 128, 2, 32};
        case GGUF_MXFP4: return {1, 4, 16, 0, 0, 1};
        default: return {8, 4, 16, 0, 0, 1};  // IQ4_XS
    }
}

// `count` fields to `out`, or above the bits that it has.
template <int FIELD, int RUN, int SHIFT> inline void spread_fields(const uint8_t* p, int count, uint8_t* out) {
    for (int at = 0; at < count; p += RUN)
        for (int shift = 0; shift < 8; shift += FIELD, at += RUN)
            for (int j = 0; j < RUN; ++j) {
                const uint8_t field = (uint8_t)((p[j] >> shift) & ((1 << FIELD) - 1));
                out[at + j] = SHIFT ? (uint8_t)(out[at + j] | field << SHIFT) : field;
            }
}

// Eight codes of BITS bits, a byte each, to BITS bytes, the first code lowest: neighbours are joined thrice.
template <int BITS> inline uint64_t join_eight(uint64_t codes) {
    constexpr uint64_t ONE = 0x00ff00ff00ff00ffu, TWO = 0x0000ffff0000ffffu, FOUR = 0x00000000ffffffffu;
    codes = (codes & ONE) | (codes >> 8 & ONE) << BITS;
    codes = (codes & TWO) | (codes >> 16 & TWO) << 2 * BITS;
    return (codes & FOUR) | codes >> 32 << 4 * BITS;
}

template <int TYPE> void codes_of_blocks(const uint8_t* blocks, int64_t first, int64_t last, uint8_t* stream) {
    constexpr GgufBlock BLOCK = gguf_block(TYPE);
    constexpr CodeFields F = code_fields<TYPE>();
    constexpr int N = BLOCK.elements, BITS = BLOCK.bits, SIZE = N / 8 * BITS;
    static_assert(BITS == F.low_bits + F.high_bits);
    for (int64_t b = first; b < last; ++b) {
        const uint8_t* p = blocks + b * BLOCK.bytes;
        uint8_t* out = stream + b * SIZE;
        if constexpr (BITS == 8) {
            memcpy(out, p + F.low, N);
        } else if constexpr (BITS == 4) {  // both fields of eight bytes at once
            constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0fu;
            for (int i = 0; i < N / 2; i += 8) {
                uint64_t eight;
                memcpy(&eight, p + F.low + i, 8);
                const uint64_t first = join_eight<4>(eight & LOW), second = join_eight<4>(eight >> 4 & LOW);
                const int at = (i / F.low_run * F.low_run * 2 + i % F.low_run) / 2;
                memcpy(out + at, &first, 4), memcpy(out + at + F.low_run / 2, &second, 4);
            }
        } else {
            alignas(64) uint8_t codes[N];
            spread_fields<F.low_bits, F.low_run, 0>(p + F.low, N, codes);
            if constexpr (F.high_bits > 0) spread_fields<F.high_bits, F.high_run, F.low_bits>(p + F.high, N, codes);
            for (int i = 0; i < N / 8; ++i) {
                uint64_t eight;
                memcpy(&eight, codes + 8 * i, 8);
                eight = join_eight<BITS>(eight);
                memcpy(out + BITS * i, &eight, BITS);
            }
        }
    }
}

using CodesOfBlocks = void (*)(const uint8_t*, int64_t first, int64_t last, uint8_t*);
inline CodesOfBlocks codes_of_type(int type) {
    switch (type) {
        case GGUF_Q4_0: return codes_of_blocks<GGUF_Q4_0>;
        case GGUF_Q4_1: return codes_of_blocks<GGUF_Q4_1>;
        case GGUF_Q5_0: return codes_of_blocks<GGUF_Q5_0>;
        case GGUF_Q5_1: return codes_of_blocks<GGUF_Q5_1>;
        case GGUF_Q8_0: return codes_of_blocks<GGUF_Q8_0>;
        case GGUF_Q2_K: return codes_of_blocks<GGUF_Q2_K>;
        case GGUF_Q3_K: return codes_of_blocks<GGUF_Q3_K>;
        case GGUF_Q4_K: return codes_of_blocks<GGUF_Q4_K>;
        case GGUF_Q5_K: return codes_of_blocks<GGUF_Q5_K>;
        case GGUF_Q6_K: return codes_of_blocks<GGUF_Q6_K>;
        case GGUF_IQ4_NL: return codes_of_blocks<GGUF_IQ4_NL>;
        case GGUF_MXFP4: return codes_of_blocks<GGUF_MXFP4>;
        default: return codes_of_blocks<GGUF_IQ4_XS>;
    }
}

void gguf_codes(int type, const uint8_t* blocks, int64_t count, uint8_t* stream, int threads) {
    constexpr int64_t PIECE = 256;  // blocks
    const CodesOfBlocks run = codes_of_type(type);
    const int64_t pieces = (count + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < pieces; ++i) run(blocks, i * PIECE, std::min(count, (i + 1) * PIECE), stream);
}

}  // namespace
