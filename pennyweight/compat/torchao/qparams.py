"""Chooses scales and zero points of plain tensors, bit-compatible with torchao, under its names.

Accepts the arguments of all releases: ``keepdim`` of the newest, ``preserve_zero`` and ``zero_point_domain`` of 0.11
and before. The minimum scale is the smallest normal number of the input's dtype, as in 0.18 (before: its machine
epsilon).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.qparams import _span
from ...planning.granularity import MappingType
from .enums import ZeroPointDomain
from .integer_ranges import FP8_TYPES, _get_and_check_qmin_qmax, block_view, require

__all__ = [
    "_Round",
    "_choose_qparams_affine_dont_preserve_zero",
    "_choose_qparams_affine_tinygemm",
    "choose_qparams_affine",
    "choose_qparams_affine_with_min_max",
]

INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE


class _Round(torch.autograd.Function):
    """Round half to even; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        return gy


def straight_round(x: Tensor) -> Tensor:
    """:class:`_Round`, without autograd overhead if nothing is recorded."""
    return _Round.apply(x) if x.requires_grad and torch.is_grad_enabled() else x.round()


def check_domain(domain: Any) -> None:
    """Raises ValueError for anything but a ZeroPointDomain."""
    if domain is None:
        raise ValueError("Please use ZeroPointDomain.NONE instead of None")
    if not isinstance(domain, ZeroPointDomain):
        raise ValueError(f"Unrecognized zero point domain: {domain}")


def _from_range(
    low: Tensor, high: Tensor, mapping_type: MappingType, quant_min: float, quant_max: float, eps: float | None,
    preserve_zero: bool, domain: ZeroPointDomain,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scale and zero point of blocks whose elements lie in low..high, in their dtype."""
    check_domain(domain)
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
        raise ValueError(
            "zero_point_domain should be ZeroPointDomain.INT or ZeroPointDomain.NONE for symmetric quantization"
        )
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
        f"Only symmetric quantization is supported for FP8 types, got {mapping_type}",
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

    low, high: minimum and maximum of the block, with zero included unless ``preserve_zero=False``.

    SYMMETRIC                  scale = max(-low, high) / ((quant_max - quant_min) / 2), zero_point the middle code
    SYMMETRIC_NO_CLIPPING_ERR  scale = max(low / quant_min, high / quant_max), zero_point the middle code
    ASYMMETRIC                 scale = (high - low) / (quant_max - quant_min), zero_point by the domain:
        INT    quant_min - round(low / scale), clamped
        FLOAT  low + scale * (quant_min + quant_max + 1) / 2, real: the value of the middle code
        NONE   None; also for the symmetric ones

    eps: floor of the scale, default the smallest normal number of the input's dtype. scale_dtype: default the input's.
    zero_point_dtype: default int32, in the float domain the input's. Shapes: axes inside a block are dropped, or with
    ``keepdim`` one entry a block on each axis. Ten positional arguments are rejected, because the tenth is ``keepdim``
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
