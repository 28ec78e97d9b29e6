"""torchao's protocols of tensors and configs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from .int8_float8_views import QuantizeTensorKwargs

__all__ = ["IsStaticQuantizationConfig", "SupportsActivationPreScaling"]


@runtime_checkable
class SupportsActivationPreScaling(Protocol):
    """A weight with a factor of its inputs, or None: quantized weights of ours have ``act_pre_scale``."""

    act_pre_scale: Tensor | None


@runtime_checkable
class IsStaticQuantizationConfig(Protocol):
    """A config with a static scale of the inputs."""

    act_quant_scale: Tensor | None

    def get_act_quant_kwargs(self) -> QuantizeTensorKwargs:
        """How inputs are quantized."""
        ...
