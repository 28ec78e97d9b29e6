// Interface between Python and the kernel for float and table formats. Mirrored by ../library.py; plain C types only.
#pragma once

#include "abi.h"

enum Decode : int32_t {
    TABLE16 = 0,      // up to 4 bits: an index into `values`
    SMALL_FLOAT = 1,  // 5 to 8 bits: sign, exponent, mantissa; subnormals, the bias of IEEE 754
    TABLE256 = 2,     // 5 to 8 bits: an index into `values`
    INTEGER = 3       // 5 or 6 bits: the code and values[0] together
};

// Static properties of a linear layer: value = values[code] * scale + offset, scale = scale code * outer scale + outer
// offset, offset = offset code * its own outer scale.
struct FloatLinear {
    int64_t n, k;              // rows and columns of the weight
    int64_t kp;                // columns of the packed codes, a multiple of 32
    int64_t scale_groups;      // scales stored for each row (or row block)
    int64_t outer_groups;      // outer scales stored for each row
    const float* values;       // [256] the number of each code
    const uint8_t *low, *high; // [256] their low and high bytes as bfloat16
    int32_t bits, decode;
    int32_t exponent, mantissa;  // bits of each, SMALL_FLOAT
    int32_t group;             // columns per scale, a multiple of 16; 0: one scale per row; -1: one per tensor
    int32_t block;             // columns per sum, a multiple of 16 that divides the group
    int32_t row_block;         // rows that share a scale, a multiple of 16; 0: one row
    int32_t scale;             // Kind; NONE: 1
    int32_t offset;            // Kind of offsets, stored like scales; NONE: none. Only if group > 0
    int32_t outer;             // scales per outer scale; 0: no outer scale; -1: one per tensor
    int32_t outer_kind;        // Kind of outer scales; the outer offset is F32
    int32_t x;                 // Kind of input and output: F32, BF16, F16
    float limit;               // largest finite number of a SMALL_FLOAT
};

// Arguments of one call.
struct FloatArgs {
    const void* x;             // [m, k], rows ldx elements apart
    int64_t m, ldx;
    void* y;                   // [m, n]
    const void* bias;          // [n] of kind bias_kind, or null
    const void *codes, *scale, *outer_scale, *outer_offset, *offset, *offset_scale;
    int32_t bias_kind, threads;
};
