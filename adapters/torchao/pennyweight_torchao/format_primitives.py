"""Float8 on plain tensors, under torchao's names: x = code * scale, scale = absmax / the float8 maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .primitives import _RoundToFloat8, straight_round
from .qparams import block_view, require

__all__ = [
    "_RoundToFloat8", "_choose_qparams_affine_float8", "_choose_scale_float8", "_dequantize_affine_float8",
    "_dequantize_affine_float8_non_decomposed", "_expand_scale_to_tensor_shape", "_maybe_expand_scale_to_tensor_shape",
    "_quantize_affine_float8", "_quantize_affine_float8_non_decomposed", "choose_qparams_affine_float8",
    "dequantize_affine_float8", "quantize_affine_float8",
]  # fmt: skip

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
