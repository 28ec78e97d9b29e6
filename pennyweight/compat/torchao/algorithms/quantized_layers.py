"""Protocols of AWQ and SmoothQuant, and one weight or linear layer under a config."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ..legacy_weights import WeightTensorWithLinearActivationScaleMetadata
from ..quant_api import _ExtraRepr, quantize_

__all__ = ["IsStaticQuantizationConfig", "SupportsActivationPreScaling"]

torch.serialization.add_safe_globals([WeightTensorWithLinearActivationScaleMetadata])


@runtime_checkable
class SupportsActivationPreScaling(Protocol):
    """A weight with ``act_pre_scale``: a tensor that its input is multiplied with, or None."""

    act_pre_scale: Tensor | None


@runtime_checkable
class IsStaticQuantizationConfig(Protocol):
    """A config of a static activation: its ``act_quant_scale``, and ``get_act_quant_kwargs()``, how to find it."""

    act_quant_scale: Any

    def get_act_quant_kwargs(self) -> Any: ...


def quantized_weight(weight: Tensor, config: AOBaseConfig | Any) -> Tensor:
    """One weight [N, K] under a config, as quantize_ makes it in a linear layer."""
    k, n = weight.shape[1], weight.shape[0]
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    model = nn.Sequential(layer)
    quantize_(model, config)
    return model[0].weight.detach()


def quantized_linear(observed: nn.Linear, weight: Tensor) -> nn.Linear:
    """A linear layer with this weight, whose input is scaled, and the bias of ``observed``."""
    layer = nn.Linear(observed.in_features, observed.out_features, False, device="meta", dtype=observed.weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = observed.bias
    layer.extra_repr = _ExtraRepr(layer)  # type: ignore[method-assign]
    return layer.train(observed.training)


def is_static(config: Any) -> bool:
    """Whether a config wants a static scale of the activation."""
    return hasattr(config, "act_quant_scale")


def with_scale(config: Any, scale: Tensor, zero_point: Tensor | None) -> Any:
    """A copy of a static config with these activation parameters."""
    given = {"act_quant_scale": scale, "act_quant_zero_point": zero_point}
    known = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if name in known})
