"""The reference rows: dequantize, then compute. Plain, slow, right for every spec; fast rows are tested against it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import fallback
from ..core.choose import Params
from ..core.numerics import dequantize, fake_quantize, quantize
from ..core.spec import ActivationSpec
from ..core.tensor import AffineQuantizedTensor
from .table import Case, Kernel, register_kernel


def quantize_activation(
    x: Tensor, act: ActivationSpec | None, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """x as the op sees it: quantized and dequantized under ``act``, in x's dtype."""
    if act is None:
        return x
    if act.mode == "dynamic":
        return fake_quantize(x, act.spec, act.rule, act.eps)
    return dequantize(quantize(x, act.spec, params=static_params(x, scale, zero_point)), act.spec, x.shape, x.dtype)


def static_params(x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Params:
    """Stored activation parameters, per tensor, in the rank of x."""
    if scale is None:
        raise RuntimeError("a static activation needs act_scale on the weight; calibrate, or pass it in the config")
    ones = (1,) * x.ndim
    return Params(scale.reshape(ones), None if zero_point is None else zero_point.reshape(ones))


def _any(case: Case) -> bool | str:
    return True


def linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = quantize(x) @ dequantize(w).T + bias. x: [.., K], w: [N, K], in x's dtype."""
    fallback.count("linear/dequantize")
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return F.linear(x, w._dequantize(x.dtype), bias)


def bmm(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """y = quantize(x) @ dequantize(w)^T per batch. x: [E, M, K], w: [E, N, K]."""
    fallback.count("bmm/dequantize")
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return torch.bmm(x, w._dequantize(x.dtype).transpose(1, 2))


def convolution(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """aten.convolution of quantize(x) with dequantize(w). w: [O, I/groups, *kernel]."""
    fallback.count("convolution/dequantize")
    x = quantize_activation(x, w.act, w.act_scale, w.act_zero_point)
    return torch.ops.aten.convolution.default(x, w._dequantize(x.dtype), bias, *rest)


for _op, _run in (("linear", linear), ("bmm", bmm), ("convolution", convolution)):
    register_kernel(Kernel(_op, "dequantize", _run, _any, rank=-1, tolerance="exact"))
