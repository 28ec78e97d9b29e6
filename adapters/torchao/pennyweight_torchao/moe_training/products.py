"""torchao.prototype.moe_training: grouped and plain products that quantize their operands, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.training import Recipe, grouped_mm

from ..enums import KernelPreference, ScaleCalculationMode
from .config import float8_rows, mxfp8

__all__ = ["_to_fp8_rowwise_then_scaled_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm"]


def grouped(
    A: Tensor, B_t: Tensor, offs: Tensor | None, recipe: Recipe, out_dtype: torch.dtype | None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Tokens A [T, K] times experts B_t [E, K, N] under a recipe; see :func:`pennyweight.training.grouped_mm`.

    A may be quantized: its value is used. Raises ValueError without ``offs``.
    """
    if offs is None:
        raise ValueError("offs must be the end of each expert's rows of A; products without it are plain torch.bmm")
    x = A.dequantize() if isinstance(A, AffineQuantizedTensor) else A
    y = grouped_mm(x, B_t, offs, recipe, bias)
    return y if out_dtype is None else y.to(out_dtype)


def _to_fp8_rowwise_then_scaled_grouped_mm(
    A: Tensor, B_t: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None = torch.bfloat16,
    float8_dtype: torch.dtype = torch.float8_e4m3fn, pad_token_groups_for_grouped_mm: bool = True,
) -> Tensor:  # fmt: skip
    """A [T, K] times B_t [E, K, N] in float8, one power-of-two scale per row of each product; all three products of
    training. Any size and memory layout; padding of groups does not change results."""
    return grouped(A, B_t, offs, float8_rows(float8_dtype), out_dtype)


def _to_mxfp8_then_scaled_grouped_mm(
    A: Tensor, B_t: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16, kernel_preference: KernelPreference = KernelPreference.AUTO,
    wgrad_with_hp: bool = False, scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:  # fmt: skip
    """A [T, K] times B_t [E, K, N] in MXFP8, plus bias [E, N] of each expert, or [N]; grad_weight in high precision if
    asked."""
    shared = bias is not None and bias.ndim < 2
    y = grouped(A, B_t, offs, mxfp8(scale_calculation_mode, wgrad_with_hp), out_dtype, None if shared else bias)
    return y if bias is None or not shared else y + bias.to(y.dtype)
