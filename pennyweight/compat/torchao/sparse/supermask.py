"""SupermaskLinear: a linear layer that learns which blocks of its weight to keep (Ramanujan et al. 2020)."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ApplyMask", "GetSubnet", "SupermaskLinear", "percentile"]

SCORES_MAX = 9e9
log = logging.getLogger(__name__)


def percentile(t: Tensor, q: float) -> Tensor:
    """The number that is larger than q % of the elements of t."""
    return t.reshape(-1).kthvalue(1 + round(0.01 * float(q) * (t.numel() - 1))).values


class GetSubnet(torch.autograd.Function):
    """``ones`` where a score is at or above the quantile ``sparsity``, else ``zeros``; its gradient is the scores'."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, zeros: Tensor, ones: Tensor, sparsity: float) -> Tensor:
        limited = scores.clamp(max=SCORES_MAX)
        return torch.where(
            limited < percentile(limited, sparsity * 100), zeros.to(scores.device), ones.to(scores.device)
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return g, None, None, None


class ApplyMask(torch.autograd.Function):
    """weight * mask. Both gradients are that of the product: a masked weight, too, is trained, and so is its score."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor) -> Tensor:
        return weight * scores

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, scores = ctx.needs_input_grad[:2]
        return grad_output if weight else None, grad_output if scores else None


class SupermaskLinear(nn.Linear):
    """A linear layer with a score for each block of its weight; the lowest ``sparsity_level`` of them are zero.

    blocksize                 rows and columns of a block; the last may be smaller
    fixed_mask, fixed_weight  do not train the scores, or the weight
    A sparsity level that would leave no block is lowered to one that leaves one.
    """

    def __init__(
        self, sparsity_level: float, blocksize: int, fixed_mask: bool, fixed_weight: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        blocks = [max(1, math.ceil(n / blocksize)) for n in self.weight.shape]
        most = 1 - 1 / math.prod(blocks)
        if sparsity_level > most:
            log.warning(
                "SupermaskLinear: sparsity reduced from %s to %s, the most for a weight of %s in blocks of %s",
                sparsity_level, most, list(self.weight.shape), blocksize,
            )  # fmt: skip
        self.sparsity_level, self.blocksize = min(sparsity_level, most), blocksize
        self.sparsify_weights = False
        self.scores = nn.Parameter(
            torch.empty(blocks, dtype=self.weight.dtype, device=self.weight.device), requires_grad=not fixed_mask
        )
        nn.init.kaiming_uniform_(self.scores, a=math.sqrt(5))
        self.weight.requires_grad = not fixed_weight

    def get_mask(self) -> Tensor:
        """0 or 1 for each element of the weight; differentiable with respect to the scores."""
        zeros, ones = torch.zeros_like(self.scores), torch.ones_like(self.scores)
        mask = GetSubnet.apply(self.scores, zeros, ones, self.sparsity_level)
        for axis, n in enumerate(self.weight.shape):
            mask = mask.repeat_interleave(self.blocksize, axis).narrow(axis, 0, n)
        return mask

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, ApplyMask.apply(self.weight, self.get_mask()), self.bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, sparsity_level: float = 0.0, blocksize: int = 1) -> SupermaskLinear:
        """A layer with a copy of the weight and bias, and new scores."""
        if not isinstance(linear, nn.Linear):
            raise AssertionError(f"from_linear needs an nn.Linear, got {type(linear).__name__}")
        new = cls(
            sparsity_level, blocksize, False, False, linear.in_features, linear.out_features, linear.bias is not None,
            device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            new.weight.copy_(linear.weight)
            if linear.bias is not None:
                new.bias.copy_(linear.bias)
        return new

    @classmethod
    def to_linear(cls, supermask_linear: SupermaskLinear) -> nn.Linear:
        """A plain layer with the masked weight."""
        old = supermask_linear
        new = nn.Linear(
            old.in_features, old.out_features, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
        )
        with torch.no_grad():
            new.weight.copy_(old.weight * old.get_mask())
            if old.bias is not None:
                new.bias.copy_(old.bias)
        return new
