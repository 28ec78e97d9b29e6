"""torchao's config of NF4 weights; :class:`pennyweight.NF4WeightOnlyConfig` uses the table of QLoRA's paper instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pennyweight.planning.configs.base import AOBaseConfig
from pennyweight.planning.granularity import PerGroup
from pennyweight.planning.module_handlers import register_quantize_module_handler

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


def accepts(module: nn.Module, config: NF4WeightOnlyConfig) -> tuple[bool, str]:
    """(True, note for the report), or (False, the reason)."""
    w = getattr(module, "weight", None)
    if not isinstance(w, torch.Tensor) or not w.is_floating_point() or w.dim() not in (1, 2):
        return False, "NF4 needs a floating-point weight of one or two axes"
    unit = config.block_size * config.scaler_block_size
    if w.numel() % unit:
        return False, (
            f"NF4 needs whole blocks: {w.numel()} elements are not a multiple of {config.block_size} elements times "
            f"{config.scaler_block_size} scalers; use smaller blocks"
        )
    return True, f"nf4 of torchao in blocks of {config.block_size}, scales in blocks of {config.scaler_block_size}"


register_quantize_module_handler(NF4WeightOnlyConfig, tells=accepts)(convert)
nf4_weight_only = NF4WeightOnlyConfig
