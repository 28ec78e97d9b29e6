"""Codes of 4- and 6-bit floats: one in a byte ("unpacked"), or packed; and torchao's kernels, as torch operations.

unpacked  uint8, the code in the low bits: sign, exponent, mantissa
fp4       two codes in a byte, the even element in the low half
fp6       four codes in three bytes

torchao's Triton and CUDA kernels run on one GPU. The functions of their names here give the same values with torch's
operations, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pennyweight.core.formats import E2M1, E2M3, E3M2, Format
from pennyweight.io.codecs.torchao.mx import unpack_uint4, unpack_uint6

from ..format_primitives import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32
from .constants import E8M0_EXPONENT_NAN_VAL

__all__ = [
    "down_size", "f4_unpacked_to_f32", "f6_e2m3_unpacked_to_f32", "f6_e3m2_unpacked_to_f32", "f32_to_f4_unpacked",
    "f32_to_f6_e2m3_unpacked", "f32_to_f6_e3m2_unpacked", "get_bits", "get_fp_scale", "pack_uint4", "pack_uint6",
    "pack_uint6_pytorch", "triton_f4_to_bf16", "triton_f4_to_scaled_bf16", "triton_f6_e2m3_to_bf16",
    "triton_f6_e2m3_to_scaled_bf16", "triton_f6_e3m2_to_bf16", "triton_f6_e3m2_to_scaled_bf16", "unpack_uint4",
    "up_size",
]  # fmt: skip

# name of a format -> exponent and mantissa bits
_BITS = {E2M1: (2, 1), E2M3: (2, 3), E3M2: (3, 2)}


def to_codes(x: Tensor, fmt: Format) -> Tensor:
    """Codes of the nearest numbers, ties to even, saturating; infinities and NaN become the greatest number of their
    sign. x: float32. Returns uint8."""
    return _f32_to_floatx_unpacked(
        torch.where(x.isnan(), torch.copysign(torch.full_like(x, fmt.hi), x), x), *_BITS[fmt]
    )


def f32_to_f4_unpacked(x: Tensor) -> Tensor:
    """e2m1 codes of float32 numbers."""
    return to_codes(x, E2M1)


def f32_to_f6_e2m3_unpacked(x: Tensor) -> Tensor:
    """e2m3 codes of float32 numbers."""
    return to_codes(x, E2M3)


def f32_to_f6_e3m2_unpacked(x: Tensor) -> Tensor:
    """e3m2 codes of float32 numbers."""
    return to_codes(x, E3M2)


def f4_unpacked_to_f32(x: Tensor) -> Tensor:
    """float32 numbers of e2m1 codes."""
    return _floatx_unpacked_to_f32(x, *_BITS[E2M1])


def f6_e2m3_unpacked_to_f32(x: Tensor) -> Tensor:
    """float32 numbers of e2m3 codes."""
    return _floatx_unpacked_to_f32(x, *_BITS[E2M3])


def f6_e3m2_unpacked_to_f32(x: Tensor) -> Tensor:
    """float32 numbers of e3m2 codes."""
    return _floatx_unpacked_to_f32(x, *_BITS[E3M2])


def get_bits(x: Tensor) -> str:
    """The bits of one integer, as "0" and "1" in the width of its dtype, two's complement."""
    width = 8 * x.element_size()
    return f"{int(x.item()) % (1 << width):0{width}b}"


# -- packing -----------------------------------------------------------------------------------------------------------


