"""torchao.prototype.quantized_training and torchao.optim, over our training and optim.

States of the optimizers are our quantized tensors. The formats of second moments differ from torchao's
(docs/optimizers.md), as do the block sizes of 4-bit states unless ``block_size`` is given; a learning rate need not be
a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...optim import AdamW8bit
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
    "Int8WeightOnlyQuantizedTrainingConfig", "_AdamW", "bitnet_training", "get_bitnet_scale",
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


# -- optimizers --------------------------------------------------------------------------------------------------------


class _AdamW(AdamW8bit):
    """AdamW with float32 states, for quantized parameters; bit-identical to torch.optim for the others."""

    LEAST = math.inf

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, bf16_stochastic_round: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, bf16_stochastic_round=bf16_stochastic_round)
