"""torchao.prototype.moe_training.tensor: weights of linear and expert layers with quantized products, and
``quantize_`` with their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.training import linear

from ..enums import KernelPreference, ScaleCalculationMode
from ..quantized_training.recipe_weight import RecipeWeight, unwrapped
from .config import (
    Float8TrainingOpConfig,
    MoEScalingType,
    MoETrainingConfig,
    MXFP8TrainingOpConfig,
    TrainingOpBaseConfig,
)
from .products import grouped

__all__ = [
    "Float8TrainingWeightWrapperTensor", "MXFP8TrainingWeightWrapperTensor", "ScaledGroupedMMTensor",
    "TrainingWeightWrapperBaseTensor", "_swap_params", "unwrap_weight",
]  # fmt: skip


class TrainingWeightWrapperBaseTensor(RecipeWeight):
    """A float weight whose linear and grouped products are quantized as ``config`` says."""

    config: Any
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ("config",)

    def __init__(self, tensor: Tensor, config: TrainingOpBaseConfig) -> None:
        self.config = config

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        return linear(x, unwrapped(self), bias, self.config.linear_recipe())

    def grouped(self, x: Tensor, ends: Tensor, bias: Tensor | None) -> Any:
        return grouped(x, unwrapped(self), ends, self.config.grouped_recipe(), self.config.out_dtype, bias)


class Float8TrainingWeightWrapperTensor(TrainingWeightWrapperBaseTensor):
    """With a :class:`Float8TrainingOpConfig`."""


class MXFP8TrainingWeightWrapperTensor(TrainingWeightWrapperBaseTensor):
    """With an :class:`MXFP8TrainingOpConfig`."""


class ScaledGroupedMMTensor(TrainingWeightWrapperBaseTensor):
    """torchao 0.12's: grouped products in float8 with one scale per row, all others in high precision."""

    def __init__(self, tensor: Tensor, config: TrainingOpBaseConfig | None = None) -> None:
        self.config = config or MoETrainingConfig()

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        return NotImplemented


def unwrap_weight(wrapper_tensor: Tensor) -> Tensor:
    """The float tensor of a weight; the gradient passes."""
    return unwrapped(wrapper_tensor)


_CLASSES = {
    Float8TrainingOpConfig: Float8TrainingWeightWrapperTensor,
    MXFP8TrainingOpConfig: MXFP8TrainingWeightWrapperTensor,
    MoETrainingConfig: ScaledGroupedMMTensor,
}


def _swap_params(
    module: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None, config: Any = None,
    target_parameter_name: str | None = None,
) -> nn.Module:  # fmt: skip
    """Replace the parameters of a module, and of modules in it that the filter selects, by weights with quantized
    products; returns the module. target_parameter_name: only parameters of that name. Raises ValueError for an unknown
    config."""
    if type(config) not in _CLASSES:
        raise ValueError(f"Unsupported config type: {type(config)}")
    for name, inner in module.named_modules():
        if module_filter_fn is not None and not module_filter_fn(inner, name):
            continue
        for own, p in list(inner.named_parameters(recurse=False)):
            if target_parameter_name in (None, own) and not isinstance(p, TrainingWeightWrapperBaseTensor):
                weight = _CLASSES[type(config)](p.detach(), config)
                setattr(inner, own, nn.Parameter(weight, requires_grad=p.requires_grad))
    return module


def _transform(module: nn.Module, config: Any, parameter_name: str | None = None) -> nn.Module:
    # quantize_ names "weight" for a module that is selected as a whole; a bias has no product, so this is equal
    only = None if parameter_name == "weight" else parameter_name
    return _swap_params(module, config=config, target_parameter_name=only)


for _config in _CLASSES:
    register_quantize_module_handler(_config)(_transform)
torch.serialization.add_safe_globals(
    [*_CLASSES, *_CLASSES.values(), KernelPreference, MoEScalingType, ScaleCalculationMode]
)
