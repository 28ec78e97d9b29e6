"""torchao.prototype.quantized_training, over our training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...planning.module_handlers import register_quantize_module_handler
from ...training import (
    BitNetTrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
)
from ...training import LowPrecisionLinear as Int8MixedPrecisionTrainingLinear
from ...training.low_precision.configs import make_trainable, names_weight

__all__ = [
    "BitNetTrainingConfig", "Int8MixedPrecisionTrainingConfig", "Int8MixedPrecisionTrainingLinear",
    "Int8WeightOnlyQuantizedTrainingConfig", "bitnet_training", "get_bitnet_scale",
    "int8_mixed_precision_training", "int8_weight_only_quantized_training", "precompute_bitnet_scale_for_fsdp",
    "quantize_bitnet_weight", "quantize_int8_rowwise",
]  # fmt: skip

# -- int8 and ternary training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyQuantizedTrainingConfig(Int8WeightOnlyTrainingConfig):
    """Weights that stay int8 during training. torchao always rounds the update stochastically; here the optimizers of
    ``torchao.optim`` do, others within ``pennyweight.training.stochastic_rounding(step)``."""


register_quantize_module_handler(Int8WeightOnlyQuantizedTrainingConfig, tells=names_weight)(make_trainable)
int8_weight_only_quantized_training = Int8WeightOnlyQuantizedTrainingConfig
int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig
bitnet_training = BitNetTrainingConfig


def quantize_int8_rowwise(
    tensor: Tensor, stochastic_rounding: bool = False, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """(int8 codes, scale a row) of a matrix: scale = absmax / 127."""
    scale = tensor.abs().amax(1) / 127
    steps = tensor * (1.0 / scale.float().clip(eps)).to(tensor.dtype).unsqueeze(1)
    steps = (steps + torch.rand_like(steps)).floor() if stochastic_rounding else steps.round()
    return steps.clip(-128, 127).to(torch.int8), scale


def get_bitnet_scale(x: Tensor) -> Tensor:
    """mean |x|."""
    return x.abs().mean()


def quantize_bitnet_weight(w: Tensor, scale: Tensor, eps: float = 1e-5) -> Tensor:
    """int8 codes -1, 0, 1."""
    return (w / scale.clip(eps)).round().clip(-1, 1).to(torch.int8)


def precompute_bitnet_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: the scale is computed from the gathered weight."""
