"""Exact products of 8-bit integers, and int8 activations per token, under torchao's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyweight.kernels.torch_int8 import constant_while_tracing, int_mm_saturates

from .enums import MappingType
from .primitives import choose_qparams_affine, dequantize_affine, quantize_affine
from .qparams import require

__all__ = [
    "_get_per_token_block_size", "_quant_int8_dynamic_per_token_linear", "_quant_int8_per_token_matmul",
    "_quantize_activation_per_token_absmax", "dequantize_per_channel", "dequantize_per_tensor",
    "dynamically_quantize_per_channel", "int_matmul", "int_scaled_matmul", "per_token_dynamic_quant",
    "quant_int8_dynamic_per_token_linear", "quant_int8_per_token_matmul", "quantize_activation_per_token_absmax",
    "safe_int_mm",
]  # fmt: skip


@constant_while_tracing
def _saturates() -> bool:
    return int_mm_saturates()


def safe_int_mm(input: Tensor, mat2: Tensor) -> Tensor:
    """input @ mat2 in int32, exact. input: int8 [M, K]; mat2: int8 [K, N], any strides, same device.

    Uses ``torch._int_mm`` where its sums are exact; else float64, which represents every sum of products of bytes, up
    to K = 2**37. Other integer dtypes are multiplied in int32. Raises AssertionError for tensors on two devices.
    """
    require(
        mat2.device == input.device,
        f"need both tensors to be on the same device but got {mat2.device} and {input.device}",
    )
    if input.dtype is not torch.int8 or mat2.dtype is not torch.int8:
        return torch.matmul(input.to(torch.int32), mat2.to(torch.int32))
    if input.device.type == "cuda":
        return _cuda_int_mm(input, mat2)
    if input.device.type != "cpu" or _saturates():
        return torch.matmul(input.double(), mat2.double()).to(torch.int32)
    return torch._int_mm(input, mat2)


def _cuda_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``torch._int_mm`` with zero padding to cuBLAS's requirements: more than 16 rows, K and N multiples of 8."""
    (m, k), n = a.shape, b.shape[1]
    rows, deep, wide = max(17 - m, 0), max(-k % 8, 8 if k == 0 else 0), -n % 8
    if rows or deep:
        a = F.pad(a, (0, deep, 0, rows))
    if deep or wide:
        b = F.pad(b, (0, wide, 0, deep))
    return torch._int_mm(a.contiguous(), b)[:m, :n]


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """:func:`safe_int_mm`."""
    return safe_int_mm(a, b)


def int_scaled_matmul(a: Tensor, b: Tensor, scales1: Tensor) -> Tensor:
    """(a @ b) * scales1 in the dtype of the scales. a: int8 [M, K]; b: int8 [K, N]; scales1: [M, 1] or [1, 1].

    Raises AssertionError for scales of another shape or not contiguous.
    """
    require(a.dim() == 2 and b.dim() == 2, f"need two matrices, got {a.dim()}-d and {b.dim()}-d tensors")
    require(a.shape[1] == b.shape[0], f"cannot multiply {list(a.shape)} by {list(b.shape)}")
    require(
        scales1.dim() == 2 and scales1.size(1) == 1 and (scales1.size(0) == a.shape[0] or scales1.numel() == 1),
        f"scales of shape {list(scales1.shape)} are neither [{a.shape[0]}, 1] nor [1, 1]",
    )
    require(scales1.is_contiguous(), "scales must be contiguous")
    return safe_int_mm(a, b).to(scales1.dtype) * scales1


# -- activations per token, weights per channel ------------------------------------------------------------------------


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
