"""int8 activations and per-channel weights under torchao's names."""

from __future__ import annotations

import torch
from torch import Tensor

from .enums import MappingType
from .integer_ranges import require
from .intmm import int_scaled_matmul
from .primitives import choose_qparams_affine, dequantize_affine, quantize_affine

__all__ = [
    "_get_per_token_block_size", "_quant_int8_dynamic_per_token_linear", "_quant_int8_per_token_matmul",
    "_quantize_activation_per_token_absmax", "dequantize_per_channel", "dequantize_per_tensor",
    "dynamically_quantize_per_channel", "per_token_dynamic_quant", "quant_int8_dynamic_per_token_linear",
    "quant_int8_per_token_matmul", "quantize_activation_per_token_absmax",
]  # fmt: skip


def _get_per_token_block_size(x: Tensor) -> list[int]:
    """block_size of one scale a token."""
    return [1] * (x.dim() - 1) + [x.shape[-1]]


def _quantize_activation_per_token_absmax(t: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 in -127..127, scale) with one scale a token, at least 1e-5: scale = absmax / 127.

    The scale drops the last axis, and is float32 for float16.
    """
    block = _get_per_token_block_size(t)
    wide = torch.float32 if t.dtype is torch.float16 else None
    scale, zero_point = choose_qparams_affine(
        t, MappingType.SYMMETRIC, block, torch.int8, -127, 127, 1e-5, scale_dtype=wide
    )
    return quantize_affine(t, block, scale, zero_point, torch.int8, -127, 127), scale


def _quant_int8_per_token_matmul(
    x_vals_int8: Tensor, x_scales: Tensor, w_vals_int8_t: Tensor, w_scales: Tensor,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """(x @ w) * x_scales * w_scales, summed exactly. x: int8 [.., K]; w: int8 [K, N]; x_scales: float32 or bfloat16.

    Raises AssertionError for other dtypes.
    """
    require(x_vals_int8.dtype is torch.int8, f"x dtype {x_vals_int8.dtype} not yet supported")
    require(w_vals_int8_t.dtype is torch.int8, f"w dtype {w_vals_int8_t.dtype} not yet supported")
    require(
        x_scales.dtype in (torch.float32, torch.bfloat16),
        f"x_scales needs to be a torch.float32 or torch.bfloat16 but got {x_scales.dtype}",
    )
    rows = x_vals_int8.reshape(-1, x_vals_int8.shape[-1])
    y = int_scaled_matmul(rows, w_vals_int8_t, x_scales.reshape(-1, 1)) * w_scales
    return y.reshape(*x_vals_int8.shape[:-1], y.shape[-1]).to(output_dtype)


def _quant_int8_dynamic_per_token_linear(
    x: Tensor, w_vals_int8_t: Tensor, w_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """F.linear with an int8 weight [K, N], x quantized by token."""
    codes, scale = _quantize_activation_per_token_absmax(x)
    y = _quant_int8_per_token_matmul(codes, scale, w_vals_int8_t, w_scales, out_dtype)
    return y if bias is None else y + bias


def dynamically_quantize_per_channel(
    x: Tensor, quant_min: int, quant_max: int, target_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale [N], zero_point int64 [N]) of the rows of a matrix, symmetric. Raises AssertionError if not 2-d."""
    require(x.dim() == 2, f"only support 2d Tensors, got {list(x.shape)}")
    block = (1, x.shape[1])
    scale, zero_point = choose_qparams_affine(
        x, MappingType.SYMMETRIC, block, target_dtype, quant_min, quant_max,
        eps=torch.finfo(torch.float32).smallest_normal, zero_point_dtype=torch.int64,
    )  # fmt: skip
    return quantize_affine(x, block, scale, zero_point, target_dtype, quant_min, quant_max), scale, zero_point


def dequantize_per_tensor(
    int_repr: Tensor, scale: Tensor, zero_point: Tensor | None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of codes under one scale. Raises AssertionError where there are several."""
    require(scale.numel() == 1, f"scale size: {scale.numel()}")
    return dequantize_affine(int_repr, int_repr.shape, scale, zero_point, int_repr.dtype, output_dtype=out_dtype)


def dequantize_per_channel(
    int_repr: Tensor, scales: Tensor, zero_points: Tensor | None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of the codes of a matrix under one scale a row. Raises AssertionError if not 2-d."""
    require(int_repr.dim() == 2, f"only support 2d Tensors, got {list(int_repr.shape)}")
    block = (1, int_repr.shape[1])
    return dequantize_affine(int_repr, block, scales, zero_points, int_repr.dtype, output_dtype=out_dtype)


def per_token_dynamic_quant(
    input: Tensor, scale_dtype: torch.dtype = torch.float32, zero_point_dtype: torch.dtype = torch.float32,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """The input through int8, asymmetric, one scale a token, and back in its dtype."""
    block = _get_per_token_block_size(input)
    scale, zero_point = choose_qparams_affine(
        input, MappingType.ASYMMETRIC, block, torch.int8, -128, 127, eps, scale_dtype, zero_point_dtype
    )
    codes = quantize_affine(input, block, scale, zero_point, torch.int8, -128, 127)
    return dequantize_affine(codes, block, scale, zero_point, torch.int8, -128, 127, output_dtype=input.dtype)


quantize_activation_per_token_absmax = _quantize_activation_per_token_absmax
quant_int8_per_token_matmul = _quant_int8_per_token_matmul
quant_int8_dynamic_per_token_linear = _quant_int8_dynamic_per_token_linear
