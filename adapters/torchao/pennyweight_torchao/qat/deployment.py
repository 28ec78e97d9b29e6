"""The values of a prepared layer: those of the kernel that runs it when it is deployed, with torchao's gradients.

A layer that ``quantize_`` or a quantizer prepares knows what it will become, so its output is that of the converted
layer, bit for bit. A layer built by hand with two configs computes what torchao's does: F.linear of both results.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.core.tracing import in_memory
from pennyweight.planning.configs import AOBaseConfig, SpecConfig
from pennyweight.planning.plan import plan
from pennyweight.training.qat.fake_quantize import FakeQuantizer, quantized_weight

from .fake_quantize_configs import FakeQuantizeConfigBase


@dataclass(frozen=True)
class Deployment:
    """What a prepared layer becomes.

    fake     the target of its weight
    configs  the activation and weight configs that the target was derived from
    """

    fake: FakeQuantizer
    configs: tuple[Any, Any]

    def weight(self, latent: Tensor) -> AffineQuantizedTensor:
        """The quantized weight. Raises ValueError if the float weight has NaN or inf."""
        with torch.no_grad():
            return quantized_weight(self.fake, latent, {})


def deployment(module: nn.Module, config: AOBaseConfig | None, activation: Any, weight: Any) -> Deployment | None:
    """The deployment of a float layer under a config; None without one, or if a solver chooses its codes.

    Raises PlanError if the config does not fit the layer.
    """
    if config is None:
        return None
    row = plan(module, config, lambda m, fqn: m is module).rows[0]
    if row.site is None or row.scheme is None or row.scheme.solver:
        return None
    fake = FakeQuantizer(config, row.site, row.scheme, row.layout)
    return Deployment(fake, copy.deepcopy((activation, weight)))


def spec_config(activation: FakeQuantizeConfigBase | None, weight: FakeQuantizeConfigBase | None) -> SpecConfig | None:
    """The config of the scheme that two fake quantization configs train for; None if there is none."""
    if weight is None or getattr(weight, "range_learning", False) or weight.weight_spec is None:
        return None
    act = None if activation is None else activation.activation_spec
    if activation is not None and act is None:
        return None
    return SpecConfig(weight.weight_spec, act, weight.rule, weight.eps)


def applies(found: Deployment | None, activation: Any, weight: Any, latent: Tensor) -> bool:
    """Whether a layer with these fake quantizers computes its deployed values now.

    Not if a quantizer was switched off, replaced, or given another config, and not in a trace.
    """
    if found is None or torch.compiler.is_compiling() or not in_memory(latent):
        return False
    on = all(q is None or getattr(q, "enabled", False) for q in (activation, weight))
    return on and found.configs == tuple(getattr(q, "config", None) for q in (activation, weight))


class DeployedLinear(torch.autograd.Function):
    """``value`` of a linear layer, with the gradients of F.linear(x, w, bias)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_bias, _ = ctx.needs_input_grad
        grad = grad.to(w.dtype)
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            (grad @ w).to(x.dtype) if to_x else None,
            flat.t() @ x.reshape(-1, x.shape[-1]).to(w.dtype) if to_w else None,
            flat.sum(0).to(ctx.bias_dtype) if to_bias else None,
            None,
        )


class DeployedTable(torch.autograd.Function):
    """``value`` of a table, with the gradient of ``w``."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
