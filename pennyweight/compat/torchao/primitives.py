"""Affine quantization of plain tensors under torchao's names and with its bits: choose, quantize, dequantize.

Arguments of all releases are accepted: ``keepdim`` of the newest, ``preserve_zero`` and ``zero_point_domain`` of 0.11
and before. Where releases differ in numbers these are 0.18's: scales have the smallest normal number of the input's
dtype as their floor (its machine epsilon before), and zero points are subtracted in the output's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.choose import _span
from ...core.numerics import _reciprocal
from ...models.granularity import MappingType
from .bounds import (
    _SUB_BYTE_INT_BOUNDS,
    _SUB_BYTE_UINT_BOUNDS,
    FP8_TYPES,
    _get_and_check_qmin_qmax,
    block_view,
    require,
    spread,
    stored_dtype,
)
from .enums import TorchAODType, ZeroPointDomain

__all__ = [
    "MappingType",
    "TorchAODType",
    "ZeroPointDomain",
    "_Round",
    "_choose_qparams_affine_dont_preserve_zero",
    "_choose_qparams_affine_tinygemm",
    "_dequantize_affine_no_zero_point",
    "_dequantize_affine_tinygemm",
    "_quantize_affine_no_zero_point",
    "_quantize_affine_tinygemm",
    "choose_qparams_affine",
    "choose_qparams_affine_with_min_max",
    "dequantize_affine",
    "quantize_affine",
]

INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE
VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Round(torch.autograd.Function):
    """Round half to even; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        return gy


class _RoundToFloat8(torch.autograd.Function):
    """``x.to(float8_dtype)``; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, float8_dtype: torch.dtype) -> Tensor:
        return x.to(float8_dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        return gy, None


def straight_round(x: Tensor) -> Tensor:
    """:class:`_Round`, without the detour through autograd where nothing is recorded."""
    return _Round.apply(x) if x.requires_grad and torch.is_grad_enabled() else x.round()


# -- choosing ----------------------------------------------------------------------------------------------------------


def _check_domain(domain: Any) -> None:
    if domain is None:
        raise ValueError("Please use ZeroPointDomain.NONE instead of None")
    if not isinstance(domain, ZeroPointDomain):
        raise ValueError(f"Unrecognized zero point domain: {domain}")


def _from_range(
    low: Tensor, high: Tensor, mapping_type: MappingType, quant_min: float, quant_max: float, eps: float | None,
    preserve_zero: bool, domain: ZeroPointDomain,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scale and zero point of blocks whose elements lie in low..high, in their dtype."""
    _check_domain(domain)
    require(isinstance(mapping_type, MappingType), f"Unsupported mapping type: {mapping_type}")
    info = torch.finfo(low.dtype)
    eps = info.smallest_normal if eps is None else eps
    if preserve_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    if mapping_type is MappingType.ASYMMETRIC:
        scale = _span(low, high, float(quant_max - quant_min)).clamp(eps, info.max)
        if domain is NONE:
            return scale, None
        if domain is FLOAT:
            return scale, low + scale * ((quant_max + quant_min + 1) / 2)
        return scale, (quant_min - straight_round(low / scale)).clamp(quant_min, quant_max)
    if not preserve_zero:
        raise ValueError("preserve_zero == False is not supported for symmetric quantization")
    if domain is FLOAT:
        raise ValueError("symmetric quantization needs ZeroPointDomain.INT or ZeroPointDomain.NONE")
    if mapping_type is MappingType.SYMMETRIC:
        scale = torch.maximum(-low, high) / (float(quant_max - quant_min) / 2)
    else:  # an end without codes (int1 has no positive one, uint8 no negative) is left out
        sides = [end / float(bound) for end, bound in ((low, quant_min), (high, quant_max)) if bound]
        scale = sides[0] if len(sides) == 1 else torch.maximum(*sides)
    scale = scale.clamp(eps, info.max)
    return scale, None if domain is NONE else torch.full_like(scale, int((quant_max + quant_min + 1) / 2))


