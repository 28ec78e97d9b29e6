"""SmoothQuant: scales activation outliers into the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import register
from .equalization import EqualizationPair
from .scale_search import ReaderInputs, Scales, ScaleSearch


@register("smooth")
@dataclass(frozen=True)
class Smooth(ScaleSearch):
    """Divides each channel of an input by s and multiplies the weights' column (Xiao et al. 2023).

        s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

    max|W_j| is taken over all layers that read the input, so that they share s.

    alpha   0 to 1, or "search": for each pair the value of 0, 0.1, .. 1 or no smoothing with the smallest error of the
            layers' outputs, with weights and inputs quantized by their schemes
    """

    alpha: float | str = "search"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != "search" and not (isinstance(self.alpha, (int, float)) and 0 <= self.alpha <= 1):
            raise ValueError(f"smooth: alpha must be 'search' or between 0 and 1, got {self.alpha!r}")

    def candidates(self, pair: EqualizationPair, seen: ReaderInputs, weights: Tensor) -> Iterator[Scales]:
        x, w = pair.gather(seen.largest), pair.gather(weights)
        if self.alpha == "search":
            yield "", torch.ones_like(x)
        for alpha in [i / 10 for i in range(11)] if self.alpha == "search" else [float(self.alpha)]:
            s = x**alpha / w ** (1 - alpha)
            yield f"alpha={alpha:g}", torch.where((x > 0) & (w > 0), s, torch.nan)
