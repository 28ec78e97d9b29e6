"""Affine quantization of plain tensors, bit-compatible with torchao, under its names.

Accepts the arguments of all releases, including ``zero_point_domain`` of 0.11 and before. Where releases differ
numerically, 0.18 applies: zero points are subtracted in the output's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pennyweight.core.numerics import offset_steps, zero_point_steps
from pennyweight.planning.granularity import MappingType

from .enums import TorchAODType, ZeroPointDomain
from .qparams import (
    _SUB_BYTE_INT_BOUNDS,
    _SUB_BYTE_UINT_BOUNDS,
    FLOAT,
    FP8_TYPES,
    INT,
    NONE,
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    _get_and_check_qmin_qmax,
    _Round,
    block_view,
    check_domain,
    choose_qparams_affine,
    choose_qparams_affine_with_min_max,
    expand_to_groups,
    kept_by_export,
    require,
    stored_dtype,
    straight_round,
)

__all__ = [
    "MappingType", "TorchAODType", "ZeroPointDomain", "_Round", "_choose_qparams_affine_dont_preserve_zero",
    "_choose_qparams_affine_tinygemm", "_dequantize_affine_no_zero_point", "_dequantize_affine_tinygemm",
    "_fake_quantize_affine", "_fake_quantize_affine_cachemask", "_quantize_affine_no_zero_point",
    "_quantize_affine_tinygemm", "choose_qparams_affine", "choose_qparams_affine_with_min_max", "dequantize_affine",
    "fake_quantize_affine", "fake_quantize_affine_cachemask", "quantize_affine",
]  # fmt: skip

VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _RoundToFloat8(torch.autograd.Function):
    """``x.to(float8_dtype)``; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, float8_dtype: torch.dtype) -> Tensor:
        return x.to(float8_dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        return gy, None


# -- quantizing --------------------------------------------------------------------------------------------------------


def unclamped(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_min: float,
    quant_max: float, domain: ZeroPointDomain, dtype: Any,
) -> Tensor:  # fmt: skip
    """Codes in a float dtype, not yet clamped to quant_min..quant_max, and the shape of the input; differentiable.

    INT, NONE  round(x * (1 / scale)) + zero_point: a product with the reciprocal, rounded before the sum
    FLOAT      round((x - (zero_point - scale * mid)) / scale)
    float8     not rounded: its codes are not integers
    """
    require(input.dtype in VALUE_DTYPES, f"Unsupported input dtype: {input.dtype}")
    view, _, shape = block_view(input, block_size)
    scale = expand_to_groups(scale, shape, "scale")
    zero_point = (
        None if zero_point is None or zero_point.numel() == 0 else expand_to_groups(zero_point, shape, "zero_point")
    )
    if domain is FLOAT:
        offset = torch.zeros_like(scale) if zero_point is None else zero_point
        mid, span = (quant_max + quant_min + 1) / 2, quant_max - quant_min
        steps = offset_steps(view, scale, offset, mid, span, straight_round)
    else:
        rounding = (lambda x: x) if dtype in FP8_TYPES else straight_round
        steps = zero_point_steps(view, scale, zero_point if domain is INT else None, rounding)
    return steps.reshape(input.shape)


def _quantize(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, dtype: Any,
    quant_min: float | None, quant_max: float | None, domain: ZeroPointDomain,
) -> Tensor:  # fmt: skip
    quant_min, quant_max = _get_and_check_qmin_qmax(dtype, quant_min, quant_max)
    steps = unclamped(input, block_size, scale, zero_point, quant_min, quant_max, domain, dtype)
    return steps.clamp(quant_min, quant_max).to(stored_dtype(dtype))


def check_zero_point(zero_point: Tensor | None, domain: Any) -> None:
    """Raises ValueError for None as a domain and for a zero point in the domain that has none."""
    check_domain(domain)
    if domain is NONE and zero_point is not None:
        raise ValueError("zero_point should be None when zero_point_domain is NONE")


@kept_by_export
@torch.no_grad()
def quantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, output_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> Tensor:  # fmt: skip
    """Codes clamp(round(x / scale) + zero_point, quant_min, quant_max), computed as :func:`unclamped` says.

    input: float32, float16 or bfloat16, any strides. scale, zero_point: one a block, any shape of that many; a zero
    point that is None or empty counts as 0. Codes of less than a byte (``torch.uint4``, ``torch.int4``, ..) come as
    uint8 or int8. A scale of zero gives a block of zeros.

    Raises AssertionError for other input dtypes, bounds outside the dtype and blocks that do not divide the input,
    RuntimeError where scale or zero_point is not one a block, ValueError for an unknown output dtype or domain.
    """
    check_zero_point(zero_point, zero_point_domain)
    return _quantize(input, block_size, scale, zero_point, output_dtype, quant_min, quant_max, zero_point_domain)


@torch.no_grad()
def _quantize_affine_tinygemm(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, output_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
) -> Tensor:  # fmt: skip
    """:func:`quantize_affine` in the float domain."""
    return _quantize(input, block_size, scale, zero_point, output_dtype, quant_min, quant_max, FLOAT)


@torch.no_grad()
def _quantize_affine_no_zero_point(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, output_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
) -> Tensor:  # fmt: skip
    """:func:`quantize_affine` without a zero point; one that is given is not used."""
    return _quantize(input, block_size, scale, None, output_dtype, quant_min, quant_max, NONE)


# -- dequantizing ------------------------------------------------------------------------------------------------------


def values(
    codes: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_min: float,
    quant_max: float, domain: ZeroPointDomain, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Values of codes in torchao's order and dtypes. Core computes all in one dtype; this rounds differently: the codes
    and the zero point to the output's dtype before they are subtracted, the product with the scale in the wider of the
    output's dtype and the scale's, and in the float domain the product again before the sum."""
    view, _, shape = block_view(codes, block_size)
    scale = expand_to_groups(scale, shape, "scale")
    zero_point = None if zero_point is None else expand_to_groups(zero_point, shape, "zero_point")
    if domain is FLOAT:
        x = (view - (quant_max + quant_min + 1) / 2).to(output_dtype)
        x = (x * scale).to(output_dtype)
        x = x if zero_point is None else x + zero_point
    else:
        x = view.to(output_dtype)
        x = x if zero_point is None else x - zero_point.to(output_dtype)
        x = x * scale
    return x.reshape(codes.shape).to(output_dtype)


def _dequantize(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, input_dtype: Any,
    quant_min: float | None, quant_max: float | None, domain: ZeroPointDomain, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if input_dtype not in _SUB_BYTE_UINT_BOUNDS and input_dtype not in _SUB_BYTE_INT_BOUNDS:
        require(input.dtype == input_dtype, f"Expected: {input_dtype}, got: {input.dtype}")
    require(output_dtype in VALUE_DTYPES, f"Unsupported output dtype: {output_dtype}")
    quant_min, quant_max = _get_and_check_qmin_qmax(input_dtype, quant_min, quant_max)
    return values(input, block_size, scale, zero_point, quant_min, quant_max, domain, output_dtype)


@kept_by_export
def dequantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, input_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, *, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Values (code - zero_point) * scale; in the float domain (code - mid) * scale + zero_point.

    input: codes of ``input_dtype``, those of less than a byte one a byte. scale, zero_point: one a block; a zero point
    of None counts as 0. output_dtype: float32, float16 or bfloat16. Raises as :func:`quantize_affine` does.
    """
    check_zero_point(zero_point, zero_point_domain)
    return _dequantize(
        input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, zero_point_domain, output_dtype
    )


def _dequantize_affine_tinygemm(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, input_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, *, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """:func:`dequantize_affine` in the float domain."""
    return _dequantize(input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, FLOAT, output_dtype)


def _dequantize_affine_no_zero_point(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, input_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, *, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """:func:`dequantize_affine` without a zero point. Raises AssertionError where one is given."""
    require(zero_point is None, "zero_point should be None for _dequantize_affine_no_zero_point")
    return _dequantize(input, block_size, scale, None, input_dtype, quant_min, quant_max, NONE, output_dtype)


# -- fake quantization with torchao's gradients ------------------------------------------------------------------------


def _steps_codes_values(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_dtype: Any,
    quant_min: float | None, quant_max: float | None, domain: ZeroPointDomain,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_zero_point(zero_point, domain)
    quant_min, quant_max = _get_and_check_qmin_qmax(quant_dtype, quant_min, quant_max)
    steps = unclamped(input, block_size, scale, zero_point, quant_min, quant_max, domain, quant_dtype)
    codes = steps.clamp(quant_min, quant_max)
    if quant_dtype in FP8_TYPES:  # the counterpart of rounding to integers
        codes = _RoundToFloat8.apply(codes, quant_dtype).to(steps.dtype)
    inside = (steps >= quant_min) & (steps <= quant_max)
    if zero_point is not None and zero_point.numel() == 0:
        zero_point = None
    return inside, codes, values(codes, block_size, scale, zero_point, quant_min, quant_max, domain, input.dtype)


def _fake_quantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> Tensor:  # fmt: skip
    """quantize_affine followed by dequantize_affine, in the dtype of the input, with a gradient.

    The gradient is straight-through, and zero where the code was clamped; scale and zero_point get gradients too.
    Raises the same errors as :func:`pennyweight_torchao.primitives.quantize_affine`.
    """
    return _steps_codes_values(
        input, block_size, scale, zero_point, quant_dtype, quant_min, quant_max, zero_point_domain
    )[2]


def _fake_quantize_affine_cachemask(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`_fake_quantize_affine` and a mask of the elements whose code was within bounds before clamping."""
    inside, _, x = _steps_codes_values(
        input, block_size, scale, zero_point, quant_dtype, quant_min, quant_max, zero_point_domain
    )
    return x, inside


fake_quantize_affine = _fake_quantize_affine
fake_quantize_affine_cachemask = _fake_quantize_affine_cachemask
