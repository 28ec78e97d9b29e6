"""Straight-through estimator for statically quantized activations, including the gradient of the scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core.numerics import dequantize, quantize
from ...core.spec import QuantSpec
from ...kernels.activation import static_params


class ClampSTE(torch.autograd.Function):
    """Activation with a static scale.

    quantizes  whether to quantize the value; else returns x, for a kernel that quantizes it

    The gradient of x is straight-through within the range and zero where it clips; the gradient of the scale is that of
    LSQ, times 1 / sqrt(width * largest value).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec, quantizes: bool
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.spec = spec
        if not quantizes:
            return x.view_as(x)
        return dequantize(quantize(x, spec, params=static_params(x, scale, zero_point)), spec, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, zero_point = ctx.saved_tensors
        inside, slope, factor = clamp_gradients(x, scale, zero_point, ctx.spec)
        found = None
        if ctx.needs_input_grad[1]:
            found = ((grad.float() * slope).sum() * factor).reshape(scale.shape).to(scale.dtype)
        return (grad * inside).to(x.dtype), found, None, None, None


def clamp_gradients(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec
) -> tuple[Tensor, Tensor, float]:
    """(d/dx, d/dscale, factor of the scale's gradient) of quantized x."""
    f, s, z = spec.format, scale.float(), 0.0 if zero_point is None else zero_point.float()
    u = x.detach().float() / s
    half = 0.5 if f.kind == "int" else 0.0
    least, most = f.lo - z, f.hi - z
    inside = ((u >= least - half) & (u <= most + half)).float()
    parts = quantize(x.detach(), spec, params=static_params(x, scale.detach(), zero_point))
    number = f.decode(parts.codes, torch.float32) - z
    return inside.to(x.dtype), number - inside * u, 1 / math.sqrt(x.shape[-1] * max(abs(f.lo), abs(f.hi)))


def clamp_ste(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec) -> Tensor:
    """Same as :class:`ClampSTE` with ``quantizes``, in traceable operations."""
    with torch.no_grad():
        inside, slope, factor = clamp_gradients(x, scale, zero_point, spec)
        parts = quantize(x, spec, params=static_params(x, scale.detach(), zero_point))
        y = dequantize(parts, spec, x.shape, x.dtype)
    return y + (x - x.detach()) * inside + (slope * ((scale - scale.detach()) * factor)).to(x.dtype)
