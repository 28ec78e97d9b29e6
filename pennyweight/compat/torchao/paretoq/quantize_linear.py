"""Straight-through quantization with learned step sizes (ParetoQ, Liu et al. 2025), and a linear layer that uses it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LsqBinaryTernaryExtension", "QuantizeLinear", "StretchedElasticQuant"]

_LEAST_STEP = 1e-5
_CLIP = 1 - 1e-2  # stretched: |w| / alpha is clamped to it, so that the outermost interval is no larger than the others


def _bounds(bits: int) -> tuple[int, int]:
    """Least and greatest code; bits 0 is ternary, 1 binary."""
    return (-1, 1) if bits <= 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _stretched(steps: Tensor, bits: int) -> Tensor:
    """w / alpha rounded to the stretched grid, in units of alpha."""
    levels, shift = (1.5, 0.0) if bits == 0 else (2 ** (bits - 1), 0.5)
    return ((steps.clamp(-_CLIP, _CLIP) * levels - shift).round() + shift) / levels


class _LearnedStep(torch.autograd.Function):
    """w -> alpha round(w / alpha), with gradients for w, straight-through inside the range, and for the step alpha."""

    @staticmethod
    def setup(ctx: Any, w: Tensor, alpha: Tensor, bits: int, layerwise: bool) -> Tensor:
        alpha = alpha.clamp(min=_LEAST_STEP)
        ctx.save_for_backward(w, alpha)
        ctx.bits, ctx.layerwise = bits, layerwise
        ctx.scale = 1 / math.sqrt(w.numel() * _bounds(bits)[1])
        return alpha

    @staticmethod
    def gradients(
        ctx: Any, gy: Tensor, limits: tuple[float, float], ends: tuple[float, float], rounded: Any
    ) -> tuple[Tensor, Tensor, None, None]:
        """limits: range of w / alpha with a gradient; ends: values below and above it; rounded: of w / alpha."""
        w, alpha = ctx.saved_tensors
        steps = w / alpha
        below, above = steps < limits[0], steps > limits[1]
        inside = ~(below | above)
        if ctx.bits == 1:
            slope = w.sign()
        else:
            slope = below * ends[0] + above * ends[1] + inside * (rounded(steps) - steps)
        slope = slope * gy * ctx.scale
        return inside * gy, slope.sum().unsqueeze(0) if ctx.layerwise else slope.sum(-1, keepdim=True), None, None


class LsqBinaryTernaryExtension(torch.autograd.Function):
    """alpha clamp(round(w / alpha), least, greatest code); 1 bit: alpha sign(w). Learned step size, Esser et al. 2020.

    apply(w, alpha, num_bits, layerwise): w [rows, columns], alpha [rows, 1], or [1] if layerwise. 16 bits and more: w.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, alpha: Tensor, num_bits: int, layerwise: bool) -> Tensor:
        ctx.bits = num_bits
        if num_bits >= 16:
            return input.clone()
        alpha = _LearnedStep.setup(ctx, input, alpha, num_bits, layerwise)
        codes = input.sign() if num_bits == 1 else (input / alpha).round().clamp(*_bounds(num_bits))
        return codes * alpha

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if ctx.bits >= 16:
            return grad_output, None, None, None
        ends = _bounds(ctx.bits)
        return _LearnedStep.gradients(ctx, grad_output, ends, ends, torch.round)


class StretchedElasticQuant(torch.autograd.Function):
    """alpha (round(n clamp(w / alpha) - 1/2) + 1/2) / n, n = 2^(num_bits - 1): as many values on either side of zero.

    0 bits: -2/3, 0, 2/3 times alpha. Arguments as for :class:`LsqBinaryTernaryExtension`; alpha is the largest value,
    not a step.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, alpha: Tensor, num_bits: int, layerwise: bool) -> Tensor:
        ctx.bits = num_bits
        if num_bits >= 16:
            return input.clone()
        alpha = _LearnedStep.setup(ctx, input, alpha, num_bits, layerwise)
        return (input.sign() if num_bits == 1 else _stretched(input / alpha, num_bits)) * alpha

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        bits = ctx.bits
        if bits >= 16:
            return grad_output, None, None, None
        levels, shift = (1.5, 0.0) if bits == 0 else (2 ** (bits - 1), 0.5)
        most = (levels - shift) / levels
        return _LearnedStep.gradients(
            ctx, grad_output, (-_CLIP, _CLIP), (-most, most), lambda steps: _stretched(steps, bits)
        )


class QuantizeLinear(nn.Linear):
    """A linear layer whose weight is rounded to ``w_bits`` bits at each call; 16 and more: not.

    w_bits 0 (ternary) and 2 use :class:`StretchedElasticQuant`, 1, 3 and 4 :class:`LsqBinaryTernaryExtension`. The
    parameter ``weight_clip_val`` [out, 1] is alpha. It begins as mean|w| of the row for 1 bit, max|w| for 0 and 2, else
    max|w| / (2^(w_bits - 1) - 1); call :meth:`reset_clip_val` after setting the weight. symmetric: no effect.
    Raises ValueError for 5 to 15 bits.
    """

    def __init__(
        self, *kargs: Any, symmetric: bool = True, bias: bool = False, w_bits: int = 16, weight_layerwise: bool = False
    ) -> None:  # fmt: skip
        super().__init__(*kargs, bias=bias)
        if 4 < w_bits < 16 or w_bits < 0:
            raise ValueError(f"QuantizeLinear: w_bits must be 0 to 4, or 16 for a float weight, got {w_bits}")
        self.w_bits, self.weight_layerwise = w_bits, weight_layerwise
        if w_bits < 16:
            self.weight_clip_val = nn.Parameter(torch.zeros(self.weight.shape[0], 1))
            self.reset_clip_val()

    @torch.no_grad()
    def reset_clip_val(self) -> None:
        """Set ``weight_clip_val`` from the weight."""
        size = self.weight.abs()
        if self.w_bits == 1:
            self.weight_clip_val.copy_(size.mean(-1, keepdim=True))
        else:
            steps = 1 if self.w_bits in (0, 2) else 2 ** (self.w_bits - 1) - 1
            self.weight_clip_val.copy_(size.amax(-1, keepdim=True) / steps)

    def forward(self, input_: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.w_bits < 16:
            how = StretchedElasticQuant if self.w_bits in (0, 2) else LsqBinaryTernaryExtension
            weight = how.apply(weight, self.weight_clip_val, self.w_bits, self.weight_layerwise).to(input_.dtype)
        return nn.functional.linear(input_, weight, self.bias)
