"""torchao.prototype.moe_training: grouped and plain products that quantize their operands, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.training import LowPrecisionLinear, Recipe, grouped_mm, linear

from ..enums import KernelPreference, ScaleCalculationMode
from .config import TrainingOpBaseConfig, float8_rows, mxfp8

__all__ = [
    "MXFP8Linear", "_quantize_then_scaled_grouped_mm", "_scaled_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm",
    "_to_mxfp8_then_scaled_grouped_mm", "_to_mxfp8_then_scaled_mm", "mx_mm",
]  # fmt: skip


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


def _scaled_grouped_mm(
    A: Tensor, B_t: Tensor, offs: Tensor | None = None, out_dtype: torch.dtype | None = torch.bfloat16
) -> Tensor:
    """:func:`_to_fp8_rowwise_then_scaled_grouped_mm` under the name of torchao 0.12."""
    return grouped(A, B_t, offs, float8_rows(torch.float8_e4m3fn), out_dtype)


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


def _quantize_then_scaled_grouped_mm(
    A: Tensor, B_t: Tensor, config: TrainingOpBaseConfig, offs: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """A [T, K] times B_t [E, K, N] under a config. Raises ValueError for an unknown one."""
    if not isinstance(config, TrainingOpBaseConfig):
        raise ValueError(f"Unsupported config type: {type(config)}")
    return grouped(A, B_t, offs, config.grouped_recipe(), config.out_dtype, bias)  # type: ignore[attr-defined]


def _to_mxfp8_then_scaled_mm(
    input_hp: Tensor, weight_hp: Tensor, kernel_preference: KernelPreference = KernelPreference.AUTO,
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL, wgrad_with_hp: bool = False,
) -> Tensor:  # fmt: skip
    """input [.., K] · weight [N, K]ᵀ in MXFP8, with its gradients."""
    return linear(input_hp, weight_hp, None, mxfp8(scale_calculation_mode, wgrad_with_hp))


class mx_mm:
    """:func:`_to_mxfp8_then_scaled_mm` with torchao's arguments."""

    @staticmethod
    def apply(
        input_hp: Tensor, weight_hp: Tensor, in_elem_dtype: torch.dtype, w_elem_dtype: torch.dtype,
        grad_elem_dtype: torch.dtype, block_size: int, kernel_preference: KernelPreference,
        mxfp8_dim0_cast_kernel_choice: Any, mxfp8_dim1_cast_kernel_choice: Any,
        scale_calculation_mode: ScaleCalculationMode, wgrad_with_hp: bool = False,
    ) -> Tensor:  # fmt: skip
        """Raises ValueError for other elements than e4m3 and other blocks than 32."""
        if {in_elem_dtype, w_elem_dtype, grad_elem_dtype} != {torch.float8_e4m3fn} or block_size != 32:
            raise ValueError(
                "mx_mm supports float8_e4m3fn in blocks of 32; for others use pennyweight.training.linear with a Recipe"
            )
        return _to_mxfp8_then_scaled_mm(input_hp, weight_hp, kernel_preference, scale_calculation_mode, wgrad_with_hp)


class MXFP8Linear(LowPrecisionLinear):
    """nn.Linear whose products are computed in MXFP8."""

    def __init__(
        self, *args: Any, kernel_preference: KernelPreference = KernelPreference.AUTO,
        scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL, wgrad_with_hp: bool = False,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, recipe=mxfp8(scale_calculation_mode, wgrad_with_hp), **kwargs)
        self.kernel_preference, self.scale_calculation_mode = kernel_preference, scale_calculation_mode
        self.wgrad_with_hp = wgrad_with_hp

    @classmethod
    def from_float(cls, mod: nn.Linear, **kwargs: Any) -> MXFP8Linear:
        """A layer with the parameters of ``mod``, which are shared."""
        made = cls(mod.in_features, mod.out_features, False, device="meta", **kwargs)
        made.weight, made.bias = mod.weight, mod.bias
        return made.train(mod.training)
