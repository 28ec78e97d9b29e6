// The functions that each instruction set offers.
#pragma once

#include "abi.h"
#include "affine.h"
#include "float_abi.h"
#include "optim_abi.h"

struct Table {
    int (*int_linear)(const IntLinear*, const LinearArgs*, int count);
    void (*pack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads);
    void (*unpack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads);
    int64_t (*probe)(int what, const void* p, int64_t n, int threads);
    int (*float_linear)(const FloatLinear*, const FloatArgs*);
    void (*dequantize)(const Affine*, const Parts*, const int64_t* index, int64_t m, char* out, int threads);
    int (*quantize)(const Rounding*, const char* x, int64_t ldx, const Parts*, double* sums, int threads);
    void (*ranges)(const Affine*, const char* x, int64_t ldx, char* out, int threads);
    int (*finite)(const void* x, int kind, int64_t count, int threads);
    int (*optim_steps)(const OptimJob*, int64_t count, int threads);
};
