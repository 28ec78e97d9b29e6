"""LowPrecisionLinear: nn.Linear with a quantized forward and backward, otherwise unchanged."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor
from ...distributed.dtensor import local_tensor
from .functional import linear
from .recipes import Recipe, get_recipe


class LowPrecisionLinear(nn.Linear):
    """nn.Linear whose three products are quantized. Parameters, their names and its state dict are nn.Linear's.

    After ``pennyweight.quantize_`` it runs the quantized weight like any other layer.
    """

    recipe: Recipe

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, recipe: str | Recipe = "rowwise", **factory: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.recipe = get_recipe(recipe)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(local_tensor(self.weight), AffineQuantizedTensor):
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def convert_(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert an nn.Linear in place: changes its class; the object, its parameters and its hooks stay the same."""
    module.__class__ = LowPrecisionLinear
    module.recipe = recipe  # type: ignore[assignment]
    return module


def restore_(module: nn.Module) -> nn.Module:
    """Inverse of :func:`convert_`."""
    module.__class__ = nn.Linear
    del module.recipe
    return module


__all__ = ["LowPrecisionLinear", "convert_", "restore_"]
