"""Q4_K under torchao's names: 4-bit codes in blocks, whose scales and minima are 6-bit codes in super-blocks of 256.

    x = code * (quantized_block_scale * super_block_scale_scale) + quantized_block_min * super_block_min_scale

As in llama.cpp, a block's minimum is at most 0. Codes and 6-bit numbers are rounded and in range, unlike torchao's,
whose uint4 are unrounded floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .integer_ranges import block_view, require

__all__ = ["_GGUF_QK_K", "_choose_qparams_gguf", "_dequantize_gguf", "_quantize_gguf"]

_GGUF_QK_K = 256  # elements of a super-block, as in llama.cpp
_SIX_BITS = 63
_FOUR_BITS = 15


def _nonzero(scale: Tensor) -> Tensor:
    """A divisor: infinite where the scale is zero, so that the quotient is zero."""
    return torch.where(scale == 0, torch.inf, scale)


def _check(block_size: Sequence[int], target_dtype: torch.dtype) -> None:
    require(target_dtype is torch.uint4, f"only torch.uint4 is supported, got {target_dtype}")
    require(
        len(block_size) == 2 and block_size[0] == 1 and _GGUF_QK_K % block_size[1] == 0,
        f"block_size must be (1, b) with b dividing {_GGUF_QK_K}, got {tuple(block_size)}",
    )


def _choose_qparams_gguf(
    input: Tensor, block_size: Sequence[int], target_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(super_block_scale_scale, super_block_min_scale, quantized_block_scale, quantized_block_min).

    input: [N, K], K a multiple of 256. The first two are [N, K / 256], the others [N, K / 256, 256 / b] (without the
    middle axis where K is 256), all in the dtype of the input; the quantized ones are whole numbers 0..63, and
    super_block_min_scale is at most 0.
    """
    _check(block_size, target_dtype)
    view, reduced, _ = block_view(input, block_size)
    low, high = view.amin(reduced).clamp(max=0), view.amax(reduced).clamp(min=0)
    scale, least = (high - low) / _FOUR_BITS, low
    supers, inner, shape = block_view(scale, (1, _GGUF_QK_K // block_size[1]))
    mins = least.reshape(supers.shape)
    scale_scale = supers.amax(inner) / _SIX_BITS
    min_scale = mins.amin(inner) / _SIX_BITS
    quantized_scale = (supers / _nonzero(scale_scale).reshape(shape)).round().clamp(0, _SIX_BITS)
    quantized_min = (mins / _nonzero(min_scale).reshape(shape)).round().clamp(0, _SIX_BITS)
    return scale_scale, min_scale, quantized_scale, quantized_min


def _block_parameters(
    block_size: Sequence[int], scale_scale: Tensor, min_scale: Tensor, scale: Tensor, least: Tensor, shape: list[int]
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each block, against a block view."""
    per_super = _GGUF_QK_K // block_size[1]
    blocks = (-1, per_super)
    return (
        (scale.reshape(blocks) * scale_scale.reshape(-1, 1)).reshape(shape),
        (least.reshape(blocks) * min_scale.reshape(-1, 1)).reshape(shape),
    )


def _quantize_gguf(
    input: Tensor, block_size: Sequence[int], target_dtype: torch.dtype, super_block_scale_scale: Tensor,
    super_block_min_scale: Tensor, quantized_block_scale: Tensor, quantized_block_min: Tensor,
) -> Tensor:  # fmt: skip
    """Codes clamp(round((x - min) / scale), 0, 15) as uint8, in the shape of the input."""
    _check(block_size, target_dtype)
    view, _, shape = block_view(input, block_size)
    scale, least = _block_parameters(
        block_size, super_block_scale_scale, super_block_min_scale, quantized_block_scale, quantized_block_min, shape
    )
    codes = ((view - least) / _nonzero(scale)).round().clamp(0, _FOUR_BITS)
    return codes.reshape(input.shape).to(torch.uint8)


def _dequantize_gguf(
    input: Tensor, block_size: Sequence[int], target_dtype: torch.dtype, super_block_scale_scale: Tensor,
    super_block_min_scale: Tensor, quantized_block_scale: Tensor, quantized_block_min: Tensor,
    output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Values code * scale + min, by default in the dtype of the scales."""
    _check(block_size, target_dtype)
    view, _, shape = block_view(input, block_size)
    scale, least = _block_parameters(
        block_size, super_block_scale_scale, super_block_min_scale, quantized_block_scale, quantized_block_min, shape
    )
    x = (view.to(scale.dtype) * scale + least).reshape(input.shape)
    return x if output_dtype is None else x.to(output_dtype)
