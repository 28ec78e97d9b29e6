"""Ranges of integer dtypes, and torchao's block_size: one number per axis, the elements that share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...planning.granularity import Granularity, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from .enums import TorchAODType

__all__ = [
    "FP8_TYPES",
    "_DTYPE_TO_BIT_WIDTH",
    "_DTYPE_TO_QVALUE_BOUNDS",
    "_SUB_BYTE_INT_BOUNDS",
    "_SUB_BYTE_UINT_BOUNDS",
    "_get_and_check_qmin_qmax",
    "_get_reduction_params",
    "get_block_size",
]

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


def spread(part: Tensor, shape: list[int], name: str) -> Tensor:
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
