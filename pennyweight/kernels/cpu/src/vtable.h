// The functions that an instruction set offers. A part (int_linear.cpp, float_linear.cpp, convolution.cpp,
// conversions.cpp) is compiled once for each instruction set that makes a difference to it, with PW_ISA as its name,
// and enters its functions into the table. The other functions are those of the instruction set's base, see
// dispatch.cpp.
#pragma once

#include "abi.h"

enum Probe : int32_t { PROBE_READ = 0, PROBE_INT8 = 1, PROBE_BF16 = 2, PROBE_F32 = 3 };

struct Table {
    int (*int_linear)(const IntLinear*, const LinearArgs*, int count);
    int (*blocks)(const Block* const*, int count);
    int (*float_linear)(const FloatLinear*, const FloatArgs*);
    int (*convolution)(const Conv*, const ConvArgs*);
    void (*pack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out, int threads);
    void (*pack_stream)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int pad, uint8_t* out, int threads);
    void (*unpack_codes)(const uint8_t*, int64_t n, int64_t k, int64_t kp, int bits, int flip, uint8_t* out,
                         int threads);
    void (*dequantize)(const Affine*, const Parts*, const int64_t* index, int64_t m, char* out, int threads);
    int (*quantize)(const Rounding*, const char* x, int64_t ldx, const Parts*, double* sums, int threads);
    void (*ranges)(const Affine*, const char* x, int64_t ldx, char* out, int threads);
    int (*finite)(const void* x, int kind, int64_t count, int threads);
    int (*optim_steps)(const OptimJob*, int64_t count, int threads);
    int (*attention)(const AttentionArgs*, int threads);
    int (*rotary)(const RotaryArgs*, int threads);
    int64_t (*probe[4])(const void* p, int64_t n, int threads);  // see bandwidth_probe.h
    int (*conv_chain)(const Chain*);
    int (*gguf_quantize)(int type, const void* x, int kind, int64_t count, int64_t k, const float* importance,
                         uint8_t* out, double* sums, int threads);
    void (*gguf_codes)(int type, const uint8_t* blocks, int64_t count, uint8_t* stream, int threads);
    void (*gptq_block)(const GptqBlock*);
    void (*squared_errors)(const BlockErrors*);
};

// pw_part_<part>_<isa>: the function of a part that enters its functions. It must not run on a machine without the
// instruction set.
#define PW_PART_NAME2(part, isa) pw_part_##part##_##isa
#define PW_PART_NAME(part, isa) PW_PART_NAME2(part, isa)
#define PW_PART(part) extern "C" void PW_PART_NAME(part, PW_ISA)(Table * table)
