"""torchao.prototype.qat: fake quantization in MX and NVFP4, over our QAT.

A prepared layer computes what the deployed one will: both operands quantized. Gradients use the quantized operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pennyweight.core.formats import E2M1
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.io.codecs.torchao.mx import BLOCK_SIZE_DEFAULT, E8M0_SCALE, element
from pennyweight.io.codecs.torchao.nvfp4 import ALONE, UNDER_ONE, _is_nvfp4
from pennyweight.training import FakeQuantizedLinear
from pennyweight.training.qat.modules import FakeQuantized

from ..enums import KernelPreference, ScaleCalculationMode
from ..qat.fake_quantize_configs import FakeQuantizeConfigBase
from ..qat.steps import LINEAR
from .checks import _validate_kernel_preference

__all__ = [
    "MXFakeQuantizeConfig", "MXFakeQuantizedLinear", "NVFP4FakeQuantizeConfig", "NVFP4FakeQuantizedLinear",
]  # fmt: skip


@dataclass
class MXFakeQuantizeConfig(FakeQuantizeConfigBase):
    """OCP MX: elements, block size and rounding of the scales. AUTO is accepted for e4m3 and e2m1 in blocks of 32, as
    in torchao; no kernel preference has an effect."""

    dtype: Any = torch.float4_e2m1fn_x2
    block_size: int = BLOCK_SIZE_DEFAULT
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    kernel_preference: KernelPreference = KernelPreference.EMULATED

    def __post_init__(self) -> None:
        element(self.dtype)
        _validate_kernel_preference(self.kernel_preference, self.block_size, self.dtype)

    @property
    def rule(self) -> str:  # type: ignore[override]
        return f"mx_{self.scaling_mode.value}"

    @property
    def weight_spec(self) -> QuantSpec:
        return QuantSpec(element(self.dtype), (self.block_size,), E8M0_SCALE)

    @property
    def activation_spec(self) -> ActivationSpec:
        return ActivationSpec(self.weight_spec, "dynamic", self.rule)


@dataclass
class NVFP4FakeQuantizeConfig(FakeQuantizeConfigBase):
    """NVFP4: with or without a scale per tensor. The order of the scales and the kernel are chosen here."""

    use_per_tensor_scale: bool = True
    use_swizzled_scales: bool = False
    use_triton_kernel: bool = False

    @property
    def weight_spec(self) -> QuantSpec:
        return QuantSpec(E2M1, (16,), UNDER_ONE if self.use_per_tensor_scale else ALONE)

    @property
    def activation_spec(self) -> ActivationSpec:
        return ActivationSpec(self.weight_spec)


class _Prepared(type(nn.Module)):  # type: ignore[misc]
    """isinstance() tests whether a layer is prepared with this kind of weight: preparing keeps the object."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, FakeQuantized) or not isinstance(instance, nn.Linear):
            return type.__instancecheck__(cls, instance)
        fake = instance.fake_quantized.get("weight")
        return fake is not None and cls.holds(fake.spec)


class _Linear(FakeQuantizedLinear):
    """A prepared layer that checks its configs as torchao does. Weight-only training works too."""

    activation_config: Any
    weight_config: Any

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, activation_config: Any = None,
        weight_config: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if weight_config is None:
            raise ValueError("Must specify `weight_config`")
        super().__init__(in_features, out_features, bias, activation_config, weight_config, *args, **kwargs)
        self.activation_config, self.weight_config = activation_config, weight_config

    @classmethod
    def from_linear(cls, mod: nn.Linear, activation_config: Any = None, weight_config: Any = None) -> Any:
        """``mod`` itself, prepared."""
        if weight_config is None:
            raise ValueError("Must specify `weight_config`")
        made = super().from_linear(mod, activation_config, weight_config)
        made.activation_config, made.weight_config = activation_config, weight_config
        return made


class MXFakeQuantizedLinear(_Linear, metaclass=_Prepared):
    """A linear layer prepared for training in MX."""

    @staticmethod
    def holds(spec: QuantSpec) -> bool:
        return spec.scale == E8M0_SCALE


class NVFP4FakeQuantizedLinear(_Linear, metaclass=_Prepared):
    """A linear layer prepared for training in NVFP4."""

    holds = staticmethod(_is_nvfp4)


# quantize_(model, QATConfig(weight_config=...)) prepares layers by these classes
LINEAR |= {MXFakeQuantizeConfig: MXFakeQuantizedLinear, NVFP4FakeQuantizeConfig: NVFP4FakeQuantizedLinear}
