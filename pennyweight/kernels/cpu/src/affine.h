// Interface between Python and the float conversions. Mirrored by ../matrix_view.py, ../convert.py; plain C types only.
#pragma once

#include "abi.h"

// Storage of codes: one per byte; bit streams per row; tiles (see pack.h).
enum Store : int32_t { PLAIN = 0, BITS = 1, TILES = 2 };

// Interpretation of a code: an integer, a small float with sign, an index into a table.
enum Meaning : int32_t { UNSIGNED = 0, SIGNED = 1, MINIFLOAT = 2, LOOKUP = 3 };

// A quantized matrix: value = (number(code) - center - zero_point) * scale + offset.
//
// Index of the scale, zero point and offset of row r, group g: r / row_block * groups + g; in TILES with row_block 1,
// (r / 16 * groups + g) * 16 + r % 16.
struct Affine {
    int64_t n, k;              // rows and columns
    int64_t width;             // columns with codes: k in whole groups; in TILES also in blocks of 32
    int64_t stride;            // bytes from one row of codes to the next; of 16 rows in TILES
    int64_t group, groups;     // columns that share a scale, and scales of a row
    int64_t row_block;         // rows that share a scale
    int32_t store, bits;
    int32_t numbers;           // Meaning
    int32_t center;
    int32_t mantissa, bias;    // MINIFLOAT: bits of the mantissa, bias of the exponent
    int32_t special;           // and the smallest code magnitude that is inf or NaN
    int32_t scale, zero_point, offset, x;  // Kind
    int32_t zero_bits, zero_lo;  // zero points as a bit stream for each row of blocks, less zero_lo; 0: not packed
    const float* table;        // LOOKUP: 256 numbers
};

struct Parts {
    void *codes, *scale, *zero_point, *offset;
};

// GIVEN: the parameters are given. The others are rules of core/qparams.py.
enum Rule : int32_t { GIVEN = 0, RULE_SYMMETRIC = 1, NO_CLIP = 2, RULE_ASYMMETRIC = 3, MINMAX = 4 };

// Quantization of a float matrix to codes lo..hi of an integer format.
struct Rounding {
    Affine to;
    int32_t rule;
    float lo, hi, mid;
    float floor;               // minimum scale
    float large;               // larger scales are reduced by a factor of 4 (offsets only)
    float part, rest;          // (mid - lo) / (hi - lo), and 1 minus that
};
