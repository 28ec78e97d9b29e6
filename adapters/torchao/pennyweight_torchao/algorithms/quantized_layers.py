"""One weight or linear layer under a config, for AWQ and SmoothQuant."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from pennyweight.planning.configs import AOBaseConfig

from ..quant_api import _ExtraRepr, quantize_

__all__: list[str] = []


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
