"""Ranges of dtypes, blocks, and the choice of scales and zero points of plain tensors, under torchao's names.

``block_size`` has one number per axis: the elements that share a scale. Scales and zero points are bit-compatible with
torchao. Accepts the arguments of all releases: ``keepdim`` of the newest, ``preserve_zero`` and ``zero_point_domain``
of 0.11 and before. The minimum scale is the smallest normal number of the input's dtype, as in 0.18 (before: its
machine epsilon).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pennyweight.core.qparams import no_clip_scale, offset_of, range_scale, symmetric_scale, zero_point_of
from pennyweight.planning.granularity import (
    Granularity,
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)

from .enums import TorchAODType, ZeroPointDomain

__all__ = [
    "FP8_TYPES", "_DTYPE_TO_BIT_WIDTH", "_DTYPE_TO_QVALUE_BOUNDS", "_SUB_BYTE_INT_BOUNDS", "_SUB_BYTE_UINT_BOUNDS",
    "_Round", "_choose_qparams_affine_dont_preserve_zero", "_choose_qparams_affine_tinygemm",
    "_get_and_check_qmin_qmax", "_get_reduction_params", "choose_qparams_affine", "choose_qparams_affine_with_min_max",
    "get_block_size",
]  # fmt: skip

# -- ranges and blocks -------------------------------------------------------------------------------------------------

FP8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_SUB_BYTE = range(1, 8)
_SUB_BYTE_UINT_BOUNDS: dict[Any, tuple[int, int]] = {
    getattr(torch, f"uint{bits}"): (0, 2**bits - 1) for bits in _SUB_BYTE
}
_SUB_BYTE_INT_BOUNDS: dict[Any, tuple[int, int]] = {
    dtype: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for bits in _SUB_BYTE
    for dtype in (TorchAODType[f"INT{bits}"], getattr(torch, f"int{bits}"))
}
_WHOLE_BYTES = (torch.uint8, torch.int8, torch.int16, torch.int32)
_DTYPE_TO_QVALUE_BOUNDS: dict[Any, tuple[int, int]] = {
    **{dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _WHOLE_BYTES},
    **_SUB_BYTE_UINT_BOUNDS,
    **_SUB_BYTE_INT_BOUNDS,
}
_DTYPE_TO_BIT_WIDTH: dict[Any, int] = {
    dtype: (high - low).bit_length() for dtype, (low, high) in _DTYPE_TO_QVALUE_BOUNDS.items()
}


# Name of a function -> its call under torch.export, which may return NotImplemented; filled by operators/affine.py.
EXPORTED: dict[str, Callable[..., Any]] = {}


def kept_by_export(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: call the entry in :data:`EXPORTED`, if there is one, while torch.export traces. ``whole`` is the
    function itself."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if EXPORTED and torch.compiler.is_exporting():
            result = EXPORTED[function.__name__](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    call.whole = function  # type: ignore[attr-defined]
    return call


def require(ok: bool, message: str) -> None:
    """Raise AssertionError, as torchao does for wrong arguments; also under ``python -O``."""
    if not ok:
        raise AssertionError(message)


def stored_dtype(dtype: Any) -> torch.dtype:
    """The dtype that stores codes of ``dtype``: bytes for sub-byte dtypes."""
    if dtype in _SUB_BYTE_UINT_BOUNDS:
        return torch.uint8
    return torch.int8 if dtype in _SUB_BYTE_INT_BOUNDS else dtype


def _get_and_check_qmin_qmax(dtype: Any, quant_min: float | None, quant_max: float | None) -> tuple[Any, Any]:
    """quant_min and quant_max, by default the range of ``dtype``.

    Raises ValueError for a dtype without codes, AssertionError for a bound outside its range.
    """
    if dtype in FP8_TYPES:
        low: float = torch.finfo(dtype).min
        high: float = torch.finfo(dtype).max
    elif dtype in _DTYPE_TO_QVALUE_BOUNDS:
        low, high = _DTYPE_TO_QVALUE_BOUNDS[dtype]
    else:
        raise ValueError(f"Unsupported dtype: {dtype}; codes are integers of at most 32 bits or float8")
    quant_min = low if quant_min is None else quant_min
    quant_max = high if quant_max is None else quant_max
    require(low <= quant_min, f"quant_min out of bound for dtype {dtype}: {quant_min} is below {low}")
    require(quant_max <= high, f"quant_max out of bound for dtype {dtype}: {quant_max} is above {high}")
    return quant_min, quant_max


def _get_reduction_params(block_size: Sequence[int], input_size: Sequence[int]) -> tuple[list[int], list[int]]:
    """The shape in which to view a tensor so that each block has its own axes, and those axes.

    An axis of n elements in blocks of b becomes (n / b, b), reduced over the second; it stays one axis if b is n
    (reduced) or 1 (kept). -1 is the whole axis. Raises AssertionError if a block does not divide its axis.
    """
    require(
        len(block_size) == len(input_size),
        f"block_size {list(block_size)} needs one number for each of the {len(input_size)} axes of the input",
    )
    shape: list[int] = []
    reduced: list[int] = []
    for axis, (b, n) in enumerate(zip(block_size, input_size, strict=True)):
        if b in (1, n, -1):
            if b != 1:
                reduced.append(len(shape))
            shape.append(n)
            continue
        require(
            b > 1 and n % b == 0,
            f"Expecting input size at {axis} dimension: {n} to be divisible by block_size at {axis} dimension: {b}",
        )
        reduced.append(len(shape) + 1)
        shape += [n // b, b]
    return shape, reduced


def block_view(x: Tensor, block_size: Sequence[int]) -> tuple[Tensor, list[int], list[int]]:
    """x with its blocks on separate axes, those axes, and the broadcast shape of parameters.

    Copies if the strides of x do not allow a view.
    """
    require(len(block_size) == x.dim(), f"Got input dim:{x.dim()}, block_size: {tuple(block_size)}: one number an axis")
    shape, reduced = _get_reduction_params(block_size, x.shape)
    return x.reshape(shape), reduced, [1 if axis in reduced else n for axis, n in enumerate(shape)]


def expand_to_groups(part: Tensor, shape: list[int], name: str) -> Tensor:
    """A parameter in its broadcast shape for a block view. Raises RuntimeError unless it has one value per block."""
    blocks = 1
    for n in shape:
        blocks = blocks * n
    if part.numel() != blocks:
        raise RuntimeError(  # the wording of torch's view error, which callers match
            f"{name}: shape '{shape}' is invalid for input of size {part.numel()}; block_size makes {blocks} blocks"
        )
    return part.reshape(shape)


def get_block_size(input_shape: Sequence[int], granularity: Granularity) -> tuple[int, ...]:
    """block_size of a granularity, for a tensor of this shape.

    Raises AssertionError where a group or block does not divide the shape, ValueError for an unsupported granularity.
    """
    shape = tuple(input_shape)
    if isinstance(granularity, PerTensor):
        return shape
    if isinstance(granularity, PerAxis):
        return tuple(1 if axis == granularity.axis % len(shape) else n for axis, n in enumerate(shape))
    if isinstance(granularity, PerRow):
        return tuple(n if axis == granularity.dim % len(shape) else 1 for axis, n in enumerate(shape))
    if isinstance(granularity, PerToken):
        return (1,) * (len(shape) - 1) + shape[-1:]
    if isinstance(granularity, PerGroup):
        group = granularity.group_size
        require(shape[-1] % group == 0, f"Last dimension of input {shape[-1]} is not divisible by group size {group}")
        return (1,) * (len(shape) - 1) + (group,)
    if isinstance(granularity, PerBlock):
        block = (1,) * (len(shape) - len(granularity.block_size)) + tuple(granularity.block_size)
        require(len(block) == len(shape), f"Block size {block} has more dimensions than input shape {shape}")
        block = tuple(n if b == -1 else b for b, n in zip(block, shape, strict=True))
        for b, n in zip(block, shape, strict=True):
            require(n % b == 0, f"input shape {shape} is not divisible by block size {block}")
        return block
    raise ValueError(f"Unsupported Granularity: {granularity}")


# -- scales and zero points --------------------------------------------------------------------------------------------

INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE


class _Round(torch.autograd.Function):
    """Round half to even; the gradient passes unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

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
    """Scale and zero point of blocks with elements in low..high, in their dtype, by core's functions of a range."""
    check_domain(domain)
    require(isinstance(mapping_type, MappingType), f"Unsupported mapping type: {mapping_type}")
    eps = torch.finfo(low.dtype).smallest_normal if eps is None else eps
    if preserve_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    steps = float(quant_max - quant_min)
    if mapping_type is MappingType.ASYMMETRIC:
        scale = range_scale(low, high, steps, eps)
        if domain is NONE:
            return scale, None
        if domain is FLOAT:
            return scale, offset_of(low, high, scale, (quant_max + quant_min + 1) / 2, steps)
        return scale, zero_point_of(low, scale, quant_min, quant_max, straight_round)
    if not preserve_zero:
        raise ValueError("preserve_zero == False is not supported for symmetric quantization")
    if domain is FLOAT:
        raise ValueError(
            "zero_point_domain should be ZeroPointDomain.INT or ZeroPointDomain.NONE for symmetric quantization"
        )
    choose = symmetric_scale if mapping_type is MappingType.SYMMETRIC else no_clip_scale
    scale = choose(low, high, float(quant_min), float(quant_max), eps)
    return scale, None if domain is NONE else torch.full_like(scale, int((quant_max + quant_min + 1) / 2))


def _as_asked(
    scale: Tensor, zero_point: Tensor | None, domain: ZeroPointDomain,
    scale_dtype: torch.dtype | None, zero_point_dtype: torch.dtype | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """In the requested dtypes. A zero point is int32 by default, or in the float domain as the input."""
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


@kept_by_export
@torch.no_grad()
def choose_qparams_affine(
    input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, *before_0_12: Any,
    keepdim: bool = False, preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Any]:  # fmt: skip
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
    min_val: Tensor, max_val: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> tuple[Tensor, Any]:  # fmt: skip
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
    input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ASYMMETRIC with ``preserve_zero=False`` in the float domain: tinygemm's numbers."""
    _asymmetric_only(mapping_type)
    return _choose(
        input, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
        False, False, FLOAT,
    )  # fmt: skip


@torch.no_grad()
def _choose_qparams_affine_dont_preserve_zero(
    input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: Any,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ASYMMETRIC with ``preserve_zero=False`` in the integer domain."""
    _asymmetric_only(mapping_type)
    return _choose(
        input, mapping_type, block_size, target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
        False, False, INT,
    )  # fmt: skip
