"""Straight-through estimators of quantized inputs: static activations, with the gradient of their scale, and products
with a weight that quantizes its input."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.numerics import dequantize, quantize
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...kernels.activation import quantize_activation, static_params


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


# -- products ----------------------------------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """F.linear for a weight that quantizes its input. The weight gradient uses the quantized input; F.linear itself
    would use the float input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        to_x, to_w, to_bias = ctx.needs_input_grad
        x_dtype, bias_dtype = ctx.dtypes
        flat = grad.reshape(-1, grad.shape[-1])
        by = None
        if to_w:
            x = quantize_activation(x.to(grad.dtype), w.act, w.act_scale, w.act_zero_point)
            by = flat.t() @ x.reshape(-1, x.shape[-1])
        return (
            (grad @ w._dequantize(grad.dtype)).to(x_dtype) if to_x else None,
            by,
            flat.sum(0).to(bias_dtype) if to_bias else None,
        )


class WithValue(torch.autograd.Function):
    """``value``, with the gradient of y, which differs from it by rounding."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Addmm(torch.autograd.Function):
    """bias + x @ w for a quantized w; gradients use the quantized x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: AffineQuantizedTensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.addmm(bias, x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
        return grad @ w._dequantize(grad.dtype).t(), x.to(grad.dtype).t() @ grad, grad.sum(0)
