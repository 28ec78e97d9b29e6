"""Float8 and floats of at most 8 bits ("floatx") on plain tensors, under torchao's names.

float8   x = code * scale, scale = absmax / the float8 maximum
floatx   one sign, ``ebits`` exponent and ``mbits`` mantissa bits, no infinities or NaN. A code is kept in the low bits
         of a byte: sign, exponent, mantissa. The exponent's bias is 2**(ebits - 1) - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .primitives import _RoundToFloat8, straight_round
from .qparams import block_view, require

__all__ = [
    "_RoundToFloat8", "_choose_qparams_affine_float8", "_choose_qparams_affine_floatx", "_choose_scale_float8",
    "_dequantize_affine_float8", "_dequantize_affine_float8_non_decomposed", "_dequantize_affine_floatx",
    "_expand_scale_to_tensor_shape", "_f32_to_floatx_unpacked", "_floatx_unpacked_to_f32",
    "_maybe_expand_scale_to_tensor_shape", "_n_ones", "_quantize_affine_float8",
    "_quantize_affine_float8_non_decomposed", "_quantize_affine_floatx", "choose_qparams_affine_float8",
    "choose_qparams_affine_floatx", "dequantize_affine_float8", "dequantize_affine_floatx",
    "quantize_affine_float8", "quantize_affine_floatx",
]  # fmt: skip

# -- float8 ------------------------------------------------------------------------------------------------------------

# torchao has no floor: its scale of a zero block is 0, and the block becomes NaN.
_FLOOR = torch.finfo(torch.float32).smallest_normal


def _choose_scale_float8(
    tensor: Tensor, block_size: Sequence[int], float8_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32, hp_value_lb: float | None = None, hp_value_ub: float | None = None,
) -> Tensor:  # fmt: skip
    """float32 scales max|x| / finfo(float8_dtype).max of each block, of shape [n / b for each axis].

    An empty ``block_size`` means the whole tensor, with a 0-d scale. max|x| is first clamped to
    hp_value_lb..hp_value_ub. ``scale_dtype=torch.float8_e8m0fnu`` rounds to the nearest power of two (in its
    logarithm).
    the smallest normal number. Raises AssertionError for other scale dtypes and blocks that do not divide the tensor.
    """
    require(
        scale_dtype in (torch.float32, torch.float8_e8m0fnu),
        f"Only float8_e8m0fnu is supported besides float32, got {scale_dtype}",
    )
    if len(block_size) == 0:
        absmax, shape = tensor.abs().max(), []
    else:
        view, reduced, _ = block_view(tensor, block_size)
        absmax = view.abs().amax(reduced) if reduced else view.abs()
        shape = [1 if b == -1 else n // max(b, 1) for b, n in zip(block_size, tensor.shape, strict=True)]
    if hp_value_lb is not None or hp_value_ub is not None:
        absmax = absmax.clamp(hp_value_lb, hp_value_ub)
    scale = (absmax / torch.finfo(float8_dtype).max).reshape(shape)
    if scale_dtype is not torch.float32:
        scale = torch.exp2(straight_round(torch.log2(scale)))
    return scale.to(torch.float32).clamp(min=_FLOOR)


def choose_qparams_affine_float8(
    tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn, scale_dtype: torch.dtype = torch.float32,
    block_size: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """:func:`_choose_scale_float8` with the arguments it had to 0.11; the whole tensor by default."""
    return _choose_scale_float8(tensor, block_size or (), float8_dtype, scale_dtype)


def _maybe_expand_scale_to_tensor_shape(scale: Tensor, target_shape: Sequence[int]) -> Tensor:
    """scale repeated over its blocks, unless it broadcasts as it is.

    Raises ValueError where the ranks differ or a number of blocks does not divide its axis.
    """
    target = tuple(target_shape)
    if scale.numel() == 1 or all(s in (n, 1) for s, n in zip(scale.shape, target, strict=False)):
        return scale
    return _expand_scale_to_tensor_shape(scale, target)


def _expand_scale_to_tensor_shape(scale: Tensor, target_shape: Sequence[int]) -> Tensor:
    """scale repeated over its blocks, in the shape of the tensor; one number stays as it is. Raises as above."""
    target = tuple(target_shape)
    if scale.numel() == 1:
        return scale
    if scale.ndim != len(target):
        raise ValueError(f"Scale tensor has {scale.ndim} dimensions but target has {len(target)}")
    for axis, (n, blocks) in enumerate(zip(target, scale.shape, strict=True)):
        if blocks == 0 or n % blocks:
            raise ValueError(f"Dimension {axis}: target size {n} is not evenly divisible by scale size {blocks}")
        if n != blocks:
            scale = scale.repeat_interleave(n // blocks, dim=axis)
    return scale


def _quantize_affine_float8(tensor: Tensor, scale: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """float8 codes of x / scale in float32, saturating; the gradient passes the cast unchanged.

    scale: one number, one per block (of the rank of the tensor), or broadcastable. A scale of zero gives zeros.
    """
    scale = _maybe_expand_scale_to_tensor_shape(scale, tensor.shape)
    limit = torch.finfo(float8_dtype).max
    scaled = tensor.to(torch.float32) / torch.where(scale == 0, torch.inf, scale)
    return _RoundToFloat8.apply(scaled.clamp(-limit, limit), float8_dtype)


def _dequantize_affine_float8(tensor: Tensor, scale: Tensor, output_dtype: torch.dtype = torch.float32) -> Tensor:
    """code * scale in float32, rounded to ``output_dtype``."""
    scale = _maybe_expand_scale_to_tensor_shape(scale, tensor.shape)
    return (tensor.to(torch.float32) * scale).to(output_dtype)


_choose_qparams_affine_float8 = _choose_scale_float8
quantize_affine_float8 = _quantize_affine_float8_non_decomposed = _quantize_affine_float8
dequantize_affine_float8 = _dequantize_affine_float8_non_decomposed = _dequantize_affine_float8


# -- floatx ------------------------------------------------------------------------------------------------------------


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
