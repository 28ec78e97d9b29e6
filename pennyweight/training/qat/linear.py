"""Products with a weight that quantizes its input; the weight gradient uses the quantized input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.tensor import AffineQuantizedTensor
from ...kernels.activation import quantize_activation


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
