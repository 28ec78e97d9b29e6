"""torchao.prototype.smoothquant: SmoothQuant as two calls of quantize_ around the calibration.

    quantize_(model, SmoothQuantConfig(base, "prepare"));  model(batch) ...;  quantize_(model, SmoothQuantConfig(base,
    "convert"))

Each linear layer gets factors s of its input channels: the weight stores W * s, and its input is divided by s. Unlike
``algorithm="smooth"`` of pennyweight.quantize_ nothing is folded into the layer before, so every layer gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pennyweight.io.codecs.torchao.tensor_class import with_pre_scale
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.planning.granularity import MappingType, PerTensor
from pennyweight.planning.module_handlers import register_quantize_module_handler

from ..enums import QuantizationStep
from ..int8_float8_views import QuantizeTensorToInt8Kwargs
from .awq import check_step
from .quantized_layers import is_static, quantized_linear, quantized_weight, with_scale
from .smooth_observers import SmoothQuantObservedLinear, SmoothQuantObserver

__all__ = ["SmoothQuantConfig", "SmoothQuantStep"]

SmoothQuantStep = QuantizationStep  # its name in 0.14


@dataclass
class SmoothQuantConfig(AOBaseConfig):
    """SmoothQuant over a config of weights and activations.

    step    "prepare": observe linear layers. "convert": quantize the observed ones; others stay.
            "prepare_for_loading": quantize now without data, for ``load_state_dict`` of a converted model.
            "prepare_for_smoothquant_smoothing_factor": torchao's step between two passes over the data. No effect
    alpha   0 to 1: how much of the range moves into the weights; None: no smoothing
    use_running_absmax  no effect: inputs are kept in either case, and the numbers are the same
    base_config with a static activation: its scale is found from the calibration data
    """

    base_config: AOBaseConfig
    step: Any
    alpha: float | None = 0.5
    use_running_absmax: bool = False

    def __post_init__(self) -> None:
        self.step = check_step(self.step)


@register_quantize_module_handler(SmoothQuantConfig)
def _smooth_quant_transform(module: nn.Module, config: SmoothQuantConfig) -> nn.Module:
    layer: Any = module
    base = config.base_config
    if config.step == "prepare":
        return SmoothQuantObservedLinear.from_float(layer, SmoothQuantObserver(layer.weight, config.alpha))
    if config.step == "prepare_for_loading":
        w = layer.weight.detach()
        if is_static(base) and base.act_quant_scale is None:
            asymmetric = base.act_mapping_type is MappingType.ASYMMETRIC
            base = with_scale(base, torch.ones(1), torch.zeros(1, dtype=torch.int8) if asymmetric else None)
        return quantized_linear(layer, with_pre_scale(quantized_weight(w, base), torch.ones_like(w[0])))
    if config.step != "convert" or not isinstance(layer, SmoothQuantObservedLinear):
        return layer
    s, scale, zero_point = layer.obs.calculate_qparams(_activation_kwargs(base))
    if scale is not None:
        base = with_scale(base, scale, zero_point)
    weight = quantized_weight((layer.weight.detach() * s).to(layer.weight.dtype), base)
    return quantized_linear(layer, with_pre_scale(weight, (1.0 / s).to(layer.weight.dtype)))


def _activation_kwargs(base: Any) -> Any:
    """How to find the scale of a static activation: one for the whole input. None for other configs."""
    if not is_static(base):
        return None
    kwargs = base.get_act_quant_kwargs()
    if isinstance(kwargs, QuantizeTensorToInt8Kwargs):
        return QuantizeTensorToInt8Kwargs(PerTensor(), kwargs.mapping_type, kwargs.reduce_range)
    return kwargs
