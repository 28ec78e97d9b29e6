"""torchao's protocols of tensors and configs, and the method by which our static config fulfils its own."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ...planning.configs import Int8StaticActivationInt8WeightConfig
from .int8_float8_views import QuantizeTensorKwargs, QuantizeTensorToInt8Kwargs

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


def _int8_kwargs(config: Int8StaticActivationInt8WeightConfig) -> QuantizeTensorToInt8Kwargs:
    """How the inputs are quantized."""
    both = config.granularity
    return QuantizeTensorToInt8Kwargs(
        both[0] if isinstance(both, tuple) else both, config.act_mapping_type, config.reduce_range
    )


Int8StaticActivationInt8WeightConfig.get_act_quant_kwargs = _int8_kwargs  # type: ignore[attr-defined]
