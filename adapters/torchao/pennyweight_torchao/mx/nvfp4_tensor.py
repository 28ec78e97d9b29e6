"""NVFP4Tensor: torchao's NVFP4 tensor as a view of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import nvfp4 as files
from pennyweight.io.codecs.torchao.nvfp4 import QuantizeTensorToNVFP4Kwargs

from ..enums import NVFP4MMConfig
from .conversion import nvfp4_quantize

__all__ = ["NVFP4Tensor", "QuantizeTensorToNVFP4Kwargs"]


class NVFP4Tensor(files.NVFP4Tensor):
    """e2m1 in blocks of 16 with e4m3 scales, and optionally one float32 scale, or one per expert [E, 1, 1]."""

    @classmethod
    def to_nvfp4(
        cls, data_hp: Tensor, block_size: int = 16, per_tensor_scale: Tensor | None = None,
        act_per_tensor_scale: Tensor | None = None, is_swizzled_scales: bool = False, use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None, mm_config: Any = None,
    ) -> QT:  # fmt: skip
        """A matrix, or a batch of them, quantized along the last axis, by :func:`.conversion.nvfp4_quantize`.

        The kernel table chooses layout and kernel, and scales are kept in the order of the elements: the arguments for
        them are ignored. ``mm_config`` DYNAMIC (0.12): inputs are quantized too, without a scale per tensor.
        """
        if data_hp.ndim not in (2, 3):
            raise AssertionError(
                f"NVFP4Tensor.to_nvfp4 takes a matrix or a batch of matrices, got {list(data_hp.shape)}"
            )
        if mm_config is NVFP4MMConfig.DYNAMIC and act_quant_kwargs is None:
            act_quant_kwargs = QuantizeTensorToNVFP4Kwargs()
        # float64 under that default dtype; files hold float32
        per_tensor_scale, act_per_tensor_scale = (
            None if p is None else p.float() for p in (per_tensor_scale, act_per_tensor_scale)
        )
        scale, codes = nvfp4_quantize(data_hp.detach(), block_size, per_tensor_scale)
        return cls.build(
            codes, scale, block_size, data_hp.dtype, per_tensor_scale, act_per_tensor_scale,
            act_quant_kwargs=act_quant_kwargs,
        )  # fmt: skip
