"""Fake quantization with torchao's gradients: straight-through for rounding, zero where a code was clamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .enums import ZeroPointDomain
from .integer_ranges import FP8_TYPES, _get_and_check_qmin_qmax
from .primitives import _RoundToFloat8, check_zero_point, unclamped, values

__all__ = [
    "_do_fake_quantize_affine", "_fake_quantize_affine", "_fake_quantize_affine_cachemask", "fake_quantize_affine",
    "fake_quantize_affine_cachemask",
]  # fmt: skip


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
    Raises the same errors as :func:`pennyweight.compat.torchao.primitives.quantize_affine`.
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


def _do_fake_quantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes in a float dtype, and the values they represent."""
    return _steps_codes_values(
        input, block_size, scale, zero_point, quant_dtype, quant_min, quant_max, zero_point_domain
    )[1:]


fake_quantize_affine = _fake_quantize_affine
fake_quantize_affine_cachemask = _fake_quantize_affine_cachemask
