"""Floats of at most 8 bits without infinities or NaN: one sign, ``ebits`` exponent and ``mbits`` mantissa bits.

A code is kept in the low bits of a byte: sign, exponent, mantissa. The exponent's bias is 2**(ebits - 1) - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .integer_ranges import require

__all__ = [
    "_choose_qparams_affine_floatx", "_dequantize_affine_floatx", "_f32_to_floatx_unpacked", "_floatx_unpacked_to_f32",
    "_n_ones", "_quantize_affine_floatx", "choose_qparams_affine_floatx", "dequantize_affine_floatx",
    "quantize_affine_floatx",
]  # fmt: skip


def _n_ones(n: int) -> int:
    """The number whose n lowest bits are ones."""
    return (1 << n) - 1


def _check_bits(ebits: int, mbits: int) -> None:
    require(
        ebits >= 1 and mbits >= 0 and 1 + ebits + mbits <= 8,
        f"a sign, {ebits} exponent and {mbits} mantissa bits are no float of at most 8 bits",
    )


def _greatest(ebits: int, mbits: int) -> float:
    return 2.0 ** (_n_ones(ebits) - _n_ones(ebits - 1)) * (_n_ones(mbits + 1) / 2**mbits)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float32, exact. exponent: int32, -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _f32_to_floatx_unpacked(x: Tensor, ebits: int, mbits: int) -> Tensor:
    """Codes of the nearest numbers, ties to even, saturating. x: float32, without NaN. Returns uint8.

    Between 2**e and 2**(e + 1) numbers lie 2**(e - mbits) apart; below the least normal number as far apart as just
    above it. So the count of such steps, plus 2**mbits for each power of two below, is the code.
    """
    require(x.dtype == torch.float32, f"floatx codes are made of float32, got {x.dtype}")
    _check_bits(ebits, mbits)
    least = 1 - _n_ones(ebits - 1)  # exponent of the least normal number
    magnitude = x.abs().clamp(max=_greatest(ebits, mbits))
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=least)
    steps, below = magnitude * _power_of_two(mbits - exponent), (exponent - least) << mbits
    if mbits:
        code = steps.round().to(torch.int32) + below
    else:  # an odd number may lie below: the tie goes to the even code, not to the even number of steps
        code = (steps.double() + below).round().to(torch.int32)
    return (code | (x.signbit().to(torch.int32) << (ebits + mbits))).to(torch.uint8)


def _floatx_unpacked_to_f32(x: Tensor, ebits: int, mbits: int) -> Tensor:
    """float32 numbers of the codes. x: uint8."""
    require(x.dtype == torch.uint8, f"floatx codes are uint8, got {x.dtype}")
    _check_bits(ebits, mbits)
    code = x.to(torch.int32)
    field = (code >> mbits) & _n_ones(ebits)
    mantissa = (code & _n_ones(mbits)) + ((field > 0).to(torch.int32) << mbits)
    exponent = field.clamp(min=1) - _n_ones(ebits - 1) - mbits
    magnitude = mantissa.to(torch.float32) * _power_of_two(exponent)
    return torch.where(code >> (ebits + mbits) > 0, -magnitude, magnitude)


def _choose_qparams_affine_floatx(tensor: Tensor, ebits: int, mbits: int) -> Tensor:
    """max|row| (at least 1e-12) / greatest number, in the dtype of the tensor. tensor: [N, K]; returns [N]."""
    _check_bits(ebits, mbits)
    return (tensor.float().abs().amax(1).clamp(min=1e-12) / _greatest(ebits, mbits)).to(tensor.dtype)


def _quantize_affine_floatx(tensor: Tensor, scale: Tensor, ebits: int, mbits: int) -> Tensor:
    """Codes of x / scale. tensor: [N, K]; scale: [N], where 0 (1e-12 underflows in float16) gives zeros."""
    scale = torch.where(scale == 0, torch.inf, scale).reshape(-1, 1)
    return _f32_to_floatx_unpacked(tensor.float() / scale, ebits, mbits)


def _dequantize_affine_floatx(
    tensor: Tensor, scale: Tensor, ebits: int, mbits: int, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers of the codes times scale, in float32, rounded once to ``output_dtype``."""
    return (_floatx_unpacked_to_f32(tensor, ebits, mbits) * scale.float().reshape(-1, 1)).to(output_dtype)


choose_qparams_affine_floatx = _choose_qparams_affine_floatx
quantize_affine_floatx = _quantize_affine_floatx
dequantize_affine_floatx = _dequantize_affine_floatx
