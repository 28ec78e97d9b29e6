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
    "_get_per_token_block_size", "dynamically_quantize_per_channel", "int_matmul", "int_scaled_matmul",
    "per_token_dynamic_quant", "safe_int_mm",
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
