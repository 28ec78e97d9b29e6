"""``torchao.kernel.blockwise_quantization``: float8 in blocks of 128, as DeepSeek-V3's checkpoints have it.

torchao's functions launch Triton kernels; these are their formulas. Scales are max|x| / 448 of a block, for both float8
formats, and at least the smallest normal number: a block of zeros gives zeros, where torchao's kernels divide by zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .format_primitives import _choose_scale_float8, _dequantize_affine_float8, _quantize_affine_float8
from .qparams import require

__all__ = [
    "blockwise_fp8_gemm", "fp8_blockwise_act_quant", "fp8_blockwise_weight_dequant", "fp8_blockwise_weight_quant",
]  # fmt: skip


def _quantize(x: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    require(x.is_contiguous(), "the input must be contiguous")
    require(dtype in (torch.float8_e4m3fn, torch.float8_e5m2), "dtype must be torch.float8_e4m3fn or torch.float8_e5m2")
    require(
        all(n % b == 0 for n, b in zip(x.shape, block, strict=True)),
        f"blocks {list(block)} must divide the shape {list(x.shape)}",
    )
    scale = _choose_scale_float8(x.float(), block, torch.float8_e4m3fn)
    return _quantize_affine_float8(x, scale, dtype), scale


def fp8_blockwise_act_quant(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Codes of x [.., K] and float32 scales [.., K / block_size].

    Raises AssertionError where the blocks do not divide K, for another dtype, and for an input that is not contiguous.
    """
    return _quantize(x, (*(1,) * (x.ndim - 1), block_size), dtype)


def fp8_blockwise_weight_quant(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Codes of x [M, N] and float32 scales [M / block_size, N / block_size]. Raises as
    :func:`fp8_blockwise_act_quant`."""
    require(x.ndim == 2, "the input must have 2 dimensions")
    return _quantize(x, (block_size, block_size), dtype)


def fp8_blockwise_weight_dequant(x: Tensor, s: Tensor, block_size: int = 128) -> Tensor:
    """x * s in the default dtype; blocks at the ends may be smaller. x: codes [M, N]; s: one scale a block."""
    require(x.ndim == 2, "the codes must have 2 dimensions")
    require(s.ndim == 2, "the scales must have 2 dimensions")
    rows, columns = x.shape
    scale = s.repeat_interleave(block_size, 0)[:rows].repeat_interleave(block_size, 1)[:, :columns]
    return (x.float() * scale).to(torch.get_default_dtype())


def blockwise_fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, block_size: int = 128) -> Tensor:
    """a @ b.T in bfloat16, computed in float32.

    a, a_s  codes [.., K] and scales [.., K / block_size]
    b, b_s  codes [N, K] and scales [N / block_size, K / block_size]
    """
    values = fp8_blockwise_weight_dequant(b, b_s, block_size).float()
    return F.linear(_dequantize_affine_float8(a, a_s), values).to(torch.bfloat16)
