"""Constants, structures and exported functions of the native library, with the names of src/abi.h.

Made from src/abi.h by `python -m tests.kernels.cpu.native.abi`; do not edit. Pointers are plain addresses: the caller
keeps what they point to.
"""

# fmt: off
from collections.abc import Iterator
from ctypes import Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any


def _f(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    for name in names.split():
        yield name, kind


ABI = 14
DONE, NO_MEMORY, INVALID = range(3)  # Status
NONE, F32, BF16, F16, E8M0, I8, U8, E4M3 = range(8)  # Kind
FLOAT, SYMMETRIC, ASYMMETRIC, STATIC = range(4)  # Activation
IDENTITY, RELU, GELU, GELU_TANH, QUICK_GELU, SILU, RELU6, HARDSWISH = range(8)  # Function
TABLE16, SMALL_FLOAT, TABLE256, INTEGER = range(4)  # Decode
CHAIN_INPUT, CHAIN_CONV, CHAIN_MAX, CHAIN_MEAN, CHAIN_ADD = range(5)  # ChainKind
PLAIN, BITS, TILES = range(3)  # Store
UNSIGNED, SIGNED, MINIFLOAT, LOOKUP = range(4)  # Meaning
GIVEN, RULE_SYMMETRIC, NO_CLIP, RULE_ASYMMETRIC, MINMAX = range(5)  # Rule
GPTQ_COLUMNS = 128
TABLE_LEVELS = 63
GGUF_Q4_0, GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1, GGUF_Q8_0, GGUF_Q2_K = 2, 3, 6, 7, 8, 10  # GgufType
GGUF_Q3_K, GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS = 11, 12, 13, 14, 20, 23  # GgufType
GGUF_MXFP4 = 39  # GgufType
GGUF_PIECE = 4096
GGUF_BLOCKS = {  # (elements, bytes, bits of a code, made) of a block
    GGUF_Q4_0: (32, 18, 4, 1), GGUF_Q4_1: (32, 20, 4, 1), GGUF_Q5_0: (32, 22, 5, 1), GGUF_Q5_1: (32, 24, 5, 1),
    GGUF_Q8_0: (32, 34, 8, 1), GGUF_Q2_K: (256, 84, 2, 1), GGUF_Q3_K: (256, 110, 3, 1), GGUF_Q4_K: (256, 144, 4, 1),
    GGUF_Q5_K: (256, 176, 5, 1), GGUF_Q6_K: (256, 210, 6, 1), GGUF_IQ4_NL: (32, 18, 4, 1),
    GGUF_IQ4_XS: (256, 136, 4, 1), GGUF_MXFP4: (32, 17, 4, 0),
}
NO_NORM, LAYER_NORM, RMS_NORM = range(3)  # NormKind
MOST_CHANNELS = 1024
UNROTATED, HALVES, INTERLEAVED = range(3)  # Rotation
STEP_LINEAR, STEP_NORM, STEP_ROTARY, STEP_ATTENTION = range(4)  # StepKind
STATE_FLOAT, STATE_TABLE, STATE_UFLOAT = range(3)  # StateKind
RULE_ADAM, RULE_LION, RULE_SGD = range(3)  # OptimRule
MAXIMIZE, NESTEROV, STOCHASTIC = 1, 2, 4  # OptimFlags
INT_WEIGHT, FLOAT_WEIGHT, CONV_WEIGHT, MATRIX, MATRIX_BY_ROW, OPTIM_STATES = range(6)  # Described


class IntLinear(Structure):
    _fields_ = (
        *_f(c_int64, "n k kp act_group"),
        *_f(c_int32, "bits center group block scale zero_point offset outer outer_kind x act act_lo act_hi act_scale"),
        *_f(c_float, "act_floor act_steps"),
    )


class LinearArgs(Structure):
    _fields_ = (
        *_f(c_void_p, "x"), *_f(c_int64, "m ldx"),
        *_f(c_void_p, "y bias codes scale zero_point offset outer_scale outer_offset act_scale"),
        *_f(c_int32, "act_zero_point bias_kind threads"),
    )


class FloatLinear(Structure):
    _fields_ = (
        *_f(c_int64, "n k kp scale_groups outer_groups"), *_f(c_void_p, "values low high"),
        *_f(c_int32, "bits decode exponent mantissa group block row_block scale offset outer outer_kind x"),
        *_f(c_float, "limit"),
    )


class FloatArgs(Structure):
    _fields_ = (
        *_f(c_void_p, "x"), *_f(c_int64, "m ldx"),
        *_f(c_void_p, "y bias codes scale outer_scale outer_offset offset offset_scale"),
        *_f(c_int32, "bias_kind threads"),
    )


class Conv(Structure):
    _fields_ = (
        *_f(c_int64, "o c kh kw channels kp"),
        *_f(c_int32, "bits center scale zero_point one_scale x act act_lo act_hi act_scale"),
        *_f(c_float, "act_floor act_steps"),
    )


class ConvArgs(Structure):
    _fields_ = (
        *_f(c_void_p, "x y bias codes scale zero_point act_scale"),
        *_f(c_int64, "n h w oh ow groups stride_h stride_w pad_h pad_w dilation_h dilation_w"),
        *_f(c_int32, "act_zero_point bias_kind x_last y_last function threads"),
    )


class ChainTensor(Structure):
    _fields_ = (
        *_f(c_int64, "channels h w margin_h margin_w codes numbers"), *_f(c_void_p, "scale"),
        *_f(c_int32, "zero_point lo hi scale_kind output"),
    )


class ChainStep(Structure):
    _fields_ = (
        *_f(c_void_p, "conv bias codes scale sums"),
        *_f(c_int64, "groups kh kw stride_h stride_w pad_h pad_w dilation_h dilation_w"),
        *_f(c_int32, "kind x y residual function"), *_f(c_float, "lo hi"),
    )


class ChainInput(Structure):
    _fields_ = (*_f(c_void_p, "data"), *_f(c_int64, "last"),)


class Chain(Structure):
    _fields_ = (
        *_f(c_void_p, "steps tensors inputs outputs"), *_f(c_int64, "n scratch"),
        *_f(c_int32, "step_count tensor_count input_count output_count threads"),
    )


class Affine(Structure):
    _fields_ = (
        *_f(c_int64, "n k width stride group groups row_block"),
        *_f(c_int32, "store bits numbers center mantissa bias special scale zero_point offset x zero_bits zero_lo"),
        *_f(c_void_p, "table"),
    )


class Parts(Structure):
    _fields_ = (*_f(c_void_p, "codes scale zero_point offset"),)


class Rounding(Structure):
    _fields_ = (*_f(Affine, "to"), *_f(c_int32, "rule"), *_f(c_float, "lo hi mid floor large part rest"),)


class NumberTable(Structure):
    _fields_ = (*_f(c_void_p, "levels numbers"), *_f(c_int32, "count sign"),)


class GptqBlock(Structure):
    _fields_ = (
        *_f(c_int64, "n columns"),
        *_f(c_void_p, "w lower keep factor scale zero_point least divisor offset codes values errors"),
        *_f(c_float, "shift lo hi mid"), *_f(NumberTable, "table"), *_f(c_int32, "threads descent"),
    )


class BlockErrors(Structure):
    _fields_ = (
        *_f(c_int64, "blocks size"), *_f(c_void_p, "x weight"), *_f(c_int64, "weights"),
        *_f(c_void_p, "factor scale zero_point least divisor offset errors"), *_f(c_float, "shift lo hi mid"),
        *_f(NumberTable, "table"), *_f(c_int32, "threads"),
    )


class RowNorm(Structure):
    _fields_ = (*_f(c_void_p, "weight bias"), *_f(c_int32, "kind weight_kind bias_kind"), *_f(c_float, "eps offset"),)


class RotaryArgs(Structure):
    _fields_ = (
        *_f(c_void_p, "q k v"), *_f(c_int64, "q_stride k_stride v_stride"), *_f(c_void_p, "keys values"),
        *_f(c_int64 * 3, "key_strides value_strides"), *_f(c_void_p, "cos sin"),
        *_f(c_int64 * 2, "cos_strides sin_strides"), *_f(RowNorm, "q_norm k_norm"), *_f(c_int64, "batch tokens past"),
        *_f(c_int32, "heads shared size rotation rotated cache_kind angle_kind"),
    )


class CacheCodes(Structure):
    _fields_ = (
        *_f(c_void_p, "codes scale offset"), *_f(c_int64 * 3, "code_strides scale_strides offset_strides"),
        *_f(c_int64, "row"), *_f(c_int32, "bits kind tokens channels hadamard"),
    )


class AttentionArgs(Structure):
    _fields_ = (
        *_f(c_void_p, "q out keys values mask"), *_f(c_int64 * 3, "q_strides out_strides key_strides value_strides"),
        *_f(c_int64 * 4, "mask_strides"), *_f(c_int64, "batch tokens length window"),
        *_f(c_int32, "heads shared size q_kind out_kind kind mask_kind causal"), *_f(c_float, "scale softcap"),
        *_f(c_int64, "past"), *_f(c_void_p, "past_keys past_values"),
    )


class Buffer(Structure):
    _fields_ = (*_f(c_void_p, "data"), *_f(c_int64, "width offset"), *_f(c_int32, "kind"),)


class BlockLinear(Structure):
    _fields_ = (
        *_f(RowNorm, "norm"), *_f(c_void_p, "weights args out"),
        *_f(c_int32, "count x normed residual function gated"),
    )


class BlockNorm(Structure):
    _fields_ = (*_f(RowNorm, "norm"), *_f(c_int32, "x out residual"),)


class Columns(Structure):
    _fields_ = (*_f(c_int32, "buffer start"),)


class BlockRotary(Structure):
    _fields_ = (
        *_f(RowNorm, "q_norm k_norm"), *_f(Columns, "q k v"), *_f(c_int32, "heads shared size rotation rotated"),
    )


class BlockAttention(Structure):
    _fields_ = (*_f(Columns, "q k v"), *_f(c_int32, "out heads shared size"), *_f(c_float, "scale softcap"),)


class BlockStep(Structure):
    _fields_ = (*_f(c_void_p, "linear norm rotary attention"), *_f(c_int32, "kind"),)


class Block(Structure):
    _fields_ = (
        *_f(c_void_p, "steps buffers"), *_f(c_int64, "scratch"), *_f(c_int32, "step_count buffer_count"),
        *_f(c_void_p, "keys values cos sin mask"), *_f(c_int64 * 3, "key_strides value_strides"),
        *_f(c_int64 * 2, "cos_strides sin_strides"), *_f(c_int64 * 4, "mask_strides"),
        *_f(c_int64, "batch tokens past length window coded"), *_f(c_void_p, "past_keys past_values"),
        *_f(c_int32, "cache_kind angle_kind mask_kind causal threads"),
    )


class CodeTable(Structure):
    _fields_ = (*_f(c_void_p, "cells values"), *_f(c_int32, "shift first last negative mirror"),)


class OptimState(Structure):
    _fields_ = (
        *_f(c_void_p, "codes scale table"), *_f(c_int32, "kind bits stochastic power shift base top split low"),
        *_f(c_float, "hi"),
    )


class OptimJob(Structure):
    _fields_ = (
        *_f(c_void_p, "p g"), *_f(c_int64, "count slab block inner row"),
        *_f(c_int32, "p_kind g_kind rule flags states"), *_f(c_uint32 * 2, "key"), *_f(c_uint32, "turn"),
        *_f(c_float * 8, "c"), *_f(OptimState * 3, "state"),
    )


class Extent(Structure):
    _fields_ = (*_f(c_char_p, "name"), *_f(c_int64, "count"), *_f(c_int32, "kind"),)


_P, _N, _I = c_void_p, c_int64, c_int
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name: (result, arguments)
    "pw_abi": (_I, ()),
    "pw_isa_count": (_I, ()),
    "pw_isa_name": (c_char_p, (_I,)),
    "pw_isa_here": (_I, (_I,)),
    "pw_isa_use": (_I, (c_char_p,)),
    "pw_int_linear": (_I, (_P, _P, _N, _N, _P, _P, _I, _P, _P, _P, _P, _P, _P, _P, _N, _I)),
    "pw_int_linears": (_I, (_P, _P, _I)),
    "pw_blocks": (_I, (_P, _I)),
    "pw_float_linear": (_I, (_P, _P, _N, _N, _P, _P, _I, _P, _P, _P, _P, _P, _P, _I)),
    "pw_convolution": (_I, (_P, _P)),
    "pw_conv_chain": (_I, (_P,)),
    "pw_pack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_pack_stream": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_unpack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_probe": (_N, (_I, _P, _N, _I)),
    "pw_dequantize": (_I, (_P, _P, _P, _P, _P, _P, _N, _P, _I)),
    "pw_quantize": (_I, (_P, _P, _N, _P, _P, _P, _P, _P, _I)),
    "pw_ranges": (_I, (_P, _P, _N, _P, _I)),
    "pw_finite": (_I, (_P, _I, _N, _I)),
    "pw_gguf_quantize": (_I, (_I, _P, _I, _N, _N, _P, _P, _P, _I)),
    "pw_gguf_codes": (_I, (_I, _P, _N, _P, _I)),
    "pw_gptq_block": (_I, (_P,)),
    "pw_squared_errors": (_I, (_P,)),
    "pw_attention": (_I, (_P, _I)),
    "pw_rotary": (_I, (_P, _I)),
    "pw_optim_steps": (_I, (_P, _N, _I)),
    "pw_extents": (_I, (_I, _P, _P, _I)),
}
