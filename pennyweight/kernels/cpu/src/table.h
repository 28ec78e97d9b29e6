// The functions that each instruction set offers.
#pragma once

#include "abi.h"
#include "float_abi.h"

struct Table {
    int (*int_linear)(const IntLinear*, const LinearArgs*);
    void (*pack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads);
    void (*unpack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads);
    int64_t (*probe)(int what, const void* p, int64_t n, int threads);
    int (*float_linear)(const FloatLinear*, const FloatArgs*);
};
