"""Inference configs of torchao.prototype.mx_formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.io.codecs.torchao.mx import (
    BLOCK_SIZE_DEFAULT,
    E8M0_SCALE,
    element,
)
from pennyweight.planning import configs as ours
from pennyweight.planning.granularity import PerGroup
from pennyweight.planning.parameters import Site
from pennyweight.planning.scheme import Scheme

from ..enums import MXGemmKernelChoice, NVFP4MMConfig, QuantizationStep
from .checks import check_kernel_choice

__all__ = [
    "MXFPInferenceConfig", "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4InferenceConfig",
]  # fmt: skip


@dataclass
class MXFPInferenceConfig(ours.AOBaseConfig):
    """MX weights and inputs of torchao 0.12, with scales rounded down; later MXDynamicActivationMXWeightConfig."""

    block_size: int = BLOCK_SIZE_DEFAULT
    activation_dtype: Any = torch.float8_e4m3fn
    weight_dtype: Any = torch.float8_e4m3fn
    gemm_kernel_choice: MXGemmKernelChoice = MXGemmKernelChoice.CUBLAS

    def __post_init__(self) -> None:
        element(self.activation_dtype)
        if element(self.weight_dtype) is not element(self.activation_dtype):
            raise AssertionError(
                f"MXFPInferenceConfig: inputs and weights must have one dtype, got {self.activation_dtype} and "
                f"{self.weight_dtype}; MXDynamicActivationMXWeightConfig takes two"
            )
        check_kernel_choice(self.gemm_kernel_choice, self.block_size, self.weight_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        group, fmt = PerGroup(self.block_size), element(self.weight_dtype)
        act = ActivationSpec(QuantSpec(fmt, site.activation_block(group), E8M0_SCALE), "dynamic", "mx_floor")
        return Scheme(QuantSpec(fmt, site.block(group, on_indivisible), E8M0_SCALE), act, "mx_floor")


@dataclass
class NVFP4InferenceConfig(ours.AOBaseConfig):
    """NVFP4 of torchao 0.12, without a scale per tensor: weights, and with ``mm_config`` DYNAMIC inputs too."""

    mm_config: NVFP4MMConfig = NVFP4MMConfig.DYNAMIC
    use_triton_kernel: bool = True

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        dynamic = self.mm_config is NVFP4MMConfig.DYNAMIC
        kind = ours.NVFP4DynamicActivationNVFP4WeightConfig if dynamic else ours.NVFP4WeightOnlyConfig
        return kind(use_dynamic_per_tensor_scale=False).scheme(site, on_indivisible)


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(ours.NVFP4DynamicActivationNVFP4WeightConfig):
    """Like ours. ``step`` is kept for stored configs: ``quantize_`` with one raises ValueError, ``act_scale`` is the
    result of torchao's steps."""

    step: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None:
            object.__setattr__(self, "step", QuantizationStep(self.step))
            object.__setattr__(self, "use_dynamic_per_tensor_scale", False)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        if self.step is not None:
            raise ValueError(
                f"{type(self).__name__} quantizes in one step, got step={self.step.value!r}; for static inputs give "
                "act_scale, the largest input / (6 * 448)"
            )
        return super().scheme(site, on_indivisible)
