"""``F.conv1d`` and ``F.conv2d`` with a quantized weight in eager mode: calls the bound kernel directly.

Anything else (gradients, autocast, tracing, modes, other layouts) goes through torch's dispatcher to the handler of
``aten.convolution``, which selects from the same table. Of a product whose graph torch makes itself, of any
kind, the graph gets an alias of a frozen weight: see ``AffineQuantizedTensor.in_graph``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.tensor import FUNCTIONS, AffineQuantizedTensor, implements
from ..core.tracing import refuse_jit_trace
from .aten_operands import dequantized, meta_result, misfit
from .cpu import conv
from .table import case_of, select

QT = AffineQuantizedTensor
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = (None, None, None, 1, 0, 1, 1)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@implements(torch.conv1d, torch.conv2d, table=FUNCTIONS)
def _convolution(func: Any, args: Any, kwargs: Any) -> Any:
    y = _eager(args, kwargs)
    return _in_graph(func, args, kwargs) if y is NotImplemented else y


def _eager(args: Any, kwargs: Any) -> Any:
    """The result of the bound kernel; NotImplemented if the call is not a plain eager one."""
    rest = list(zip(_NAMES, _DEFAULTS, strict=True))[len(args) :]
    given: list[Any] = [*args] + [kwargs.get(name, value) for name, value in rest]
    x, w, bias, stride, padding, dilation, groups = given
    if (
        type(w) is not QT or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled() or isinstance(padding, str)
    ):  # fmt: skip
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        refuse_jit_trace("convolution", w)
        if w.spec.layout != conv.LAYOUT.name or w.axes is not None or x.ndim != w.ndim:
            return NotImplemented
        if torch.is_grad_enabled() and (
            x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return NotImplemented
        bound = w._bound.get(("convolution", x.dtype))
        if bound is None:
            case = case_of(w, x.dtype)
            if select("convolution", case).layout != conv.LAYOUT.name:
                return NotImplemented
            run, operand = conv.bind(case)
            bound = w._bound["convolution", x.dtype] = (run, operand(w.parts))
        n = x.ndim - 2
        y = bound[0](x, bound[1], bias, _each(stride, n), _each(padding, n), _each(dilation, n), groups)
        return NotImplemented if y is None else y


@implements(torch.ops.aten.convolution.default)
def _aten_convolution(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[1], QT):
        refuse_jit_trace("convolution", args[1])
    if (shapes := meta_result(func, args, kwargs)) is not NotImplemented:
        return shapes
    x, w, bias, *rest = args
    transposed = rest[3]
    if x.device != w.device or not x.is_floating_point():
        raise misfit("convolution", x, w, "both must be floating point on one device")
    channels = w.shape[0] if transposed else w.shape[1] * rest[5]
    if x.shape[1] != channels:
        raise misfit("convolution", x, w, f"the input [N, channels, ...] must have {channels} channels")
    if not isinstance(w, QT) or isinstance(x, QT) or isinstance(bias, QT) or w.axes is not None:
        return dequantized(func, args, kwargs)
    op = "transposed_convolution" if transposed else "convolution"
    return select(op, case_of(w, x.dtype)).run(x, w, bias, *rest)


@implements(
    torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, torch.matmul, torch.mm,
    torch.bmm, torch.addmm, torch.baddbmm, torch.mv, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.baddbmm,
    torch.Tensor.mv, torch.einsum, torch._grouped_mm, torch.bilinear, F.multi_head_attention_forward, table=FUNCTIONS,
)  # fmt: skip
def _in_graph(func: Any, args: Any, kwargs: Any) -> Any:
    """Give the graph that torch makes aliases of frozen weights."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return func(*map(_alias, args), **{name: _alias(a) for name, a in kwargs.items()})


def _alias(a: Any) -> Any:
    if type(a) is QT:
        return a.in_graph()
    return [_alias(each) for each in a] if type(a) in (list, tuple) and any(type(each) is QT for each in a) else a
