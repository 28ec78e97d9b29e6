"""MXTensor: torchao's OCP MX tensor as a view of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import mx as files
from pennyweight.io.codecs.torchao.mx import BLOCK_SIZE_DEFAULT, QuantizeTensorToMXKwargs

from ..enums import KernelPreference, ScaleCalculationMode
from .conversion import to_mx

__all__ = ["FromMXConstrFunc", "MXTensor", "QuantizeTensorToMXKwargs", "ToMXConstrFunc"]


class MXTensor(files.MXTensor):
    """OCP MX: blocks of 32 along the last axis under power-of-two scales."""

    @classmethod
    def from_qdata_and_scales(
        cls, qdata: Tensor, scales: Tensor, orig_dtype: torch.dtype, *, block_size: int = BLOCK_SIZE_DEFAULT,
        kernel_preference: Any = None, act_quant_kwargs: QuantizeTensorToMXKwargs | None = None,
        is_swizzled_scales: bool = False,
    ) -> QT:  # fmt: skip
        """A tensor of codes whose dtype names the element. Raises AssertionError for bytes, which do not."""
        if qdata.dtype is torch.uint8:
            raise AssertionError(
                "qdata must have the dtype of its elements; for bytes call MXTensor(qdata, scale, ...)"
            )
        return cls.build(
            qdata, scales, qdata.dtype, block_size, orig_dtype, kernel_preference, act_quant_kwargs, is_swizzled_scales
        )

    @classmethod
    def to_mx(
        cls, data_hp: Tensor, elem_dtype: Any, block_size: int = BLOCK_SIZE_DEFAULT,
        scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
        kernel_preference: Any = KernelPreference.EMULATED,
        act_quant_kwargs: QuantizeTensorToMXKwargs | None = None, is_swizzled_scales: bool = False, **kwargs: Any,
    ) -> QT:  # fmt: skip
        """The data quantized along its last axis, by :func:`.conversion.to_mx`.

        The kernel table chooses layout and kernel, and scales are kept in the order of the elements: the arguments for
        them are ignored. So are ``gemm_kernel_choice`` and the like of older releases; others raise TypeError.
        """
        unknown = kwargs.keys() - _IGNORED
        if unknown:
            raise TypeError(f"MXTensor.to_mx got unknown arguments {sorted(unknown)}")
        scale, codes = to_mx(data_hp.detach(), elem_dtype, block_size, scaling_mode)
        return cls.build(codes, scale, elem_dtype, block_size, data_hp.dtype, kernel_preference, act_quant_kwargs)


# Arguments of to_mx that select a kernel, or how fp6 is packed
_IGNORED = {
    "gemm_kernel_choice", "mxfp8_dim0_cast_kernel_choice", "pack_fp6", "use_fp4_custom_triton_dequant_kernel",
}  # fmt: skip


# -- functions of torchao's own modules --------------------------------------------------------------------------------


def _addmm_mx_dispatch(a: Tensor, b: Tensor, aten_op: Any = None, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias of matrices of which one or both are quantized. A float ``a`` is quantized as b says."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _to_mxfp8_dim1_kernel_wrapper(
    a: Tensor, block_size: int, elem_dtype: Any, hp_dtype: torch.dtype, kernel_preference: Any = None,
    cast_kernel_choice: Any = None, scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
) -> QT:  # fmt: skip
    """The transpose of a matrix, quantized along its columns, in ``hp_dtype``. Kernel choices have no effect."""
    made = MXTensor.to_mx(a.t().contiguous(), elem_dtype, block_size, scale_calculation_mode)
    return made.to(hp_dtype)  # type: ignore[return-value]


# -- casts of torchao 0.9 ----------------------------------------------------------------------------------------------


class ToMXConstrFunc(torch.autograd.Function):
    """``apply(data, elem_dtype, block_size, scaling_mode, ...)``: MXTensor.to_mx with a straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any, data_hp: Tensor, elem_dtype: Any, block_size: int, scaling_mode: ScaleCalculationMode,
        use_fp4_custom_triton_dequant_kernel: bool = False, gemm_kernel_choice: Any = None,
    ) -> Tensor:  # fmt: skip
        return MXTensor.to_mx(data_hp, elem_dtype, block_size, scaling_mode)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return g, None, None, None, None, None


class FromMXConstrFunc(torch.autograd.Function):
    """``apply(tensor, dtype)``: dequantize with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, tensor_lp: QT, target_dtype: torch.dtype) -> Tensor:
        return tensor_lp.dequantize(target_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, None]:
        return g, None
