"""Linear layers with a frozen NF4 weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.core.tensor import AffineQuantizedTensor as QT

from .config import NF4WeightOnlyConfig, convert

__all__ = ["LinearNF4", "linear_nf4", "nf4_weight_only"]


class LinearNF4(torch.autograd.Function):
    """input [.., K] @ weight [N, K].T; the gradient goes to the input only."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: QT) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(input, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad_output @ weight.detach(), None


def linear_nf4(input: Tensor, weight: QT) -> Tensor:
    """input [.., K] @ weight [N, K].T; the gradient goes to the input only."""
    return F.linear(input, weight.detach())


def nf4_weight_only(block_size: int = 64, scaler_block_size: int = 256) -> Callable[[nn.Module], nn.Module]:
    """A function that converts a module's weight to NF4, accepted by quantize_ as in torchao's releases of that
    time."""

    def apply(module: nn.Module) -> nn.Module:
        return convert(module, NF4WeightOnlyConfig(block_size, scaler_block_size))

    return apply
