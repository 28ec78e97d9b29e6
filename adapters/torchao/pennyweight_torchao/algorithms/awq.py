"""torchao.prototype.awq: AWQ as two calls of quantize_ around the calibration.

    quantize_(model, AWQConfig(base, step="prepare"));  model(batch) ...;  quantize_(model, AWQConfig(base, "convert"))

Each linear layer gets scales s of its input channels: the weight stores W * s, and its input is divided by s. Unlike
``algorithm="awq"`` of pennyweight.quantize_ nothing is folded into the layer before, so every layer gets its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.io.codecs.torchao.tensor_class import with_pre_scale
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.planning.module_handlers import register_quantize_module_handler

from ..enums import QuantizationStep
from .quantized_layers import quantized_linear, quantized_weight

__all__ = ["AWQConfig", "AWQObservedLinear", "AWQObserver", "AWQStep", "get_act_scale"]

logger = logging.getLogger(__name__)
AWQStep = QuantizationStep  # its name in 0.13


@torch.no_grad()
def get_act_scale(x: Tensor) -> Tensor:
    """Mean magnitude of each channel: x [.., K] -> [K]."""
    return x.abs().reshape(-1, x.shape[-1]).mean(0)


class AWQObserver(nn.Module):
    """Keeps the inputs of a layer, and searches the scales of their channels.

        s_j = (E|x_j|)^r / sqrt(max_j min_j),  r = i / scale_search_space_size,  i = 0, 1, ..

    ``calculate_qparams()`` returns the s [K] with the least squared error of the layer's output, its weight quantized
    under ``base_config``. r = 0 is plain rounding, so the result is never worse on these inputs.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, base_config: AOBaseConfig, scale_search_space_size: int = 20
    ) -> None:
        super().__init__()
        if scale_search_space_size < 1:
            raise ValueError(f"scale_search_space_size must be at least 1, got {scale_search_space_size}")
        self.base_config, self.scale_options = base_config, scale_search_space_size
        self.weight, self.bias, self.device = weight, bias, weight.device
        self.inputs: list[Tensor] = []

    @torch.no_grad()
    def forward(self, input: Tensor, output: Tensor) -> None:
        self.inputs.append(input.detach().reshape(-1, input.shape[-1]).to("cpu", copy=True))

    @torch.no_grad()
    def calculate_qparams(self) -> Tensor:
        """The best scales, [K] in the weight's dtype. Raises AssertionError without inputs."""
        assert self.inputs, "calibrate observer first by running model on exemplar data"
        x = torch.cat(self.inputs).to(self.device)
        w = self.weight.detach()
        wanted = F.linear(x, w, self.bias)

        def loss(s: Tensor) -> float:
            got = F.linear(x / s, quantized_weight(w * s, self.base_config), self.bias)
            return (wanted - got).pow(2).mean().item()

        return _search(get_act_scale(x), w.dtype, self.scale_options, loss, 1e-4).reshape(-1)


def _search(mean: Tensor, dtype: torch.dtype, options: int, loss: Callable[[Tensor], float], least: float) -> Tensor:
    """The candidate with the smallest loss; ones if none has a finite loss."""
    best, found = torch.ones_like(mean, dtype=dtype), float("inf")
    for i in range(options):
        s = mean.pow(i / options).to(dtype)
        s = s.clamp(min=least) if least else s
        s = s / (s.max() * s.min()).sqrt()
        if bool(s.isfinite().all()) and (now := loss(s)) < found:
            best, found = s, now
    return best


class AWQObservedLinear(nn.Linear):
    """A linear layer that passes its inputs and outputs to ``act_obs``."""

    def __init__(
        self, in_features: int, out_features: int, act_obs: nn.Module, bias: bool = True, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act_obs = act_obs

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        self.act_obs(input, output)
        return output

    @classmethod
    def from_float(cls, float_linear: nn.Linear, act_obs: nn.Module) -> AWQObservedLinear:
        """An observed layer with the parameters of ``float_linear``."""
        w = float_linear.weight
        new = cls(float_linear.in_features, float_linear.out_features, act_obs, False, "meta", w.dtype)
        new.weight, new.bias = w, float_linear.bias
        return new.train(float_linear.training)


@dataclass
class AWQConfig(AOBaseConfig):
    """AWQ over a config of the weights.

    step  "prepare": observe linear layers. "convert": quantize the observed ones; others stay.
          "prepare_for_loading": quantize now without data, for ``load_state_dict`` of a converted model
    scale_search_space_size  number of candidates for the scales
    """

    base_config: AOBaseConfig
    step: Any
    scale_search_space_size: int = 20

    def __post_init__(self) -> None:
        self.step = check_step(self.step)


def check_step(step: Any) -> str:
    """The value of a QuantizationStep, from itself or its name in any case. Raises ValueError."""
    text = step.value if isinstance(step, QuantizationStep) else str(step).lower()
    known = [s.value for s in QuantizationStep]
    if text not in known:
        raise ValueError(f"{text} is not one of {known}")
    return text


@register_quantize_module_handler(AWQConfig)
def _awq_transform(module: nn.Module, config: AWQConfig) -> nn.Module:
    layer: Any = module
    if config.step in ("prepare", "prepare_for_loading"):
        observer = AWQObserver(layer.weight, layer.bias, config.base_config, config.scale_search_space_size)
        if config.step == "prepare":
            return AWQObservedLinear.from_float(layer, observer)
        scales = torch.ones(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    elif config.step != "convert":
        raise ValueError(f"AWQConfig has the steps prepare, convert and prepare_for_loading, got {config.step!r}")
    elif not isinstance(layer, AWQObservedLinear):
        logger.info("convert: module is not AWQObservedLinear, skipping: %s", type(layer))
        return layer
    else:
        scales = layer.act_obs.calculate_qparams()
    weight = quantized_weight(layer.weight.detach() * scales, config.base_config)
    return quantized_linear(layer, with_pre_scale(weight, 1.0 / scales))
