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

__all__ = ["MXTensor", "QuantizeTensorToMXKwargs"]


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
