"""Static NVFP4 inputs, in two steps: layers observe calibration data, then get the scale of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.planning import configs as ours
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.planning.quantize_report import Report
from pennyweight.quantize.pipeline import Pipeline, quantize_

from ..enums import QuantizationStep
from .conversion import per_tensor_amax_to_scale

__all__ = ["NVFP4ObservedLinear", "StaticSteps"]


class NVFP4ObservedLinear(nn.Linear):
    """A linear layer that records the largest magnitude of its inputs, ``amax``."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.amax = torch.zeros((), dtype=torch.float32, device=device)

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            if input.numel():
                self.amax = torch.maximum(self.amax.to(input.device), input.detach().abs().amax().to(self.amax.dtype))
        return F.linear(input, self.weight, self.bias)

    @classmethod
    def from_float(cls, float_linear: nn.Linear) -> NVFP4ObservedLinear:
        """A layer with the parameters of ``float_linear``, which are shared."""
        new = cls(float_linear.in_features, float_linear.out_features, False, "meta", float_linear.weight.dtype)
        new.weight, new.bias = float_linear.weight, float_linear.bias
        new.amax = torch.zeros((), dtype=torch.float32, device=new.weight.device)
        return new.train(float_linear.training)


@dataclass(frozen=True)
class _NVFP4Step(ours.AOBaseConfig):
    """A step of static quantization, carried out by a handler."""

    step: QuantizationStep


class StaticSteps(Pipeline):
    """quantize_ with a config that has a ``step``."""

    def __init__(self, model: nn.Module, config: Any, options: Any) -> None:
        if config.step not in (QuantizationStep.PREPARE, QuantizationStep.CONVERT):
            raise ValueError(f"Unexpected step: {config.step}. Expected prepare, convert or None")
        super().__init__(model, _NVFP4Step(config.step), options)
        self.given = config

    def run(self) -> Report:
        report = super().run()
        report.config = str(self.given)
        report.verb = "prepared" if self.given.step is QuantizationStep.PREPARE else "converted"
        return report


def _fits(module: nn.Module, config: _NVFP4Step) -> tuple[bool, str]:
    if not isinstance(module, nn.Linear):
        return False, "only nn.Linear is observed"
    observed = isinstance(module, NVFP4ObservedLinear)
    if config.step is QuantizationStep.CONVERT:
        return observed, "its inputs have been observed" if observed else "its inputs have not been observed"
    return not observed, "its inputs are already observed" if observed else "its inputs will be observed"


@register_quantize_module_handler(_NVFP4Step, tells=_fits)
def _carry_out(module: nn.Module, config: _NVFP4Step) -> nn.Module:
    assert isinstance(module, nn.Linear)
    if config.step is QuantizationStep.PREPARE:
        return NVFP4ObservedLinear.from_float(module)
    assert isinstance(module, NVFP4ObservedLinear)
    scale = per_tensor_amax_to_scale(module.amax)
    if not bool(scale > 0) or not bool(scale.isfinite()):
        raise PlanError(
            f"a layer of shape {list(module.weight.shape)} has seen inputs up to {float(module.amax)}; run the "
            "prepared model on calibration data before step='convert'"
        )
    linear = nn.Linear(module.in_features, module.out_features, False, "meta")
    linear.weight, linear.bias = module.weight, module.bias
    config_ = ours.NVFP4DynamicActivationNVFP4WeightConfig(act_scale=float(scale))
    quantize_(linear, config_, lambda m, fqn: m is linear, progress=False)
    return linear.train(module.training)
