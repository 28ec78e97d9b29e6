"""Reference kernels: dequantize, then compute. Slow but valid for every spec; fast kernels are tested against them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import fallback
from ..core.call_site import in_layer
from ..core.tensor import AffineQuantizedTensor
from ..support.errors import ArgumentError
from .activation import quantize_activation
from .table import Case, Kernel, register_kernel


def _any(case: Case) -> bool | str:
    return True


def linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = quantize(x) @ dequantize(w).T + bias. x: [.., K], w: [N, K], in x's dtype."""
    fallback.count("linear/dequantize")
    if bias is not None and bias.dtype != x.dtype:  # of F.linear too, whose message names neither
        raise ArgumentError(
            f"linear{in_layer()}: input {tuple(x.shape)} is {x.dtype} and the bias {bias.dtype}; convert the input "
            f"with x.to({bias.dtype}), or the model with model.to({x.dtype})"
        )
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return F.linear(x, w._dequantize(x.dtype), bias)


def bmm(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """y = quantize(x) @ dequantize(w)^T per batch. x: [E, M, K], w: [E, N, K]."""
    fallback.count("bmm/dequantize")
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return torch.bmm(x, w._dequantize(x.dtype).transpose(1, 2))


def convolution(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """aten.convolution of quantize(x) with dequantize(w): [O, I/groups, *kernel], transposed [I, O/groups, *kernel]."""
    fallback.count("convolution/dequantize")
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return torch.ops.aten.convolution.default(x, w._dequantize(x.dtype), bias, *rest)


_ROWS = {"linear": linear, "bmm": bmm, "convolution": convolution, "transposed_convolution": convolution}
for _op, _run in _ROWS.items():
    register_kernel(Kernel(_op, "dequantize", _run, _any, rank=-1, tolerance="exact"))
