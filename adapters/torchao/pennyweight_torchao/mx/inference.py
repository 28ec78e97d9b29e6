"""Inference configs of torchao.prototype.mx_formats, and the observers of static NVFP4 inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.torchao.mx import (
    BLOCK_SIZE_DEFAULT,
    DTYPE_FP6_E2M3,
    DTYPE_FP6_E3M2,
    DTYPE_TO_SHORT_STR,
    E8M0_SCALE,
    element,
)
from pennyweight.planning import configs as ours
from pennyweight.planning.granularity import PerGroup
from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.planning.parameters import Site
from pennyweight.planning.scheme import Scheme
from pennyweight.quantize.pipeline import Pipeline

from ..enums import MXGemmKernelChoice, NVFP4MMConfig, QuantizationStep
from .checks import check_kernel_choice
from .mx_tensor import MXTensor
from .observers import NVFP4ObservedLinear, StaticSteps

__all__ = [
    "MXFPInferenceConfig", "MXInferenceLinear", "MXInferenceLinearConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4InferenceConfig", "NVFP4ObservedLinear",
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


# -- weights in a layer of their own -----------------------------------------------------------------------------------


@dataclass
class MXInferenceLinearConfig(ours.AOBaseConfig):
    """MX weights of torchao 0.12, inputs unchanged, in a layer of their own: :class:`MXInferenceLinear`."""

    block_size: int = BLOCK_SIZE_DEFAULT
    elem_dtype: Any = torch.float8_e4m3fn
    gemm_kernel_choice: MXGemmKernelChoice = MXGemmKernelChoice.EMULATED
    use_fp4_custom_triton_dequant_kernel: bool = False
    pack_fp6: bool = True

    def __post_init__(self) -> None:
        element(self.elem_dtype)
        check_kernel_choice(self.gemm_kernel_choice, self.block_size, self.elem_dtype)

    def short_str(self) -> str:
        """The config in a few words, for the layer's repr."""
        text = f"bl_sz={self.block_size}, lp_dtype={DTYPE_TO_SHORT_STR[self.elem_dtype]}"
        text += f", kernel={self.gemm_kernel_choice.value}"
        if self.use_fp4_custom_triton_dequant_kernel:
            text += ", use_fp4_custom_triton_dequant_kernel=True"
        return text + (", pack_fp6=True" if self.elem_dtype in _FP6 and self.pack_fp6 else "")


_FP6 = (DTYPE_FP6_E2M3, DTYPE_FP6_E3M2)


class MXInferenceLinear(nn.Linear):
    """A linear layer whose weight is MX, the parameter ``weight_mx`` (``weight`` is None); computes like a layer
    quantized by MXWeightOnlyConfig."""

    weight_mx: AffineQuantizedTensor
    config: Any

    @classmethod
    @torch.no_grad()
    def from_float(cls, mod: nn.Linear, config: Any = None) -> MXInferenceLinear:
        """A layer with the quantized weight and the bias of ``mod``. ``config``: MXInferenceLinearConfig; in 0.9
        MXLinearConfig."""
        config = MXInferenceLinearConfig() if config is None else config
        new = cls(mod.in_features, mod.out_features, bias=False, device="meta")
        weight = MXTensor.to_mx(mod.weight.contiguous(), config.elem_dtype, config.block_size)
        new.weight = None  # type: ignore[assignment]
        new.weight_mx = nn.Parameter(weight, requires_grad=False)  # type: ignore[assignment]
        new.bias, new.config = mod.bias, config
        return new.train(mod.training)

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight_mx, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.short_str()}"


@register_quantize_module_handler(MXInferenceLinearConfig)
def _mx_inference_linear(module: nn.Module, config: MXInferenceLinearConfig) -> nn.Module:
    return MXInferenceLinear.from_float(module, config)  # type: ignore[arg-type]


# -- NVFP4 weights and inputs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(ours.NVFP4DynamicActivationNVFP4WeightConfig):
    """Like ours, with torchao's two steps of static quantization.

    step  "prepare": layers become NVFP4ObservedLinear, to be run on calibration data; "convert": their inputs get the
          scale amax / (6 * 448). None: quantize now
    """

    step: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None:
            object.__setattr__(self, "step", QuantizationStep(self.step))
            object.__setattr__(self, "use_dynamic_per_tensor_scale", False)

    @property
    def pipeline(self) -> type[Pipeline]:  # type: ignore[override]
        return Pipeline if self.step is None else StaticSteps
