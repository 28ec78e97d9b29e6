"""AWQ: scales up weight columns with large inputs, so that they are quantized more precisely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import register
from .equalization import EqualizationPair
from .scale_search import ReaderInputs, Scales, ScaleSearch


@register("awq")
@dataclass(frozen=True)
class AWQ(ScaleSearch):
    """Multiplies the columns of weights by s and divides their inputs (Lin et al. 2024).

        s_j = (E|x_j|)^alpha / sqrt(max_j min_j),  alpha in 0, 1/grid, .. (grid - 1)/grid

    alpha minimises the output error of all layers that read the input, with weights rounded to nearest in their own
    scheme. Clipping is done by the solver's grids (``{"gptq": {"grids": [...]}}``).

    grid    number of candidates for alpha
    """

    grid: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid < 1:
            raise ValueError(f"awq: grid must be at least 1, got {self.grid}")

    def candidates(self, pair: EqualizationPair, seen: ReaderInputs, weights: Tensor) -> Iterator[Scales]:
        x = pair.gather(seen.mean)
        yield "", torch.ones_like(x)
        for i in range(1, self.grid):
            s = x ** (i / self.grid)
            yield f"alpha={i / self.grid:g}", torch.where(x > 0, s, torch.nan)
