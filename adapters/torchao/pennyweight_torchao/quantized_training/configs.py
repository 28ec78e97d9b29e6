"""torchao.prototype.quantized_training: configs for quantize_, and the quantizers of int8 and ternary weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight import training
from pennyweight.planning.module_handlers import HANDLERS, PREVIEWS, register_quantize_module_handler
from pennyweight.training import (
    BitNetTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    LowPrecisionLinear,
)
from pennyweight.training.low_precision.configs import LEAST, make_trainable, names_weight

from ..int8_matmul import safe_int_mm

__all__ = [
    "BitNetTrainingConfig", "Int8MixedPrecisionTrainingConfig", "Int8MixedPrecisionTrainingLinear",
    "Int8WeightOnlyQuantizedTrainingConfig", "bitnet_training", "int8_mixed_precision_training",
    "int8_weight_only_quantized_training", "quantize_int8_rowwise", "scaled_int8_mm",
]  # fmt: skip

# -- int8 and ternary training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyQuantizedTrainingConfig(Int8WeightOnlyTrainingConfig):
    """Weights that stay int8 during training. torchao always rounds the update stochastically; here the optimizers of
    ``torchao.optim`` do, others within ``pennyweight.training.stochastic_rounding(step)``."""


@dataclass(frozen=True, init=False)
class Int8MixedPrecisionTrainingConfig(training.Int8MixedPrecisionTrainingConfig):
    """Each of the three products in int8, or in high precision if its flag is False; torchao's order of arguments.

    ``quantize_`` converts the layer whatever ``module_swap`` says; :class:`Int8MixedPrecisionTrainingLinearWeight` is
    torchao's other way. output: also a config, whose copy is made, as the first argument of torchao 0.9.
    """

    def __init__(
        self, output: Any = True, grad_input: bool = True, grad_weight: bool = True, module_swap: bool = True, *,
        recipe: Any = "int8", least: int = LEAST, config: Any = None,
    ) -> None:  # fmt: skip
        config = output if isinstance(output, training.Int8MixedPrecisionTrainingConfig) else config
        if config is not None:
            output, grad_input, grad_weight = config.output, config.grad_input, config.grad_weight
            recipe, least = config.recipe, config.least
        values = {
            "output": output, "grad_input": grad_input, "grad_weight": grad_weight, "module_swap": module_swap,
            "recipe": recipe, "least": least,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)  # of a frozen dataclass, while it is made
        self.__post_init__()


class _Layers(type(nn.Module)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LowPrecisionLinear)


class Int8MixedPrecisionTrainingLinear(LowPrecisionLinear, metaclass=_Layers):
    """nn.Linear with int8 products; layers that ``quantize_`` converts are instances. config: which products."""

    def __init__(self, *args: Any, config: Int8MixedPrecisionTrainingConfig, **kwargs: Any) -> None:
        super().__init__(*args, recipe=config.make(), **kwargs)
        self.config = config


_OURS = training.Int8MixedPrecisionTrainingConfig
register_quantize_module_handler(Int8MixedPrecisionTrainingConfig, tells=PREVIEWS[_OURS])(HANDLERS[_OURS])
register_quantize_module_handler(Int8WeightOnlyQuantizedTrainingConfig, tells=names_weight)(make_trainable)
int8_weight_only_quantized_training = Int8WeightOnlyQuantizedTrainingConfig
int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig
bitnet_training = BitNetTrainingConfig


@torch.no_grad()
def quantize_int8_rowwise(
    tensor: Tensor, stochastic_rounding: bool = False, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """(int8 codes, scale a row) of a matrix: scale = absmax / 127, in the dtype of the tensor; codes are computed in
    float32. stochastic_rounding: with torch's random numbers."""
    scale = tensor.abs().amax(1) / 127
    steps = tensor.float() * (1.0 / scale.float().clip(eps)).unsqueeze(1)
    steps = (steps + torch.rand_like(steps)).floor() if stochastic_rounding else steps.round()
    return steps.clip(-128, 127).to(torch.int8), scale


def scaled_int8_mm(A: Tensor, B: Tensor, row_scale: Tensor, col_scale: Tensor) -> Tensor:
    """(A @ B) * col_scale * row_scale, with exact sums of int8 products. A: [M, K]; B: [K, N]; scales: M and N numbers,
    or one."""
    return safe_int_mm(A, B) * col_scale.view(-1) * row_scale.view(-1, 1)
