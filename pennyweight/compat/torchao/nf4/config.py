"""torchao's config of NF4 weights; :class:`pennyweight.NF4WeightOnlyConfig` uses the table of QLoRA's paper instead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....planning.configs.base import AOBaseConfig
from ....planning.granularity import PerGroup
from ....planning.module_handlers import register_quantize_module_handler
from ....training.low_precision.configs import names_weight
from .tensor import to_nf4

__all__ = ["NF4WeightOnlyConfig", "nf4_weight_only"]


@dataclass(frozen=True)
class NF4WeightOnlyConfig(AOBaseConfig):
    """:func:`to_nf4` of the weights. Unlike torchao's, which takes no arguments, it takes the block sizes."""

    block_size: int = 64
    scaler_block_size: int = 256

    def __post_init__(self) -> None:
        PerGroup(self.block_size)
        PerGroup(self.scaler_block_size)


def convert(module: nn.Module, config: NF4WeightOnlyConfig) -> nn.Module:
    """Replace the module's weight by a frozen NF4 one; returns the module."""
    weight = to_nf4(module.weight.detach(), config.block_size, config.scaler_block_size)  # type: ignore[arg-type, operator]
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


register_quantize_module_handler(NF4WeightOnlyConfig, tells=names_weight)(convert)
nf4_weight_only = NF4WeightOnlyConfig