def down_size(size: Sequence[int]) -> tuple[int, ...]:
    """Size of packed fp4: the last axis halved."""
    if size[-1] % 2:
        raise AssertionError(f"{tuple(size)}: two codes fit in a byte, so the last axis must be even")
    return (*size[:-1], size[-1] // 2)


def up_size(size: Sequence[int]) -> tuple[int, ...]:
    """Size of unpacked fp4: the last axis doubled."""
    return (*size[:-1], size[-1] * 2)


def pack_uint4(uint8_data: Tensor) -> Tensor:
    """Two codes in a byte, the even element in the low half."""
    down_size(uint8_data.shape)
    return uint8_data[..., ::2] | uint8_data[..., 1::2] << 4


def _quarters(x: Tensor) -> list[Tensor]:
    if x.shape[-1] % 4:
        raise AssertionError(f"{tuple(x.shape)}: four codes fit in three bytes, so 4 must divide the last axis")
    return [x[..., i::4] for i in range(4)]


def pack_uint6_pytorch(uint8_data: Tensor) -> Tensor:
    """Four codes a, b, c, d in three bytes, the three next to each other: the high 4 bits of a and b, those of d and c,
    and the low 2 bits of a, b, d, c, from high to low."""
    a, b, c, d = _quarters(uint8_data)
    packed = [(a & 0x3C) << 2 | b >> 2, (d & 0x3C) << 2 | c >> 2, a << 6 | (b & 3) << 4 | (d & 3) << 2 | c & 3]
    return torch.stack(packed, -1).flatten(-2)


def pack_uint6(uint8_data: Tensor) -> Tensor:
    """The order of torchao's GPU kernel. The last axis is one block: all first bytes (high 4 bits of a, of b), then all
    second (of c, of d), then all third ones (low 2 bits of a, b, c, d)."""
    a, b, c, d = _quarters(uint8_data)
    return torch.cat(
        [(a & 0x3C) << 2 | b >> 2, (c & 0x3C) << 2 | d >> 2, a << 6 | (b & 3) << 4 | (c & 3) << 2 | d & 3], -1
    )


# -- kernels of one GPU ------------------------------------------------------------------------------------------------


def get_fp_scale(scale_e8m0: Tensor) -> Tensor:
    """2**(byte - 127) in float32; byte 255 is NaN. scale_e8m0: uint8 or float8_e8m0fnu."""
    code = scale_e8m0.view(torch.uint8)
    power = torch.ldexp(torch.ones_like(code, dtype=torch.float64), code.to(torch.int32) - 127).to(torch.float32)
    return torch.where(code == E8M0_EXPONENT_NAN_VAL, torch.nan, power)


def _scaled(x: Tensor, scale: Tensor, block: int) -> Tensor:
    """bfloat16 numbers times the power of two of their block."""
    by_block = x.reshape(-1, block) * get_fp_scale(scale).reshape(-1, 1)
    return by_block.reshape(x.shape).to(torch.bfloat16)


def triton_f4_to_bf16(x: Tensor) -> Tensor:
    """bfloat16 numbers of packed fp4 codes."""
    return f4_unpacked_to_f32(unpack_uint4(x)).to(torch.bfloat16)


def triton_f4_to_scaled_bf16(x: Tensor, s_e8m0: Tensor, mx_block_size: int) -> Tensor:
    """bfloat16 values of packed fp4 codes under the scales of their blocks of ``mx_block_size``."""
    return _scaled(f4_unpacked_to_f32(unpack_uint4(x)), s_e8m0, mx_block_size)


def _packed_fp6(x: Tensor, fmt: Format, block: int | None = None) -> Tensor:
    size = x.shape[-1] if block is None else 3 * block // 4
    codes = unpack_uint6(x.reshape(-1, size)).reshape(*x.shape[:-1], x.shape[-1] // 3 * 4)
    return _floatx_unpacked_to_f32(codes, *_BITS[fmt])


def triton_f6_e2m3_to_bf16(x: Tensor) -> Tensor:
    """bfloat16 numbers of e2m3 codes packed by :func:`pack_uint6`, the last axis one block."""
    return _packed_fp6(x, E2M3).to(torch.bfloat16)


def triton_f6_e3m2_to_bf16(x: Tensor) -> Tensor:
    """bfloat16 numbers of e3m2 codes packed by :func:`pack_uint6`, the last axis one block."""
    return _packed_fp6(x, E3M2).to(torch.bfloat16)


def triton_f6_e2m3_to_scaled_bf16(x: Tensor, s_e8m0: Tensor, mx_block_size: int) -> Tensor:
    """bfloat16 values of e2m3 codes packed block by block."""
    return _scaled(_packed_fp6(x, E2M3, mx_block_size), s_e8m0, mx_block_size)


def triton_f6_e3m2_to_scaled_bf16(x: Tensor, s_e8m0: Tensor, mx_block_size: int) -> Tensor:
    """bfloat16 values of e3m2 codes packed block by block."""
    return _scaled(_packed_fp6(x, E3M2, mx_block_size), s_e8m0, mx_block_size)
