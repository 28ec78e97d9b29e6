// Interface between Python and the kernels. Mirrored by ../library.py; plain C types only.
#pragma once

#include <cstdint>

constexpr int ABI = 4;  // incremented with each change of a structure or of an exported function's arguments

// Status codes of exported functions; for pw_dequantize 1 means an index out of range.
enum Status : int32_t { DONE = 0, NO_MEMORY = 1, INVALID = 2 };  // INVALID: inconsistent arguments, see check.h

enum Kind : int32_t {  // number kinds of parts and of inputs
    NONE = 0, F32 = 1, BF16 = 2, F16 = 3, E8M0 = 4, I8 = 5, U8 = 6, E4M3 = 7
};

enum Activation : int32_t { FLOAT = 0, SYMMETRIC = 1, ASYMMETRIC = 2, STATIC = 3 };

// Static properties of a linear layer with integer codes: value = (u - center - zero_point) * scale + offset.
struct IntLinear {
    int64_t n, k;        // rows and columns of the weight
    int64_t kp;          // k in whole groups and whole blocks of 32
    int32_t bits;        // of a code, 1..8
    int32_t center;      // constant subtracted from the unsigned code
    int32_t group;       // columns per weight scale; 0: one scale per row; -1: one per tensor
    int32_t block;       // columns per integer sum, a multiple of 32 that divides the group
    int32_t scale, zero_point, offset;  // Kind; I8 and U8: scales and offsets are codes with outer scales
    int32_t outer;       // number of such codes per outer scale in a row; 0: none
    int32_t outer_kind;  // Kind of the outer scales
    int32_t x;           // Kind of input and output: F32, BF16, F16
    int32_t act;         // Activation
    int32_t act_lo, act_hi;
    int32_t act_scale;   // Kind in which a dynamic activation scale is stored
    float act_floor;     // minimum dynamic scale
    float act_steps;     // divisor of the range for a dynamic scale
};

// Arguments of one call.
struct LinearArgs {
    const void* x;       // [m, k], rows ldx elements apart
    int64_t m, ldx;
    void* y;             // [m, n]
    const void* bias;    // [n] of kind bias_kind, or null
    const void *codes, *scale, *zero_point, *offset, *outer_scale, *outer_offset;
    const void* act_scale;   // float32 [1], static activations
    int32_t act_zero_point;  // static activations
    int32_t bias_kind, threads;
};
