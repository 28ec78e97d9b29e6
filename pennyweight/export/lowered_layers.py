"""Layers whose input is quantized with one scale, computed from each input: as ``choose_qparams`` does in graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor


class _Dynamic(nn.Module):
    """codes: (first, last, least scale) of the input. symmetric: zero point 0. The weight has a static activation.

    scale = (max - min) / (last - first), zero_point = first - round(min / scale), with 0 inside the range;
    symmetric: scale = max |x| / ((last - first) / 2).
    """

    codes: tuple[int, int, float]
    symmetric: bool
    weight: Any

    def _weight(self, x: Tensor) -> AffineQuantizedTensor:
        first, last, eps = self.codes
        if x.numel() == 0:
            return self.weight
        low, high = torch.aminmax(x.detach())
        low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
        if self.symmetric:
            scale = (torch.maximum(-low, high) / ((last - first) / 2)).clamp(min=eps)
            zero_point = torch.zeros_like(scale)
        else:
            scale = ((high - low) / (last - first)).clamp(min=eps)
            zero_point = (first - torch.round(low / scale)).clamp(first, last)
        w: AffineQuantizedTensor = self.weight
        return w.with_(act_scale=scale.float().reshape(1), act_zero_point=zero_point.float().reshape(1))


class DynamicLinear(_Dynamic, nn.Linear):
    """A linear layer with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self._weight(input), self.bias)


class DynamicConv1d(_Dynamic, nn.Conv1d):
    """A convolution of one dimension with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self._weight(input), self.bias)


class DynamicConv2d(_Dynamic, nn.Conv2d):
    """A convolution of two dimensions with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self._weight(input), self.bias)


DynamicConv: dict[int, Any] = {1: DynamicConv1d, 2: DynamicConv2d}
