// The exported functions of the native library, as src/dispatch.cpp has them.
#pragma once

#include "../../../../pennyweight/kernels/cpu/src/abi.h"

extern "C" {
int pw_abi();
int pw_isa_count();
const char* pw_isa_name(int);
int pw_isa_here(int);
int pw_isa_use(const char*);
int pw_int_linear(const IntLinear*, const void*, int64_t, int64_t, void*, const void*, int, const void*, const void*,
                  const void*, const void*, const void*, const void*, const void*, int64_t, int);
int pw_int_linears(const IntLinear*, const LinearArgs*, int);
int pw_block(const Block*);
int pw_float_linear(const FloatLinear*, const void*, int64_t, int64_t, void*, const void*, int, const void*, const void*,
                    const void*, const void*, const void*, const void*, int);
int pw_convolution(const Conv*, const ConvArgs*);
int pw_conv_chain(const Chain*);
int pw_pack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, int, uint8_t*, int);
int pw_pack_stream(const uint8_t*, int64_t, int64_t, int64_t, int, int, uint8_t*, int);
int pw_unpack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, int, uint8_t*, int);
int64_t pw_probe(int, const void*, int64_t, int);
int pw_dequantize(const Affine*, void*, void*, void*, void*, const int64_t*, int64_t, void*, int);
int pw_quantize(const Rounding*, const void*, int64_t, void*, void*, void*, void*, double*, int);
int pw_ranges(const Affine*, const void*, int64_t, void*, int);
int pw_finite(const void*, int, int64_t, int);
int pw_attention(const AttentionArgs*, int);
int pw_rotary(const RotaryArgs*, int);
int pw_gguf_quantize(int, const void*, int, int64_t, int64_t, const float*, uint8_t*, double*, int);
int pw_optim_steps(const OptimJob*, int64_t, int);
}