def _as_asked(
    scale: Tensor, zero_point: Tensor | None, domain: ZeroPointDomain,
    scale_dtype: torch.dtype | None, zero_point_dtype: torch.dtype | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """In the dtypes asked for. A zero point is int32 by default, or in the float domain as the input."""
    if zero_point is not None:
        if zero_point_dtype is None:
            zero_point_dtype = torch.int32 if domain is INT else scale.dtype
        zero_point = zero_point.to(zero_point_dtype)
    return scale if scale_dtype is None else scale.to(scale_dtype), zero_point


def _choose(
    input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: Any, quant_min: float | None,
    quant_max: float | None, eps: float | None, scale_dtype: torch.dtype | None, zero_point_dtype: torch.dtype | None,
    keepdim: bool, preserve_zero: bool, domain: ZeroPointDomain,
) -> tuple[Tensor, Any]:  # fmt: skip
    quant_min, quant_max = _get_and_check_qmin_qmax(target_dtype, quant_min, quant_max)
    require(
        target_dtype not in FP8_TYPES or mapping_type is MappingType.SYMMETRIC,
        f"float8 has symmetric quantization only, got {mapping_type}",
    )
    view, reduced, _ = block_view(input, block_size)
    low, high = (view.amin(reduced), view.amax(reduced)) if reduced else (view, view)  # over no axes: over all
    scale, zero_point = _from_range(low, high, mapping_type, quant_min, quant_max, eps, preserve_zero, domain)
    if keepdim:
        counts = [n if b == 1 else 1 if b in (n, -1) else n // b for b, n in zip(block_size, input.shape, strict=True)]
        scale = scale.reshape(counts)
        zero_point = None if zero_point is None else zero_point.reshape(counts)
    return _as_asked(scale, zero_point, domain, scale_dtype, zero_point_dtype)


@torch.no_grad()
def choose_qparams_affine(
    input: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    *before_0_12: Any,
    keepdim: bool = False,
    preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Any]:
    """(scale, zero_point) of each block, computed in the dtype of the input.

    low, high: least and greatest element of the block, with zero included unless ``preserve_zero=False``.

    SYMMETRIC                  scale = max(-low, high) / ((quant_max - quant_min) / 2), zero_point the middle code
    SYMMETRIC_NO_CLIPPING_ERR  scale = max(low / quant_min, high / quant_max), zero_point the middle code
    ASYMMETRIC                 scale = (high - low) / (quant_max - quant_min), zero_point by the domain:
        INT    quant_min - round(low / scale), clamped
        FLOAT  low + scale * (quant_min + quant_max + 1) / 2, real: the value of the middle code
        NONE   None; also for the symmetric ones

    eps: floor of the scale, default the smallest normal number of the input's dtype. scale_dtype: default the input's.
    zero_point_dtype: default int32, in the float domain the input's. Shapes: axes inside a block are dropped, or with
    ``keepdim`` one entry a block on each axis. Ten positional arguments are refused, because the tenth is ``keepdim``
    in new releases and ``preserve_zero`` in old ones; of eleven the last two are preserve_zero and zero_point_domain.

    Raises AssertionError where a block does not divide its axis or a bound is outside the dtype, and ValueError for
    an unknown target dtype or a domain that the mapping does not have.
    """
    if len(before_0_12) == 2:
        preserve_zero, zero_point_domain = before_0_12
    elif before_0_12:
        raise TypeError(
            f"choose_qparams_affine: the positional {before_0_12} after zero_point_dtype may mean keepdim or "
            "preserve_zero; pass keepdim=, preserve_zero= or zero_point_domain= by name"
        )
    return _choose(
        input, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
        keepdim, preserve_zero, zero_point_domain,
    )  # fmt: skip


def choose_qparams_affine_with_min_max(
    min_val: Tensor,
    max_val: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Any]:
    """As :func:`choose_qparams_affine`, from the ranges themselves; ``block_size`` is not used."""
    quant_min, quant_max = _get_and_check_qmin_qmax(target_dtype, quant_min, quant_max)
    require(min_val is not None and max_val is not None, "both min_val and max_val are needed")
    require(min_val.dtype == max_val.dtype, f"min_val and max_val differ in dtype: {min_val.dtype} and {max_val.dtype}")
    scale, zero_point = _from_range(
        min_val, max_val, mapping_type, quant_min, quant_max, eps, preserve_zero, zero_point_domain
    )
    return _as_asked(scale, zero_point, zero_point_domain, scale_dtype, zero_point_dtype)


def _asymmetric_only(mapping_type: MappingType) -> None:
    require(mapping_type is MappingType.ASYMMETRIC, f"Unsupported mapping type: {mapping_type}; only ASYMMETRIC")


@torch.no_grad()
def _choose_qparams_affine_tinygemm(
    input: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """ASYMMETRIC with ``preserve_zero=False`` in the float domain: tinygemm's numbers."""
    _asymmetric_only(mapping_type)
    return _choose(
        input, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
        False, False, FLOAT,
    )  # fmt: skip


@torch.no_grad()
def _choose_qparams_affine_dont_preserve_zero(
    input: Tensor,
    mapping_type: MappingType,
    block_size: Sequence[int],
    target_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """ASYMMETRIC with ``preserve_zero=False`` in the integer domain."""
    _asymmetric_only(mapping_type)
    return _choose(
        input, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
        False, False, INT,
    )  # fmt: skip


# -- quantizing --------------------------------------------------------------------------------------------------------


def unclamped(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_min: float,
    quant_max: float, domain: ZeroPointDomain, dtype: Any,
) -> Tensor:  # fmt: skip
    """Codes in a float dtype and the shape of the input, not yet held to quant_min..quant_max; gradients pass.

    INT, NONE  round(x * (1 / scale)) + zero_point: a product with the reciprocal, rounded before the sum
    FLOAT      round((x - (zero_point - scale * mid)) / scale)
    float8     not rounded: its codes are no integers
    """
    require(input.dtype in VALUE_DTYPES, f"Unsupported input dtype: {input.dtype}")
    view, _, shape = block_view(input, block_size)
    scale = spread(scale, shape, "scale")
    zero_point = None if zero_point is None or zero_point.numel() == 0 else spread(zero_point, shape, "zero_point")
    if domain is FLOAT:
        base = -scale * ((quant_max + quant_min + 1) / 2)
        steps = (view - (base if zero_point is None else zero_point + base)) / torch.where(scale == 0, torch.inf, scale)
        return straight_round(steps).reshape(input.shape)
    steps = (view * _reciprocal(scale)).to(torch.promote_types(view.dtype, scale.dtype))
    if dtype not in FP8_TYPES:
        steps = straight_round(steps)
    if zero_point is not None and domain is INT:
        steps = steps + zero_point
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
    _check_domain(domain)
    if domain is NONE and zero_point is not None:
        raise ValueError("zero_point should be None when zero_point_domain is NONE")


@torch.no_grad()
def quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> Tensor:
    """Codes clamp(round(x / scale) + zero_point, quant_min, quant_max), computed as :func:`unclamped` says.

    input: float32, float16 or bfloat16, any strides. scale, zero_point: one a block, any shape of that many; a zero
    point that is None or empty counts as 0. Codes of less than a byte (``torch.uint4``, ``torch.int4``, ..) come as
    uint8 or int8. A scale of zero sends its block to zero.

    Raises AssertionError for other input dtypes, bounds outside the dtype and blocks that do not divide the input,
    RuntimeError where scale or zero_point is not one a block, ValueError for an unknown output dtype or domain.
    """
    check_zero_point(zero_point, zero_point_domain)
    return _quantize(input, block_size, scale, zero_point, output_dtype, quant_min, quant_max, zero_point_domain)


@torch.no_grad()
def _quantize_affine_tinygemm(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
) -> Tensor:
    """:func:`quantize_affine` in the float domain."""
    return _quantize(input, block_size, scale, zero_point, output_dtype, quant_min, quant_max, FLOAT)


@torch.no_grad()
def _quantize_affine_no_zero_point(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
) -> Tensor:
    """:func:`quantize_affine` without a zero point; one that is given is not used."""
    return _quantize(input, block_size, scale, None, output_dtype, quant_min, quant_max, NONE)


# -- dequantizing ------------------------------------------------------------------------------------------------------


def values(
    codes: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None, quant_min: float,
    quant_max: float, domain: ZeroPointDomain, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Values of codes, each operation in the wider of the output's dtype and the scale's, in torchao's order."""
    view, _, shape = block_view(codes, block_size)
    scale = spread(scale, shape, "scale")
    zero_point = None if zero_point is None else spread(zero_point, shape, "zero_point")
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


def dequantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values (code - zero_point) * scale; in the float domain (code - mid) * scale + zero_point.

    input: codes of ``input_dtype``, those of less than a byte one a byte. scale, zero_point: one a block; a zero point
    of None counts as 0. output_dtype: float32, float16 or bfloat16. Raises as :func:`quantize_affine` does.
    """
    check_zero_point(zero_point, zero_point_domain)
    return _dequantize(
        input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, zero_point_domain, output_dtype
    )


def _dequantize_affine_tinygemm(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`dequantize_affine` in the float domain."""
    return _dequantize(input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, FLOAT, output_dtype)


def _dequantize_affine_no_zero_point(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: Any,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`dequantize_affine` without a zero point. Raises AssertionError where one is given."""
    require(zero_point is None, "zero_point should be None for _dequantize_affine_no_zero_point")
    return _dequantize(input, block_size, scale, None, input_dtype, quant_min, quant_max, NONE, output_dtype)
