"""torchao.prototype.quantized_training: configs for quantize_, and the quantizers of int8 and ternary weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....planning.module_handlers import register_quantize_module_handler
from ....training import (
    BitNetTrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    LowPrecisionLinear,
)
from ....training.low_precision.configs import make_trainable, names_weight
from ..int8_matmul import safe_int_mm

__all__ = [
    "BitNetTrainingConfig", "Int8MixedPrecisionTrainingConfig", "Int8MixedPrecisionTrainingLinear",
    "Int8WeightOnlyQuantizedTrainingConfig", "bitnet_training", "get_bitnet_scale",
    "int8_mixed_precision_training", "int8_weight_only_quantized_training", "precompute_bitnet_scale_for_fsdp",
    "quantize_bitnet_weight", "quantize_int8_rowwise", "scaled_int8_mm",
]  # fmt: skip

# -- int8 and ternary training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyQuantizedTrainingConfig(Int8WeightOnlyTrainingConfig):
    """Weights that stay int8 during training. torchao always rounds the update stochastically; here the optimizers of
    ``torchao.optim`` do, others within ``pennyweight.training.stochastic_rounding(step)``."""


class _Layers(type(nn.Module)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LowPrecisionLinear)


class Int8MixedPrecisionTrainingLinear(LowPrecisionLinear, metaclass=_Layers):
    """nn.Linear with int8 products; layers that ``quantize_`` converts are instances. config: which products."""

    def __init__(self, *args: Any, config: Int8MixedPrecisionTrainingConfig, **kwargs: Any) -> None:
        super().__init__(*args, recipe=config.make(), **kwargs)
        self.config = config


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


def get_bitnet_scale(x: Tensor) -> Tensor:
    """mean |x|, in float32."""
    return x.float().abs().mean()


def quantize_bitnet_weight(w: Tensor, scale: Tensor, eps: float = 1e-5) -> Tensor:
    """int8 codes -1, 0, 1."""
    return (w.float() / scale.clip(eps)).round().clip(-1, 1).to(torch.int8)


def precompute_bitnet_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: the scale is computed from the gathered weight."""


def scaled_int8_mm(A: Tensor, B: Tensor, row_scale: Tensor, col_scale: Tensor) -> Tensor:
    """(A @ B) * col_scale * row_scale, with exact sums of int8 products. A: [M, K]; B: [K, N]; scales: M and N numbers,
    or one."""
    return safe_int_mm(A, B) * col_scale.view(-1) * row_scale.view(-1, 1)
